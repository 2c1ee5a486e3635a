"""Describe a plan: as text and as one JSON object (--dry-run and --json print them), and as the
record next to the result.
"""

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import relative_path, stamp, versions
from gqa.convert.head_maps import StoredMaps
from gqa.convert.heads.family import groups_text
from gqa.convert.plan import Plan
from gqa.convert.verdict import Loss
from gqa.core.errors import one_line
from gqa.corpus.sources import is_self

BY_LAYER = (
    "`config.num_key_value_heads` raises an error in transformers, since layers differ; "
    "`config.per_layer_config[i].num_key_value_heads` is the number of layer i."
)


def size(count: float) -> str:
    """Format bytes: `2.0 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def kv_line(plan: Plan) -> str:
    """KV-cache bytes before and after, per token and at the model's context."""
    before, after = plan.cache_before, plan.cache_after
    text = f"{size(before.bytes_per_token)} per token before, {size(after.bytes_per_token)} after"
    text += f" ({cache_change(before.bytes_at(1) / max(after.bytes_at(1), 1))})"
    if after.cross:
        cross_sizes = [size(cache.cross_bytes_per_token) for cache in (before, after)]
        text += f", with {' and '.join(cross_sizes)} per token of the source"
    if context := after.context:
        context_sizes = [size(cache.bytes_at(context)) for cache in (before, after)]
        text += f"; {' and '.join(context_sizes)} at {context:,} tokens"
    return text


def cache_change(ratio: float) -> str:
    """How the KV cache changes in words, from bytes before / bytes after: `4x less`."""
    if ratio == 1:
        return "the same"
    return f"{ratio:.3g}x less" if ratio > 1 else f"{1 / ratio:.3g}x more"


def ratio_text(ratio: Mapping[str, float | None]) -> str:
    """`1.24 (95% interval 1.22-1.26)`: two decimals below 10, whole numbers from 100."""
    names = [name for name in ("ratio", "ratio_low", "ratio_high") if name in ratio]
    value, *bounds = [_ratio_number(ratio[name]) for name in names]
    return f"{value} (95% interval {'-'.join(bounds)})" if len(bounds) == 2 else value


def _ratio_number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "not a number"
    decimals = 0
    if value < 100:
        decimals = 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"


def describe_quality(quality: Mapping[str, Any], text: str) -> str:
    """`perplexity x1.24 (95% interval 1.22-1.26), recall 79% (base model 80%), on self-generated
    text`.

    quality: Of a conversion's record. text: What it was measured on, of `measured_text`.
    """
    parts = [f"perplexity x{ratio_text(quality)}"]
    if recall := quality.get("recall"):
        parts.append(f"recall {recall['converted']:.0%} (base model {recall['base']:.0%})")
    return ", ".join([*parts, f"on {text}"])


def measured_text(sources: Sequence[str]) -> str:
    """The text on which a conversion measured quality, in words, from the sources of its
    calibration text.
    """
    if all(map(is_self, sources)):
        return "self-generated text"
    return f"held-out blocks of {', '.join(sources)}"


def loss_of(quality: Mapping[str, Any] | None) -> Loss:
    """What a conversion has measured that its result has lost."""
    if quality is None:
        return Loss(None)
    ratio = math.nan if quality["ratio"] is None else quality["ratio"]
    recall = quality.get("recall")
    recall_loss = recall["base"] - recall["converted"] if recall else None
    return Loss(ratio, quality.get("ratio_high"), recall_loss)


def quality_text(maps: StoredMaps | None) -> str:
    """The measured quality of the result in words; empty if it was not measured."""
    if maps is None or maps.quality is None:
        return ""
    return describe_quality(maps.quality, measured_text(maps.description["text"]["sources"]))


def quality_loss(maps: StoredMaps | None) -> Loss:
    """What the result has lost, as far as it was measured."""
    return loss_of(maps.quality if maps else None)


def error_lines(maps: StoredMaps | None) -> list[str]:
    """The error of each layer that was fitted to text; none if no layer was."""
    if maps is None or not maps.errors:
        return []
    cells = ["-" if error is None else f"{error:.2g}" for error in maps.errors]
    rows = [cells[start : start + 10] for start in range(0, len(cells), 10)]
    title = "layers      relative squared error of the attention output, layer by layer:"
    return [title, *(" " * 12 + " ".join(f"{cell:6}" for cell in row).rstrip() for row in rows)]


def plan_record(plan: Plan, kv_budget: float | None = None) -> dict[str, Any]:
    """The plan as one JSON-ready object; the plan's text and the provenance are made from it."""
    main, before, after = plan.config.main, plan.cache_before, plan.cache_after
    way, classes, context = plan.checkpoint.way, plan.checkpoint.classes, after.context
    return {
        "model": plan.checkpoint.hub_id or plan.checkpoint.name,
        "revision": plan.checkpoint.revision,
        "model_type": plan.config.text.model_type,
        "family": plan.config.family.name,
        "recast": {"from": vars(classes[0]), "to": vars(classes[1]), "way": way} if way else None,
        "method": plan.method,
        "heads": {"query": main.query, "kv_before": main.kv, "kv_after": plan.groups},
        "config_edits": list(plan.config_edits),
        "changed_tensors": [
            {"name": t.name, "shape": list(t.shape), "source_shapes": [list(t.source.shape)]}
            for t in plan.changed
        ],
        "shards": [
            {"file": s.file, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in plan.shards
        ],
        "total_bytes": plan.total_bytes,
        "parameters": {
            "before": plan.checkpoint.parameters,
            "after": plan.parameters_after,
            "saved": plan.checkpoint.parameters - plan.parameters_after,
        },
        "kv_cache": {
            "bytes_per_token_before": before.bytes_per_token,
            "bytes_per_token_after": after.bytes_per_token,
            "cross_bytes_per_token_before": before.cross_bytes_per_token,
            "cross_bytes_per_token_after": after.cross_bytes_per_token,
            "context": context,
            "bytes_at_context_before": before.bytes_at(context) if context else None,
            "bytes_at_context_after": after.bytes_at(context) if context else None,
        },
        "warnings": list(plan.warnings),
    } | (
        {"allotment": {"kv_budget": kv_budget, "heads": plan.groups, "nats": plan.losses}}
        if plan.losses
        else {}
    )


def plan_lines(plan: Plan, tensors: bool) -> list[str]:
    """The plan for people.

    `tensors`: list every changed tensor with its shapes instead of their number.
    """
    record, classes = plan_record(plan), " -> ".join(map(str, plan.checkpoint.classes))
    heads, saved = record["heads"], record["parameters"]["saved"]
    lines = [
        f"model       {record['model']} ({record['model_type']}: {record['family']})",
        *([f"class       {classes}, {plan.checkpoint.way}"] if record["recast"] else []),
        f"heads       {heads['query']} query, {heads['kv_before']} -> {groups_text(plan.groups)} "
        f"key/value (method {plan.method})",
        f"KV cache    {kv_line(plan)}",
        "parameters  {before:,} -> {after:,}".format(**record["parameters"])
        + (f" ({saved:,} saved)" if saved >= 0 else f" ({-saved:,} more)"),
        *(
            one_line("config      {key}: {before} -> {after}".format(**edit), 200)
            for edit in record["config_edits"]
        ),
        *(
            "shard       {file}: {bytes:,} bytes, {tensors} tensors".format(**shard)
            for shard in record["shards"]
        ),
        *([f"note        {BY_LAYER}"] if isinstance(plan.groups, tuple) else []),
    ]
    if not tensors:
        lines.append(f"tensors     {len(record['changed_tensors'])} changed")
    for tensor in plan.changed if tensors else ():
        lines.append(
            f"tensor      {tensor.name}: {list(tensor.source.shape)} -> {list(tensor.shape)} "
            f"{tensor.dtype}"
        )
    return lines


def options_used(
    plan: Plan, maps: StoredMaps | None, out: Path, requested: Mapping[str, Any]
) -> dict[str, Any]:
    """What was chosen where an option was left open, and None for a seed from which nothing was
    drawn.
    """
    # With a KV budget text is drawn too, on which layers are measured, whatever the method is.
    draws = bool(plan.losses)
    if plan.merging is not None:
        draws |= "seed" in plan.merging.settings
    used = {
        "kv_heads": plan.groups,
        "method": plan.method,
        "seed": plan.seed if draws else None,
        "dtype": plan.dtype,
        "output": requested.get("output") or out.name,
    }
    if maps is not None:
        used["device"] = maps.description["device"]
    return used


def provenance(
    plan: Plan, maps: StoredMaps | None, out: Path, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Record of how the result at `out` was made, JSON-ready.

    maps: Those of the plan's method; None if it reads nothing.
    request: The command's arguments and options.
    """
    planned = plan_record(plan)
    requested = request.get("options", {})
    record: dict[str, Any] = {
        **stamp("gqa-convert", request.get("argv", ())),
        "source": {name: planned[name] for name in ("model", "revision")},
        **{name: planned[name] for name in ("model_type", "family")},
        "options": {
            **requested,
            **options_used(plan, maps, out, requested),
        },
        **{name: planned[name] for name in ("heads", "kv_cache", "config_edits")},
        "changed_tensors": [t.name for t in plan.changed],
        "versions": versions("torch", "transformers", "safetensors")
        | {"python": platform.python_version()},
    }
    # Where training looks for its teacher; without the user's name
    if plan.checkpoint.hub_id is None:
        record["source"]["path"] = relative_path(plan.checkpoint.directory, out)
    optional = {"recast": planned["recast"]}
    if maps is not None:
        optional |= {
            "maps": maps.description,
            "layer_errors": maps.errors,
            "quality": maps.quality,
        }
    return record | {name: value for name, value in optional.items() if value}
