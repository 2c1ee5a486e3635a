"""From a method to the maps of a model: from weights, or layer by layer from text; a stopped run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.identity import checkpoint_digest
from gqa.checkpoint.locks import locked
from gqa.checkpoint.provenance import versions
from gqa.checkpoint.write import OutputDirectory
from gqa.convert.heads.modules import attention_modules
from gqa.convert.maps import HeadMaps
from gqa.convert.maps_file import StoredMaps, maps_tensors, save_tensors
from gqa.convert.merge.calibration import Calibrator
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.pair import Inputs
from gqa.convert.merge.watcher import SILENT, Watcher
from gqa.convert.plan import Plan, searches

Maps = list[tuple[str, HeadMaps]]  # of attention modules by their paths


@contextmanager
def with_maps(
    plan: Plan, out: Path, options: MapsOptions, watcher: Watcher = SILENT, *, overwrite: bool = False
) -> Iterator[Plan]:
    """The plan with the maps that it lacks, for as long as the block runs. Raises RefusedError and CorpusError.

    What would refuse `out` later does so before they are sought. Finished layers are kept beside `out` until the block
    succeeds; the same call then goes on after the last of them.
    """
    OutputDirectory(out, plan.checkpoint.directory, overwrite)
    search = searches(plan, options.grouping)
    layers = _FinishedLayers(out, describe(plan, options))
    with layers.held(overwrite, watcher):
        reads = plan.merging.how.reads_text and not layers.complete
        inputs = options.text.inputs(plan.checkpoint, options.device, watcher) if reads else {}
        try:
            if reads:
                _run_layers(plan, layers, inputs, options, watcher)
            elif not plan.merging.how.reads_text:
                _look_at_weights(plan, layers, search, options, watcher)
        except RefusedError:  # it would be again
            layers.forget()
            raise
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise RefusedError(
                f"out of memory on {options.device} with {options.at_once} blocks of {options.text.length} tokens in "
                f"a layer at a time ({options.refinement.batch} to refine it); lower --context, give --precision "
                "bfloat16, or another --device"
            ) from error
        yield replace(plan, merging=replace(plan.merging, maps=layers.maps()))


def _look_at_weights(plan: Plan, layers: _FinishedLayers, search: bool, options: MapsOptions, watcher: Watcher) -> None:
    """Module after module, from the first that is not finished on."""
    first = layers.count
    count = sum(bool(plan.changes_of(module)) for module in attention_modules(plan.checkpoint, plan.config))
    watcher.stage(plan.merging.method, count - first, "module")
    steps = plan.merging.how.find(plan, search, options.device, first, layers.state())
    for number, (module, maps, state) in enumerate(steps, first + 1):
        layers.finish([(module, maps)], {}, state)
        watcher.update(1)
        watcher.layer(number, count, float("nan"))


def _run_layers(plan: Plan, layers: _FinishedLayers, inputs: Inputs, options: MapsOptions, watcher: Watcher) -> None:
    """Layer after layer, from the first that is not finished on."""
    how, first = options.refinement, layers.count
    trained = how.steps * how.batch * options.text.length if plan.merging.how.refines else 0
    calibrator = Calibrator(plan, inputs, options, layers.state(), layers.directory)
    layers.total = calibrator.layers
    watcher.stage("calibrating", sum(calibrator.tokens(layer, trained) for layer in range(first, layers.total)))
    for layer in range(first, layers.total):
        results = calibrator.run(layer, watcher.update)
        for result in results:
            if result.warning:
                watcher.warn(f"layer {layer}: {result.warning}")
        weights = {name: tensor for result in results for name, tensor in result.weights.items()}
        layers.finish([(result.module.path, result.maps) for result in results], weights, calibrator.state())
        watcher.layer(layer + 1, layers.total, max((result.error for result in results), default=float("nan")))


def describe(plan: Plan, options: MapsOptions) -> dict[str, Any]:
    """What decides the maps, as JSON."""
    description: dict[str, Any] = {
        "method": plan.merging.method,
        "groups": plan.groups,
        "grouping": "search" if searches(plan, options.grouping) else "contiguous",
        "name": plan.checkpoint.hub_id or plan.checkpoint.name,
        "model": checkpoint_digest(plan.checkpoint),
        "device": options.device,
        "versions": versions("torch", "transformers"),
    }
    if plan.merging.how.reads_text:
        description |= {"text": asdict(options.text), "content": options.text.identify(plan.checkpoint)}
        description |= {name: getattr(options, name) for name in ("ridge", "dtype", "batch")}
    if plan.merging.how.refines:
        description["refinement"] = asdict(options.training)
    return dict(json.loads(json.dumps(description)))


class _FinishedLayers:
    """The layers of one conversion that are finished, in a hidden directory beside `out`: a file of maps for each, and
    `state.safetensors` with what the next one needs. One run at a time has the directory.
    """

    def __init__(self, out: Path, description: Mapping[str, Any]) -> None:
        self._out, self._description = out, description
        self.directory = out.absolute().with_name(f".{out.absolute().name}.gqa-work")
        self._state = self.directory / "state.safetensors"
        self.count = 0
        self.total: int | None = None  # layers of the model, where that is known

    @property
    def complete(self) -> bool:
        return self.count == self.total

    @contextmanager
    def held(self, overwrite: bool, watcher: Watcher) -> Iterator[None]:
        """Keep the directory if the block fails and a layer is finished, else remove it. Raises RefusedError where
        another run has it, or holds layers that were made otherwise; with `overwrite` these are removed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        another = f"another run is finding maps for {self._out}; wait for it or give another -o"
        with locked(self.directory / "lock", another):
            self._open(overwrite, watcher)
            try:
                yield
            except BaseException:
                if not self.count:
                    shutil.rmtree(self.directory, ignore_errors=True)
                raise
            shutil.rmtree(self.directory, ignore_errors=True)

    def _open(self, overwrite: bool, watcher: Watcher) -> None:
        """Count the layers that a run of the same description has finished."""
        progress: dict[str, Any] = {}
        for path in [*self._files(), *([self._state] if self._state.exists() else [])]:
            try:
                with safe_open(path, framework="pt") as file:
                    progress = json.loads((file.metadata() or {}).get("progress", "{}"))
            except (SafetensorError, OSError, ValueError) as error:  # cut off by a power failure
                watcher.warn(f"{path} is damaged ({error}); all layers are made anew")
                self.forget()
                return
        before = progress.get("description", {})
        if before == self._description:
            self.count, self.total = progress["layers"], progress["of"]
        elif before and not overwrite:
            key = next(key for key in self._description if before.get(key) != self._description[key])
            raise RefusedError(
                f"{self.directory} holds layers of an unfinished run with {key} {before.get(key)}, not "
                f"{self._description[key]}; run it to its end, or start over with --overwrite"
            )
        else:
            self.forget()

    def finish(self, maps: Maps, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Store one more layer: the maps of its modules and whole tensors, and the state after it."""
        save_tensors(self.directory / f"{self.count:05d}.safetensors", {**maps_tensors(maps), **weights})
        progress = {"description": self._description, "layers": self.count + 1, "of": self.total}
        save_tensors(self._state, state, {"progress": json.dumps(progress)})
        self.count += 1

    def state(self) -> dict[str, Tensor]:
        """The state after the last finished layer."""
        if not self.count:
            return {}
        with safe_open(self._state, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict

    def maps(self) -> StoredMaps:
        return StoredMaps(tuple(self._files()), self._description)

    def forget(self) -> None:
        """Remove all layers."""
        self.count = 0
        for path in self.directory.iterdir():
            if path.name != "lock":
                with suppress(OSError):
                    path.unlink()

    def _files(self) -> list[Path]:
        return sorted(self.directory.glob("[0-9]*.safetensors"))
