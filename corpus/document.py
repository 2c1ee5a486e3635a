"""What a corpus is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.errors import CorpusError, listing


@dataclass(frozen=True)
class Document:
    """One text with the name it is known by."""

    name: str
    text: str


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
