"""What optimisers cost and what they do not go with; and text that repeats itself while training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import Runs, material, options_for

from gqa.checkpoint.read import read_checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.uptrain.dataloader import Dataloader, open_dataloader
from gqa.uptrain.summary import memory_bytes


def test_adafactor_is_refused_with_shards(runs: Runs, tmp_path: Path) -> None:
    done = runs.run(*runs.words(tmp_path / "out", steps=1, optimizer="adafactor"), before="shard()")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "--optimizer adafactor does not go with FSDP2, which divides weights; use adamw" in done.err


def test_bytes_of_a_parameter() -> None:
    assert [memory_bytes(100, 100, name) for name in ("adamw", "adafactor")] == [1600, 900]


def opened(**given: Any) -> Dataloader:
    options = replace(options_for(steps=8, batch_size=2, seed=3), **given)
    return open_dataloader(options, load_tokenizer(read_checkpoint(material() / "model")), 64)


def batches(loader: Dataloader, first: int = 0, rank: int = 0, ranks: int = 1) -> list[Any]:
    return [micro["input_ids"].numpy() for step in loader.batches(first, rank, ranks, 2) for micro in step]


@pytest.mark.parametrize("streaming", [False, True])
def test_half_of_the_blocks_repeat_themselves(streaming: bool) -> None:
    """The others stay as they are; what is held out does; and every rank and every continued run reads the same."""
    given = {"streaming": streaming, "heldout_tokens": 640}
    plain, mixed = opened(**given), opened(**given, repeats=True)
    before, after = (np.concatenate(batches(loader)) for loader in (plain, mixed))
    same = (before == after).all(1)
    assert 5 <= same.sum() <= 11
    assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(plain.heldout, mixed.heldout, strict=True))
    assert len(mixed.heldout) >= 5
    assert np.array_equal(np.concatenate(batches(mixed, 5)), after[10:])
    ranks = [np.concatenate(batches(mixed, 0, rank, 2)) for rank in range(2)]
    assert np.array_equal(np.stack(ranks, 1).reshape(-1, 64), after)
