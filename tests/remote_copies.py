"""Files of `checkpoint/modelling` that are others with other names: `python tests/remote_copies.py` writes them.

A file travels alone, so what several need is in each of them; it is changed in one and written to the others here.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

MODELLING = Path(__file__).parent.parent / "checkpoint" / "modelling"


@dataclass(frozen=True)
class Names:
    """What a model is called in words, in classes and in module names."""

    words: str
    classes: str
    modules: str


BART, T5 = Names("BART", "Bart", "bart"), Names("T5", "T5", "t5")
# Of which file a file is made, and what stands for the names in it.
COPIES: dict[str, tuple[Names, Names]] = {
    "mbart": (BART, Names("mBART", "MBart", "mbart")),
    "marian": (BART, Names("Marian", "Marian", "marian")),
    "pegasus": (BART, Names("Pegasus", "Pegasus", "pegasus")),
    "m2m_100": (BART, Names("M2M-100", "M2M100", "m2m_100")),
    "mt5": (T5, Names("mT5", "MT5", "mt5")),
}
# Classes of transformers whose names do not follow from the other's.
_RENAMED = {"MarianForConditionalGeneration": "MarianMTModel"}
_MODEL = re.compile(r"\n\nclass GQA(\w+)\(Grouped, source\.\w+\):\n    pass\n")


def file_of(name: str) -> Path:
    return MODELLING / f"modeling_gqa_{name}.py"


def copy_of(name: str) -> str:
    """The text of a file, with the models that transformers has of it."""
    theirs, ours = COPIES[name]
    text = file_of(theirs.modules).read_text()
    text = re.sub(rf"(?<![a-zA-Z]){theirs.words}(?![A-Za-z])", ours.words, text)  # in words
    text = re.sub(rf"(?<=[^a-z]){theirs.classes}(?=[A-Z])|(?<=GQA){theirs.classes}", ours.classes, text)
    text = re.sub(rf"(?<=[._]){theirs.modules}\b", ours.modules, text)
    for wrong, right in _RENAMED.items():
        text = text.replace(wrong, right)
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return _MODEL.sub(lambda found: found[0] if hasattr(source, found[1]) else "", text)


if __name__ == "__main__":
    for made in COPIES:
        file_of(made).write_text(copy_of(made))
