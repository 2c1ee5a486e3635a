"""Data sets of the Hugging Face hub, through `datasets` and huggingface_hub and nothing else.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean there.
"""

from __future__ import annotations

import re
from typing import Any

from gqa.checkpoint.errors import CorpusError, explain
from gqa.checkpoint.hub_errors import error_chain, hub_reason, quiet


def load_hub(name: str, config: str | None, split: str, streaming: bool) -> Any:
    """Load a data set (`datasets.Dataset`, or `IterableDataset` when streaming) at its newest commit.

    Raises CorpusError if it cannot be loaded, and OSError if this machine is the cause.
    """
    import datasets
    from huggingface_hub import HfApi, constants

    try:
        with quiet("datasets"):
            # The hub's own error comes first: `datasets` retries for half a minute and says less.
            revision = None if constants.HF_HUB_OFFLINE else HfApi().dataset_info(name).sha
            return datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    except Exception as error:  # datasets, huggingface_hub, its HTTP client and fsspec raise many kinds
        raise hub_error(error, name) from error


def hub_error(error: BaseException, name: str) -> Exception:
    """The error to raise for a data set that cannot be loaded: the cause, and what to do about it."""
    if reason := hub_reason(error, name, None, data_set=True):
        return CorpusError(f"there is no file or directory {name}, and {reason}")
    chain = error_chain(error)
    system_errors = (e for e in chain if isinstance(e, OSError) and e.errno is not None)
    if local_error := next((e for e in system_errors if not isinstance(e, FileNotFoundError)), None):  # no space
        return local_error
    message = explain(chain[-1]).partition(" Example of usage")[0].rstrip(".")
    if re.match("config name|builderconfig|unknown split|bad split", message, re.IGNORECASE):
        message += f"; write {name}:CONFIG or {name}:CONFIG:SPLIT"
    return CorpusError(f"the data set {name} cannot be loaded: {message}")
