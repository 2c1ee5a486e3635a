"""Choose the parameters that train, and the optimiser that trains them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gqa.checkpoint.compat import unsaved_names
from gqa.checkpoint.errors import RefusedError, listing
from gqa.checkpoint.names import parameter_names
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import read_config
from gqa.convert.heads.modules import attention_modules, rule_of
from gqa.uptrain.lora import add_adapters
from gqa.uptrain.options import Scope, TrainOptions


def attention_parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[set[str], set[str]]:
    """Names of the parameters in attention modules, and of those among them that project to keys or values.

    The family's entry names the stored tensors, which are mapped to the model's parameters. A fused projection of
    queries, keys and values counts as one of keys and values. Raises RefusedError if the class combines the tensors of
    a projection with others.
    """
    config = read_config(checkpoint.config, checkpoint.name)
    modules = attention_modules(checkpoint, config)
    inside = {f"{module.path}.{tail}" for module in modules for tail in module.tensors}
    projections = {f"{m.path}.{tail}" for m in modules for tail in m.tensors if rule_of(tail, config)}
    parameters, trainable = parameter_names(model), {name for name, _ in model.named_parameters()}
    if missing := [name for name in projections if name not in parameters]:
        raise RefusedError(
            f"{type(model).__name__} has no parameter that is {listing(missing)} alone, so keys and values cannot be "
            "picked out; use --train all"
        )
    attention = {parameters[name] for name in inside if parameters.get(name) in trainable}
    return attention, {parameters[name] for name in projections} & trainable


def choose(model: PreTrainedModel, checkpoint: Checkpoint, scope: Scope, rank: int = 16) -> None:
    """Freeze the parameters outside the scope; `lora` adds adapters of that rank to the other linear layers.

    `all` freezes only parameters that the class does not store, like sinusoids. Raises RefusedError.
    """
    if scope == "all":
        unsaved = unsaved_names(model)
        for name, parameter in model.named_parameters():
            if name in unsaved:
                parameter.requires_grad_(False)
        return
    attention, keys_and_values = attention_parameters(model, checkpoint)
    trained = attention if scope == "attention" else keys_and_values
    if scope == "lora":
        add_adapters(model, trained, rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained or "lora_" in name)


def trained_names(model: PreTrainedModel) -> list[str]:
    """Names in the state dict of parameters that train, with all names of a tied one."""
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups: matrices decay; vectors (norms, biases, gates) do not, even if stored as matrices."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            vector = parameter.ndim < 2 or re.search(r"norm|bias", name.lower())
            (undecayed if vector else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW (fused if the device supports it), or Adafactor with an external learning rate (arXiv 1804.04235, section
    3.1). There is no empty parameter group, which torch's distributed state dicts cannot hold.
    """
    groups = [group for group in parameter_groups(model, options.weight_decay) if group["params"]]
    if options.optimizer == "adafactor":
        from transformers import Adafactor

        adafactor: torch.optim.Optimizer = Adafactor(
            groups, lr=options.learning_rate, relative_step=False, scale_parameter=False, warmup_init=False
        )
        return adafactor
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused)
