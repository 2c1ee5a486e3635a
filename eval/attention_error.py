"""Where a conversion hurts: the error of every layer's attention output against the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.devices import as_float64
from gqa.corpus.windows import Window


@dataclass(frozen=True)
class LayerError:
    """||output - baseline's|| / ||baseline's|| (Frobenius, over all positions), of one attention module.

    own: both read what the baseline's layer reads, so this is what merging this layer costs.
    accumulated: each reads what its own model gives it, so errors of the layers before are in it.
    """

    module: str
    own: float
    accumulated: float


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Self- and cross-attention modules by name: the outermost whose class is named so."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if "Attention" in type(module).__name__ and not inside:
            found[name] = module
    return found


@torch.inference_mode()
def attention_errors(baseline: PreTrainedModel, model: PreTrainedModel, windows: Sequence[Window]) -> list[LayerError]:
    """Errors over `windows`, one at a time; an empty list where the two do not have the same attention modules."""
    theirs, ours = attention_modules(baseline), attention_modules(model)
    if theirs.keys() != ours.keys():
        return []
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in theirs}  # own, accumulated, norm
    outputs: dict[str, Tensor] = {}

    def of_baseline(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs[name] = as_float64(_first(output))
            own = as_float64(_first(ours[name].forward(*args, **kwargs)))  # forward: hooks are for its own run
            sums[name][0] += (own - outputs[name]).square().sum().cpu()
            sums[name][2] += outputs[name].square().sum().cpu()

        return hook

    def of_model(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            sums[name][1] += (as_float64(_first(output)) - outputs[name]).square().sum().cpu()

        return hook

    for window in windows:
        inputs = _inputs(window, baseline.device)
        for run, modules, hook in ((baseline, theirs, of_baseline), (model, ours, of_model)):
            handles = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
            try:
                run(**inputs, use_cache=False)
            finally:
                for handle in handles:
                    handle.remove()
    return [
        LayerError(name, float((s[0] / s[2]).sqrt()), float((s[1] / s[2]).sqrt())) for name, s in sums.items() if s[2]
    ]


def _first(output: Any) -> Tensor:
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value


def _inputs(window: Window, device: torch.device) -> dict[str, Tensor]:
    ids = torch.tensor([window.ids[:-1]], device=device)
    if not window.source:
        return {"input_ids": ids}
    return {"input_ids": torch.tensor([window.source], device=device), "decoder_input_ids": ids}
