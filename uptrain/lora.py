"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, and what they come to in the weights they adapt."""

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
    for name, (own, *adapter) in parts(weights).items():
        tensor = weights[own]
        if adapter:
            down, up = (weights[each] for each in adapter)
            tensor = tensor + (ALPHA / len(down)) * (up @ down)
            if not bool(tensor.isfinite().all()):
                raise OutputError(f"the adapter of {name.rpartition('.')[0]} is not finite; nothing was written")
        plain[name] = tensor
    return plain


def parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Names in a state dict -> those of `merged`, each with what it is made of: W, or W, A and B."""
    found = {}
    for name in names:
        path, base, tail = name.rpartition(_BASE)
        if base:
            found[f"{path}.{tail}"] = [name, path + _DOWN, path + _UP] if tail == "weight" else [name]
        elif ".lora_" not in name:
            found[name] = [name]
    return found
