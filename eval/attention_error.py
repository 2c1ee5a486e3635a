"""Where a conversion hurts: the error of every layer's attention output against the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.devices import as_float64
from gqa.corpus.windows import Window
from gqa.eval.scoring import padded, watched


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Self- and cross-attention modules by name: the outermost whose class is named so."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if "Attention" in type(module).__name__ and not inside:
            found[name] = module
    return found


@torch.inference_mode()
def attention_errors(
    baseline: PreTrainedModel, model: PreTrainedModel, windows: Sequence[Window]
) -> list[dict[str, Any]]:
    """||output - baseline's|| / ||baseline's|| (Frobenius, over all positions of `windows`) of each attention `module`,
    JSON-ready; an empty list where the two do not have the same.

    own: both read what the baseline's layer reads, so this is what merging this layer costs.
    accumulated: each reads what its own model gives it, so errors of the layers before are in it.
    """
    theirs, ours = attention_modules(baseline), attention_modules(model)
    if theirs.keys() != ours.keys():
        return []
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in theirs}  # own, accumulated, norm
    outputs: dict[str, Tensor] = {}

    def see_baseline(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs[name] = _first(output)
        own = _first(ours[name].forward(*args, **kwargs))  # forward: it is watched in its own run
        sums[name][0] += (own - outputs[name]).square().sum().cpu()
        sums[name][2] += outputs[name].square().sum().cpu()

    def see_model(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        sums[name][1] += (_first(output) - outputs[name]).square().sum().cpu()

    for window in windows:
        inputs = padded([window], baseline)
        for run, modules, see in ((baseline, theirs, see_baseline), (model, ours, see_model)):
            with watched(modules.items(), see):
                run(**inputs, use_cache=False)
    return [
        {"module": name, "own": float((own / norm).sqrt()), "accumulated": float((accumulated / norm).sqrt())}
        for name, (own, accumulated, norm) in sums.items()
        if norm
    ]


def _first(output: Any) -> Tensor:
    return as_float64(output[0] if isinstance(output, tuple) else output)
