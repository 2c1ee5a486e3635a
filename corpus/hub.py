"""Data sets of the Hugging Face hub, through `datasets` and huggingface_hub and nothing else.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import re
from typing import Any

from gqa.checkpoint.errors import CorpusError, explain
from gqa.checkpoint.hub_errors import error_chain, hub_reason, quiet


def load_hub(name: str, config: str | None, split: str, revision: str | None, streaming: bool) -> Any:
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
        raise hub_error(error, name, revision) from error


def hub_error(error: BaseException, name: str, revision: str | None = None) -> Exception:
    """What stands between here and the data set, and what to do about it."""
    if reason := hub_reason(error, name, revision, data_set=True):
        return CorpusError(f"there is no file or directory {name}, and {reason}")
    chain = error_chain(error)
    system = (e for e in chain if isinstance(e, OSError) and e.errno is not None)
    if of_this_machine := next((e for e in system if not isinstance(e, FileNotFoundError)), None):  # no space
        return of_this_machine
    message = explain(chain[-1]).partition(" Example of usage")[0].rstrip(".")
    if re.match("config name|builderconfig|unknown split|bad split", message, re.IGNORECASE):
        message += f"; write {name}:CONFIG or {name}:CONFIG:SPLIT"
    return CorpusError(f"the data set {name} cannot be loaded: {message}")
