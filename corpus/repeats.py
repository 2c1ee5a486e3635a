"""Text that repeats itself: what a model's attention looks up in its context.

A passage that stands twice can be predicted from its first copy, whatever it says. Blocks of which a part repeats
itself exercise the heads that find a thing again; text that a model writes itself hardly does. A conversion that is
calibrated or trained on plain text alone reads well and has forgotten how to look things up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]

SHORTEST = 16  # tokens of what repeats itself: below it, habit predicts as well as the first copy
# Of blocks, by what they become; docs/recall.md says what other shares are worth.
MIX = {"plain": 0.5, "tiled": 0.25, "random": 0.25}
BEFORE = 7  # blocks that the tokens of a random one are drawn from too
_GOLDEN = (math.sqrt(5) - 1) / 2


def tiled(block: Ints, random: np.random.Generator) -> Ints:
    """The first `lag` tokens of a block again and again to its end, `lag` uniform in T/8 ... T/2. Shape (T,)."""
    length = len(block)
    lag = random.integers(max(length // 8, 1), max(length // 2, 1), endpoint=True)
    return np.resize(block[:lag], length)


def mixed(blocks: Callable[[int], Ints], index: int, seed: int, lead: int, *, first: int = 0) -> Ints:
    """Block `index` of T tokens as `MIX` has it: as it stands, or repeating itself. Shape (T,).

    What it becomes depends on its number, the seed and the `BEFORE` blocks before it, not on how many there are.

    Args:
        blocks: Gives the block of a number as it stands.
        lead: Tokens at the beginning of each block that stay where they are: BOS.
        first: The first block that may be asked for.
    """
    own = blocks(index)
    head, block = own[:lead], own[lead:]
    # Numbers times the golden ratio are spread evenly: of any run of blocks each kind has about its share.
    kind = list(MIX)[int(np.searchsorted(np.cumsum(list(MIX.values())), index * _GOLDEN % 1.0, side="right"))]
    if kind == "plain" or len(block) < 2 * SHORTEST:
        return own
    random = np.random.default_rng([seed, index])
    if kind == "random":
        before = [blocks(number)[lead:] for number in range(max(first, index - BEFORE), index)]
        block = random.choice(np.concatenate([*before, block]), len(block))
    return np.concatenate([head, tiled(block, random)])
