"""Documents without the passages that they share with held-out text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gqa.corpus.rows import is_divisible, row_digest, searched_text

if TYPE_CHECKING:  # it imports numpy, for which `--help` does not wait
    from gqa.corpus.passages import Passages

# A pair or a chat is left out if at least this share of it is in held-out passages.
_WHOLE_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Exclusion:
    """Which parts of documents are left out of a source: passages of held-out text.

    Text is cut; of pairs and chats those are left out of which at least half is in passages.

    copies: digests of documents that stay as they are, because whoever reads the source leaves them
    out by digest.
    """

    passages: Passages
    copies: frozenset[bytes] = frozenset()

    @property
    def identity(self) -> str:
        copies = hashlib.sha256(b"".join(sorted(self.copies))).hexdigest()
        return f"{self.passages.identity} {copies}"

    def remainder(self, row: tuple[str, ...]) -> list[tuple[str, ...]]:
        """What is left of a document: pieces, each a document of its own."""
        if row_digest(*row) in self.copies:
            return [row]
        if is_divisible(row):
            return [(piece,) for piece in self.passages.remove_from(row[0])]
        return [] if self.passages.share(searched_text(row)) >= _WHOLE_SHARE else [row]
