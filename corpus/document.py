"""What a corpus is made of, and the one way in which it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """One text with the name it is known by."""

    name: str
    text: str


class CorpusError(ValueError):
    """Text that cannot be used. One line: what was given, what is wrong with it or allowed, what to do."""

    def __init__(self, message: str) -> None:
        """Names out of hostile files are made safe to print: no line breaks, no terminal escapes, not endless."""
        text = message if len(message) <= 1000 else f"{message[:700]} ... {message[-250:]}"
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def listing(names: Iterable[object], limit: int = 8) -> str:
    """`a, b, c` in the order given, truncated with a count: `a, b and 7 more`."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[:limit])
    return shown if len(texts) <= limit else f"{shown} and {len(texts) - limit} more"


def explain(error: BaseException, limit: int = 300) -> str:
    """What an exception of a library says, in one line; its kind where it says nothing."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def document(name: str, value: Any, field: str) -> Document | None:
    """A document from what a field holds; None where that is nothing or blank. Raises CorpusError if it is no text."""
    if value is None:
        return None
    if not isinstance(value, str):
        kind = type(value).__name__
        raise CorpusError(f"{name}: field {field!r} is no text but {kind}; name a field of text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start].encode("unicode_escape").decode()
        raise CorpusError(
            f"{name}: field {field!r} has half a character ({half}) at {error.start}; repair it"
        ) from None
    return Document(name, value) if value.strip() else None


def missing_field(place: str, field: str, present: Any) -> CorpusError:
    """The error for a field that is not there, with those that are."""
    return CorpusError(f"{place} has no field {field!r}; it has {listing(repr(name) for name in present) or 'none'}")
