"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, and what they come to in the weights they adapt."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.errors import OutputError, RefusedError

ALPHA = 32  # adapters are scaled by ALPHA / rank
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: PreTrainedModel, trained: AbstractSet[str], rank: int) -> None:
    """Adapters on every linear layer but the head and those whose weights are in `trained`."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError:
        raise RefusedError("--train lora needs peft; install it with: pip install 'gqa[lora]'") from None
    table = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not table and f"{name}.weight" not in trained
    }
    empty = {module: module.weight for module in layers.values() if module.weight.is_meta}
    for module, weight in empty.items():  # peft puts adapters where weights are, and theirs are not to be read
        module.weight = nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=[*layers]), model)
    for module, weight in empty.items():
        module.weight = weight


def merged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with adapters as one without: W + ALPHA / r x B A under W's own name. Others stay as they are."""
    plain = {}
    for name, tensor in weights.items():
        if ".lora_" in name:
            continue
        path, base, tail = name.rpartition(_BASE)
        if base and tail == "weight":
            down, up = weights[path + _DOWN], weights[path + _UP]
            tensor = tensor + (ALPHA / len(down)) * (up @ down)
            if not bool(tensor.isfinite().all()):
                raise OutputError(f"the adapter of {path} is not finite; nothing was written")
        plain[f"{path}.{tail}" if base else name] = tensor
    return plain
