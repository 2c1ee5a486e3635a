"""From a method's name to its maps on disk: from weights, or layer by layer from text, resumable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.write import OutputDirectory
from gqa.convert.align.calibration import Calibrator, MapsOptions
from gqa.convert.align.work import Work
from gqa.convert.heads.config import transformers_config
from gqa.convert.maps_file import MapsFile
from gqa.convert.methods import instead
from gqa.convert.plan import Plan, check_grouping


class Watcher(Protocol):
    """Told of stages and tokens."""

    def stage(self, name: str, tokens: int) -> None: ...
    def update(self, tokens: int) -> None: ...
    def layer(self, index: int, layers: int, error: float) -> None: ...
    def warn(self, text: str) -> None: ...


class Silent:
    """A watcher that says nothing."""

    def stage(self, name: str, tokens: int) -> None: ...
    def update(self, tokens: int) -> None: ...
    def layer(self, index: int, layers: int, error: float) -> None: ...
    def warn(self, text: str) -> None: ...


def find_maps(plan: Plan, path: Path, options: MapsOptions, watcher: Watcher, *, overwrite: bool = False) -> MapsFile:
    """Write the maps of `plan` to `path` and open them. Raises RefusedError and CorpusError before anything is written.

    What a layer gave on text is kept beside `path` until all are done; the same call then goes on after the last layer.
    What weights alone gave is not.
    """
    if path.exists() and not overwrite:
        raise RefusedError(f"{path} exists; give another name or --overwrite")
    with _found(plan, path, options, watcher, overwrite) as work:
        return work.join(path)


@contextmanager
def with_maps(
    plan: Plan, out: Path, options: MapsOptions, watcher: Watcher, *, overwrite: bool = False
) -> Iterator[Plan]:
    """`with with_maps(...) as plan`: the plan with the maps that it lacks, which are found now and gone afterwards.

    What would refuse `out` later does so before they are sought. Where the block fails those found on text are kept
    beside `out`.
    """
    OutputDirectory(out, plan.checkpoint.directory, overwrite)
    with _found(plan, out, options, watcher, overwrite) as work:
        yield replace(plan, merging=replace(plan.merging, maps=work.join(work.place / "maps.safetensors")))


@contextmanager
def _found(plan: Plan, output: Path, options: MapsOptions, watcher: Watcher, overwrite: bool) -> Iterator[Work]:
    """The work beside `output` with what all layers gave; gone once the block has made something of it."""
    check_grouping(plan, options.grouping)
    work = Work(output, options.describe(plan), overwrite)
    if plan.merging.how.needs == "weights":
        with work.held():
            found = plan.merging.how.find(plan, options.grouping == "search", options.device)
            for number, (module, maps) in enumerate(found):
                work.keep(number, module, maps, {})
                watcher.layer(number + 1, plan.config.layers, float("nan"))
            yield work
        return
    if transformers_config(plan.config.raw).is_encoder_decoder:  # which is known before its text is sampled
        raise RefusedError(
            f"the decoder of {plan.checkpoint.name} is given another sequence besides its text; it cannot be run layer "
            f"by layer: use --method {instead(lambda other: other.needs == 'weights')}"
        )
    blocks = None if work.complete else options.text.blocks(plan.checkpoint, options.device, watcher.update)
    with work.held():
        if blocks is not None:
            try:
                _run_layers(plan, work, blocks, options, watcher)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                batch, length = options.batch, options.text.length
                raise RefusedError(
                    f"out of memory on {options.device} with {batch} blocks of {length} tokens in a layer at a time "
                    f"({options.refinement.batch} to refine it); lower --context or --refine-batch, give "
                    "--precision bfloat16, or another --device"
                ) from None
        yield work


def _run_layers(plan: Plan, work: Work, blocks: Tensor, options: MapsOptions, watcher: Watcher) -> None:
    """Layer after layer, from the first that is not finished on."""
    first, calibrator = work.layers, Calibrator(plan, blocks, options, work.streams())
    how = options.refinement
    trained = how.steps * how.batch * options.text.length if plan.merging.how.refines else 0
    watcher.stage("calibrating", (blocks.numel() + trained) * (calibrator.layers - first))
    for layer in range(first, calibrator.layers):
        try:
            result = calibrator.run(layer, watcher.update)
        except RefusedError:  # it would be again
            work.remove()
            raise
        if result:
            work.keep(layer, result.module.path, result.maps, result.weights)
            if result.warning:
                watcher.warn(f"layer {layer}: {result.warning}")
        work.finish(layer, calibrator.layers, calibrator.streams)
        watcher.layer(layer + 1, calibrator.layers, result.error if result else float("nan"))
