"""Blocks that repeat themselves: what stands twice stands where it should, and plain text is left as it is."""

from __future__ import annotations

import numpy as np
import pytest

from gqa.corpus.repeats import copied, interrupted, mixed, paired, tiled

LENGTH = 256
BLOCK = np.arange(1000, 1000 + LENGTH)  # no token twice: what stands twice was copied
OTHER = np.arange(5000, 5000 + LENGTH)


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


@pytest.mark.parametrize("seed", range(5))
def test_a_passage_stands_once_more(seed: int) -> None:
    found = copied(BLOCK, np.random.default_rng(seed))
    again = first_seen(found) > 0
    start, length = int(again.argmax()), int(again.sum())
    assert 1 <= length <= LENGTH // 4
    assert again[start : start + length].all()
    assert (np.delete(found, np.flatnonzero(again)) == BLOCK[: LENGTH - length]).all()
    assert (np.diff(found[start : start + length]) == 1).all()


@pytest.mark.parametrize("seed", range(5))
def test_another_text_comes_between(seed: int) -> None:
    found = interrupted(BLOCK, OTHER, np.random.default_rng(seed))
    lag = int((first_seen(found) > 0).sum())
    assert LENGTH // 8 <= lag <= LENGTH // 3
    assert (found[:lag] == found[-lag:]).all()
    assert (found[lag:-lag] == OTHER[: LENGTH - 2 * lag]).all()


@pytest.mark.parametrize("seed", range(5))
def test_a_key_always_has_its_value(seed: int) -> None:
    pairs = paired(OTHER, LENGTH, np.random.default_rng(seed)).reshape(-1, 2)
    values = dict(pairs.tolist())
    assert all(values[key] == value for key, value in pairs.tolist())
    assert len(values) <= LENGTH // 8 < len(pairs)
    assert pairs[: len(values)].tolist() != pairs[len(values) : 2 * len(values)].tolist()


BLOCKS = np.random.default_rng(0).integers(1000, 2000, (64, LENGTH))
KINDS = ("plain", "tiled", "copied", "interrupted", "random", "pairs")


def mix(count: int = 64, seed: int = 0, length: int = LENGTH, **shares: float) -> np.ndarray:
    return np.stack([mixed(lambda n: BLOCKS[n, :length], index, seed, 1, shares) for index in range(count)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 7, 33, 64, 256])
def test_blocks_keep_their_length_and_beginning(kind: str, length: int) -> None:
    found = mix(length=length, **{kind: 1.0})
    assert found.shape == (64, length)
    assert (found[:, 0] == BLOCKS[:, 0]).all()
    assert np.isin(found, BLOCKS).all()
    assert (kind == "plain" or length <= 32) == (found == BLOCKS[:, :length]).all()


def test_a_block_does_not_depend_on_how_many_there_are() -> None:
    shares = {"plain": 0.2, "tiled": 0.2, "copied": 0.2, "interrupted": 0.2, "random": 0.1, "pairs": 0.1}
    assert (mix(20, **shares) == mix(64, **shares)[:20]).all()
    assert (mix(20, **shares) != mix(20, seed=1, **shares)).any()


@pytest.mark.parametrize("start", [0, 7])
def test_any_run_of_blocks_has_its_shares(start: int) -> None:
    plain = (mix(plain=0.5, tiled=0.3, random=0.2) == BLOCKS).all(axis=1)[start : start + 40]
    assert 18 <= plain.sum() <= 22
    assert not plain.all()
