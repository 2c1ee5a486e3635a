"""Learning rates, what decays, which options go together, and text that repeats itself while training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tiny_models import TINY, build
from training import Runs, material, options_for, training_model

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_tokenizer
from gqa.checkpoint.read import read_checkpoint
from gqa.uptrain.dataloader import Dataloader, open_dataloader
from gqa.uptrain.loop import rate_factor, warmup_steps
from gqa.uptrain.models import parameter_groups
from gqa.uptrain.options import Schedule, TrainOptions

HALF = 0.5 * (1 + math.cos(math.pi / 4)), 0.5 * (1 + math.cos(3 * math.pi / 4))


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1.0] * 6),
        ("constant", 3, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [1 / 3, 2 / 3, 1, HALF[0], 0.5, HALF[1]]),
        ("linear", 9, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        *((schedule, warmup, [rate]) for schedule in get_args(Schedule) for warmup, rate in ((0, 1), (1, 0.5))),
    ],
)
def test_rates_by_hand(schedule: Schedule, warmup: int, expected: list[float]) -> None:
    steps = len(expected)
    assert [rate_factor(step, steps, schedule, warmup) for step in range(steps)] == pytest.approx(expected)


def test_warmup_by_default() -> None:
    assert [warmup_steps(None, "cosine", steps) for steps in (19, 20, 1000, 5000)] == [0, 1, 50, 100]
    assert warmup_steps(None, "constant", 5000) == 0
    assert [warmup_steps(7, schedule, 5000) for schedule in get_args(Schedule)] == [7] * 3


@pytest.mark.parametrize("name", ["llama+bias", "gemma2", "cohere+qk_norm", "mixtral"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    """Cohere's norms of heads are matrices, and experts are three-dimensional. What is frozen is in no group."""
    model = training_model(build(TINY[name], 2))
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for name, parameter in model.named_parameters():
        vector = "norm" in name or name.endswith("bias")
        assert [any(p is parameter for p in group["params"]) for group in groups] == [not vector, vector], name
    model.requires_grad_(False)
    head = model.model.lm_head.weight.requires_grad_(True)
    assert [list(map(id, group["params"])) for group in parameter_groups(model, 0.1)] == [[id(head)], []]


def options(**given: Any) -> TrainOptions:
    return TrainOptions("model", Path("out"), **{"steps": 3} | given)


@pytest.mark.parametrize(
    ("given", "ranks", "says"),
    [
        ({"alpha": 0.1}, 1, "given by --alpha and --steps; give one of --alpha, --tokens and --steps"),
        ({"alpha": math.nan, "steps": None}, 1, "alpha: nan is not a number above 0 to 1"),
        ({"batch_size": 6}, 4, "--batch-size 6 is not a multiple of the 4 processes"),
        ({"batch_size": 8, "micro_batch": 3}, 2, "--micro-batch 3 does not divide the 4 blocks"),
        ({"heldout": "a", "heldout_fraction": 0.1}, 1, "--heldout and --heldout-fraction both name held-out text"),
        ({"data": ("self", "a")}, 1, "--data self:TOKENS stands alone"),
        ({"data": ("self",), "teacher": "none"}, 1, "--data self is what the --teacher writes"),
        ({"data": ("self",), "alpha": 0.1, "steps": None}, 1, "say how much there is, like self:1M"),
        ({"learning_rate": math.inf}, 1, "learning_rate: inf is not a number above 0"),
        ({"streaming": True, "alpha": 0.1, "steps": None}, 1, "--alpha of a stream, whose length is unknown"),
        ({"streaming": True, "data": ("a", "b")}, 1, "--streaming reads one source; give the files of all as one"),
        ({"streaming": True, "heldout_fraction": 0.1}, 1, "--heldout-fraction is not for a stream"),
        ({"teacher": "none", "distill": 0.5}, 1, "distill needs --teacher; give both or leave it out"),
        ({"train": "all", "lora_rank": 8}, 1, "lora_rank needs --train lora"),
        ({"data": ("self",), "repeats": False}, 1, "repeats needs text of yours; self repeats itself"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], ranks: int, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        options(**given).check(ranks)
    options(heldout="a", heldout_tokens=9, batch_size=8, micro_batch=2).check(2)


def test_adafactor_is_refused_with_shards(runs: Runs, tmp_path: Path) -> None:
    done = runs.run(*runs.words(tmp_path / "out", steps=1, optimizer="adafactor"), before="shard()")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "--optimizer adafactor does not go with FSDP2, which divides weights; use adamw" in done.err


def opened(**given: Any) -> Dataloader:
    settings = replace(options_for(steps=8, batch_size=2, seed=3), **given)
    return open_dataloader(settings, load_tokenizer(read_checkpoint(material() / "model")), 64)


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
    assert (len(mixed.heldout) >= 5) is not streaming
    assert np.array_equal(np.concatenate(batches(mixed, 5)), after[10:])
    ranks = [np.concatenate(batches(mixed, 0, rank, 2)) for rank in range(2)]
    assert np.array_equal(np.stack(ranks, 1).reshape(-1, 64), after)
