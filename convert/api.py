"""Plan a conversion and run it: what the command, `package/` and studies call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gqa.checkpoint.console import SILENT, Watcher
from gqa.checkpoint.hub import beside, fetch_weights, open_model
from gqa.checkpoint.provenance import PROVENANCE, request
from gqa.checkpoint.write import DEFAULT_JOBS, OutputDirectory, require_space, write_text
from gqa.convert.heads.family import Groups
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods import AUTO, MEASURING, METHODS
from gqa.convert.options import ConvertOptions
from gqa.convert.plan import Plan, make_plan, searches
from gqa.convert.rewrite import write
from gqa.convert.summary import model_card, provenance

__all__ = [
    "Conversion", "Plan", "convert_as", "convert_checkpoint", "convert_plan", "default_output", "plan_conversion",
    "plan_for",
]  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """A finished conversion."""

    out: Path
    plan: Plan
    warnings: tuple[str, ...]
    checksums: dict[str, dict[str, str]] | None = None


def plan_conversion(
    model: str | os.PathLike[str],
    groups: Groups,
    *,
    grouping: str = "auto",
    revision: str | None = None,
    headers_only: bool = True,
    method: str = AUTO,
    seed: int = 0,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> Plan:
    """Decide everything about a conversion from config and headers; nothing is written, no weights are fetched.

    Args:
        model: A local directory or a hub id.
        groups: G, the key/value heads of the result: a divisor of the base model's Hk (merging; arXiv 2305.13245,
            section 2.1) or a multiple of Hk that divides the query heads H (repeating, exact). Query head i reads
            KV head i // (H // G). A tuple has one for every layer, none above Hk; it gives custom modelling code.
        grouping: `contiguous`; `search`, where heads may change places; `auto`.
        revision: Branch, tag or commit of a hub id.
        headers_only: Refuse a hub id whose weights have no headers (.bin) instead of fetching them.
        method: One of `gqa.convert.methods.METHODS` (docs/methods.md); `auto` for the best of those that need nothing
            but weights. The pooling of arXiv 2305.13245 is `mean`.
        seed: Of `random`.
        dtype: Of the stored result (`float32`, `bfloat16`, `float16`, `float64`); None for each tensor's own.
        max_shard_bytes: Of one output file; None for the base model's partition.

    Raises:
        RefusedError: The checkpoint or the options cannot be converted; one line says why and what is allowed.
        CorruptError: Files of the checkpoint are broken or hostile (a kind of RefusedError).
    """
    checkpoint = open_model(os.fspath(model), revision, headers_only=True, or_weights=not headers_only)
    plan = make_plan(checkpoint, groups, method, seed, dtype, max_shard_bytes)
    searches(plan, grouping)  # refuses
    return plan


def plan_for(options: ConvertOptions, watcher: Watcher = SILENT) -> Plan:
    """The plan of a command; with `kv_budget` layers are measured on text first. Raises as `plan_conversion`."""
    how: dict[str, Any] = {"seed": options.seed, "dtype": options.dtype, "max_shard_bytes": options.max_shard_size}
    if options.kv_budget:
        method = MEASURING if options.method == AUTO else options.method
        return _plan_within(options, watcher, method=method, **how)
    assert options.groups is not None
    return plan_conversion(
        options.model, options.groups, grouping=options.grouping, revision=options.revision,
        headers_only=options.dry_run, method=options.method, **how,
    )  # fmt: skip


def _plan_within(options: ConvertOptions, watcher: Watcher, **how: Any) -> Plan:
    """A plan whose layers keep as many heads as `kv_budget` has room for. What would refuse it, or the output, does so
    before weights are fetched and layers are measured.
    """
    from gqa.convert.merge.budget import heads_within, uneven

    share, ranks, maps = options.kv_budget or 1.0, options.tensor_parallel, options.maps()
    checkpoint = open_model(options.model, options.revision, headers_only=True, or_weights=True)
    plan = make_plan(checkpoint, uneven(checkpoint, share, ranks), **how)
    searches(plan, options.grouping)  # refuses
    output = OutputDirectory(output_of(options, plan), checkpoint.directory, options.overwrite)
    require_space(plan.total_bytes, output.out)
    fetch_weights(checkpoint)
    (heads,), losses = heads_within(checkpoint, [share], maps, ranks, watcher)
    return replace(make_plan(checkpoint, heads, **how), losses=losses)


def convert_plan(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    calibration: MapsOptions | None = None,
    watcher: Watcher = SILENT,
    overwrite: bool = False,
    checksums: bool = False,
    jobs: int = DEFAULT_JOBS,
    progress: Callable[[int], None] | None = None,
    command: Mapping[str, Any] = MappingProxyType({}),
) -> Conversion:
    """Run a plan: fetch weights, find the maps of its method, stream the shards into `out`, verify them from disk, make
    them visible.

    Memory stays near 4 x the largest changed tensor per job; what does not change is copied by the kernel. Merging is
    done in float32 (float64 for F64 tensors) and rounded once to the stored dtype.

    Args:
        plan: Made with `plan_conversion`.
        out: Directory to make.
        calibration: How the methods that look at the model do it; None for the defaults of the command.
        watcher: Told of layers and tokens while maps are found.
        overwrite: Replace a checkpoint that is at `out`, after the new one is complete.
        checksums: Compare every untouched byte and record the SHA-256 of all shards.
        jobs: Shards written at a time.
        progress: Called with the number of bytes written, from any job's thread.
        command: For the record: the command's arguments (`argv`) and options.

    Raises:
        RefusedError: Before anything is written.
        OutputError: The result could not be written or did not verify; nothing is left at `out`.
    """
    out, merging = Path(out), plan.merging
    output = OutputDirectory(out, plan.checkpoint.directory, overwrite)
    require_space(plan.total_bytes, output.out)
    fetch_weights(plan.checkpoint)
    with ExitStack() as stack:
        stack.enter_context(output)
        if plan.needs_maps:  # what finds them runs models, whose imports take seconds
            from gqa.convert.merge.find_maps import with_maps

            maps = with_maps(plan, out, calibration or MapsOptions(), watcher, overwrite=overwrite)
            merging = replace(merging, maps=stack.enter_context(maps))
        warnings, hashes = write(plan, merging, output.work, checksums=checksums, jobs=jobs, progress=progress)
        write_text(output.work / "README.md", model_card(plan, out.name, command))
        output.commit(PROVENANCE, provenance(plan, merging.maps, hashes, out, command))
    return Conversion(out, plan, (*plan.warnings, *warnings), hashes)


def convert_as(options: ConvertOptions, plan: Plan, bar: Watcher, argv: Sequence[str] = ()) -> Conversion:
    """Run the plan of a command. Raises what `convert_plan` raises."""
    return convert_plan(
        plan, output_of(options, plan), calibration=options.maps() if plan.needs_maps else None, watcher=bar,
        overwrite=options.overwrite, checksums=options.checksums, progress=bar.written, command=request(options, argv),
    )  # fmt: skip


def convert_checkpoint(
    model: str | os.PathLike[str],
    groups: Groups,
    out: str | os.PathLike[str] | None = None,
    *,
    calibration: MapsOptions | None = None,
    **options: Any,
) -> Conversion:
    """`plan_conversion` and then `convert_plan`; `options` are what these take by name. `out` is by default as
    `default_output` says.
    """
    planning = {name: options.pop(name) for name in signature(plan_conversion).parameters if name in options}
    grouping = calibration.grouping if calibration else "auto"
    plan = plan_conversion(model, groups, grouping=grouping, headers_only=False, **planning)
    return convert_plan(plan, out or default_output(os.fspath(model), plan), calibration=calibration, **options)


def output_of(options: ConvertOptions, plan: Plan) -> Path:
    """The directory to make: `output`, or one named after the model."""
    return options.output or default_output(options.model, plan)


def default_output(model: str, plan: Plan) -> Path:
    """`MODEL-gqa4-refined` beside a local model, in the working directory for a hub id.

    `MODEL-mqa-refined` for one head; `MODEL-gqa32` where none are merged; `MODEL-kv56-refined` where layers differ and
    56 % of the KV cache is left.
    """
    suffix = "-mqa" if plan.groups == 1 else f"-gqa{plan.groups}"
    if isinstance(plan.groups, tuple):
        suffix = f"-kv{100 * sum(plan.groups) / len(plan.groups) / plan.config.main.kv:.0f}"
    suffix += f"-{plan.method}" if plan.method in METHODS else ""
    return beside(plan.checkpoint.hub_id or model, suffix)
