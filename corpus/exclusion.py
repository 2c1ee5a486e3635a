"""Documents without the passages that they share with held-out text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gqa.corpus.rows import is_divisible, row_digest, searched_text

if TYPE_CHECKING:  # it imports numpy, for which `--help` does not wait
    from gqa.corpus.passages import Passages

# Part of the name of what is stored of a search for held-out text. Raise it if passages are found,
# left out, or stored in another way, so that nothing older is used.
SEARCH_VERSION = 2
# A pair or a chat is left out if at least this share of its letters is in held-out passages
_WHOLE_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Exclusion:
    """Which parts of documents are left out of a source: passages of held-out text.

    Text is cut; of pairs and chats those are left out of which at least half is in passages.

    Attributes:
        passages: Of the held-out text.
        left_to_reader: Digests of documents that are wholly held out. They pass unchanged: who
            reads the source drops them by digest (`HeldoutDocuments`).
    """

    passages: Passages
    left_to_reader: frozenset[bytes] = frozenset()

    @property
    def identity(self) -> str:
        """What determines which parts are left out: hashes of the held-out text and documents."""
        left_to_reader = hashlib.sha256(b"".join(sorted(self.left_to_reader))).hexdigest()
        return f"{SEARCH_VERSION} {self.passages.identity} {left_to_reader}"

    def remainder(self, row: tuple[str, ...]) -> list[tuple[str, ...]]:
        """What is left of a document: the document itself, pieces of a text that are documents of
        their own, or nothing.
        """
        if row_digest(*row) in self.left_to_reader:
            return [row]
        if is_divisible(row):
            return [(piece,) for piece in self.passages.remove_from(row[0])]

        is_left_out = self.passages.share(searched_text(row)) >= _WHOLE_SHARE
        return [] if is_left_out else [row]
