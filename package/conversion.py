"""Conversion from Python: what gqa-convert and gqa-calibrate do."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.write import DEFAULT_JOBS
from gqa.convert.align.watcher import Bar
from gqa.convert.methods import AUTO

from .given import Model, in_memory, scratch, stored, undisturbed
from .results import ConvertedModel, FoundMaps

if TYPE_CHECKING:
    from gqa.convert.align.options import MapsOptions
    from gqa.convert.api import Conversion
    from gqa.convert.plan import Plan
    from gqa.convert.recast.targets import Target


def convert_model(
    model: Model,
    kv_heads: int,
    method: str = AUTO,
    data: str | Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    *,
    tokenizer: Any = None,
    options: MapsOptions | None = None,
    maps: str | os.PathLike[str] | None = None,
    target: Target | None = None,
    seed: int = 0,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    checksums: bool = False,
    verify_load: bool = False,
    jobs: int = DEFAULT_JOBS,
) -> ConvertedModel:
    """A checkpoint with `kv_heads` key/value heads, made of `model`.

    Args:
        model: A directory, a hub id, a result of another function, or a loaded model. One that is loaded is written to
            a temporary directory first and stays as it is, its config too.
        kv_heads: G: a divisor of the model's own number (merging), or a multiple of it that divides the query heads.
        method: How heads are merged (docs/methods.md); `auto` for the best that needs only the weights.
        data: Text to calibrate on, for methods that look at text: `self` (the model writes it), a file, a hub data
            set; several in a list. None for what `options` says.
        out: Directory to make. None: as gqa-convert names it, and for a loaded model a temporary directory that is
            there as long as the result.
        progress: Show bars.
        tokenizer: Of a loaded model, to be written beside it: text is read with it.
        options: How maps are found; None for the command's defaults.
        maps: A file that `calibrate` wrote, applied instead of `method`.
        target: What is asked of the class that a model is written for, where its own cannot have fewer heads.
        seed: Of random draws and samples; where it is not 0 it takes the place of those in `options`.
        dtype: Of the stored result (`float32`, `bfloat16`, `float16`, `float64`); None for each tensor's own.
        max_shard_bytes: Of one file; None for the model's partition. revision: Branch, tag or commit of a hub id.
        overwrite: Replace a checkpoint that is at `out`, once the new one is complete.
        checksums: Compare every untouched byte and record the SHA-256 of all shards.
        verify_load: Load the result with transformers, too, and run it once.
        jobs: Shards written at a time.

    Raises:
        RefusedError: The model or an option cannot be used; before anything is written.
        OutputError: The result could not be written or did not verify; nothing is left at `out`.
    """
    from gqa.convert.api import default_output, plan_conversion

    began = time.monotonic()
    _check_counts(kv_heads=kv_heads, jobs=jobs, max_shard_bytes=1 if max_shard_bytes is None else max_shard_bytes)
    with ExitStack() as stack:
        stack.enter_context(undisturbed())
        kept = scratch() if out is None and in_memory(model) else None
        place = stack.enter_context(stored(model, tokenizer))
        plan = plan_conversion(
            place, kv_heads, grouping=options.grouping if options else "auto", seed=seed, dtype=dtype,
            max_shard_bytes=max_shard_bytes, revision=revision, headers_only=False, **_chosen(method, maps, target),
        )  # fmt: skip
        named = default_output(plan.checkpoint.hub_id or place, plan)
        goal = Path(out) if out is not None else Path(kept.name, named.name) if kept else named
        calibration = _maps_options(plan, data, options, seed)
        writing = {"overwrite": overwrite, "checksums": checksums, "load": verify_load, "jobs": jobs}
        made, layers = _write(plan, goal, calibration, progress, writing)
    return ConvertedModel(
        path=made.out, plan=made.plan, warnings=made.warnings, layer_errors=layers, checksums=made.checksums,
        seconds=time.monotonic() - began, _kept=kept,
    )  # fmt: skip


def _write(
    plan: Plan, goal: Path, calibration: MapsOptions | None, progress: bool, writing: dict[str, Any]
) -> tuple[Conversion, dict[int, float]]:
    """Run a plan under a bar; what it did, and what each layer lost."""
    from gqa.convert.api import convert_plan

    with (bar := Bar(not progress, plan.total_bytes)):
        made = convert_plan(plan, goal, calibration=calibration, layers=bar, progress=bar.written, **writing)
    return made, bar.errors


def calibrate(
    model: Model,
    kv_heads: int,
    out: str | os.PathLike[str],
    method: str = "calibrated",
    data: str | Sequence[str] | None = None,
    progress: bool = True,
    *,
    tokenizer: Any = None,
    options: MapsOptions | None = None,
    target: Target | None = None,
    seed: int = 0,
    revision: str | None = None,
    overwrite: bool = False,
) -> FoundMaps:
    """Find out how the heads of `model` are best merged, and write that to the file `out` (.safetensors).

    Arguments as of `convert_model`, which applies it as `maps`. A run that was stopped goes on after its last finished
    layer when it is called again. Raises RefusedError.
    """
    from gqa.convert.align.find_maps import find_maps
    from gqa.convert.api import plan_conversion
    from gqa.convert.recast.targets import ANY

    _check_counts(kv_heads=kv_heads)
    with undisturbed(), stored(model, tokenizer) as place:
        plan = plan_conversion(
            place, kv_heads, method=method, seed=seed, revision=revision, headers_only=False,
            target=target or ANY, grouping=options.grouping if options else "auto",
        )  # fmt: skip
        if not plan.lacks_maps:
            raise RefusedError(
                f"nothing to calibrate: method {plan.method} with kv_heads {kv_heads} of {plan.config.main.kv} needs "
                "no maps"
            )
        if not Path(out).resolve().parent.is_dir():
            raise RefusedError(f"{Path(out).parent} is no directory; give a file in one that exists")
        chosen = _maps_options(plan, data, options, seed)
        assert chosen is not None  # as it lacks maps
        with (bar := Bar(not progress)):
            find_maps(plan, Path(out), chosen, bar, overwrite=overwrite)
    return FoundMaps(path=Path(out), layer_errors=bar.errors, method=plan.method, groups=plan.groups)


def _chosen(method: str, maps: str | os.PathLike[str] | None, target: Target | None) -> dict[str, Any]:
    """Those that are given, for what has defaults of its own."""
    if maps is not None and method != AUTO:
        raise RefusedError(f"method {method!r} and maps {os.fspath(maps)!r} are two ways; give one of them")
    return {k: v for k, v in {"method": method, "maps": maps, "target": target}.items() if v is not None}


def _check_counts(**numbers: object) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RefusedError(f"{name} is {number!r}; give a whole number from 1 on")


def _maps_options(
    plan: Plan, data: str | Sequence[str] | None, options: MapsOptions | None, seed: int
) -> MapsOptions | None:
    """How maps are found; None where none are. Raises RefusedError for what the method would ignore."""
    how = plan.merging.how
    if seed and not how.draws:
        raise RefusedError(f"seed means nothing to method {plan.method}, which draws nothing; leave it out")
    if data is not None and not (plan.lacks_maps and how.reads_text):
        raise RefusedError(f"data means nothing to method {plan.method}, which looks at no text; leave it out")
    if options is not None and not plan.lacks_maps:
        raise RefusedError(f"options mean nothing to method {plan.method}, which finds no maps; leave them out")
    if not plan.lacks_maps:
        return None
    from gqa.checkpoint.devices import find_device
    from gqa.convert.align.options import MapsOptions

    found = options or MapsOptions()
    find_device(found.device)
    if data is not None and not data:
        raise RefusedError("data names nothing; give one source of text or more, or leave it out")
    if data is not None:
        sources = (data,) if isinstance(data, str) else tuple(data)
        found = replace(found, text=replace(found.text, sources=sources))
    if seed:
        found = replace(found, text=replace(found.text, seed=seed), refinement=replace(found.refinement, seed=seed))
    return found
