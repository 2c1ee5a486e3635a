"""Data sets of the Hugging Face hub, through `datasets` and huggingface_hub and nothing else.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from gqa.checkpoint.errors import CorpusError, explain
from gqa.checkpoint.hub_errors import error_chain, hub_reason, quiet
from gqa.corpus.document import Document, document, missing_field

_BATCH_ROWS = 256


def load_rows(name: str, config: str | None, split: str, revision: str | None, streaming: bool) -> Any:
    """A data set (`datasets.Dataset`, or `IterableDataset` when streaming) at one commit.

    Raises CorpusError for whatever keeps it from being loaded, OSError where this machine is the cause.
    """
    import datasets
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE and revision is not None:  # `datasets` would take whatever revision is in the cache
        raise CorpusError(
            f"HF_HUB_OFFLINE is set, and without the hub no revision of {name} can be told; unset one of them"
        )
    try:
        with quiet("datasets"):
            if not constants.HF_HUB_OFFLINE:  # asked first: `datasets` retries for half a minute and says less
                revision = HfApi().dataset_info(name, revision=revision).sha
            return datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # datasets, huggingface_hub, its HTTP client and fsspec raise many kinds
        raise _refusal(error, name, revision) from None


def read_rows(name: str, rows: Any, field: str, shard: int | None = None) -> Iterator[Document]:
    """The documents of a data set that is loaded, or of one shard of a stream. Raises CorpusError."""
    if shard is not None and (shards := rows.num_shards) > 1:
        rows, name = rows.shard(shards, shard, contiguous=False), f"{name} ({shard + 1} of {shards})"
    if rows.features is not None:  # of some streams it is not known before they are read
        if field not in rows.features:
            raise missing_field(f"the data set {name}", field, rows.features)
        rows = rows.select_columns([field])
    batches = iter(rows.iter(batch_size=_BATCH_ROWS))
    for first in count(0, _BATCH_ROWS):
        try:
            with quiet("datasets"):
                batch = next(batches, None)
        except Exception as error:
            raise _refusal(error, name, None) from None
        if batch is None:
            return
        if field not in batch:
            raise missing_field(f"the data set {name}", field, batch)
        for number, value in enumerate(batch[field], first):
            if found := document(f"{name}:{number}", value, field):
                yield found


def _refusal(error: BaseException, name: str, revision: str | None) -> Exception:
    """What stands between here and the data set, and what to do about it."""
    if isinstance(error, CorpusError):
        return error
    if reason := hub_reason(error, name, revision, data_set=True):
        return CorpusError(f"there is no file or directory {name}, and {reason}")
    chain = error_chain(error)
    own = (e for e in chain if isinstance(e, OSError) and e.errno is not None and not isinstance(e, FileNotFoundError))
    if of_this_machine := next(own, None):  # no space, no permission
        return of_this_machine
    told = explain(chain[-1]).partition(" Example of usage")[0].rstrip(".")
    if re.match("config name|builderconfig|unknown split|bad split", told, re.IGNORECASE):
        told += f"; write {name}:CONFIG or {name}:CONFIG:SPLIT"
    return CorpusError(f"the data set {name} cannot be loaded: {told}")
