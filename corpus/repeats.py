"""Text that repeats itself: what a model's attention looks up in its context.

A passage that stands twice can be predicted from its first copy, whatever it says. Blocks of which a part repeats
itself exercise the heads that find a thing again; text that a model writes itself hardly does. A conversion that is
calibrated or trained on plain text alone reads well and has forgotten how to look things up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]

SHORTEST = 16  # tokens of a passage that is copied: below it, habit predicts as well as the first copy
# Of blocks, by what they become; docs/recall.md says what other shares are worth.
MIX = {"plain": 0.5, "tiled": 0.25, "random": 0.25}
_GOLDEN = (math.sqrt(5) - 1) / 2


def tiled(block: Ints, random: np.random.Generator) -> Ints:
    """The first `lag` tokens of a block again and again to its end, `lag` uniform in T/8 ... T/2. Shape (T,)."""
    length = len(block)
    lag = random.integers(max(length // 8, 1), max(length // 2, 1), endpoint=True)
    return np.resize(block[:lag], length)


def copied(block: Ints, random: np.random.Generator, copies: int = 1) -> Ints:
    """A block with `copies` of its passages inserted once more further on; what follows moves back. Shape (T,).

    Lengths are uniform in their logarithm between `SHORTEST` and a quarter of the block, places uniform.
    """
    length = len(block)
    longest = max(length // 4, 1)
    for _ in range(copies):
        passage = round(math.exp(random.uniform(math.log(min(SHORTEST, longest)), math.log(longest))))
        start = random.integers(0, length - 2 * passage, endpoint=True)
        place = random.integers(start + passage, length - passage, endpoint=True)
        block = np.concatenate([block[:place], block[start : start + passage], block[place:]])[:length]
    return block


def interrupted(block: Ints, other: Ints, random: np.random.Generator) -> Ints:
    """The beginning of a block, another text, and the beginning again, which is T/8 ... T/3 tokens long. Shape (T,)."""
    length = len(block)
    lag = int(random.integers(max(length // 8, 1), max(length // 3, 1), endpoint=True))
    return np.concatenate([block[:lag], other[: length - 2 * lag], block[:lag]])


def paired(pool: Ints, length: int, random: np.random.Generator) -> Ints:
    """Pairs of random tokens, keys and values, all once and then again and again in other orders. Shape (length,)."""
    count = max(length // int(random.integers(8, 17)), 1)
    pairs = np.resize(random.permutation(np.unique(pool)), (count, 2))
    turns = -(-length // pairs.size)
    return np.concatenate([random.permutation(pairs).flatten() for _ in range(turns)])[:length]


def mixed(blocks: Callable[[int], Ints], index: int, seed: int, lead: int, shares: Mapping[str, float] = MIX) -> Ints:
    """Block `index` of T tokens as a mix has it: as it stands, or repeating itself. Shape (T,).

    What it becomes depends on its number, the seed and the seven blocks before it, not on how many there are.

    Args:
        blocks: Gives the block of a number as it stands.
        lead: Tokens at the beginning of each block that stay where they are: BOS.
        shares: Of each kind. Of any run of blocks each kind has about its share.
    """
    own = blocks(index)
    head, block = own[:lead], own[lead:]
    kind = _kind(index, shares)
    if kind == "plain" or len(block) < 2 * SHORTEST:
        return own
    random = np.random.default_rng([seed, index])
    before = [blocks(number)[lead:] for number in range(max(0, index - 7), index)] or [block]
    if kind == "copied":
        block = copied(block, random, int(random.integers(1, 5)))
    elif kind == "interrupted":
        block = interrupted(block, before[-1], random)
    elif kind == "random":
        block = tiled(random.choice(np.concatenate([*before, block]), len(block)), random)
    elif kind == "pairs":
        block = paired(np.concatenate([*before, block]), len(block), random)
    else:
        block = tiled(block, random)
    return np.concatenate([head, block])


def _kind(index: int, shares: Mapping[str, float]) -> str:
    """Numbers times the golden ratio are spread evenly, whatever the share."""
    place = index * _GOLDEN % 1.0 * sum(shares.values())
    return list(shares)[int(np.searchsorted(np.cumsum(list(shares.values())), place, side="right"))]
