"""Documents as rows of strings: a text, a source and a target, or a chat.

The hash of these strings orders documents and decides which of them are held out.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction

from gqa.corpus.chats import Chat, spoken_text


def row_digest(*texts: str) -> bytes:
    """SHA-256 of a text, or of a source and a target, in UTF-8: 32 bytes.

    A file and a row of the same text differ in the white space around it, which does not count.
    """
    return hashlib.sha256("\0".join(text.strip() for text in texts).encode()).digest()


def in_lowest_fraction(digest: bytes, fraction: float) -> bool:
    """Whether a digest is in the lowest fraction of all, by its first 64 bits: exact, so the same
    on every machine.
    """
    return int.from_bytes(digest[:8], "big") < int(Fraction(repr(float(fraction))) * 2**64)


def is_divisible(row: tuple[str, ...]) -> bool:
    """Whether a part of a document is a document too: of plain text, not of pairs and chats."""
    return len(row) == 1 and not isinstance(row, Chat)


def searched_text(row: tuple[str, ...]) -> str:
    """The text of a document in which passages of other text are looked for."""
    return spoken_text(row[0]) if isinstance(row, Chat) else " ".join(row)
