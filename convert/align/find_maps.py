"""From a method's name to its maps on disk: from weights, or layer by layer from text, resumable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.headers import format_header
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.locks import locked
from gqa.checkpoint.processes import main_first, place_of, total, wait_for_everyone
from gqa.checkpoint.read import TORCH_DTYPES
from gqa.checkpoint.write import OutputDirectory, write_tensor
from gqa.convert.align.calibration import Calibrator
from gqa.convert.align.options import MapsOptions
from gqa.convert.align.pair import Inputs
from gqa.convert.align.watcher import SILENT, Watcher
from gqa.convert.heads.modules import attention_modules
from gqa.convert.maps import HeadMaps
from gqa.convert.maps_file import MapsFile, fingerprint, join_maps, open_maps, save_maps
from gqa.convert.plan import Plan, searches


def find_maps(
    plan: Plan, path: Path, options: MapsOptions, watcher: Watcher = SILENT, *, overwrite: bool = False
) -> MapsFile:
    """Write the maps of `plan` to `path` and open them. Raises RefusedError and CorpusError, with nothing at `path`.

    What a layer gave is kept beside `path` until all are done; the same call then goes on after the last layer.
    """
    check_place(path, overwrite)
    with _found(plan, path, options, watcher, overwrite) as work:
        return work.join(path)


def check_place(path: Path, overwrite: bool) -> None:
    """Raises RefusedError where maps cannot be written to `path`."""
    if not path.resolve().parent.is_dir():
        raise RefusedError(f"{path.parent} is no directory; give a file in one that exists")
    if path.exists() and not overwrite:
        raise RefusedError(f"{path} exists; give another name or --overwrite")


@contextmanager
def with_maps(
    plan: Plan, out: Path, options: MapsOptions, watcher: Watcher = SILENT, *, overwrite: bool = False
) -> Iterator[Plan]:
    """`with with_maps(...) as plan`: the plan with the maps that it lacks, which are found now and gone afterwards.

    What would refuse `out` later does so before they are sought. Where the block fails they are kept beside
    `out`. Several processes seek them together; the main one is the first in the block, and the others wait.
    """
    OutputDirectory(out, plan.checkpoint.directory, overwrite)
    with _found(plan, out, options, watcher, overwrite) as work:
        found = work.join(work.place / "maps.safetensors")
        with main_first():
            yield replace(plan, merging=replace(plan.merging, maps=found))


@contextmanager
def _found(plan: Plan, output: Path, options: MapsOptions, watcher: Watcher, overwrite: bool) -> Iterator[_Work]:
    """The work beside `output` with what all layers gave; gone once the block has made something of it."""
    search, watcher = searches(plan, options.grouping), watcher if ranks().is_main_process else SILENT
    work, how, blocks = _Work(output, describe(plan, options), overwrite), plan.merging.how, None
    if how.reads_text and not work.complete:
        blocks = options.text.inputs(plan.checkpoint, options.device, watcher)
    with work.held():
        if blocks is not None:
            _run_layers(plan, work, blocks, options, watcher)
        elif not how.reads_text and ranks().is_main_process:
            _look_at_weights(plan, work, search, options, watcher)
        yield work


def _look_at_weights(plan: Plan, work: _Work, search: bool, options: MapsOptions, watcher: Watcher) -> None:
    """Module after module, from the first that is not finished on, in one process."""
    first, modules = work.layers, attention_modules(plan.checkpoint, plan.config)
    kept, count = {name: rows[:] for name, rows in work.kept().items()}, sum(bool(plan.changes_of(m)) for m in modules)
    watcher.stage(plan.merging.method, count - first, "module")
    try:
        found = plan.merging.how.find(plan, search, options.device, first, kept)
        for number, (module, maps, kept) in enumerate(found, first):
            work.keep(number, module, maps, {})
            work.finish_alone(number, count, kept)
            watcher.update(1)
            watcher.layer(number + 1, count, float("nan"))
    except RefusedError:  # it would be again
        work.remove()
        raise


def _run_layers(plan: Plan, work: _Work, blocks: Inputs, options: MapsOptions, watcher: Watcher) -> None:
    """Layer after layer, from the first that is not finished on."""
    how, first = options.refinement, work.layers
    trained = how.steps * how.batch * options.text.length if plan.merging.how.refines else 0
    try:
        calibrator = Calibrator(plan, blocks, options, work.kept(), work.place)
        watcher.stage(
            "calibrating", sum(calibrator.tokens(layer, trained) for layer in range(first, calibrator.layers))
        )
        for layer in range(first, calibrator.layers):
            results = calibrator.run(layer, watcher.update)
            for number, result in enumerate(results):
                work.keep(layer, result.module.path, result.maps, result.weights, number)
                if result.warning:
                    watcher.warn(f"layer {layer}: {result.warning}")
            work.finish(layer, calibrator.layers, calibrator.keep())
            watcher.layer(layer + 1, calibrator.layers, max((result.error for result in results), default=float("nan")))
    except RefusedError:  # it would be again
        work.remove()
        raise
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise RefusedError(
            f"out of memory on {options.device} with {options.at_once} blocks of {options.text.length} tokens in a "
            f"layer at a time ({how.batch} to refine it); lower --context or --refine-batch, give --precision "
            "bfloat16 (of gqa-ablate --calibration-context, --calibration-precision), or another --device"
        ) from None


def describe(plan: Plan, options: MapsOptions) -> dict[str, Any]:
    """What decides the maps, as JSON."""
    told: dict[str, Any] = {
        "method": plan.merging.method,
        "groups": plan.groups,
        "grouping": "search" if searches(plan, options.grouping) else "contiguous",
        "name": plan.checkpoint.hub_id or plan.checkpoint.name,
        "model": fingerprint(plan.checkpoint, attention_modules(plan.checkpoint, plan.config)),
    }
    if plan.merging.how.aligns:
        told["device"] = options.device
    if plan.merging.how.reads_text:
        told |= {"text": asdict(options.text), "content": options.text.identify(plan.checkpoint)}
        told |= {name: getattr(options, name) for name in ("ridge", "dtype", "batch")}
    if plan.merging.how.refines:
        told["refinement"] = asdict(options.training)
    return dict(json.loads(json.dumps(told)))


class _Work:
    """What layers gave, in a hidden directory beside `output`, which one run at a time has while it is `held`. Of
    several processes the main one writes, but for the rows of streams that each has.

    `told` decides the maps. A run that stops, in whatever way, leaves the directory; one that finished no layer removes
    it. Layers of a run that was told otherwise are refused, or forgotten with `overwrite`.
    """

    def __init__(self, output: Path, told: Mapping[str, Any], overwrite: bool) -> None:
        self._output, self._told, self._overwrite = output, told, overwrite
        self._main = ranks().is_main_process
        self.place = output.absolute().with_name(f".{output.absolute().name}.gqa-work")
        self._state = self.place / "streams.safetensors"
        self._check()

    @property
    def layers(self) -> int:
        """How many are finished."""
        done = self._done()
        return int(done["layers"]) if done and done["told"] == self._told else 0

    @property
    def complete(self) -> bool:
        """Whether all of them are."""
        return self.layers > 0 and self.layers == int(self._done()["of"])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises RefusedError where another run has it."""
        told = f"another run is finding maps for {self._output}; wait for it or give another -o"
        with ExitStack() as holding:
            with main_first():
                if self._main:
                    self.place.mkdir(parents=True, exist_ok=True)
                    holding.enter_context(locked(self.place / "lock", told))
                    self._check()
                    if not self.layers:
                        for left in (path for path in self.place.iterdir() if path.name != "lock"):
                            left.unlink()
            try:
                yield
            except BaseException:
                if not self.layers:
                    self.remove()
                raise
            self.remove()

    def keep(self, layer: int, module: str, maps: HeadMaps, weights: Mapping[str, Tensor], number: int = 0) -> None:
        """What came out of a layer, by the path of its attention module, which has that `number` among the layer's."""
        if self._main:
            save_maps(self.place / f"{layer:04d}-{number}.safetensors", {module: maps}, weights, self._told)

    def finish(self, layer: int, layers: int, kept: Mapping[str, Tensor]) -> None:
        """One more of `layers` is finished: that word is in the file of what is needed to go on, of which each process
        has `kept` its rows.
        """
        count = int(total(len(kept["source"])))
        temporary, names = self._state.with_suffix(".partial"), {of: name for name, of in TORCH_DTYPES.items()}
        shapes = {name: (names[str(of.dtype)[6:]], (count, *of.shape[1:])) for name, of in kept.items()}
        header = format_header(shapes, self._word(layer, layers))
        with main_first():
            if self._main:
                temporary.write_bytes(header)
        with temporary.open("rb+", buffering=0) as target:
            begin, first = len(header), place_of(len(kept["source"])).start
            for tensor in kept.values():
                target.seek(begin + first * tensor[0].nbytes)
                write_tensor(target, tensor)
                begin += count * tensor[0].nbytes
        wait_for_everyone()
        if self._main:
            temporary.replace(self._state)

    def finish_alone(self, layer: int, layers: int, kept: Mapping[str, Tensor]) -> None:
        """`finish` where one process works and the others wait: all of what is needed to go on is its own."""
        temporary = self._state.with_suffix(".partial")
        save_file(dict(kept), temporary, self._word(layer, layers))
        temporary.replace(self._state)

    def kept(self) -> dict[str, Any]:
        """What is needed to go on after the last finished layer, of which rows can be taken."""
        if not self.layers:
            return {}
        stream: Any = safe_open(self._state, framework="pt")
        return {name: stream.get_slice(name) for name in stream.keys()}  # noqa: SIM118 - it is no dict

    def join(self, path: Path) -> MapsFile:
        """One file of what was kept, which says how it was made."""
        with main_first():
            if self._main:
                join_maps(path, sorted(self.place.glob("[0-9]*.safetensors")), self._told)
        return open_maps(path)

    def remove(self) -> None:
        if self._main:  # of the others each may be the first that stops
            shutil.rmtree(self.place, ignore_errors=True)

    def _word(self, layer: int, layers: int) -> dict[str, str]:
        return {"done": json.dumps({"told": self._told, "layers": layer + 1, "of": layers})}

    def _done(self) -> dict[str, Any]:
        """What is finished, of whatever run."""
        if not self._state.exists():
            return {}
        with safe_open(self._state, framework="pt") as stream:
            return dict(json.loads(stream.metadata()["done"]))

    def _check(self) -> None:
        """Raises RefusedError where another run has finished layers."""
        if self._overwrite or not (done := self._done()):
            return
        before, told = done["told"], self._told
        for key in sorted(before.keys() | told.keys()):
            if before.get(key) != told.get(key):
                raise RefusedError(
                    f"{self.place} holds layers of an unfinished run with {key} {before.get(key)}, not "
                    f"{told.get(key)}; run it to its end, or start over with --overwrite"
                )
