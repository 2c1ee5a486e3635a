"""Data sets of the Hugging Face hub, through `datasets` and huggingface_hub and nothing else.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from gqa.checkpoint.errors import CorpusError, explain
from gqa.corpus.document import Document, document, missing_field

_BATCH_ROWS = 256
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


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
        with quiet():
            if not constants.HF_HUB_OFFLINE:  # asked first: `datasets` retries for half a minute and says less
                revision = HfApi().dataset_info(name, revision=revision).sha
            return datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # datasets, huggingface_hub, its HTTP client and fsspec raise many kinds
        raise _refusal(error, name, revision) from None


def read_rows(name: str, rows: Any, field: str) -> Iterator[Document]:
    """The documents of a data set that is loaded. Raises CorpusError."""
    if rows.features is not None:  # of some streams it is not known before they are read
        if field not in rows.features:
            raise missing_field(f"the data set {name}", field, rows.features)
        rows = rows.select_columns([field])
    batches = iter(rows.iter(batch_size=_BATCH_ROWS))
    for first in count(0, _BATCH_ROWS):
        try:
            with quiet():
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


@contextmanager
def quiet() -> Iterator[None]:
    """Without the messages of `datasets` (what fails is raised), and without progress bars where nobody sees them."""
    import datasets

    level, shown = datasets.logging.get_verbosity(), datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity(max(level, logging.CRITICAL))
    if shown and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def _refusal(error: BaseException, name: str, revision: str | None) -> Exception:
    """What stands between here and the data set, and what to do about it."""
    from huggingface_hub import constants, errors, get_token

    chain = _chain(error)
    if isinstance(error, CorpusError):
        return error
    endpoint, has_token = constants.ENDPOINT, get_token() is not None
    if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):
        return CorpusError(f"the data set {name} is not in the cache, and HF_HUB_OFFLINE is set; unset it to fetch it")
    gated = f"the data set {name} is gated: accept its terms at {endpoint}/datasets/{name}, then " + (
        f"use a token of that account (the present one has no access): {_LOG_IN}" if has_token else _LOG_IN
    )
    if "is a gated dataset" in str(error):  # `datasets` does not say by what it was stopped
        return CorpusError(gated)
    texts = {
        errors.GatedRepoError: gated,
        errors.RevisionNotFoundError: f"the data set {name} has no revision {revision!r}; give a branch, a tag or a "
        "whole commit id",
        errors.RepositoryNotFoundError: f"there is no file or directory {name}, and the hub shows no data set "
        "of that name: check it; if it is private, "
        + (f"the present token has no access, {_LOG_IN} of one that has" if has_token else _LOG_IN),
        errors.HFValidationError: f"{name!r} is no data set name (org/name)",
    }
    for kind, text in texts.items():
        if any(isinstance(e, kind) for e in chain):
            return CorpusError(text)
    if answered := next((e for e in chain if isinstance(e, errors.HfHubHTTPError)), None):
        return CorpusError(f"the hub at {endpoint} answered {answered.response.status_code} for the data set {name}")
    if failed := next((e for e in chain if type(e).__module__.startswith("httpx")), None):
        return CorpusError(
            f"the hub at {endpoint} cannot be reached ({explain(failed)}); check the connection and HF_ENDPOINT, or "
            "set HF_HUB_OFFLINE=1 to use what is in the cache"
        )
    if own := next(
        (e for e in chain if isinstance(e, OSError) and e.errno is not None and not isinstance(e, FileNotFoundError)),
        None,
    ):
        return own  # no space, no permission
    told = explain(chain[-1]).partition(" Example of usage")[0].rstrip(".")
    if re.match("config name|builderconfig|unknown split|bad split", told, re.IGNORECASE):
        told += f"; write {name}:CONFIG or {name}:CONFIG:SPLIT"
    return CorpusError(f"the data set {name} cannot be loaded: {told}")


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while cause := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        if cause in chain:
            break
        chain.append(cause)
    return chain
