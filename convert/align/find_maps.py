"""From a method's name to its maps on disk: from weights, or layer by layer from text, resumable."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gqa.checkpoint.devices import default_device, native_bfloat16, out_of_memory
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.write import OutputDirectory
from gqa.convert.align.aligned import weight_maps
from gqa.convert.align.calibration import Calibration, Calibrator
from gqa.convert.align.calibration_text import CalibrationText
from gqa.convert.align.pair import Streams
from gqa.convert.align.refine import Refinement
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.modules import attention_modules
from gqa.convert.maps import HeadMaps
from gqa.convert.maps_file import MapsFile, fingerprint, open_maps, save_maps
from gqa.convert.plan import Plan, check_grouping

FROM_WEIGHTS = ("procrustes", "aligned")


class Progress(Protocol):
    """Told of stages and tokens."""

    def stage(self, name: str, tokens: int) -> None: ...
    def update(self, tokens: int) -> None: ...
    def layer(self, index: int, layers: int, error: float) -> None: ...
    def warn(self, text: str) -> None: ...


class Silent:
    """Progress that nobody looks at."""

    def stage(self, name: str, tokens: int) -> None: ...
    def update(self, tokens: int) -> None: ...
    def layer(self, index: int, layers: int, error: float) -> None: ...
    def warn(self, text: str) -> None: ...


@dataclass(frozen=True)
class MapsOptions:
    """How maps are found; of the weights-only methods only `grouping` matters."""

    text: CalibrationText = field(default_factory=CalibrationText)
    ridge: float = 0.03
    refinement: Refinement = field(default_factory=Refinement)
    device: str = field(default_factory=default_device)
    dtype: str = "float32"
    batch: int = 8
    grouping: str = "contiguous"

    def describe(self, plan: Plan) -> dict[str, Any]:
        """What decides the maps, as JSON."""
        method = plan.merging.method
        told: dict[str, Any] = {
            "method": method,
            "groups": plan.groups,
            "grouping": self.grouping,
            "name": plan.checkpoint.hub_id or plan.checkpoint.name,
            "model": fingerprint(plan.checkpoint, attention_modules(plan.checkpoint, plan.config)),
        }
        if method not in FROM_WEIGHTS:
            told |= {"text": asdict(self.text) | {"sources": list(self.text.sources)}, "ridge": self.ridge}
            told["content"] = self.text.identify()
            told |= {"dtype": self.dtype, "device": self.device, "batch": self.batch}
        if method == "refined":
            told["refinement"] = asdict(self.training)
        return told

    @property
    def training(self) -> Refinement:
        """The refinement, in bfloat16 where nothing is said and the device multiplies it faster."""
        if self.refinement.autocast is not None:
            return self.refinement
        return replace(self.refinement, autocast=native_bfloat16(self.device))


def find_maps(plan: Plan, path: Path, options: MapsOptions, progress: Progress, *, overwrite: bool = False) -> MapsFile:
    """Write the maps of `plan` to `path` and open them. Raises RefusedError and CorpusError before anything is written.

    What a layer gave is kept beside `path` until all are done; the same call then goes on after the last layer.
    """
    if path.exists() and not overwrite:
        raise RefusedError(f"{path} exists; give another name or --overwrite")
    check_grouping(plan, options.grouping)
    search = options.grouping == "search"
    told = options.describe(plan)
    if plan.merging.method in FROM_WEIGHTS:
        maps = {}
        for module, found in weight_maps(plan, search):
            maps[module] = found
            progress.layer(len(maps), plan.config.layers, float("nan"))
        save_maps(path, maps, {}, told)
        return open_maps(path)
    parts = path.with_name(f".{path.name}.gqa-layers")
    first = _resumed(parts, told, overwrite)
    if transformers_config(plan.config.raw).is_encoder_decoder:  # which is known before its text is sampled
        raise RefusedError(
            f"the decoder of {plan.checkpoint.name} is given another sequence besides its text; it cannot be run layer "
            "by layer: use --method aligned, mean or first"
        )
    blocks = options.text.blocks(plan.checkpoint, options.device, progress.update)
    try:
        with _memory_told(options):
            _run_layers(plan, parts, first, blocks, options, told, progress)
    finally:
        if not (parts / "done.json").exists():  # there is nothing to go on from
            shutil.rmtree(parts, ignore_errors=True)
    _join(parts, path, told)
    shutil.rmtree(parts)
    return open_maps(path)


def _run_layers(
    plan: Plan, parts: Path, first: int, blocks: Tensor, options: MapsOptions, told: dict[str, Any], progress: Progress
) -> None:
    """Layer after layer from `first` on, each kept in `parts`."""
    search = options.grouping == "search"
    how = Calibration(
        options.ridge, options.training if plan.merging.method == "refined" else None, search, options.device,
        getattr(torch, options.dtype), options.batch,
    )  # fmt: skip
    calibrator = Calibrator(plan, blocks, how, _saved_streams(parts, first))
    parts.mkdir(exist_ok=True)
    (parts / "options.json").write_text(json.dumps(told))
    progress.stage("calibrating", blocks.numel() * calibrator.layers)
    for layer in range(first, calibrator.layers):
        try:
            result = calibrator.run(layer, progress.update)
        except RefusedError:  # it would be again
            shutil.rmtree(parts)
            raise
        if result:
            save_maps(parts / f"{layer:04d}.safetensors", {result.module.path: result.maps}, result.weights, told)
            if result.warning:
                progress.warn(f"layer {layer}: {result.warning}")
        _save_streams(parts, layer + 1, calibrator.streams)
        progress.layer(layer + 1, calibrator.layers, result.error if result else float("nan"))


@contextmanager
def _memory_told(options: MapsOptions) -> Iterator[None]:
    """Raises RefusedError, with what was tried and what takes less, where memory is too small."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        batch, length = options.batch, options.text.length
        raise RefusedError(
            f"out of memory on {options.device} with {batch} blocks of {length} tokens in a layer at a time "
            f"({options.refinement.batch} to refine it); lower --calibration-length or --refine-batch, give "
            "--calibration-dtype bfloat16, or another --device"
        ) from None


@contextmanager
def with_maps(
    plan: Plan, out: Path, options: MapsOptions, progress: Progress, *, overwrite: bool = False
) -> Iterator[Plan]:
    """`with with_maps(...) as plan`: the plan with the maps that it lacks, which are found now and gone afterwards.

    What would refuse `out` later does so before they are sought.
    """
    OutputDirectory(out, plan.checkpoint.directory, overwrite)
    with tempfile.TemporaryDirectory(prefix="gqa-maps-") as place:
        maps = find_maps(plan, Path(place) / "maps.safetensors", options, progress)
        yield replace(plan, merging=replace(plan.merging, maps=maps))


def _resumed(parts: Path, told: dict[str, Any], overwrite: bool) -> int:
    """How many layers an interrupted call has done. Raises RefusedError where it was another one."""
    if overwrite:
        shutil.rmtree(parts, ignore_errors=True)
    if not (parts / "options.json").exists():
        return 0
    before = json.loads((parts / "options.json").read_text())
    told = json.loads(json.dumps(told))
    if different := sorted(key for key in before.keys() | told.keys() if before.get(key) != told.get(key)):
        key = different[0]
        raise RefusedError(
            f"{parts} holds layers of an unfinished run with {key} {before.get(key)}, not {told.get(key)}; "
            "run it to its end, or start over with --overwrite"
        )
    done = parts / "done.json"
    return int(json.loads(done.read_text())["layers"]) if done.exists() else 0


def _save_streams(parts: Path, layers: int, streams: Streams) -> None:
    """The new streams first, then the word that they are there."""
    file = f"streams-{layers:04d}.safetensors"
    save_file({"source": streams.source, "converted": streams.converted}, parts / file)
    temporary = parts / ".done.json"
    temporary.write_text(json.dumps({"layers": layers, "streams": file}))
    temporary.replace(parts / "done.json")
    for old in parts.glob("streams-*.safetensors"):
        if old.name != file:
            old.unlink()


def _saved_streams(parts: Path, layers: int) -> Streams | None:
    if not layers:
        return None
    tensors = load_file(parts / json.loads((parts / "done.json").read_text())["streams"])
    return Streams(tensors["source"], tensors["converted"])


def _join(parts: Path, path: Path, told: dict[str, Any]) -> None:
    """One file of all layers."""
    maps: dict[str, HeadMaps] = {}
    weights: dict[str, Tensor] = {}
    for file in sorted(parts.glob("[0-9]*.safetensors")):
        part = open_maps(file)
        for module in {name.partition("/")[0] for name in part.names if "/" in name}:
            if found := part.of(module):
                maps[module] = found
        weights |= {name: part.tensor(name) for name in part.names if "/" not in name}
    save_maps(path, maps, weights, told)
