"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, and their merging into the weights."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.errors import OutputError, RefusedError

ALPHA = 32  # adapters are scaled by ALPHA / rank
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: PreTrainedModel, trained: AbstractSet[str], rank: int) -> None:
    """Add adapters to the linear layers, except the head and layers whose weights are in `trained`.

    Routers get none, as they return tuples, nor do output projections of Mamba mixers, whose weights fused kernels read
    without calling the layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise RefusedError("--train lora needs peft; install it with: pip install 'gqa[lora]'") from error
    table = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module)
        and module is not table
        and f"{name}.weight" not in trained
        and not (name.endswith("out_proj") and hasattr(model.get_submodule(name.rpartition(".")[0]), "conv1d"))
    }
    if not layers:
        name = type(model).__name__
        raise RefusedError(f"--train lora: {name} has no other linear layers to adapt; use --train attention or all")
    empty = {module: module.weight for module in layers.values() if module.weight.is_meta}
    for module, weight in empty.items():  # peft puts adapters on the device of the weight: not on meta
        module.weight = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False)
    # peft has rules for some model types (it adapts experts instead of dense layers, and refuses out_proj), which it
    # does not apply to a module without a config.
    shell = nn.ModuleDict({"model": model})
    targets = [f"model.{name}" for name in layers]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=targets), shell)
    for module, weight in empty.items():
        module.weight = weight


@torch.no_grad()
def _is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear and returns a plain tensor: some routers are subclasses that do not."""
    if not isinstance(module, nn.Linear) or type(module) is nn.Linear:
        return isinstance(module, nn.Linear)
    try:
        output = module(module.weight.new_zeros(1, module.in_features))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(output, Tensor) and output.shape == (1, module.out_features)


def merge_adapter(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """W + ALPHA / r x B A: (out, in) weight, (r, in) A, (out, r) B."""
    return weight + (ALPHA / len(down)) * (up @ down)


def merge_adapters(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapters of a state dict into their weights, which get their plain names. Raises OutputError."""
    plain = {}
    for name, (base, *adapter) in adapter_parts(weights).items():
        tensor = weights[base]
        if adapter:
            down, up = (weights[part] for part in adapter)
            tensor = merge_adapter(tensor, down, up)
            if not bool(tensor.isfinite().all()):
                raise OutputError(f"the adapter of {name.rpartition('.')[0]} is not finite; nothing was written")
        plain[name] = tensor
    return plain


def adapter_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Plain name of each weight -> the names in a state dict that make it: W, or W, A and B."""
    parts = {}
    for name in names:
        path, base, tail = name.rpartition(_BASE)
        if base:
            parts[f"{path}.{tail}"] = [name, path + _DOWN, path + _UP] if tail == "weight" else [name]
        elif ".lora_" not in name:
            parts[name] = [name]
    return parts
