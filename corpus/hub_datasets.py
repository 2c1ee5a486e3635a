"""Datasets of the Hugging Face Hub, loaded by the library `datasets`."""

from __future__ import annotations

import re
from typing import Any

from gqa.checkpoint.hub import cache_error, error_chain, hub_reason, local_cause, quiet
from gqa.core.errors import CacheError, TextError, explain
from gqa.corpus.cache import datasets_cache


def load_hub(name: str, config: str | None, split: str, streaming: bool) -> Any:
    """Load a dataset at its newest commit; with `HF_HUB_OFFLINE`, as it is in the cache.

    Returns:
        A `datasets.Dataset`, or an `IterableDataset` when streaming.

    Raises:
        TextError: It cannot be loaded.
        CacheError: The cache cannot be written, and several processes share it, or the disk is
            full.
    """
    import datasets
    from huggingface_hub import HfApi, constants

    datasets_cache()  # where the cache cannot be written, a temporary one takes its place
    try:
        with quiet("datasets"):
            # The hub's own error comes first: `datasets` retries for half a minute and says less.
            revision = None
            if not constants.HF_HUB_OFFLINE:
                revision = HfApi().dataset_info(name).sha
            return datasets.load_dataset(
                name, config, split=split, revision=revision, streaming=streaming
            )
    # datasets, huggingface_hub, its HTTP client and fsspec raise many kinds
    except Exception as error:
        raise hub_error(error, name) from error


def hub_error(error: BaseException, name: str) -> TextError | CacheError:
    """The one-line error for a dataset that cannot be loaded: its cause, and what to do."""
    if cause := local_cause(error):
        return cache_error(cause)
    if reason := hub_reason(error):
        if _is_unknown(error):
            reason = f"{reason.rstrip('.')}; check the name, or log in (hf auth login)"
        return TextError(f"there is no file or directory {name!r}, and {reason}")

    # The innermost error says most
    message = explain(error_chain(error)[-1]).partition(" Example of usage")[0].rstrip(".")
    if re.match("config name|builderconfig|unknown split|bad split", message, re.IGNORECASE):
        message += f"; write {name}:CONFIG or {name}:CONFIG:SPLIT"
    else:
        message += "; check its name, your access to it and its files"

    return TextError(f"the dataset {name} cannot be loaded: {message}")


def _is_unknown(error: BaseException) -> bool:
    """Whether the hub has no repository of this name, or hides it from who is not logged in."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    kinds = (HFValidationError, RepositoryNotFoundError)
    return any(isinstance(cause, kinds) for cause in error_chain(error))
