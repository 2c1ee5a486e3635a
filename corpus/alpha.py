"""Select and order the training data.

Documents are ordered by a hash of their text and the seed: the same on every machine, for every number of ranks, and
for any layout of files. Training reads a prefix, so a larger alpha first reads the data of a smaller one. Held-out
documents are identified by a hash of their text, so no seed, alpha or other source brings them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from gqa.checkpoint.errors import CorpusError
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


def count_blocks(
    data_tokens: int,
    block_size: int,
    *,
    alpha: float | None = None,
    tokens: int | None = None,
    steps: int | None = None,
    blocks_per_step: int = 1,
) -> int:
    """Number of blocks to train on: those that fit into alpha x all tokens, or into `tokens`, or that `steps` need.

    Give one of alpha, tokens and steps. `blocks_per_step` is the global batch. Raises CorpusError if that is less than
    one block.
    """
    if data_tokens < block_size:
        raise CorpusError(f"the data has {data_tokens} tokens, less than one block of {block_size}; use smaller blocks")
    if steps is not None:
        return steps * blocks_per_step
    if alpha is not None:
        # Decimal: 0.29 of 100 is 29, not 28 as in binary.
        tokens = int(Fraction(repr(float(alpha))) * data_tokens)
    assert tokens is not None
    if tokens < block_size:
        length = f"tokens is {tokens}" if alpha is None else f"alpha {alpha:g} is {tokens} tokens"
        raise CorpusError(f"{length}, less than one block of {block_size}; give more, or use smaller blocks")
    return tokens // block_size


def reading_order(
    documents: Documents, lengths: Ints, *, block_size: int, seed: int = 0, **length: Any
) -> tuple[Ints, int, int]:
    """(N,) document numbers in training order, the number of blocks, and the tokens before any repeats.

    `lengths`: (D,) tokens of each document to train on. `length`: the length arguments of `count_blocks`. Exhausted
    documents start again in another order; more tokens only append documents. Raises CorpusError.
    """
    numbers = np.flatnonzero(lengths)
    if not len(numbers):
        raise CorpusError("all documents are held out and none is left to train on; hold out other or fewer documents")
    data_tokens = int(lengths.sum())
    n_blocks = count_blocks(data_tokens, block_size, **length)
    tokens = n_blocks * block_size
    epochs = range(-(-tokens // data_tokens))
    order = np.concatenate([numbers[permutation(documents.digests[numbers], seed, epoch)] for epoch in epochs])
    return order[: int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1], n_blocks, data_tokens
