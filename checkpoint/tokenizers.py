"""A checkpoint's tokenizer, where it has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gqa.checkpoint.custom_code import register
from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.read import Checkpoint

_LIKE = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken.json")


def has_tokenizer(directory: str | Path) -> bool:
    """Whether any file looks like a tokenizer's: without one some classes of transformers load an empty one."""
    return any(found for pattern in _LIKE for found in Path(directory).glob(pattern))


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool = False, instead: str = "") -> Any:
    """The checkpoint's tokenizer; `instead` is what else the user may do where it has none.

    Raises RefusedError where there is none, or none that transformers can load.
    """
    from transformers import AutoTokenizer

    directory, advice = str(checkpoint.directory), f", or {instead}" if instead else ""
    register(checkpoint.config.get("model_type"))
    if not has_tokenizer(directory):
        raise RefusedError(
            f"{checkpoint.name} has no tokenizer; copy its base model's tokenizer files into {directory}{advice}"
        )
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a library raises about files that it cannot read
        raise RefusedError(
            f"transformers cannot load the tokenizer of {checkpoint.name}: {explain(error)}; repair its files{advice}"
        ) from None
