"""Calibrate all layers of a model on text; a stopped run can continue after its last layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gqa.convert.heads.config import transformers_config
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.finished_layers import FinishedLayers, maps_tensors
from gqa.convert.merge.fit import FitTask, FittedModule
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.pair import ModelPair
from gqa.convert.merge.quality import CHECKED, QualityCheck
from gqa.convert.plan import Plan
from gqa.core.console import Watcher
from gqa.models.loading import predicts_tokens


def calibrate_model(
    plan: Plan,
    fit: Callable[[FitTask], FittedModule],
    layers: FinishedLayers,
    options: MapsOptions,
    watcher: Watcher,
) -> Mapping[str, Any] | None:
    """Calibrate the layers that are not finished, and add them to `layers`.

    Args:
        fit: How one attention module is fitted.

    Returns:
        The quality of both models on held-out text; None if it is not measured.
    """
    heldout_tokens = CHECKED if layers.holds_out else 0
    inputs, heldout = options.text.inputs(plan.checkpoint, options.device, watcher, heldout_tokens)
    calibrator = Calibrator(plan, inputs, options, fit)
    pair = calibrator.pair

    state = layers.state()
    check = None
    # A state has the calibration text, and the held-out text if that run checked its result.
    unchecked_before = layers.count > 0 and len(state) == len(pair.state())
    if options.check and unchecked_before:
        watcher.warn(
            "the quality is not measured, because the run that is continued had --no-check; use "
            "gqa-eval"
        )
    elif options.check and heldout is not None and len(heldout) and _has_head(plan, pair):
        check = QualityCheck(pair, heldout)

    if layers.count:
        pair.restore(state)
        watcher.note(
            f"continues   after layer {layers.count} of {calibrator.layers}, where a run was "
            "stopped"
        )

    assert plan.merge_method is not None
    trains = "training" in plan.merge_method.settings
    stage = "calibrating and refining" if trains else "calibrating"
    watcher.stage(stage, calibrator.layers, "layer", layers.count)
    for layer in range(layers.count, calibrator.layers):
        results = calibrator.run(layer)
        error = max((result.error for result in results), default=None)
        layers.add(_tensors(results), pair.state(), error)
        note = "" if error is None else f"error {error:.3g}"
        watcher.update(note=note)
    return check.result() if check else None


def _has_head(plan: Plan, pair: ModelPair) -> bool:
    """Whether the model predicts tokens."""
    if not predicts_tokens(transformers_config(plan.new_config)):
        return False
    return pair.base.model.get_output_embeddings() is not None


def _tensors(results: list[FittedModule]) -> dict[str, Tensor]:
    """What is stored of a layer: the maps of its modules, and the weights that were trained."""
    tensors = maps_tensors((result.module.path, result.maps) for result in results)
    for result in results:
        tensors |= result.weights
    return tensors
