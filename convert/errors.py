"""What a user can cause: one clear line each, never a traceback."""

from __future__ import annotations

from collections.abc import Iterable

from gqa.corpus.messages import explain as explain
from gqa.corpus.messages import listing as _listing
from gqa.corpus.messages import one_line as one_line


class RefusedError(ValueError):
    """A checkpoint or an option that cannot be converted; raised before a byte is written. Exit code 2."""


class CorruptError(RefusedError):
    """A checkpoint whose files are broken or hostile."""


class OutputError(OSError):
    """The output could not be written or did not verify. Exit code 1."""


def listing(names: Iterable[object], limit: int = 5) -> str:
    """`a, b, c` in sorted order, truncated with a count: `a, b, c, d, e and 7 more`."""
    return _listing(sorted(str(name) for name in names), limit)


def alternatives(numbers: Iterable[int]) -> str:
    """`1, 2, 4 or 8`."""
    texts = [str(n) for n in sorted(numbers)]
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
