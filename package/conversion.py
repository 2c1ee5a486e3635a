"""Conversion from Python: what gqa-convert does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.write import DEFAULT_JOBS, OutputDirectory
from gqa.convert.align.watcher import Bar
from gqa.convert.methods import AUTO, MEASURING

from .given import Model, in_memory, scratch, stored, undisturbed
from .results import ConvertedModel

if TYPE_CHECKING:
    from gqa.convert.align.options import MapsOptions
    from gqa.convert.api import Conversion
    from gqa.convert.heads.layout import Groups
    from gqa.convert.plan import Plan
    from gqa.convert.recast.targets import Target


def convert_model(
    model: Model,
    kv_heads: int | Sequence[int] | None = None,
    method: str = AUTO,
    data: str | Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    *,
    kv_budget: float | None = None,
    tokenizer: Any = None,
    options: MapsOptions | None = None,
    target: Target | None = None,
    seed: int = 0,
    dtype: str | None = None,
    max_shard_bytes: int | None = None, revision: str | None = None,
    overwrite: bool = False, checksums: bool = False,
    verify_load: bool = False, jobs: int = DEFAULT_JOBS, tensor_parallel: int | None = None,
) -> ConvertedModel:  # fmt: skip
    """A checkpoint with `kv_heads` key/value heads, made of `model`.

    Args:
        model: A directory, a hub id, a result of another function, or a loaded model.
            One that is loaded is written to a temporary directory first and stays as it is, its config too.
        kv_heads: G: a divisor of the model's own number (merging), or a multiple of it that divides the query heads.
            One for each layer in a list gives custom modelling code.
        method: How heads are merged (docs/methods.md); `auto` for the best that needs only the weights.
        data: Text to calibrate on, for methods that look at text: `self` (the model writes it), a file, a hub data
            set; several in a list. None for what `options` says.
        out: Directory to make. None: as gqa-convert names it, and for a loaded model a temporary directory that is
            there as long as the result.
        progress: Show bars.
        kv_budget: Instead of `kv_heads`, the share of the KV cache that is left: layers keep as many as they need.
        tokenizer: Of a loaded model, to be written beside it: text is read with it.
        options: How maps are found; None for the command's defaults.
        target: What is asked of the class that a model is written for, where its own cannot have fewer heads.
        seed: Of random draws and samples; where it is not 0 it takes the place of those in `options`.
        dtype: Of the stored result (`float32`, `bfloat16`, `float16`, `float64`); None for each tensor's own.
        max_shard_bytes: Of one file; None for the model's partition. revision: Branch, tag or commit of a hub id.
        overwrite: Replace a checkpoint that is at `out`, once the new one is complete.
        checksums: Compare every untouched byte and record the SHA-256 of all shards. jobs: Shards written at a time.
        verify_load: Load the result with transformers, too, and run it once.
        tensor_parallel: Ranks that shall hold it: the result says if they can; with `kv_budget` every layer fits them.

    Raises:
        RefusedError: The model or an option cannot be used; before anything is written.
        OutputError: The result could not be written or did not verify; nothing is left at `out`.
    """
    began, asked = time.monotonic(), _asked(kv_heads, kv_budget)
    counts = {"jobs": jobs, "max_shard_bytes": max_shard_bytes, "tensor_parallel": tensor_parallel}
    _check_counts(**{name: number for name, number in counts.items() if number is not None or name == "jobs"})
    with ExitStack() as stack:
        stack.enter_context(undisturbed(progress))
        own = scratch() if out is None and in_memory(model) else None
        place = stack.enter_context(stored(model, tokenizer))
        how: dict[str, Any] = {"seed": seed, "dtype": dtype, "max_shard_bytes": max_shard_bytes, "revision": revision}
        how |= {"method": method, "target": target}
        said = (data, options, seed) if kv_budget is None else None  # else layers are measured on them
        output = partial(_output, place, Path(own.name) if own else None, out, said)
        calibration, ranks = _with_text(options, data, seed), tensor_parallel or 1
        plan = _planned(place, asked, calibration, progress, ranks, output, out, overwrite, **how)
        writing = {"overwrite": overwrite, "checksums": checksums, "load": verify_load, "jobs": jobs}
        made, layers = _write(plan, output(plan), calibration, progress, writing)
    return ConvertedModel(
        path=made.out, plan=made.plan, warnings=made.warnings, layer_errors=layers, checksums=made.checksums,
        seconds=time.monotonic() - began, _kept=own,
    )  # fmt: skip


def _output(
    model: str, scratch: Path | None, out: str | os.PathLike[str] | None, said: tuple[Any, Any, int] | None, plan: Plan
) -> Path:
    """The directory to make: `out`, or one named after the model, in the scratch directory where there is one. Raises
    RefusedError where the plan ignores what is `said` to find maps: data, options and seed.
    """
    from gqa.convert.api import default_output

    if said:
        _check_used(plan, *said)
    named = default_output(plan.checkpoint.hub_id or model, plan)
    return Path(out) if out is not None else scratch / named.name if scratch else named


def _write(
    plan: Plan, goal: Path, calibration: MapsOptions, progress: bool, writing: dict[str, Any]
) -> tuple[Conversion, dict[int, float]]:
    """Run a plan under a bar; what it did, and what each layer lost."""
    from gqa.convert.api import convert_plan

    with (bar := Bar(not progress, plan.total_bytes)):
        made = convert_plan(plan, goal, calibration=calibration, layers=bar, progress=bar.written, **writing)
    return made, bar.errors


def _planned(
    place: str, asked: Groups | float, calibration: MapsOptions, progress: bool, ranks: int,
    output: Callable[[Plan], Path], out: str | os.PathLike[str] | None, overwrite: bool,
    *, method: str, target: Target | None, **how: Any,
) -> Plan:  # fmt: skip
    """For the heads that were asked for, or those that leave a share of the cache."""
    from gqa.convert.api import plan_conversion, plan_within
    from gqa.convert.recast.targets import ANY

    how["target"] = target or ANY
    if isinstance(asked, float):
        how |= {"method": MEASURING if method == AUTO else method, "out": out, "overwrite": overwrite}
        with Bar(not progress) as bar:
            return plan_within(place, asked, calibration, ranks=ranks, layers=bar, **how)[0]
    return plan_conversion(
        place, asked, grouping=calibration.grouping, method=method, headers_only=False,
        check=lambda plan: OutputDirectory(output(plan), None, overwrite), **how,
    )  # fmt: skip


def _asked(kv_heads: object, kv_budget: object = None) -> Groups | float:
    """One number of heads, or one for each layer; or a share of the cache, between 0 and 1."""
    if (kv_heads is None) == (kv_budget is None):
        raise RefusedError("give kv_heads, a number or one for each layer, or kv_budget, a share of the KV cache")
    if kv_heads is None:
        if isinstance(kv_budget, float) and 0 < kv_budget < 1:
            return kv_budget
        raise RefusedError(f"kv_budget is {kv_budget!r}; give a share above 0 and below 1")
    named: list[Any] = list(kv_heads) if isinstance(kv_heads, Sequence) and kv_heads else [kv_heads]
    for number in named:
        _check_counts(kv_heads=number)
    return named[0] if named == [kv_heads] else tuple(named)


def _check_counts(**numbers: object) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RefusedError(f"{name} is {number!r}; give a whole number from 1 on")


def _check_used(plan: Plan, data: str | Sequence[str] | None, options: MapsOptions | None, seed: int) -> None:
    """Raises RefusedError for what the method would ignore."""
    how = plan.merging.how
    if seed and not how.draws:
        raise RefusedError(f"seed means nothing to method {plan.method}, which draws nothing; leave it out")
    if data is not None and not (plan.lacks_maps and how.reads_text):
        raise RefusedError(f"data means nothing to method {plan.method}, which looks at no text; leave it out")
    if options is not None and not plan.lacks_maps:
        raise RefusedError(f"options mean nothing to method {plan.method}, which finds no maps; leave them out")


def _with_text(options: MapsOptions | None, data: str | Sequence[str] | None, seed: int) -> MapsOptions:
    """The options, or those of the command, with the text and the seed that were given beside them."""
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
