"""The tokenizer of a checkpoint, loaded with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gqa.checkpoint.files import TOKENIZER_FILES
from gqa.checkpoint.model_config import has_run_flags
from gqa.checkpoint.read import Checkpoint, read_json
from gqa.core.errors import RefusedError, explain
from gqa.models.classes import read_auto_config
from gqa.models.custom_code import MODEL_TYPES


def load_tokenizer(
    checkpoint: Checkpoint, trust_remote_code: bool = False, instead: str = ""
) -> Any:
    """The checkpoint's tokenizer.

    Args:
        checkpoint: The checkpoint.
        trust_remote_code: Whether code of the checkpoint may run.
        instead: Further advice in errors.

    Raises:
        RefusedError: There is none that transformers can load. Without files, or with those of the
            special tokens alone, some classes make an empty one.
    """
    directory = checkpoint.directory
    advice = f", or {instead}" if instead else ""
    has_files = any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES)
    if not has_files:
        raise _no_tokenizer(checkpoint, advice)

    try:
        tokenizer = _read_tokenizer(directory, trust_remote_code)
        words = set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens)
    except Exception as error:  # whatever a library raises about files that it cannot read
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise RefusedError(
                f"the tokenizer of {checkpoint.name} is Python code in the checkpoint; read it, "
                f"then pass --trust-remote-code to run it{advice}"
            ) from error
        raise RefusedError(
            f"transformers cannot load the tokenizer of {checkpoint.name}: {explain(error)}; "
            f"repair its files{advice}"
        ) from error

    if len(words) < 2:
        raise _no_tokenizer(checkpoint, advice)
    return tokenizer


def _no_tokenizer(checkpoint: Checkpoint, advice: str) -> RefusedError:
    """What is raised for a checkpoint without a tokenizer."""
    return RefusedError(
        f"{checkpoint.name} has no tokenizer; copy its base model's tokenizer files into "
        f"{checkpoint.directory}{advice}"
    )


def _read_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """The tokenizer that transformers loads from a directory."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = {}
    raw = read_json(directory, "config.json")  # a view's config is another
    # transformers would read the file itself, with a class that is ours and with run flags.
    if raw.get("model_type") in MODEL_TYPES or has_run_flags(raw):
        options["config"] = read_auto_config(str(directory), trust_remote_code)
    return AutoTokenizer.from_pretrained(
        str(directory), trust_remote_code=trust_remote_code, **options
    )
