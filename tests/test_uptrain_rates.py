"""The learning rate of each weight: by default relative to its size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import edit_tensors, load
from support.tiny_models import TINY, build
from support.training import losses, options_for, tiny_checkpoint, trained, training_model
from torch import Tensor

from gqa.core.errors import RefusedError
from gqa.uptrain.optimizer import base_rate, make_optimizer, set_rate
from gqa.uptrain.options import UptrainOptions


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_the_default_rate_is_a_share_of_each_weight(optimizer: str) -> None:
    """Also when one weight is a hundred times larger; a bias moves as much as its weight."""
    model = training_model(build(TINY["llama+bias"], 2))
    attention = model.model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.mul_(100)
        attention.k_proj.bias.fill_(30)

    made = make_optimizer(model, UptrainOptions("model", optimizer=optimizer))
    rates = rates_of(made)
    for weight in (attention.k_proj.weight, attention.q_proj.weight, attention.o_proj.weight):
        size = float(weight.detach().square().mean().sqrt())
        assert rates[id(weight)] == pytest.approx(0.003 * size)
    assert rates[id(attention.k_proj.bias)] == rates[id(attention.k_proj.weight)]


def test_a_share_is_the_same_however_it_is_typed() -> None:
    """So that a run continues."""
    typed = ["0.3%", "0.30%", ".3%", "3e-1%"]
    assert {UptrainOptions("model", learning_rate=rate).learning_rate for rate in typed} == {"0.3%"}


def test_a_rate_that_is_given_is_that_of_all_weights() -> None:
    model = training_model(build(TINY["llama+bias"], 2))
    optimizer = make_optimizer(model, UptrainOptions("model", learning_rate=2e-4))
    set_rate(optimizer, 1e-4)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-4}


def test_a_weight_of_zeros_trains_at_the_rate_of_the_smallest_other() -> None:
    model = training_model(build(TINY["llama"], 2))
    attention = model.model.model.layers[0].self_attn
    with torch.no_grad():
        attention.o_proj.weight.zero_()

    rates = rates_of(make_optimizer(model, UptrainOptions("model")))
    assert rates[id(attention.o_proj.weight)] == min(rates.values()) > 0


def rates_of(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """The learning rate of each parameter at the peak, by the parameter's id."""
    set_rate(optimizer, base_rate(UptrainOptions("model")))
    return {
        id(parameter): group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_a_model_in_other_units_trains_to_the_same_losses(tmp_path: Path) -> None:
    """At the default rate; at an absolute one it does not."""
    plain = tiny_checkpoint(tmp_path / "plain")
    other = tmp_path / "other"
    shutil.copytree(plain, other)
    edit_tensors(other, in_other_units)

    assert losses_of_steps(other, "0.3%") == pytest.approx(losses_of_steps(plain, "0.3%"), rel=2e-3)
    assert losses_of_steps(other, 3e-3) != pytest.approx(losses_of_steps(plain, 3e-3), rel=2e-3)


def in_other_units(tensors: dict[str, Tensor]) -> None:
    """The same model: keys 16 times as large and queries a 16th; values 16 times as large and what
    reads them a 16th.
    """
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            tensor *= 16
        elif "q_proj" in name or "o_proj" in name:
            tensor /= 16


def losses_of_steps(model: Path, rate: float | str) -> list[float]:
    """The loss of each step of a short run; the last is that of a trained model."""
    out = model.parent / f"{model.name}-{rate}"
    trained(
        options_for(model, out, steps=12, learning_rate=rate, teacher="none", train="attention")
    )
    return losses(out)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """To a norm far below Adam's epsilon (1e-8), so that hardly any weight moves."""
    model = tiny_checkpoint(tmp_path / "model")
    before = load(model)
    moved = {}
    for clip in (1.0, 1e-12):
        out = tmp_path / f"clip-{clip:g}"
        options = options_for(model, out, steps=2, teacher="none", clip=clip, weight_decay=0.0)
        trained(options)
        after = load(out)
        moved[clip] = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert moved[1e-12] < 0.01 * moved[1.0]


@pytest.mark.parametrize("rate", ["0.3%%", "x%", "-1%", "0", "nan", "inf%", "", True])
def test_a_rate_is_a_positive_number_or_share(rate: object) -> None:
    with pytest.raises(RefusedError, match="is not a learning rate; pass a share of each weight"):
        UptrainOptions("model", learning_rate=rate)  # type: ignore[arg-type]
