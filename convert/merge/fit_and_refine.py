"""Fit one attention module in closed form, then train it (`refined`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gqa.convert.merge.fit import FitTask, FittedModule, fit_or_average
from gqa.convert.merge.layer import Arguments
from gqa.convert.merge.refine import refine, without_validation


def fit_and_refine(task: FitTask) -> FittedModule:
    """The maps in closed form, and the trained weights of the module, which take their place."""
    # Training chooses its best step on validation blocks, and splits the blocks itself. The closed
    # form must not see these blocks either: training could hardly improve on a start that is fitted
    # to them. So here they weigh nothing.
    settings = task.pair.options.refinement
    weights_without_validation = without_validation(task.position_weights, settings)
    fitted = fit_or_average(replace(task, position_weights=weights_without_validation))

    task.apply(fitted.maps)
    return _train(task, fitted)


def _train(task: FitTask, fitted: FittedModule) -> FittedModule:
    """Train the converted module, which has the merged heads of `fitted`, toward its targets.

    Returns `fitted` with the trained weights and their error.
    """
    pair = task.pair
    attention = task.converted_attention
    full_names = pair.trainable(attention, task.module)  # name in the module -> name in the model
    start = {name: attention.module.get_parameter(name).detach() for name in full_names}

    def arguments(rows: Tensor) -> Arguments:
        return attention.capture_blocks(task.inputs, rows, "arguments").arguments

    with torch.enable_grad():  # `Calibrator.run` disables gradients
        trained = refine(
            attention.module,
            start,
            arguments,
            task.targets,
            task.position_weights,
            pair.options.refinement,
        )

    by_full_name = {full_names[name]: tensor for name, tensor in trained.weights.items()}
    return replace(fitted, trained_tensors=pair.by_stored_name(by_full_name), error=trained.error)
