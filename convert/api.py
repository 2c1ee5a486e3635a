"""What the command and `package/` convert by: the same two steps, plan and convert."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.hub import beside, open_model
from gqa.checkpoint.provenance import PROVENANCE, request
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import DEFAULT_JOBS, OutputDirectory, require_space, write_text
from gqa.convert.heads.layout import Groups
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.watcher import SILENT, Watcher
from gqa.convert.methods import AUTO, MEASURING, METHODS
from gqa.convert.options import ConvertOptions
from gqa.convert.plan import Plan, make_plan, searches
from gqa.convert.recast.targets import ANY, Target
from gqa.convert.rewrite import write
from gqa.convert.summary import model_card, provenance
from gqa.convert.verify import verify_load

if TYPE_CHECKING:
    from gqa.convert.merge.allot import Losses

__all__ = [
    "Conversion", "Plan", "Target", "convert_checkpoint", "convert_plan", "default_output", "plan_conversion",
    "plan_within",
]  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What a run did."""

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
    method: str = "auto",
    seed: int = 0,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    target: Target = ANY,
    check: Callable[[Plan], object] = lambda plan: None,
) -> Plan:
    """Decide everything about a conversion from config and headers; nothing is written.

    Args:
        model: A local directory or a hub id.
        groups: G, the key/value heads of the result: a divisor of the base model's Hk (merging; arXiv 2305.13245,
            section 2.1) or a multiple of Hk that divides the query heads H (repeating, exact). Query head i reads
            KV head i // (H // G). A tuple has one for every layer, none above Hk; it gives custom modelling code.
        grouping: How maps are going to be sought: `contiguous`; `search`, where heads may change places; `auto`.
        revision: Branch, tag or commit of a hub id.
        headers_only: Of a hub id fetch only config and headers (such a plan cannot be run).
        method: One of `gqa.convert.methods.METHODS` (docs/methods.md); `auto` for the best of those that need nothing
            but weights. The pooling of arXiv 2305.13245 is `mean`.
        seed: Of `random`.
        dtype: Of the stored result (`float32`, `bfloat16`, `float16`, `float64`); None for each tensor's own.
        max_shard_bytes: Of one output file; None for the base model's partition.
        target: What is asked of the class that a model is written for, where its own cannot have fewer heads.
        check: Called with the plan before weights are fetched; may refuse it.

    Returns:
        The plan: shards with every output tensor's name, shape and dtype, the edits of config.json, and the KV cache
        before and after in bytes.

    Raises:
        RefusedError: The checkpoint or the options cannot be converted; one line says why and what is allowed.
        CorruptError: Files of the checkpoint are broken or hostile (a kind of RefusedError).
    """

    def plan(checkpoint: Checkpoint) -> Plan:
        made = make_plan(checkpoint, groups, method, seed, dtype, max_shard_bytes, target)
        searches(made, grouping)  # refuses
        return made

    return plan(open_model(os.fspath(model), revision, headers_only, lambda headers: check(plan(headers))))


def plan_within(
    model: str | os.PathLike[str],
    share: float,
    how: MapsOptions,
    *,
    ranks: int = 1,
    layers: Watcher = SILENT,
    revision: str | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> tuple[Plan, tuple[int, ...], Losses]:
    """A plan, with weights, whose layers keep as many heads as a `share` of the KV cache has room for; these heads, and
    what layers would lose by any number: see `heads_within`. `options` are those of `make_plan`.

    What would refuse the plan, or `out`, does so before layers are measured and before weights are fetched.
    """
    from gqa.convert.merge.allot import heads_within, uneven

    def plan(checkpoint: Checkpoint, groups: Groups) -> Plan:
        made = make_plan(checkpoint, groups, **options)
        searches(made, how.grouping)  # refuses
        return made

    def check(checkpoint: Checkpoint) -> None:
        planned = plan(checkpoint, uneven(checkpoint, share, ranks))
        if out:
            require_space(planned.total_bytes, OutputDirectory(Path(out), checkpoint.directory, overwrite).out)

    source = open_model(os.fspath(model), revision, check=check)
    check(source)
    (heads,), losses = heads_within(source, [share], how, ranks, layers)
    return plan(source, heads), heads, losses


def convert_plan(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    calibration: MapsOptions | None = None,
    layers: Watcher = SILENT,
    overwrite: bool = False,
    checksums: bool = False,
    load: bool = False,
    jobs: int = DEFAULT_JOBS,
    progress: Callable[[int], None] | None = None,
    asked: Mapping[str, Any] = MappingProxyType({}),
) -> Conversion:
    """Run a plan: find the maps that it lacks, stream the shards into `out`, verify them from disk, make it visible.

    Memory stays near 4 x the largest changed tensor per job; what does not change is copied by the kernel. Merging is
    done in float32 (float64 for F64 tensors) and rounded once to the stored dtype.

    Args:
        plan: Made with `headers_only=False`.
        out: Directory to make.
        calibration: How the methods that look at the model do it; None for the defaults of the command.
        layers: Told of layers and tokens while maps are found.
        overwrite: Replace a checkpoint that is at `out`, after the new one is complete.
        checksums: Compare every untouched byte and record the SHA-256 of all shards.
        load: Load the result with transformers, too, and run one forward pass.
        jobs: Shards written at a time.
        progress: Called with the number of bytes written, from any job's thread.
        asked: For the record: the command's arguments (`argv`) and options.

    Raises:
        RefusedError: Before anything is written.
        OutputError: The result could not be written or did not verify; nothing is left at `out`.
    """
    if not all((plan.checkpoint.directory / file).exists() for file in plan.checkpoint.files):
        raise RefusedError(f"the plan is of the headers of {plan.checkpoint.name}; make it with headers_only=False")
    out = Path(out)
    output = OutputDirectory(out, plan.checkpoint.directory, overwrite)
    require_space(plan.total_bytes, output.out)
    with ExitStack() as stack:
        stack.enter_context(output)
        if plan.lacks_maps:  # what finds them runs models, whose imports take seconds
            from gqa.convert.merge.find_maps import with_maps

            plan = stack.enter_context(with_maps(plan, out, calibration or MapsOptions(), layers, overwrite=overwrite))
        warnings, hashes = write(plan, output.work, checksums=checksums, jobs=jobs, progress=progress)
        write_text(output.work / "README.md", model_card(plan, out.name, asked))
        if load:
            verify_load(output.work)
        output.commit(PROVENANCE, provenance(plan, hashes, out, asked))
    return Conversion(out, plan, (*plan.warnings, *warnings), hashes)


def plan_for(options: ConvertOptions, layers: Watcher = SILENT) -> tuple[Plan, tuple[tuple[int, ...], Losses] | None]:
    """The plan of a command; with `kv_budget` also the heads of every layer, and what it would lose by any number.
    Raises what `plan_conversion` raises, also where the output cannot be written.
    """
    how: dict[str, Any] = {"seed": options.seed, "dtype": options.dtype, "revision": options.revision}
    how |= {"max_shard_bytes": options.max_shard_size, "target": options.target()}
    if options.kv_budget:
        method = MEASURING if options.method == AUTO else options.method
        plan, heads, losses = plan_within(
            options.model, options.kv_budget, options.maps(), ranks=options.tensor_parallel or 1, layers=layers,
            out=options.output, overwrite=options.overwrite, method=method, **how,
        )  # fmt: skip
        return plan, (heads, losses)
    assert options.groups is not None
    return plan_conversion(
        options.model, options.groups, grouping=options.grouping, headers_only=options.dry_run, method=options.method,
        check=lambda plan: OutputDirectory(output_of(options, plan), None, options.overwrite), **how,
    ), None  # fmt: skip


def output_of(options: ConvertOptions, plan: Plan) -> Path:
    """The directory to make: the one that is given, or one named after the model."""
    return options.output or default_output(plan.checkpoint.hub_id or options.model, plan)


def convert_as(options: ConvertOptions, plan: Plan, bar: Watcher, argv: Sequence[str] = ()) -> Conversion:
    """Run the plan of a command. Raises what `convert_plan` raises."""
    return convert_plan(
        plan, output_of(options, plan), calibration=options.maps() if plan.lacks_maps else None, layers=bar,
        overwrite=options.overwrite, checksums=options.checksums, load=options.verify_load, progress=bar.written,
        asked=request(options, argv),
    )  # fmt: skip


def convert_checkpoint(
    model: str | os.PathLike[str],
    groups: Groups,
    out: str | os.PathLike[str] | None = None,
    *,
    calibration: MapsOptions | None = None,
    **options: Any,
) -> Conversion:
    """`plan_conversion` and then `convert_plan`; `options` are what these take by name.

    `out` is the directory to make; default as `default_output` says. Raises what the two do.
    """
    writing = {name: options.pop(name) for name in signature(convert_plan).parameters if name in options}
    grouping = calibration.grouping if calibration else "auto"

    def place(plan: Plan) -> Path:
        return default_output(plan.checkpoint.hub_id or os.fspath(model), plan) if out is None else Path(out)

    plan = plan_conversion(
        model, groups, grouping=grouping, headers_only=False,
        check=lambda plan: OutputDirectory(place(plan), None, writing.get("overwrite", False)), **options,
    )  # fmt: skip
    return convert_plan(plan, place(plan), calibration=calibration, **writing)


def default_output(model: str, plan: Plan) -> Path:
    """`MODEL-gqa4-refined` beside a local model, in the working directory for a hub id.

    `MODEL-mqa-refined` for one head; `MODEL-gqa32` where none are merged; `MODEL-kv56-refined` where layers differ and
    56 % of the KV cache is left.
    """
    suffix = "-mqa" if plan.groups == 1 else f"-gqa{plan.groups}"
    if isinstance(plan.groups, tuple):
        suffix = f"-kv{100 * sum(plan.groups) / len(plan.groups) / plan.config.main.kv:.0f}"
    suffix += f"-{plan.method}" if plan.method in METHODS else ""
    return beside(model, suffix)
