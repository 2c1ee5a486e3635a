"""Blocks that repeat themselves: what stands twice stands where it should, and plain text is left as it is."""

from __future__ import annotations

import numpy as np
import pytest

from gqa.corpus.tokens import mixed, tiled

LENGTH = 256
BLOCK = np.arange(1000, 1000 + LENGTH)  # no token twice: what stands twice was copied


@pytest.mark.parametrize("seed", range(5))
def test_the_beginning_comes_again_and_again(seed: int) -> None:
    ids = tiled(BLOCK, np.random.default_rng(seed))
    lag = len(np.unique(ids))
    assert LENGTH // 8 <= lag <= LENGTH // 2
    assert np.array_equal(ids, BLOCK[np.arange(LENGTH) % lag])


BLOCKS = np.random.default_rng(0).integers(1000, 2000, (64, LENGTH))


def mix(count: int = 64, seed: int = 0, length: int = LENGTH) -> np.ndarray:
    return np.stack([mixed(lambda n: BLOCKS[n, :length], index, seed, 1) for index in range(count)])


@pytest.mark.parametrize("length", [2, 32, 33, 256])
def test_blocks_keep_their_length_and_beginning(length: int) -> None:
    blocks = mix(length=length)
    assert blocks.shape == (64, length)
    assert (blocks[:, 0] == BLOCKS[:, 0]).all()
    assert np.isin(blocks, BLOCKS).all()
    assert (length <= 32) == (blocks == BLOCKS[:, :length]).all()


def test_any_run_of_blocks_has_its_shares() -> None:
    """A block does not depend on how many there are."""
    blocks = mix()
    assert (mix(20) == blocks[:20]).all()
    assert (mix(20) != mix(20, seed=1)).any()
    plain, repeated = (blocks == BLOCKS).all(axis=1), (blocks[:, 1:32] == BLOCKS[:, 1:32]).all(axis=1)
    for start in (0, 7):
        assert 18 <= plain[start : start + 40].sum() <= 22
        assert 8 <= (repeated & ~plain)[start : start + 40].sum() <= 12  # the others are of random tokens
