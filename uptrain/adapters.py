"""Low-rank adapters (LoRA, arXiv 2106.09685) of the linear layers beside keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.core.errors import OutputError, RefusedError

LORA_ALPHA = 32  # an adapter is scaled by LORA_ALPHA / rank
_LINEAR = ("Linear", "FalconLinear")  # classes that adapters fit
# Parts of the names in a state dict of an adapted weight W, and of A and B of its adapter
_BASE = ".base_layer."
_DOWN = ".lora_A.default.weight"
_UP = ".lora_B.default.weight"


def require_peft() -> None:
    """Raise RefusedError if peft is not installed."""
    if find_spec("peft") is None:
        raise RefusedError("--train lora needs peft; install it with: pip install peft")


def add_adapters(model: PreTrainedModel, trained: AbstractSet[str], rank: int) -> None:
    """Add adapters to the linear layers, except the head and layers whose weights are in `trained`.

    Routers get none, though some are subclasses of nn.Linear, as they return tuples. Nor do output
    projections of Mamba mixers, whose weights fused kernels read without calling the layer.

    peft makes them (`require_peft`). Raises RefusedError if there is no layer to adapt.
    """
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        is_linear = type(module).__name__ in _LINEAR and module is not head
        if is_linear and f"{name}.weight" not in trained and not is_of_mamba(model, name):
            layers[name] = module
    if not layers:
        class_name = type(model).__name__
        raise RefusedError(
            f"--train lora: {class_name} has no other linear layers to adapt; use --train "
            "attention or all"
        )

    # peft puts adapters on the device of the weight, which must not be meta.
    empty = {module: module.weight for module in layers.values() if module.weight.is_meta}
    for module, weight in empty.items():
        zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        module.weight = nn.Parameter(zeros, requires_grad=False)

    # peft has rules for some model types (it adapts experts instead of dense layers, and refuses
    # out_proj), which it does not apply to a module without a config.
    shell = nn.ModuleDict({"model": model})
    targets = [f"model.{name}" for name in layers]
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=LORA_ALPHA, target_modules=targets), shell
    )
    for module, weight in empty.items():
        module.weight = weight


def is_of_mamba(model: PreTrainedModel, name: str) -> bool:
    """Whether a layer is the output projection of a Mamba mixer."""
    parent = name.rpartition(".")[0]
    return name.endswith("out_proj") and hasattr(model.get_submodule(parent), "conv1d")


def adapter_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Plain name of each weight -> the names in a state dict that make it: W, or W, A and B."""
    parts = {}
    for name in names:
        path, base, tail = name.rpartition(_BASE)
        if base and tail == "weight":
            parts[f"{path}.weight"] = [name, path + _DOWN, path + _UP]
        elif base:  # a bias, to which no adapter adds
            parts[f"{path}.{tail}"] = [name]
        elif ".lora_" not in name:
            parts[name] = [name]
    return parts


def merge_adapter(weight: Tensor, *adapter: Tensor) -> Tensor:
    """W + LORA_ALPHA / r x B A: (out, in) weight; the adapter, if there is one: (r, in) A, (out, r)
    B.
    """
    if not adapter:
        return weight
    down, up = adapter
    return weight + (LORA_ALPHA / len(down)) * (up @ down)


def merge_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the adapters of a state dict into its weights, which get their plain names.

    Raises OutputError.
    """
    plain = {}
    for name, parts in adapter_parts(weights).items():
        plain[name] = merge_adapter(*(weights[part] for part in parts))
        has_adapter = len(parts) > 1
        if has_adapter and not bool(plain[name].isfinite().all()):
            raise OutputError(
                f"the adapter of {name.rpartition('.')[0]} is not finite, so nothing was written; "
                "repeat the command with --overwrite and a lower --learning-rate"
            )
    return plain
