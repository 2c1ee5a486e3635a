"""The embedded checkpoint with its tokenizer, for tests that need real text and a model that has learnt something."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

from gqa.checkpoint.loading import load_model
from gqa.convert import convert_checkpoint
from gqa.corpus.stdlib import stdlib_documents

SOURCE = Path(__file__).parents[1] / "examples" / "stdlib-mha"
UNIFORM_VOCABULARY = 4096


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SOURCE)


@cache
def texts(count: int, characters: int = 3000) -> tuple[str, ...]:
    """The beginnings of `count` held-out modules, of different lengths."""
    found = []
    for number, document in enumerate(stdlib_documents("heldout")):
        if number == count:
            break
        found.append(document.text[: characters // (1 + number % 3)])
    return tuple(found)


def converted(directory: Path, groups: int) -> Path:
    out = directory / f"gqa{groups}"
    if not out.is_dir():
        convert_checkpoint(SOURCE, groups, out, method="mean")
    return out


def copy_source(directory: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(SOURCE, directory / name))


def load(path: Path) -> Any:
    return load_model(str(path), dtype="float32")
