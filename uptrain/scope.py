"""What trains: everything, the attention, the keys and values, or keys and values with low-rank changes elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from gqa.convert.attention import attention_modules
from gqa.convert.checkpoint import Checkpoint
from gqa.convert.errors import RefusedError
from gqa.convert.model_config import read_config

Scope = Literal["all", "attention", "kv", "lora"]
SCOPES: tuple[Scope, ...] = ("all", "attention", "kv", "lora")


@dataclass(frozen=True)
class AttentionParameters:
    """Names of a model's parameters in attention modules, and those of them that hold keys or values."""

    all: frozenset[str]
    keys_and_values: frozenset[str]


def attention_parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> AttentionParameters:
    """Found by the family's entry in the checkpoint, then by name in the model.

    Raises RefusedError where the class gives its parameters other names than the checkpoint has.
    """
    config = read_config(checkpoint.config, checkpoint.name)
    names = {name for name, _ in model.named_parameters()}
    modules, projections = set(), set()
    for module in attention_modules(checkpoint, config):
        modules.add(module.path)
        projections |= {f"{module.path}.{tail}" for tail in module.tensors if module.rule_of(tail, config)}
    inside = frozenset(name for name in names if any(name.startswith(f"{path}.") for path in modules))
    found = frozenset(projections & names)
    if not found:
        raise RefusedError(
            f"the parameters of {type(model).__name__} have other names than those in {checkpoint.name}, so its keys "
            "and values cannot be picked out; use --train all"
        )
    return AttentionParameters(inside, found)


def choose(model: PreTrainedModel, checkpoint: Checkpoint, scope: Scope, rank: int = 16, alpha: int = 32) -> None:
    """Freeze what does not train; with `lora` put adapters of `rank`, scaled by alpha / rank, on all other linears."""
    if scope == "all":
        return
    attention = attention_parameters(model, checkpoint)
    trained = attention.all if scope == "attention" else attention.keys_and_values
    if scope == "lora":
        _add_adapters(model, trained, rank, alpha)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained or "lora_" in name)


def _add_adapters(model: PreTrainedModel, trained: frozenset[str], rank: int, alpha: int) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise RefusedError("--train lora needs peft; install it with: pip install 'gqa-convert[lora]'") from None
    table = model.get_output_embeddings()
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not table and f"{name}.weight" not in trained
    ]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets), model)


def adapter_weights(model: PreTrainedModel) -> dict[str, Any]:
    """The adapters and what trained whole beside them, to be kept apart on request."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def merge_adapters(model: PreTrainedModel) -> None:
    """Adapters become part of the weights that they change; afterwards the model is the class' own again."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    for name, layer in layers:
        layer.merge(safe_merge=True)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups: matrices decay; vectors (norms, biases, gates) and embeddings of positions do not."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in parameters if p.ndim >= 2 and not re.search(r"norm|bias", name.lower())]
    chosen = {id(p) for p in decayed}
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": [p for _, p in parameters if id(p) not in chosen], "weight_decay": 0.0},
    ]
