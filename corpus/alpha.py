"""Select and order the training data.

Documents are ordered by a hash of their text and the seed: the same on every machine, for every number of ranks, and
for any layout of files. Training reads a prefix, so a larger alpha first reads the data of a smaller one. Held-out
documents are identified by a hash of their text, so no seed, alpha or other source brings them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import CorpusError
from gqa.corpus.sources import is_below
from gqa.corpus.tokens import Documents, Ints, permutation


@dataclass(frozen=True)
class Heldout:
    """Text that training never reads, in any source and epoch: documents with a digest in `limits` from that number of
    tokens on, and documents whose digest is in the lowest `fraction` of all.
    """

    limits: Mapping[bytes, int] = field(default_factory=dict)
    fraction: float = 0.0

    def limit(self, digest: bytes, length: int) -> int:
        """Tokens to train on, from the start of a document of this digest and length."""
        if is_below(digest, self.fraction):
            return 0
        return min(self.limits.get(digest, length), length)

    def lengths(self, documents: Documents) -> Ints:
        """(D,) tokens of each document to train on."""
        pairs = zip(documents.digests, documents.lengths.tolist(), strict=True)
        return np.array([self.limit(digest.tobytes(), length) for digest, length in pairs], np.int64)


def hold_back(documents: Iterable[tuple[bytes, int]], tokens: int, limits: dict[bytes, int]) -> None:
    """Add so many tokens to the `limits` of a `Heldout`: whole documents (digest, length) in order, and the end of
    the last one.
    """
    for digest, length in documents:
        if tokens <= 0:
            return
        if digest not in limits:
            limits[digest] = max(length - tokens, 0)
            tokens -= length - limits[digest]


def hold_back_of_each(documents: Documents, tokens: int) -> dict[bytes, int]:
    """Hold back so many tokens: from each source its share, documents in the order of their hash."""
    limits: dict[bytes, int] = {}
    lengths, digests = documents.lengths, documents.digests
    for first, end in pairwise(np.cumsum([0, *documents.sizes])):
        hashes = np.ascontiguousarray(digests[first:end, :8]).view(">u8").ravel()
        order = first + np.argsort(hashes, kind="stable")
        share = -(-tokens * int(lengths[order].sum()) // int(lengths.sum()))
        hold_back(((digests[i].tobytes(), int(lengths[i])) for i in order), share, limits)
    return limits


def n_blocks_for(
    data_tokens: int,
    block_size: int,
    *,
    alpha: float | None = None,
    tokens: int | None = None,
    steps: int | None = None,
    blocks_per_step: int = 1,
    pretraining_tokens: int | None = None,
) -> int:
    """Number of blocks to train on: those that fit into alpha x all tokens, or into `tokens`, or that `steps` need.

    Give one of alpha, tokens and steps. All tokens are `pretraining_tokens` if given, else `data_tokens`.
    `blocks_per_step` is the global batch. Raises CorpusError if that is less than one block.
    """
    if data_tokens < block_size:
        raise CorpusError(f"the data has {data_tokens} tokens, less than one block of {block_size}; use smaller blocks")
    if steps is not None:
        return steps * blocks_per_step
    if alpha is not None:
        # Decimal: 0.29 of 100 is 29, not 28 as in binary.
        tokens = int(Fraction(repr(float(alpha))) * (pretraining_tokens or data_tokens))
    assert tokens is not None
    if tokens < block_size:
        length = f"tokens is {tokens}" if alpha is None else f"alpha {alpha:g} is {tokens} tokens"
        raise CorpusError(f"{length}, less than one block of {block_size}; give more, or use smaller blocks")
    return tokens // block_size


def reading_order(
    documents: Documents, lengths: Ints, *, block_size: int, seed: int = 0, weights: Sequence[float] | None = None,
    **length: Any,
) -> tuple[Ints, int, int]:  # fmt: skip
    """(N,) document numbers in training order, the number of blocks, and the tokens before any repeats.

    `lengths`: (D,) tokens of each document to train on. `length`: the length arguments of `n_blocks_for`. `weights`:
    each source's share of the tokens; the data then ends when the first source is exhausted. An exhausted source starts
    again in another order. Raises CorpusError.
    """
    sizes = (len(lengths),) if weights is None else documents.sizes
    sources = [np.flatnonzero(lengths[a:b]) + a for a, b in pairwise(np.cumsum([0, *sizes]))]
    if not all(map(len, sources)):
        raise CorpusError(
            "all documents are held out and none of a source is left to train on; hold out other or fewer documents"
        )
    shares = shares_of([1.0] if weights is None else weights)
    totals = [int(lengths[source].sum()) for source in sources]
    data_tokens = min(int(total / share) for total, share in zip(totals, shares, strict=True))
    n_blocks = n_blocks_for(data_tokens, block_size, **length)
    return _merged(documents.digests, lengths, sources, shares, n_blocks * block_size, seed), n_blocks, data_tokens


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Divide weights by their sum, exactly."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def _merged(
    digests: NDArray[np.uint8], lengths: Ints, sources: list[Ints], shares: list[Fraction], tokens: int, seed: int
) -> Ints:
    """Documents with at least so many tokens, from each source its share.

    The next document is always from the source furthest behind its share: a sort by (tokens of the source before the
    document) / share. A larger `tokens` only appends documents.
    """
    orders, due = [], []
    for source, share in zip(sources, shares, strict=True):
        needed = math.ceil(share * tokens)
        epochs = -(-needed // int(lengths[source].sum()))
        order = np.concatenate([source[permutation(digests[source], seed, epoch)] for epoch in range(epochs)])
        before = np.cumsum(lengths[order]) - lengths[order]
        orders.append(order[before < needed])
        due.append(before[before < needed] / float(share))
    order = np.concatenate(orders)[np.argsort(np.concatenate(due), kind="stable")]
    return order[: int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1]
