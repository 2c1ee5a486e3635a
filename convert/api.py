"""Plan and run a conversion: called by the command, `package/` and studies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gqa.checkpoint.hub import fetch_weights, open_model
from gqa.checkpoint.output_directory import OutputDirectory, require_space
from gqa.checkpoint.provenance import PROVENANCE, describe_request
from gqa.checkpoint.read import Checkpoint
from gqa.convert.advice import Advice
from gqa.convert.card import model_card
from gqa.convert.find_maps import method_errors, with_maps
from gqa.convert.head_maps import StoredMaps
from gqa.convert.heads.config import ModelConfig, read_config
from gqa.convert.heads.config_edits import valid_kv_heads
from gqa.convert.heads.family import KVCounts
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods.maps_method import MapsMethod
from gqa.convert.methods.table import BUDGET_METHOD, METHODS
from gqa.convert.options import ConvertOptions
from gqa.convert.plan import Plan
from gqa.convert.planning import make_plan
from gqa.convert.recast.targets import recast_as_is
from gqa.convert.rewrite import ConvertedCheckpoint
from gqa.convert.summary import provenance
from gqa.core.console import SILENT, Watcher
from gqa.core.errors import RefusedError, alternatives, plural
from gqa.core.options import parameters_in_errors

__all__ = ["Conversion", "Plan", "convert", "convert_checkpoint", "plan_conversion", "prepare"]


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    maps: What the plan's method has found: description, errors and quality, but no tensors any
        more; None if it reads nothing.
    record: gqa_conversion.json.
    advice: What is said of its quality, and what is advised.
    """

    out: Path
    plan: Plan
    maps: StoredMaps | None
    warnings: tuple[str, ...]
    record: dict[str, Any]
    advice: Advice


def prepare(options: ConvertOptions, watcher: Watcher = SILENT) -> Plan:
    """Decide everything about a conversion from config and headers; write nothing.

    Weights are fetched only if they have no headers (.bin), or with `kv_budget`, which measures
    layers on text.

    Raises:
        RefusedError: The checkpoint or the options cannot be converted; one line says why and what
            is allowed.
        CorruptError: Files of the checkpoint are broken or hostile (a kind of RefusedError).
    """
    options.refuse_conflicts()
    checkpoint = open_model(options.model, options.revision, headers_only=True)
    if not options.kv_budget:
        if options.kv_heads is None:
            raise _no_kv_heads(checkpoint)
        return _checked_plan(checkpoint, options.kv_heads, options)

    from gqa.convert.merge.budget import heads_within, uneven_heads

    # Check plan and output before fetching weights and measuring layers.
    share = options.kv_budget
    heads = uneven_heads(checkpoint, share)
    plan_to_check = _checked_plan(checkpoint, heads, options)
    try:
        make_plan(checkpoint, heads, BUDGET_METHOD)
    except RefusedError as error:
        reason = str(error).partition("; use --method")[0]
        raise RefusedError(
            f"--kv-budget measures layers with --method {BUDGET_METHOD}, but {reason}; pass "
            "--kv-heads instead"
        ) from error
    options.maps_options.text.check_sources(checkpoint)  # read whatever the method reads
    open_output(options, plan_to_check)

    fetch_weights(checkpoint)
    measuring = METHODS[BUDGET_METHOD]
    assert isinstance(measuring, MapsMethod)
    with method_errors(measuring, options.maps_options, "pass --kv-heads instead"):
        heads, losses = heads_within(checkpoint, share, options.maps_options, watcher)
    return _checked_plan(checkpoint, heads, options, losses)


def _no_kv_heads(checkpoint: Checkpoint) -> RefusedError:
    """The error for a conversion that does not say how many KV heads the result has.

    It names the numbers that make the KV cache of this model smaller, or where there are none, all
    that the model can have.
    """
    config = _config_for_any_heads(checkpoint)
    return RefusedError(
        f"--kv-heads is missing; {checkpoint.name} has {plural(config.main_heads.kv, 'KV head')}: "
        f"pass {alternatives(_fewer_kv_heads(config) or valid_kv_heads(config))}"
    )


def _config_for_any_heads(checkpoint: Checkpoint) -> ModelConfig:
    """The config of a model, in the class that allows most numbers of KV heads."""
    return read_config(recast_as_is(checkpoint).config, checkpoint.name)


def _fewer_kv_heads(config: ModelConfig) -> list[int]:
    """The numbers of KV heads that make the KV cache of a model smaller."""
    return [count for count in valid_kv_heads(config) if count < config.main_heads.kv]


def refuse_copy(plan: Plan) -> None:
    """Raise RefusedError if the result of a plan would be a copy of the base model."""
    if plan.changed_tensors or plan.config_edits or plan.dtype:
        return
    advice = ""
    if fewer := _fewer_kv_heads(_config_for_any_heads(plan.checkpoint)):
        advice = f"; pass {alternatives(fewer)}"
    raise RefusedError(
        f"{plan.checkpoint.name} has {plural(plan.config.main_heads.kv, 'KV head')} already, so "
        f"the result would be a copy of it{advice}"
    )


def _checked_plan(
    checkpoint: Checkpoint,
    kv_heads: KVCounts,
    options: ConvertOptions,
    losses: Sequence[Mapping[int, float]] = (),
) -> Plan:
    """The plan of these options, with text that can be used if the method reads any.

    losses: With a KV budget, by layer: heads -> loss (nats per token); none before it is measured.
    """
    plan = make_plan(checkpoint, kv_heads, options.method, options.seed, options.dtype)
    if plan.method.reads == "text":
        options.maps_options.text.check_sources(checkpoint)
    return replace(plan, kv_budget=options.kv_budget, losses=losses)


def output_path(options: ConvertOptions, plan: Plan) -> Path:
    """`output`, or the default directory."""
    return options.output or plan.default_directory(options.model, plan.method)


def open_output(options: ConvertOptions, plan: Plan) -> OutputDirectory:
    """The output directory, not yet created.

    Raises RefusedError if it must not be, or OutputError if the disk is too full.
    """
    path = output_path(options, plan)
    output = OutputDirectory(path, plan.checkpoint.directory, options.overwrite)
    require_space(plan.total_bytes, output.out, what="the result takes")
    return output


def convert(
    plan: Plan,
    options: ConvertOptions,
    watcher: Watcher = SILENT,
    argv: Sequence[str] = (),
    *,
    output: OutputDirectory | None = None,
    maps_options: MapsOptions | None = None,
) -> Conversion:
    """Run a plan: fetch weights, find the maps of its method, stream the shards into the output,
    verify them from disk, make them visible.

    Memory stays near 4 x the largest changed tensor per thread; unchanged tensors are copied by the
    kernel. Merging is done in float32 (float64 for F64 tensors) and rounded once to the stored
    dtype.

    Args:
        plan: Made with `prepare` from the same options.
        argv: The command's arguments, for the record.
        output: What `open_output` has returned, if it was called before.
        maps_options: How maps are computed, instead of as `options` say.

    Raises:
        RefusedError: Weights or text cannot be used.
        OutputError: The result could not be written or did not verify.

    After either, nothing is left at the output.
    """
    request = describe_request(options, argv)
    if plan.method.computes_maps and maps_options is None:
        maps_options = options.maps_options  # refuses a device that cannot be used
    output = output or open_output(options, plan)
    out = output.given
    fetch_weights(plan.checkpoint)

    with output, with_maps(plan, out, maps_options, watcher, options.overwrite) as maps:
        watcher.stage("converting", plan.total_bytes, "byte")
        record = ConvertedCheckpoint(plan, maps, watcher.update).write(
            output,
            PROVENANCE,
            provenance(plan, maps, out, request),
            {"README.md": model_card(plan, maps, output.out.name, request)},
        )

    advice = Advice(plan, maps, options, out, record["source"])
    return Conversion(out, plan, maps, (*plan.warnings, *advice.warnings()), record, advice)


def plan_conversion(
    model: str | os.PathLike[str], kv_heads: int | tuple[int, ...], **options: Any
) -> Plan:
    """The plan of `--dry-run`; `options` are fields of `ConvertOptions`.

    Raises what `prepare` raises.
    """
    with parameters_in_errors(ConvertOptions):
        return prepare(
            ConvertOptions(model=os.fspath(model), kv_heads=kv_heads, dry_run=True, **options)
        )


def convert_checkpoint(
    model: str | os.PathLike[str],
    kv_heads: int | tuple[int, ...],
    out: str | os.PathLike[str] | None = None,
    *,
    maps_options: MapsOptions | None = None,
    **options: Any,
) -> Conversion:
    """`prepare`, then `convert`; `options` are fields of `ConvertOptions`."""
    output = Path(out) if out else None
    settings = ConvertOptions(model=os.fspath(model), kv_heads=kv_heads, output=output, **options)
    return convert(prepare(settings), settings, maps_options=maps_options)
