"""Learning rates, what decays, and which options go together: by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from tiny_models import TINY, build
from torch import nn
from training import training_model

from gqa.checkpoint.errors import RefusedError
from gqa.uptrain.options import TrainOptions, differences
from gqa.uptrain.schedule import Schedule, rate_factor, warmup_steps
from gqa.uptrain.scope import parameter_groups

HALF = 0.5 * (1 + math.cos(math.pi / 4)), 0.5 * (1 + math.cos(3 * math.pi / 4))


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        ("constant", {}, [1.0] * 6),
        ("constant", {"warmup": 3}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", {"warmup": 2}, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", {"warmup": 2}, [1 / 3, 2 / 3, 1, HALF[0], 0.5, HALF[1]]),
        ("wsd", {"warmup": 1, "decay": 0.5}, [0.5, 1, 1, 1, 2 / 3, 1 / 3]),
        ("wsd", {"decay": 0.01}, [1, 1, 1, 1, 1, 1]),
        ("wsd", {"decay": 1.0}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", {"warmup": 9}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        ("wsd", {"decay": 0.1}, [1.0] * 28 + [2 / 3, 1 / 3]),  # 0.1 x 30 is a little more than 3 in binary
        *(
            (schedule, {"warmup": warmup}, [rate])
            for schedule in get_args(Schedule)
            for warmup, rate in ((0, 1), (1, 0.5))
        ),
    ],
)
def test_rates_by_hand(schedule: Schedule, options: dict[str, Any], expected: list[float]) -> None:
    steps = len(expected)
    assert [rate_factor(step, steps, schedule, **options) for step in range(steps)] == pytest.approx(expected)


def test_warmup_by_default() -> None:
    assert [warmup_steps(None, "cosine", steps) for steps in (19, 20, 1000, 5000)] == [0, 1, 50, 100]
    assert warmup_steps(None, "constant", 5000) == 0
    assert [warmup_steps(7, schedule, 5000) for schedule in get_args(Schedule)] == [7] * 4


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    chosen = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


@pytest.mark.parametrize("name", ["llama+bias", "gemma2", "olmo2", "cohere+qk_norm", "mixtral", "stablelm+qk_norm"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    """Cohere's norms of heads are matrices, and experts are three-dimensional."""
    model = training_model(build(TINY[name], 2))
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    one, other = names_of(model, decayed), names_of(model, others)
    assert one | other == {name for name, _ in model.named_parameters()}
    assert not one & other
    assert all("norm" in name or name.endswith("bias") for name in other)
    assert not any("norm" in name or name.endswith("bias") for name in one)
    assert other


def test_what_is_frozen_is_in_no_group() -> None:
    model = training_model(build(TINY["llama"], 2))
    model.requires_grad_(False)
    kept = model.model.lm_head.weight.requires_grad_(True)
    assert [list(map(id, group["params"])) for group in parameter_groups(model, 0.1)] == [[id(kept)], []]


def options(**given: Any) -> TrainOptions:
    return TrainOptions("model", Path("out"), **{"steps": 3} | given)


@pytest.mark.parametrize(
    ("given", "ranks", "says"),
    [
        ({"alpha": 0.1}, 1, "given by --alpha and --steps; give one of --alpha, --tokens and --steps"),
        ({"alpha": math.nan, "steps": None}, 1, "alpha: nan is not a number above 0 to 1"),
        ({"pretraining_tokens": 9}, 1, "pretraining_tokens is what --alpha is a fraction of"),
        ({"batch_size": 6}, 4, "--batch-size 6 cannot be shared by 4 processes; give a multiple of 4"),
        ({"batch_size": 8, "micro_batch": 3}, 2, "--micro-batch 3 does not divide the 4 blocks"),
        ({"distill": 0.5, "teacher": "none"}, 1, "--distill needs --teacher"),
        ({"temperature": 2.0, "teacher": "none"}, 1, "--temperature needs --teacher, the model before conversion"),
        ({"lora_rank": 4, "train": "kv"}, 1, "--lora-rank needs --train lora; give both"),
        ({"decay": 0.5}, 1, "--decay needs --schedule wsd; give both"),
        ({"heldout": "a", "heldout_fraction": 0.1}, 1, "given by --heldout and --heldout-fraction; give one"),
        ({"learning_rate": math.inf}, 1, "learning_rate: inf is not a number above 0"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], ranks: int, says: str) -> None:
    with pytest.raises(RefusedError, match=says.replace("(", r"\(").replace(".", r"\.")):
        options(**given).check(ranks)


def test_options_that_go_with_another() -> None:
    """The control: with it each of them is taken."""
    options(train="lora", lora_rank=4, schedule="wsd", decay=0.5, temperature=2.0, distill=0.5).check(1)
    options(heldout="a", heldout_tokens=9).check(1)


def test_what_binds_a_run() -> None:
    """Where it is kept, how it is told and how it is computed may change; everything else is named."""
    before = options().binding()
    same = options(micro_batch=1, keep_last=9, save_every=1, checkpointing=True, report_to=("wandb",), overwrite=True)
    assert differences(same.binding(), before) == []
    other = options(seed=1, data=("a", "b"), heldout="c").binding()
    assert differences(other, before) == ["data: [] -> ['a', 'b']", "heldout: None -> c", "seed: 0 -> 1"]
