"""Repeated text, which trains recall from the context.

The second copy of a passage can be predicted from the first, whatever it says. Such blocks exercise the heads that look
things up; self-generated text hardly does. A model that is calibrated or trained on plain text alone has a low
perplexity but loses recall.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]

SHORTEST = 16  # tokens of a repeated passage: shorter ones are predicted without the first copy
# Shares of the kinds of blocks; docs/results.md compares others.
MIX = {"plain": 0.5, "tiled": 0.25, "random": 0.25}
BEFORE = 7  # earlier blocks from which a random block draws tokens too
_GOLDEN = (math.sqrt(5) - 1) / 2


def tiled(block: Ints, random: np.random.Generator) -> Ints:
    """Repeat the first `lag` tokens of a block (T,) to its end, `lag` uniform in T/8 ... T/2."""
    length = len(block)
    lag = random.integers(max(length // 8, 1), max(length // 2, 1), endpoint=True)
    return np.resize(block[:lag], length)


def mixed(blocks: Callable[[int], Ints], index: int, seed: int, lead: int, *, first: int = 0) -> Ints:
    """Block `index` (T,), plain or repeating itself, with the shares of `MIX`.

    It depends on the index, the seed and the `BEFORE` earlier blocks, not on the number of blocks.

    Args:
        blocks: Index -> plain block.
        lead: Tokens at the start of each block that do not change: BOS.
        first: The first block that exists.
    """
    plain = blocks(index)
    head, block = plain[:lead], plain[lead:]
    # Multiples of the golden ratio are spread evenly, so each kind has its share in any run of blocks.
    kind = list(MIX)[int(np.searchsorted(np.cumsum(list(MIX.values())), index * _GOLDEN % 1.0, side="right"))]
    if kind == "plain" or len(block) < 2 * SHORTEST:
        return plain
    random = np.random.default_rng([seed, index])
    if kind == "random":
        before = [blocks(number)[lead:] for number in range(max(first, index - BEFORE), index)]
        block = random.choice(np.concatenate([*before, block]), len(block))
    return np.concatenate([head, tiled(block, random)])
