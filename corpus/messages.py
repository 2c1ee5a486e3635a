"""How errors put things: in one line, and not endless."""

from __future__ import annotations

from collections.abc import Iterable


def listing(names: Iterable[object], limit: int = 8) -> str:
    """`a, b, c` in the order given, truncated with a count: `a, b and 7 more`."""
    texts = [str(name) for name in names]
    shown = ", ".join(texts[:limit])
    return shown if len(texts) <= limit else f"{shown} and {len(texts) - limit} more"


def explain(error: BaseException, limit: int = 300) -> str:
    """What an exception of a library says, in one line; its kind where it says nothing."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def one_line(text: str, limit: int = 1000) -> str:
    """Text with names out of a hostile file, safe to print: no line breaks, no terminal escapes, not endless."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
