"""Fit one attention module in closed form, then train it (`refined`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gqa.convert.merge.fit import FitTask, FittedModule, fit_or_average
from gqa.convert.merge.layer import Arguments
from gqa.convert.merge.refine import refine, without_validation


def fit_and_refine(task: FitTask) -> FittedModule:
    """Maps in closed form, and the weights of the module after training."""
    # Training chooses its best step on validation blocks. The closed form must not see them either
    # (a start that is fitted to them could hardly be improved there), so they weigh 0 in the fit.
    fitted_weights = without_validation(task.position_weights, task.pair.options.refinement)
    result = fit_or_average(replace(task, position_weights=fitted_weights))

    task.apply(result.maps)
    return _refine(task, result)


def _refine(task: FitTask, result: FittedModule) -> FittedModule:
    """Train the converted module, which has the merged heads of `result`, towards the base model's
    output; return `result` with the trained weights and their error.
    """
    pair = task.pair
    attention = task.converted_attention
    names = pair.trainable(attention, task.module)
    start = {name: attention.module.get_parameter(name).detach() for name in names}

    def arguments(rows: Tensor) -> Arguments:
        return attention.capture_blocks(task.stream, rows, "arguments").arguments

    with torch.enable_grad():  # `Calibrator.run` disables gradients
        refined = refine(
            attention.module,
            start,
            arguments,
            task.targets,
            task.position_weights,
            pair.options.refinement,
        )

    by_full_name = {names[name]: tensor for name, tensor in refined.weights.items()}
    return replace(result, weights=pair.stored(by_full_name), error=refined.error)
