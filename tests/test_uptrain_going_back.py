"""A run whose held-out loss rises goes back to its best weights, at a lower learning rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import shard
from support.training import Runs, Step, losses, material, metrics, options_for, trained

from gqa.uptrain.optimizer import forget_moments, make_optimizer, set_rate
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.schedule import evaluates_after

STEPS = 8
EVERY = 2  # steps between two evaluations
TOO_FAST = 1.0  # a learning rate that ruins the model in two steps
TOO_SLOW = 1e-30  # one that changes no weight
HARDLY = 1e-5  # one that lowers the loss in two steps by less than 1%


@pytest.fixture
def converted() -> Path:
    """A tiny model that its teacher can improve."""
    return material() / "model"


def run(model: Path, out: Path, rate: float, **given: Any) -> dict[str, Any]:
    """The record of a run of a few steps, distilled and measured every two steps."""
    options = {
        "steps": STEPS,
        "eval_every": EVERY,
        "warmup": 0,
        "schedule": "linear",
        "validation_tokens": 256,
        "teacher": str(material() / "teacher"),
    }
    trained(options_for(model, out, learning_rate=rate, **options | given))
    return dict(json.loads((out / "gqa_uptraining.json").read_text()))


def rates(out: Path) -> list[float]:
    """The learning rate of each step."""
    return [record["learning_rate"] for record in metrics(out / "gqa_uptraining.jsonl")]


def test_the_rate_falls_to_a_third_whenever_the_loss_has_not_fallen(
    converted: Path, tmp_path: Path
) -> None:
    record = run(converted, tmp_path / "out", TOO_FAST)
    steps = metrics(tmp_path / "out" / "gqa_uptraining.jsonl")

    lowest = record["losses"]["distillation_before"]
    cuts = 0
    for number, step in enumerate(steps):
        scheduled = TOO_FAST * (STEPS - number) / STEPS
        assert step["learning_rate"] == pytest.approx(scheduled / 3**cuts)
        is_last = step["step"] == STEPS
        if "validation_kl" in step and not is_last:
            cuts += step["validation_kl"] >= lowest
            lowest = min(lowest, step["validation_kl"])
    assert record["losses"]["rate_cuts"] == cuts >= 1


def test_the_run_goes_on_from_the_best_weights(converted: Path, tmp_path: Path) -> None:
    """Here those of the start: after the first evaluation, a step has the loss of a model that
    never changed. The step before it has not.
    """
    run(converted, tmp_path / "fast", TOO_FAST)
    run(converted, tmp_path / "slow", TOO_SLOW)
    fast = losses(tmp_path / "fast")
    unchanged = losses(tmp_path / "slow")
    assert fast[EVERY - 1] > 1.1 * unchanged[EVERY - 1]
    assert fast[EVERY] == pytest.approx(unchanged[EVERY], rel=1e-6)


def test_a_small_fall_lowers_no_rate(converted: Path, tmp_path: Path) -> None:
    """It may be that of a rate which is too low."""
    record = run(converted, tmp_path / "out", HARDLY)
    before = record["losses"]["distillation_before"]
    first = metrics(tmp_path / "out" / "gqa_uptraining.jsonl")[EVERY - 1]["validation_kl"]
    assert 0.99 * before < first < before
    assert record["losses"]["rate_cuts"] == 0


def test_a_run_whose_loss_falls_keeps_its_rate(converted: Path, tmp_path: Path) -> None:
    record = run(converted, tmp_path / "out", 1e-3)
    assert record["losses"]["rate_cuts"] == 0
    scheduled = [1e-3 * (STEPS - step) / STEPS for step in range(STEPS)]
    assert rates(tmp_path / "out") == pytest.approx(scheduled)


def test_a_constant_schedule_keeps_its_rate(converted: Path, tmp_path: Path) -> None:
    """Its first steps are those of a longer run, whatever is measured between them."""
    record = run(converted, tmp_path / "out", TOO_FAST, schedule="constant")
    assert record["losses"]["rate_cuts"] == 0
    assert rates(tmp_path / "out") == [TOO_FAST] * STEPS


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_an_optimizer_without_moments_steps_like_a_new_one(name: str) -> None:
    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def made() -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Linear(4, 6, bias=False)
        with torch.no_grad():
            model.weight.copy_(weights)
        return model, make_optimizer(model, UptrainOptions("model", optimizer=name))

    def step(model: torch.nn.Module, optimizer: Any, scale: float) -> None:
        (parameter,) = model.parameters()
        parameter.grad = scale * weights.flip(0)
        set_rate(optimizer, 1e-2)
        optimizer.step()

    used, its_optimizer = made()
    for _ in range(3):
        step(used, its_optimizer, scale=-50.0)
    (parameter,) = used.parameters()
    with torch.no_grad():
        parameter.copy_(weights)
    new, other_optimizer = made()

    forget_moments(its_optimizer)
    step(used, its_optimizer, scale=1.0)
    step(new, other_optimizer, scale=1.0)
    assert torch.equal(parameter, next(new.parameters()))
    assert not torch.equal(parameter, weights)


def test_a_run_is_measured_early_and_four_times() -> None:
    def measured(steps: int, every: int | None = None) -> list[int]:
        return [step for step in range(1, steps + 1) if evaluates_after(step, steps, every)]

    assert measured(256) == [16, 64, 128, 192, 256]
    assert measured(250) == [15, 63, 126, 189, 250]
    assert measured(8) == [2, 4, 6, 8]
    assert measured(100, every=30) == [30, 60, 90, 100]


def test_processes_and_shards_go_back_alike(runs: Runs, tmp_path: Path) -> None:
    options = {
        "steps": STEPS,
        "eval_every": EVERY,
        "warmup": 0,
        "learning_rate": TOO_FAST,
        "teacher": "teacher",
        "validation_tokens": 256,
    }
    ways: dict[str, tuple[int, list[Step]]] = {
        "one": (1, []),
        "two": (2, []),
        "shards": (2, [shard]),
    }
    for name, (ranks, before) in ways.items():
        runs.finish(*runs.words(tmp_path / name, **options), ranks=ranks, before=before)

    assert rates(tmp_path / "one")[EVERY] < TOO_FAST / 2, "it has gone back"
    for name in ("two", "shards"):
        assert rates(tmp_path / name) == pytest.approx(rates(tmp_path / "one"))
        # The steps until it went back, and the first one after it.
        until = EVERY + 1
        expected = losses(tmp_path / "one")[:until]
        assert losses(tmp_path / name)[:until] == pytest.approx(expected, rel=1e-3)
