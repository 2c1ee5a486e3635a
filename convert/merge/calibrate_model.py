"""Calibrate all layers of a model on text; a stopped run can continue after its last layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.finished_layers import FinishedLayers, maps_tensors
from gqa.convert.merge.fit import FitTask, FittedModule
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.pair import ModelPair
from gqa.convert.merge.quality import CHECKED_TOKENS, QualityCheck
from gqa.convert.plan import Plan
from gqa.core.console import Watcher
from gqa.models.classes import predicts_tokens


def calibrate_model(
    plan: Plan,
    fit: Callable[[FitTask], FittedModule],
    finished: FinishedLayers,
    options: MapsOptions,
    watcher: Watcher,
) -> Mapping[str, Any] | None:
    """Calibrate the layers that are not finished, and add them to `finished`.

    Args:
        plan: The plan of the conversion.
        fit: How one attention module is fitted.
        finished: The finished layers, after which this run continues.
        options: How maps are computed.
        watcher: Shows the progress.

    Returns:
        The quality of both models on held-out text; None if it is not measured.
    """
    # Not `options.check`: a continued run must hold out what the stopped one did, also if this one
    # does not check its result.
    heldout_tokens = CHECKED_TOKENS if finished.holds_out else 0
    reader = CalibrationReader(options.text, plan.checkpoint, options.device, watcher)
    inputs, heldout = reader.inputs(heldout_tokens)
    calibrator = Calibrator(plan, inputs, options, fit)
    pair = calibrator.pair

    state = finished.state()
    check = None
    if options.check and heldout is not None and _has_head(pair):
        check = _quality_check(pair, heldout, finished, state, watcher)

    if finished.count:
        pair.restore(state)
        watcher.note(
            f"continues   after layer {finished.count} of {calibrator.n_layers}, where a run was "
            "stopped"
        )

    trains = "training" in plan.method.settings
    stage = "calibrating and refining" if trains else "calibrating"
    watcher.stage(stage, calibrator.n_layers, "layer", finished.count)
    for layer in range(finished.count, calibrator.n_layers):
        results = calibrator.run(layer)
        error = max((result.error for result in results), default=None)
        drift = calibrator.calibration_states.drift()
        finished.add_layer(_tensors(results), pair.state(), error, drift)
        note = "" if error is None else f"error {error:.3g}"
        watcher.update(note=note)
    return check.result() if check else None


def _quality_check(
    pair: ModelPair,
    heldout: Tensor,
    finished: FinishedLayers,
    state: Mapping[str, Tensor],
    watcher: Watcher,
) -> QualityCheck | None:
    """The comparison of both models on `heldout` blocks.

    None if there are no blocks, or if the run that is continued did not carry them along.
    """
    # Of this pair only the calibration text is known yet. A state with more tensors is that of a
    # run which checked its result, and has the held-out text too.
    carries_heldout = len(state) > len(pair.state())
    if finished.count == 0 or carries_heldout:
        return QualityCheck(pair, heldout) if len(heldout) else None

    if len(heldout) or not finished.holds_out:
        watcher.warn(
            "the quality is not measured, because the run that is continued had --no-check; use "
            "gqa-eval"
        )
    return None


def _has_head(pair: ModelPair) -> bool:
    """Whether the model predicts tokens."""
    if not predicts_tokens(pair.converted_model.model.config):
        return False
    return pair.base_model.model.get_output_embeddings() is not None


def _tensors(results: list[FittedModule]) -> dict[str, Tensor]:
    """What is stored of a layer: the maps of its modules, and the weights that were trained."""
    tensors = maps_tensors((result.module.path, result.maps) for result in results)
    for result in results:
        tensors |= result.trained_tensors
    return tensors
