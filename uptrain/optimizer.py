"""The optimizer of a run, and the learning rate of each weight."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gqa.uptrain.options import UptrainOptions

# Adapters begin at zero and are scaled: a size of their own would say nothing.
_ADAPTER_SIZE = 0.1
_BETAS = (0.9, 0.95)


def base_rate(options: UptrainOptions) -> float:
    """The peak learning rate, which `make_optimizer` multiplies by the `scale` of a weight."""
    if is_relative(options):
        return float(str(options.learning_rate).removesuffix("%")) / 100
    return float(options.learning_rate)


def is_relative(options: UptrainOptions) -> bool:
    """Whether the learning rate is a share of the size of each weight.

    It is by default. A step of Adam has about the size of the rate whatever the gradient, so one
    number that suits a model is ten times too large for another: the root mean square of matrices
    is 0.2 in SmolLM2-135M and 0.016 in Qwen2.5-0.5B.
    """
    return isinstance(options.learning_rate, str)


def make_optimizer(model: nn.Module, options: UptrainOptions) -> torch.optim.Optimizer:
    """AdamW (fused if the device supports it), or Adafactor with an external learning rate (arXiv
    1804.04235, section 3.1).

    Matrices decay; vectors (norms, biases, gates) do not, even if stored as matrices. There is no
    empty parameter group, which torch's distributed state dicts cannot hold.

    Each group has a `scale`: its learning rate is that of the step times the scale, which is 1 if
    the options name one rate for all weights.
    """
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    scales = dict.fromkeys(trained, 1.0)
    if is_relative(options):
        scales = weight_sizes(trained)

    # Parameters of the same scale and decay share a group.
    by_setting: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        is_vector = parameter.ndim < 2 or re.search(r"norm|bias", name.lower())
        decay = 0.0 if is_vector else options.weight_decay
        by_setting.setdefault((scales[name], decay), []).append(parameter)

    groups: list[dict[str, Any]] = []
    for (scale, decay), parameters in by_setting.items():
        groups.append({"params": parameters, "weight_decay": decay, "scale": scale})

    rate = base_rate(options)
    if options.optimizer == "adafactor":
        from transformers import Adafactor

        adafactor: torch.optim.Optimizer = Adafactor(
            groups, lr=rate, relative_step=False, scale_parameter=False, warmup_init=False
        )
        return adafactor

    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in trained.values())
    return torch.optim.AdamW(groups, lr=rate, betas=_BETAS, fused=fused)


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rates of the next step: `rate` times the scale of each group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


@torch.no_grad()
def forget_moments(optimizer: Any) -> None:
    """Set the state of an optimizer to what it is before the first step: moments of gradients that
    other weights had would lead astray.

    The entries stay, since a saved state has them.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            else:
                state[name] = type(value)(0)


@torch.no_grad()
def weight_sizes(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """What a learning rate is relative to: the root mean square of each weight, by name.

    A bias has that of its weight, so that both move the output alike: biases of keys can be a
    thousand times larger (Qwen2), of which a share would be a leap. A weight of zeros has the size
    of the smallest other one.
    """
    sizes = {}
    for name, parameter in parameters.items():
        weight = parameters.get(re.sub(r"bias$", "weight", name), parameter)
        sizes[name] = _ADAPTER_SIZE if ".lora_" in name else _root_mean_square(weight)

    smallest = min((size for size in sizes.values() if size), default=1.0)
    return {name: size or smallest for name, size in sizes.items()}


def _root_mean_square(weight: torch.Tensor) -> float:
    """Of a whole weight, also if each process has its shard of it: all must call it then."""
    # A sum, as shards may differ in size, of which a mean of means would know nothing
    squares = weight.detach().float().square().sum()
    if isinstance(squares, DTensor):
        # On the device of the mesh: what is offloaded cannot be gathered on the host
        squares = squares.to(squares.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return math.sqrt(float(squares) / weight.numel())
