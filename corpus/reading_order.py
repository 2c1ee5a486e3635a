"""The order in which documents are read, and what of them is held out of training.

Documents are ordered by a hash of their text and the seed: the same on every machine, for every
number of ranks, and for any layout of files. Training reads a prefix, so a larger alpha first reads
the data of a smaller one. Held-out documents are identified by a hash of their text, so no seed,
alpha or other source brings them back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gqa.corpus.tokens import Documents, Ints


def permutation(digests: NDArray[np.uint8], seed: int, epoch: int = 0) -> Ints:
    """(D,) order of documents with these text digests (D, 32).

    The key is SHA-256(digest, seed, epoch, number of earlier copies of the text), which spreads
    copies out.
    """
    import pandas

    raw = digests.tobytes()
    words = pandas.DataFrame(np.frombuffer(raw, np.uint64).reshape(-1, 4))
    earlier_copies = words.groupby([0, 1, 2, 3]).cumcount()

    keys = list[bytes]()
    for number, copies in enumerate(earlier_copies):
        digest = raw[32 * number : 32 * number + 32]
        salt = f"{seed}:{epoch}:{copies}".encode()
        keys.append(hashlib.sha256(digest + salt).digest()[:8])
    return np.argsort(np.frombuffer(b"".join(keys), ">u8"), kind="stable")


@dataclass(frozen=True)
class HeldoutDocuments:
    """Text that training never reads, in any source and epoch.

    limits: Digest of a document -> how many of its first tokens may be trained on. What follows is
        held out: all of it at 0. Documents without an entry are trained on whole.
    """

    limits: Mapping[bytes, int] = field(default_factory=dict)

    def limit(self, digest: bytes, length: int) -> int:
        """Tokens to train on, from the start of a document of this digest and length."""
        return min(self.limits.get(digest, length), length)

    def lengths(self, documents: Documents) -> Ints:
        """(D,) tokens of each document to train on."""
        limits = [
            self.limit(digest.tobytes(), length)
            for digest, length in zip(documents.digests, documents.lengths.tolist(), strict=True)
        ]
        return np.array(limits, np.int64)


def hold_back(documents: Documents, tokens: int) -> dict[bytes, int]:
    """The `limits` of `HeldoutDocuments` that hold back so many tokens.

    Documents are taken from the lowest digest on, whole, until there are enough tokens. Of the last
    one only its end is taken, if it can be divided.
    """
    limits: dict[bytes, int] = {}
    hashes = np.ascontiguousarray(documents.digests[:, :8]).view(">u8").ravel()
    for i in np.argsort(hashes, kind="stable"):
        if tokens <= 0:
            break
        digest = documents.digests[i].tobytes()
        if digest in limits:
            continue

        length = int(documents.lengths[i])
        limit = 0
        if documents.divisible[i]:
            limit = max(length - tokens, 0)
        limits[digest] = limit
        tokens -= length - limit
    return limits


def reading_order(documents: Documents, lengths: Ints, tokens: int, seed: int = 0) -> Ints:
    """(N,) document numbers in training order, enough for so many tokens.

    `lengths`: (D,) tokens of each document to train on. Exhausted documents start again in another
    order; more tokens only append documents.
    """
    numbers = np.flatnonzero(lengths)
    digests = documents.digests[numbers]
    epochs = -(-tokens // int(lengths.sum()))  # rounded up
    order = np.concatenate([numbers[permutation(digests, seed, epoch)] for epoch in range(epochs)])
    ends = np.cumsum(lengths[order])
    count = int(np.searchsorted(ends, tokens)) + 1
    return order[:count]


def count_in_loss(documents: Documents, lengths: Ints, order: Ints, tokens: int) -> int:
    """How many of the first `tokens` tokens count in the loss, if documents are read in this order.

    lengths: (D,) tokens of each document to read: its length, or 0 if it is left out. (Chats are
        not divided.)
    """
    ends = np.cumsum(lengths[order])
    n_whole = int(np.searchsorted(ends, tokens, "right"))
    counted = int(documents.loss_tokens[order[:n_whole]].sum())

    rest = tokens - int(ends[:n_whole][-1:].sum())  # of the document after these
    if rest:
        mask = documents.tokens_with_mask(int(order[n_whole]))[:rest, 1]
        counted += int(mask.sum())
    return counted
