"""Blocks that repeat themselves: what stands twice stands where it should, and plain text is left as it is."""

from __future__ import annotations

import numpy as np
import pytest

from gqa.corpus.tokens import mixed, tiled

LENGTH = 256
BLOCK = np.arange(1000, 1000 + LENGTH)  # no token twice: what stands twice was copied


def first_seen(ids: np.ndarray) -> np.ndarray:
    """Of every token that stood before, how long ago; 0 where it is new."""
    last: dict[int, int] = {}
    found = np.zeros(len(ids), int)
    for place, token in enumerate(ids.tolist()):
        found[place] = place - last.get(token, place)
        last[token] = place
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_beginning_comes_again_and_again(seed: int) -> None:
    lags = first_seen(tiled(BLOCK, np.random.default_rng(seed)))
    lag = int(lags.max())
    assert LENGTH // 8 <= lag <= LENGTH // 2
    assert (lags == np.where(np.arange(LENGTH) < lag, 0, lag)).all()


BLOCKS = np.random.default_rng(0).integers(1000, 2000, (64, LENGTH))


def mix(count: int = 64, seed: int = 0, length: int = LENGTH) -> np.ndarray:
    return np.stack([mixed(lambda n: BLOCKS[n, :length], index, seed, 1) for index in range(count)])


@pytest.mark.parametrize("length", [2, 7, 32, 33, 256])
def test_blocks_keep_their_length_and_beginning(length: int) -> None:
    found = mix(length=length)
    assert found.shape == (64, length)
    assert (found[:, 0] == BLOCKS[:, 0]).all()
    assert np.isin(found, BLOCKS).all()
    assert (length <= 32) == (found == BLOCKS[:, :length]).all()


def test_a_block_does_not_depend_on_how_many_there_are() -> None:
    assert (mix(20) == mix(64)[:20]).all()
    assert (mix(20) != mix(20, seed=1)).any()


@pytest.mark.parametrize("start", [0, 7])
def test_any_run_of_blocks_has_its_shares(start: int) -> None:
    found = mix()
    plain, tiled_ = (found == BLOCKS).all(axis=1), (found[:, 1:32] == BLOCKS[:, 1:32]).all(axis=1)
    assert 18 <= plain[start : start + 40].sum() <= 22
    assert 8 <= (tiled_ & ~plain)[start : start + 40].sum() <= 12  # the others are of random tokens
