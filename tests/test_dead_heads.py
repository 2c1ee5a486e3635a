"""Heads that compute nothing or the same everywhere, as pruning leaves them: they are merged like others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scrambled import Ids, on_ids, relative
from test_families import load, write_checkpoint
from tiny_models import TINY, build, inputs, logits

from gqa.convert import convert_checkpoint
from gqa.convert.align.alignment import ridge, shared_key, shared_value
from gqa.convert.align.options import Refinement
from gqa.convert.heads.symmetries import Rotary

HEADS, DIM = 2, 6


# Whose weights are zero, along which dimension, and what part of them.
DEATHS = {
    "values": ("v_proj", 0, 1),
    "values of a group": ("v_proj", 0, 2),
    "keys of a group": ("k_proj", 0, 2),
    "outputs of a group": ("o_proj", 1, 2),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("method", ["aligned", "calibrated", "refined"])
@pytest.mark.parametrize("name", ["llama", "glm", "granitemoehybrid+nope"])
def test_dead_heads_are_merged(name: str, method: str, death: str, tmp_path: Path) -> None:
    """Without rotation, with some, with all dimensions rotated; float16 holds what is written."""
    tiny, (projection, dim, share) = TINY[name], DEATHS[death]
    model = build(tiny, 4)
    for own, weight in model.named_parameters():
        if own.endswith(f".{projection}.weight"):
            weight.data.narrow(dim, 0, weight.shape[dim] // share).zero_()
    source = write_checkpoint(model, tmp_path / "source")
    options = on_ids(ridge=0.0, text=Ids(high=tiny.tokens), refinement=Refinement(steps=4, batch=16))
    found = {}
    for way in (method, "mean"):
        out = convert_checkpoint(
            source, 2, tmp_path / way, method=way, dtype="float16", calibration=options if way == method else None
        ).out
        found[way] = logits(tiny, load(tiny, out, "sdpa"), inputs(tiny))
    assert found[method].isfinite().all()
    expected = logits(tiny, model, inputs(tiny))
    assert relative(found[method], expected) <= relative(found["mean"], expected)


@pytest.mark.parametrize(
    "rotary", [Rotary(0), Rotary(DIM), Rotary(2), Rotary(DIM, slow=(0.01, 0.001))], ids=["none", "all", "some", "slow"]
)
@pytest.mark.parametrize("dead", ["keys", "queries", "constant keys"])
def test_keys_that_carry_nothing(rotary: Rotary, dead: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, HEADS * DIM, dtype=torch.float64, generator=generator)
    rows = rows[:1].expand(50, -1) if dead == "constant keys" else rows * (dead != "keys")
    queries = torch.eye(DIM, dtype=torch.float64).expand(HEADS, DIM, DIM) * (dead != "queries")
    found = shared_key(rows.T @ rows / 50, queries, rows.mean(0), rotary)
    assert found.merge.isfinite().all()
    assert found.back.isfinite().all()
    assert found.back.abs().max() < 1e4  # which float16 holds with weights of the usual size
    assert found.merge.abs().max() < 1e4


@pytest.mark.parametrize("size", [0.0, 1e-3])
def test_weak_slow_pairs_lose_nothing_where_heads_are_redundant(size: float) -> None:
    """Keys of two heads that lie in four dimensions, of which rotation frequency by frequency would find few."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(4, 8, dtype=torch.float64, generator=generator)
    mixing = mixing * torch.tensor([1, size, 1, size] * 2, dtype=torch.float64)  # the second pair of either head
    keys = torch.randn(500, 4, dtype=torch.float64, generator=generator) @ mixing
    queries, means = torch.eye(4, dtype=torch.float64).expand(2, 4, 4), torch.zeros(8, dtype=torch.float64)
    found = shared_key(keys.T @ keys / 500, queries, means, Rotary(4, slow=(0.0, 0.0)))
    back = torch.cat([keys @ found.merge.T @ found.back[head] for head in range(2)], 1)
    assert float((back - keys).square().sum() / keys.square().sum()) < 1e-5


def test_values_that_are_zero() -> None:
    zeros = torch.zeros(HEADS, HEADS * DIM, HEADS * DIM, dtype=torch.float64)
    gains = torch.eye(DIM, dtype=torch.float64).expand(HEADS, DIM, DIM)
    found = shared_value(zeros, zeros[0], gains, torch.arange(HEADS))
    assert found.merge.isfinite().all()
    assert found.back.isfinite().all()


def test_a_ridge_where_inputs_are_nothing_stays_at_its_start() -> None:
    start = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(4, 4, dtype=torch.float64)
    for strength in (0.0, 0.03):
        assert torch.allclose(ridge(nothing, nothing, start, strength), start)
    inputs = torch.diag(torch.tensor([2.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    found = ridge(inputs, inputs, start, 0.0)
    assert torch.allclose(found[:, :2], torch.eye(4, dtype=torch.float64)[:, :2])
    assert torch.allclose(found[:, 2:], start[:, 2:])
