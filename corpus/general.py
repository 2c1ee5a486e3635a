"""`general`: short documents of many kinds, for calibration.

What a model writes by itself is often of few kinds: a model of code writes code. Calibrated on
that alone, it loses more on the rest. These documents are stories, articles, everyday text, other
languages and code, written for this purpose (corpus/kinds), and parts of Python's own
documentation and library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

from gqa.corpus.stdlib import stdlib_texts

_SEPARATOR = "\n----\n"
_TOPICS = 12  # of Python's documentation
_MODULES = 16  # of Python's library
_CHARACTERS = 1200  # of each


def general_texts() -> Iterator[str]:
    """The documents, the same for a version of Python."""
    for path in sorted(Path(__file__).with_name("kinds").glob("*.txt")):
        yield from path.read_text(encoding="utf-8").strip().split(_SEPARATOR)

    yield from _parts(_topics(), _TOPICS)
    yield from _parts(stdlib_texts("train"), _MODULES)


def _topics() -> Iterable[str]:
    """Pages of Python's documentation, which some installations leave out."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        return ()
    return topics.values()


def _parts(texts: Iterable[str], count: int) -> Iterator[str]:
    """Lines from the middle of the first `count` texts, in the order of their hashes; the last line
    may be cut.
    """
    long_enough = (text for text in texts if len(text) > 3 * _CHARACTERS)
    chosen = sorted(long_enough, key=lambda text: hashlib.sha256(text.encode()).digest())
    for text in chosen[:count]:
        middle = text[len(text) // 3 :]
        _, lines = middle.split("\n", 1)
        yield lines[:_CHARACTERS]
