"""Compute the maps of a model by its method: from weights, or layer by layer on text; a stopped run
can continue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import checkpoint_digest, portable, versions
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.modules import attention_modules
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.finished_layers import FinishedLayers, maps_tensors
from gqa.convert.merge.from_weights import from_weights
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.quality import CHECKED, QualityCheck
from gqa.convert.methods import StoredMaps
from gqa.convert.plan import Plan, searches
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import out_of_memory
from gqa.core.errors import NoMemoryError, RefusedError
from gqa.models.loading import predicts_tokens


@contextmanager
def with_maps(
    plan: Plan,
    out: Path,
    options: MapsOptions,
    watcher: Watcher = SILENT,
    *,
    overwrite: bool = False,
) -> Iterator[StoredMaps]:
    """Yield the maps of a plan's method, which exist while the block runs.

    Raises RefusedError and CorpusError.

    Layers calibrated on text are stored beside `out` until the block succeeds, so that the same
    call can continue after the last of them.
    """
    reads_text = plan.merging.traits.reads_text
    layers = FinishedLayers(out, describe(plan, options), overwrite, holds_out=options.check)
    quality, continued = None, layers.count > 0
    try:
        if reads_text:
            quality = _calibrate(plan, layers, options, watcher)
        else:
            _look_at_weights(plan, layers, options, watcher)
    except BaseException as error:
        layers.remove(keep=continued or not isinstance(error, RefusedError))
        if not out_of_memory(error):
            raise
        blocks, advice = "", "give another --device"
        if reads_text:
            blocks = (
                f" with {options.at_once} blocks of {options.text.length} tokens in a layer at a "
                "time"
            )
            blocks += f" ({options.refinement.batch} to refine it)"
            advice = "lower --context, give --precision bfloat16, or another --device"
        raise NoMemoryError(f"out of memory on {options.device}{blocks}; {advice}") from error
    try:
        yield layers.maps(quality)
    except BaseException:  # the result could not be written: layers that took hours stay
        layers.remove(keep=True)
        raise
    layers.remove()


def _look_at_weights(
    plan: Plan, layers: FinishedLayers, options: MapsOptions, watcher: Watcher
) -> None:
    count = sum(
        bool(plan.changes_of(module)) for module in attention_modules(plan.checkpoint, plan.config)
    )
    watcher.stage(plan.merging.method, count, "module")
    for module, maps in from_weights(plan, searches(plan, options.grouping), options.device):
        layers.add(maps_tensors([(module, maps)]))
        watcher.update(1)


def _calibrate(
    plan: Plan, layers: FinishedLayers, options: MapsOptions, watcher: Watcher
) -> dict[str, Any] | None:
    """Calibrate the layers that are not finished; return the quality of the result on held-out
    text, if any.
    """
    most = CHECKED if layers.holds_out else 0
    inputs, blocks = options.text.inputs(plan.checkpoint, options.device, watcher, most)
    calibrator = Calibrator(plan, inputs, options)
    pair = calibrator.pair
    has_head = predicts_tokens(transformers_config(plan.new_config)) and (
        pair.base.model.get_output_embeddings() is not None
    )
    check = None
    state = layers.state()
    # A state has the calibration text, and the held-out text if that run checked its result.
    unchecked_before = layers.count > 0 and len(state) == len(pair.state())
    if options.check and unchecked_before:
        watcher.warn(
            "the quality is not measured, because the run that is continued had --no-check; use "
            "gqa-eval"
        )
    elif options.check and blocks is not None and len(blocks) and has_head:
        check = QualityCheck(pair, blocks)
    if layers.count:
        pair.restore(state)
        watcher.note(
            f"continues   after layer {layers.count} of {calibrator.layers}, where a run was "
            "stopped"
        )

    watcher.stage("calibrating", calibrator.layers, "layer", layers.count)
    for layer in range(layers.count, calibrator.layers):
        results = calibrator.run(layer)
        tensors = maps_tensors((result.module.path, result.maps) for result in results)
        for result in results:
            tensors |= result.weights
        error = max((result.error for result in results), default=None)
        layers.add(tensors, pair.state(), error)
        watcher.update(note="" if error is None else f"error {error:.3g}")
    return check.result() if check else None


def describe(plan: Plan, options: MapsOptions) -> dict[str, Any]:
    """Everything that determines the maps, as JSON."""
    description: dict[str, Any] = {
        "method": plan.merging.method,
        "groups": plan.groups,
        "grouping": "search" if searches(plan, options.grouping) else "contiguous",
        "name": plan.checkpoint.hub_id or plan.checkpoint.name,
        "model": checkpoint_digest(plan.checkpoint),
        "device": options.device,
        "versions": versions("gqa", "torch", "transformers"),
    }
    if plan.merging.traits.reads_text:
        text = {name: portable(value) for name, value in asdict(options.text).items()} | {
            "tokens": options.text.taken
        }
        description |= {"text": text, "content": options.text.identify()}
        description |= {name: getattr(options, name) for name in ("ridge", "dtype", "batch")}
    if plan.merging.traits.refines:
        description["refinement"] = asdict(options.refinement)
    return dict(json.loads(json.dumps(description)))
