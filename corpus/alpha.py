"""How much of the data training sees, and in which order.

The order is that of a hash of each document's text and the seed: the same on every machine, for every number of ranks,
and whatever file a document lies in. Training reads a prefix of it, so what a smaller alpha sees, a larger one sees
first. Held-out documents are chosen by a hash of the text alone: no seed and no alpha brings them back, and copies of a
text are on the same side.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import CorpusError
from gqa.corpus.sources import hash_threshold, is_below
from gqa.corpus.tokens import Blocks, Ints, TokenisedText


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
    """The blocks that training reads: those that fit into alpha x all tokens, into `tokens`, or that `steps` need.

    Of alpha, tokens and steps one is given. All tokens are `pretraining_tokens` if given, else `data_tokens`.
    `blocks_per_step` is the global batch. Raises CorpusError where it comes to less than one block.
    """
    if data_tokens < block_size:
        raise CorpusError(f"the data has {data_tokens} tokens, less than one block of {block_size}; use smaller blocks")
    if steps is not None:
        return steps * blocks_per_step
    if alpha is not None:
        # As it is written: 0.29 of 100 is 29, and not 28 as in binary.
        tokens = int(Fraction(repr(float(alpha))) * (pretraining_tokens or data_tokens))
    assert tokens is not None
    if tokens < block_size:
        told = f"tokens is {tokens}" if alpha is None else f"alpha {alpha:g} is {tokens} tokens"
        raise CorpusError(f"{told}, less than one block of {block_size}; give more, or use smaller blocks")
    return tokens // block_size


def permutation(digests: NDArray[np.uint8], seed: int, epoch: int = 0) -> Ints:
    """(D,) the order of documents whose texts have these digests, (D, 32).

    That of the SHA-256 of a text's SHA-256, the seed, the epoch and how many documents before have the same text:
    copies of a text are spread out. Which of them is which makes no difference.
    """
    import pandas

    raw = digests.tobytes()
    copies = pandas.DataFrame(np.frombuffer(raw, np.uint64).reshape(-1, 4)).groupby([0, 1, 2, 3]).cumcount()
    told = (f"{seed}:{epoch}:{copy}".encode() for copy in copies)
    keys = [hashlib.sha256(raw[32 * i : 32 * i + 32] + text).digest()[:8] for i, text in enumerate(told)]
    return np.argsort(np.frombuffer(b"".join(keys), ">u8"), kind="stable")


def heldout_mask(digests: NDArray[np.uint8], fraction: float) -> NDArray[np.bool_]:
    """(D,) whether each document is held out, as `Source.part` decides."""
    threshold = hash_threshold(fraction)
    return np.array([is_below(digest.tobytes(), threshold) for digest in digests], bool)


@dataclass(frozen=True)
class Selection:
    """What training reads: its blocks, out of `data_tokens` that may be read before anything repeats."""

    blocks: Blocks
    data_tokens: int
    heldout_documents: int

    def summary(self) -> str:
        """One line for people."""
        blocks, size = self.blocks.n_blocks, self.blocks.size
        text = f"{blocks:,} blocks of {size:,}: {blocks * size:,} of {self.data_tokens:,} tokens"
        if (epochs := blocks * size / self.data_tokens) > 1:
            text += f", which are read {epochs:.2f} times, each time in another order"
        return f"{text}; {self.heldout_documents:,} documents held out" if self.heldout_documents else text


def select(
    text: TokenisedText,
    *,
    block_size: int,
    seed: int = 0,
    heldout_fraction: float = 0.0,
    weights: Sequence[float] | None = None,
    boundaries: bool = False,
    **length: Any,
) -> Selection:
    """The blocks that training reads, in the order in which it reads them. `length` is what `n_blocks_for` takes.

    `weights`: the share of the tokens that each of the text's sources has; the data then ends where the first source
    would repeat. A source that is exhausted begins again in another order. Raises CorpusError.
    """
    heldout = heldout_mask(text.digests, heldout_fraction)
    sources = _groups(text, heldout, weights)
    shares = shares_of([1.0] if weights is None else weights)
    sizes = [int(text.lengths[group].sum()) for group in sources]
    data_tokens = min(int(size / share) for size, share in zip(sizes, shares, strict=True))
    n_blocks = n_blocks_for(data_tokens, block_size, **length)
    order = _merged(text, sources, shares, n_blocks * block_size, seed)
    return Selection(Blocks(text, order, block_size, n_blocks, boundaries), data_tokens, int(heldout.sum()))


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Weights, divided by their sum."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def _groups(text: TokenisedText, heldout: NDArray[np.bool_], weights: Sequence[float] | None) -> list[Ints]:
    """The documents that training may see: of each source where sources have weights, else all together."""
    sizes = (len(text),) if weights is None else text.sizes
    groups = [np.flatnonzero(~heldout[a:b]) + a for a, b in pairwise(np.cumsum([0, *sizes]))]
    if not all(map(len, groups)):
        raise CorpusError("all documents are held out and none is left to train on; hold out a smaller fraction")
    return groups


def _merged(text: TokenisedText, sources: list[Ints], shares: list[Fraction], wanted: int, seed: int) -> Ints:
    """Documents of `wanted` tokens or a little more, from each source its share.

    The next document is always of the source that has had least for its share, which is to sort all documents by
    (tokens of its source before it) / share. What comes first does not depend on `wanted`.
    """
    orders, due = [], []
    for group, share in zip(sources, shares, strict=True):
        needed = math.ceil(share * wanted)
        epochs = -(-needed // int(text.lengths[group].sum()))
        order = np.concatenate([group[permutation(text.digests[group], seed, epoch)] for epoch in range(epochs)])
        before = np.cumsum(text.lengths[order]) - text.lengths[order]
        orders.append(order[before < needed])
        due.append(before[before < needed] / float(share))
    order = np.concatenate(orders)[np.argsort(np.concatenate(due), kind="stable")]
    return order[: int(np.searchsorted(np.cumsum(text.lengths[order]), wanted)) + 1]
