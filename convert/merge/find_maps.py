"""Compute the maps of a model by its method: from weights, or layer by layer on text; a stopped run
can continue.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.provenance import checkpoint_digest, portable, versions
from gqa.checkpoint.write import replacing
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.modules import attention_modules
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.from_weights import from_weights
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.quality import CHECKED, QualityCheck
from gqa.convert.methods import MAPS, HeadMaps, StoredMaps
from gqa.convert.plan import Plan, searches
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import out_of_memory
from gqa.core.errors import CorruptError, NoMemoryError, RefusedError, differences
from gqa.core.json_text import parse_json
from gqa.core.work import claim, fingerprint, is_ours, remove
from gqa.models.loading import predicts_tokens

_INTERVAL = 20  # seconds between states, which may take gigabytes
_PURPOSE = "finished layers"  # of the directory of `FinishedLayers`


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


# What options are called in errors; the others have the names of `describe`.
_NAMES = {
    "method": "--method",
    "groups": "--groups",
    "grouping": "--grouping",
    "name": "name of the model",
    "model": "content of the model",
    "device": "--device",
    "content": "content of --data",
    "dtype": "--precision",
    "text sources": "--data",
    "text tokens": "--tokens",
    "text length": "--context",
    "text seed": "--seed",
    "text field": "--field",
    "text target_field": "--target-field",
    "text separator": "--separator",
    "text trust_remote_code": "--trust-remote-code",
    "refinement steps": "--refine-steps",
    "refinement seed": "--seed",
}


def _flat(description: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """A description for people: options by their names, values as they are typed,
    hashes shortened.
    """
    flat = dict[str, str]()
    for key, value in description.items():
        name = f"{within} {key}".strip()
        if isinstance(value, dict):
            flat |= _flat(value, name)
        elif isinstance(value, list):
            flat[_NAMES.get(name, name)] = ",".join(_short(str(one)) for one in value)
        else:
            flat[_NAMES.get(name, name)] = _short("none" if value is None else str(value))
    return flat


def _short(text: str) -> str:
    """A text, in which hashes have 12 digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}", r"\1", text)


def maps_tensors(maps: Iterable[tuple[str, HeadMaps]]) -> dict[str, Tensor]:
    """The maps of attention modules by their paths -> tensors by the names that `StoredMaps`
    reads.
    """
    tensors: dict[str, Tensor] = {}
    for module, head_maps in maps:
        parts = {part: getattr(head_maps, part) for part in MAPS}
        tensors |= {
            f"{module}/{part}": tensor.float()
            for part, tensor in parts.items()
            if tensor is not None
        }
        if head_maps.order is not None:
            tensors[f"{module}/order"] = torch.tensor(head_maps.order)
    return tensors


def _save(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file whole and durable or not at all."""
    with replacing(path) as temporary:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            temporary,
            metadata,
        )


class FinishedLayers:
    """The layers of one conversion that are finished, in a hidden directory beside `out`: a file
    for each, and from time to time `state.safetensors` with what the next one needs, and their
    number.
    """

    def __init__(
        self, out: Path, description: Mapping[str, Any], overwrite: bool, holds_out: bool
    ) -> None:
        """Count the finished layers of a run with the same description.

        Raises RefusedError for layers of another run; with `overwrite` these are removed. Raises it
        in any case for a directory that no run of ours has made.

        holds_out: Whether text is held out for the check, and so is no calibration text. A run that
            continues another one takes the same text, whether or not it checks the result.
        """
        self.directory = out.absolute().with_name(f".{out.absolute().name}.gqa-work")
        if os.path.lexists(self.directory) and not is_ours(self.directory, _PURPOSE):
            raise RefusedError(
                f"{self.directory} was not left by a run of gqa; move it away or give another "
                "directory with -o"
            )

        self._state, self._description = self.directory / "state.safetensors", description
        self.holds_out = holds_out
        self.count, self.errors, self._saved = 0, list[float | None](), time.monotonic()
        if self._state.exists():
            with suppress(RefusedError) if overwrite else nullcontext():
                self._continue()
        if not self.count:
            self.remove()

    def _continue(self) -> None:
        """Count the stored layers. Raises RefusedError if they are of another run, or damaged."""
        try:
            with safe_open(self._state, framework="pt") as file:
                progress = parse_json(file.metadata()["progress"], self._state.name)
            for layer in range(progress["layers"]):
                (self.directory / f"{layer:05d}.safetensors").stat()
            now, before = _flat(self._description), _flat(progress["description"])
            holds_out = bool(progress["holds_out"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(f"{self._state} is damaged; start over with --overwrite") from error
        if changed := differences(now, before):
            advice = "finish that with its options, or start over with --overwrite"
            raise RefusedError(
                f"{self.directory} holds layers of another run ({'; '.join(changed)}); {advice}"
            )
        self.count, self.errors, self.holds_out = progress["layers"], progress["errors"], holds_out

    def add(
        self,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None = None,
        error: float | None = None,
    ) -> None:
        """Store one more layer with its error, and the state after it if it is time; another run
        continues there.
        """
        if not self.directory.exists():
            claim(self.directory, _PURPOSE, fingerprint(self._description))
        _save(self.directory / f"{self.count:05d}.safetensors", tensors)
        self.count += 1
        if state is not None:
            self.errors.append(error)
            if time.monotonic() - self._saved >= _INTERVAL:
                progress = {
                    "description": self._description,
                    "layers": self.count,
                    "errors": self.errors,
                    "holds_out": self.holds_out,
                }
                _save(self._state, state, {"progress": json.dumps(progress)})
                self._saved = time.monotonic()

    def state(self) -> dict[str, Tensor]:
        """The state from which this run continues."""
        return load_file(self._state) if self.count else {}

    def maps(self, quality: Mapping[str, Any] | None) -> StoredMaps:
        files = tuple(sorted(self.directory.glob("[0-9]*.safetensors")))
        return StoredMaps(files, self._description, self.errors, quality)

    def remove(self, keep: bool = False) -> None:
        """Remove the layers; with `keep` only if no run can continue after them."""
        if not (keep and self._state.exists()):
            with suppress(OSError):  # what stays is removed by the next run
                remove(self.directory, _PURPOSE)
