"""The embedded checkpoint with its tokenizer, for tests that need real text and a model that has
learnt something.
"""

from __future__ import annotations

import shutil
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from gqa.convert.api import convert_checkpoint
from gqa.corpus.stdlib import stdlib_texts
from gqa.models.loading import load_model
from support.checkpoints import edit_json
from support.repository import ROOT, SCRIPTS

SOURCE = ROOT / "examples" / "stdlib-mha"
UNIFORM_VOCABULARY = 4096


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SOURCE)


@cache
def texts(count: int, characters: int = 3000) -> tuple[str, ...]:
    """The beginnings of `count` held-out modules, of different lengths."""
    modules = islice(stdlib_texts("heldout"), count)
    return tuple(text[: characters // (1 + number % 3)] for number, text in enumerate(modules))


def counting(numbers: int = 2000) -> str:
    """Text that does not repeat itself: squares in words of their own."""
    return " ".join(f"{number} squared is {number**2}." for number in range(numbers))


def converted(directory: Path, groups: int) -> Path:
    out = directory / f"gqa{groups}"
    if not out.is_dir():
        convert_checkpoint(SOURCE, groups, out, method="mean")
    return out


def copy_source(directory: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(SOURCE, directory / name))


def without_bos(place: Path) -> Path:
    """A copy with a tokenizer that adds no BOS."""
    model = copy_source(place)
    edit_json(model / "tokenizer_config.json", lambda config: config | {"add_bos_token": False})
    edit_json(model / "tokenizer.json", lambda config: config | {"post_processor": None})
    return model


def bring_tokenizer(model: Path) -> None:
    """Replace the tokenizer of a checkpoint by code beside it."""
    custom = {
        "tokenizer_class": "Ours",
        "auto_map": {"AutoTokenizer": [None, "tokenization_ours.Ours"]},
    }
    edit_json(model / "tokenizer_config.json", lambda config: config | custom)
    shutil.copy(SCRIPTS / "tokenization_ours.py", model)


def bring_class(model: Path) -> None:
    """Replace the class of a Llama by code beside it, which always writes token 7."""
    custom = {
        "architectures": ["Ours"],
        "auto_map": {"AutoModelForCausalLM": "modeling_ours.Ours"},
    }
    edit_json(model / "config.json", lambda config: config | custom)
    shutil.copy(SCRIPTS / "modeling_ours.py", model)


def load(path: Path) -> Any:
    return load_model(str(path), dtype="float32")
