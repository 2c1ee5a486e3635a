"""Select and order the training data.

Documents are ordered by a hash of their text and the seed: the same on every machine, for every number of ranks, and
for any layout of files. Training reads a prefix, so a larger alpha first reads the data of a smaller one. Held-out
documents are identified by a hash of their text, so no seed, alpha or other source brings them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gqa.corpus.tokens import Documents, Ints, permutation


@dataclass(frozen=True)
class Heldout:
    """Text that training never reads, in any source and epoch: documents with a digest in `limits` from that number of
    tokens on.
    """

    limits: Mapping[bytes, int] = field(default_factory=dict)

    def limit(self, digest: bytes, length: int) -> int:
        """Tokens to train on, from the start of a document of this digest and length."""
        return min(self.limits.get(digest, length), length)

    def lengths(self, documents: Documents) -> Ints:
        """(D,) tokens of each document to train on."""
        pairs = zip(documents.digests, documents.lengths.tolist(), strict=True)
        return np.array([self.limit(digest.tobytes(), length) for digest, length in pairs], np.int64)


def hold_back(documents: Documents, tokens: int) -> dict[bytes, int]:
    """The `limits` of a `Heldout` that hold back so many tokens: whole documents in the order of their digests, and the
    end of the last one.
    """
    limits: dict[bytes, int] = {}
    hashes = np.ascontiguousarray(documents.digests[:, :8]).view(">u8").ravel()
    for i in np.argsort(hashes, kind="stable"):
        if tokens <= 0:
            break
        digest, length = documents.digests[i].tobytes(), int(documents.lengths[i])
        if digest not in limits:
            limits[digest] = max(length - tokens, 0)
            tokens -= length - limits[digest]
    return limits


def reading_order(documents: Documents, lengths: Ints, tokens: int, seed: int = 0) -> Ints:
    """(N,) document numbers in training order, enough for so many tokens.

    `lengths`: (D,) tokens of each document to train on. Exhausted documents start again in another order; more tokens
    only append documents.
    """
    numbers = np.flatnonzero(lengths)
    epochs = range(-(-tokens // int(lengths.sum())))
    order = np.concatenate([numbers[permutation(documents.digests[numbers], seed, epoch)] for epoch in epochs])
    return order[: int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1]
