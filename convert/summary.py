"""Describe a plan: as text and as one JSON object (--dry-run and --json print them), and as the
record next to the result.
"""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import relative_path, stamp, versions
from gqa.convert.head_maps import StoredMaps
from gqa.convert.heads.family import kv_heads_text
from gqa.convert.heads.kv_cache import KVCache
from gqa.convert.plan import Plan
from gqa.convert.verdict import Loss
from gqa.core.errors import one_line
from gqa.corpus.specs import GENERAL, is_self

_INDENT = " " * 12  # the width of the titles of lines
_LAYERS_IN_LINE = 10

BY_LAYER = (
    "`config.num_key_value_heads` raises an error in transformers, since layers differ; "
    "`config.per_layer_config[i].num_key_value_heads` is the number of layer i."
)


def size(count: float) -> str:
    """Format bytes: `2.0 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            decimals = 0 if unit == "bytes" else 1
            return f"{count:.{decimals}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def kv_line(before: KVCache, after: KVCache) -> str:
    """Bytes of the KV cache before and after, per token and at the model's context."""
    ratio = before.bytes_at(1) / max(after.bytes_at(1), 1)
    text = (
        f"{size(before.bytes_per_token)} per token before, {size(after.bytes_per_token)} after"
        f" ({cache_change(ratio)})"
    )

    if after.cross:
        cross_before = size(before.cross_bytes_per_token)
        cross_after = size(after.cross_bytes_per_token)
        text += f", with {cross_before} and {cross_after} per token of the source"

    context = after.context
    if context:
        context_before = size(before.bytes_at(context))
        context_after = size(after.bytes_at(context))
        text += f"; {context_before} and {context_after} at {context:,} tokens"
    return text


def cache_change(ratio: float) -> str:
    """How the KV cache changes in words, from bytes before / bytes after: `4x smaller`."""
    if ratio == 1:
        return "the same"
    return f"{ratio:.3g}x smaller" if ratio > 1 else f"{1 / ratio:.3g}x larger"


def ratio_text(ratio: Mapping[str, float | None]) -> str:
    """`1.24 (95% interval 1.22-1.26)`: two decimals below 10, whole numbers from 100."""
    value = _ratio_number(ratio["ratio"])
    if "ratio_low" not in ratio or "ratio_high" not in ratio:
        return value

    low = _ratio_number(ratio["ratio_low"])
    high = _ratio_number(ratio["ratio_high"])
    return f"{value} (95% interval {low}-{high})"


def _ratio_number(value: float | None) -> str:
    """A ratio with three digits or more; None is not finite, which JSON cannot say."""
    if value is None or math.isnan(value):
        return "not a number"

    if value < 10:
        decimals = 2
    elif value < 100:
        decimals = 1
    else:
        decimals = 0
    return f"{value:,.{decimals}f}"


def describe_quality(quality: Mapping[str, Any], text: str) -> str:
    """The measured quality in words: `perplexity x1.24 (95% interval 1.22-1.26) on 8,160 tokens of
    generated text in windows of 256, recall 80% -> 79%`.

    Args:
        quality: The entry `quality` of a conversion's record.
        text: What it was measured on, in the words of `measured_text`.
    """
    where = f"{quality['tokens']:,} tokens of {text}"
    if "context" in quality:  # not in older records
        where += f" in windows of {quality['context']:,}"

    parts = [f"perplexity x{ratio_text(quality)} on {where}"]
    recall = quality.get("recall")
    if recall:
        parts.append(f"recall {recall['base']:.0%} -> {recall['converted']:.0%}")
    return ", ".join(parts)


def measured_text(sources: Sequence[str]) -> str:
    """The text on which a conversion measured quality, in words.

    `sources`: those of its calibration text.
    """
    others = [source for source in sources if source != GENERAL]
    if others and all(map(is_self, others)):
        return "generated text"
    return f"held-out blocks of {', '.join(others or sources)}"


def loss_of(quality: Mapping[str, Any] | None) -> Loss:
    """What a conversion has measured that its result has lost."""
    if quality is None:
        return Loss(None)

    ratio = quality["ratio"]
    if ratio is None:  # not finite, which JSON cannot say
        ratio = math.nan

    recall = quality.get("recall")
    recall_loss = None
    if recall:
        recall_loss = recall["base"] - recall["converted"]
    return Loss(ratio, quality.get("ratio_high"), recall_loss)


def quality_text(maps: StoredMaps | None) -> str:
    """The measured quality of the result in words; empty if it was not measured."""
    if maps is None or maps.quality is None:
        return ""
    return describe_quality(maps.quality, measured_text(maps.description["text"]["sources"]))


def quality_loss(maps: StoredMaps | None) -> Loss:
    """What the result has lost, as far as it was measured."""
    if maps is None:
        return loss_of(None)
    return loss_of(maps.quality)


def layer_lines(maps: StoredMaps | None) -> list[str]:
    """The error of each layer that was fitted to text, and the drift after it; none if no layer
    was.
    """
    if maps is None or not maps.errors:
        return []

    return [
        "errors      relative squared error of the attention output (not of the model), layer by "
        "layer:",
        *_rows([_error_cell(error) for error in maps.errors]),
        "drift       difference of the hidden states from the base model's, after each layer:",
        *_rows([f"{drift:.0%}" for drift in maps.drifts]),
    ]


def _error_cell(error: float | None) -> str:
    """The error of a layer; a dash for a layer that was not fitted."""
    return "-" if error is None else f"{error:.2g}"


def _rows(cells: Sequence[str]) -> Iterator[str]:
    """Cells of one layer each, in lines below the first word of a summary."""
    for start in range(0, len(cells), _LAYERS_IN_LINE):
        row = [f"{cell:6}" for cell in cells[start : start + _LAYERS_IN_LINE]]
        yield _INDENT + " ".join(row).rstrip()


def plan_record(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON-ready object; the plan's text and the provenance are made from it."""
    checkpoint = plan.checkpoint
    main = plan.config.main_heads

    record: dict[str, Any] = {
        "model": checkpoint.hub_id or checkpoint.name,
        "revision": checkpoint.revision,
        "model_type": plan.config.text_config.model_type,
        "family": plan.config.family.name,
        "recast": _recast_record(plan),
        "method": plan.method.name,
        "heads": {"query": main.query, "kv_before": main.kv, "kv_after": plan.kv_heads},
        "config_edits": list(plan.config_edits),
        "changed_tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "source_shapes": [list(tensor.source.shape)],
            }
            for tensor in plan.changed_tensors
        ],
        "shards": [
            {"file": shard.file, "bytes": shard.nbytes, "tensors": len(shard.tensors)}
            for shard in plan.shards
        ],
        "total_bytes": plan.total_bytes,
        "parameters": {
            "before": checkpoint.parameters,
            "after": plan.parameters_after,
            "saved": checkpoint.parameters - plan.parameters_after,
        },
        "kv_cache": cache_record(plan.cache_before, plan.cache_after),
        "warnings": list(plan.warnings),
    }

    if plan.losses:
        record["allotment"] = {
            "kv_budget": plan.kv_budget,
            "heads": plan.kv_heads,
            "nats": plan.losses,
        }
    return record


def _recast_record(plan: Plan) -> dict[str, Any] | None:
    """The classes of a checkpoint that is converted as one of another class."""
    if not plan.checkpoint.view_kind:
        return None
    source, target = plan.checkpoint.classes
    return {"from": vars(source), "to": vars(target), "way": plan.checkpoint.view_kind}


def cache_record(before: KVCache, after: KVCache) -> dict[str, Any]:
    """The KV cache before and after, in bytes."""
    context = after.context
    bytes_at_context_before = None
    bytes_at_context_after = None
    if context:
        bytes_at_context_before = before.bytes_at(context)
        bytes_at_context_after = after.bytes_at(context)

    return {
        "bytes_per_token_before": before.bytes_per_token,
        "bytes_per_token_after": after.bytes_per_token,
        "cross_bytes_per_token_before": before.cross_bytes_per_token,
        "cross_bytes_per_token_after": after.cross_bytes_per_token,
        "context": context,
        "bytes_at_context_before": bytes_at_context_before,
        "bytes_at_context_after": bytes_at_context_after,
    }


def plan_lines(plan: Plan, record: Mapping[str, Any], tensors: bool) -> list[str]:
    """The plan in lines for people.

    Args:
        plan: The plan.
        record: Its `plan_record`.
        tensors: Whether to list every changed tensor with its shapes instead of their number.
    """
    lines = [f"model       {record['model']} ({record['model_type']}: {record['family']})"]
    if record["recast"]:
        classes = " -> ".join(map(str, plan.checkpoint.classes))
        lines.append(f"class       {classes}, {plan.checkpoint.view_kind}")

    heads = record["heads"]
    kv_heads = f"{heads['kv_before']} -> {kv_heads_text(plan.kv_heads)} KV"
    lines.append(f"heads       {heads['query']} query, {kv_heads} (method {plan.method.name})")
    lines.append(f"KV cache    {kv_line(plan.cache_before, plan.cache_after)}")

    parameters = record["parameters"]
    saved = parameters["saved"]
    change = f"{saved:,} saved" if saved >= 0 else f"{-saved:,} more"
    lines.append(f"parameters  {parameters['before']:,} -> {parameters['after']:,} ({change})")

    for edit in record["config_edits"]:
        line = f"config      {edit['key']}: {edit['before']} -> {edit['after']}"
        lines.append(one_line(line, 200))
    for shard in record["shards"]:
        contents = f"{shard['bytes']:,} bytes, {shard['tensors']} tensors"
        lines.append(f"shard       {shard['file']}: {contents}")
    if isinstance(plan.kv_heads, tuple):
        lines.append(f"note        {BY_LAYER}")

    if not tensors:
        lines.append(f"tensors     {len(record['changed_tensors'])} changed")
        return lines

    for tensor in plan.changed_tensors:
        shapes = f"{list(tensor.source.shape)} -> {list(tensor.shape)}"
        lines.append(f"tensor      {tensor.name}: {shapes} {tensor.dtype}")
    return lines


def options_used(
    plan: Plan, maps: StoredMaps | None, out: Path, requested: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of options that were left open. The seed is None if nothing was drawn from it.

    Args:
        plan: The conversion.
        maps: Those of its method; None if it reads nothing.
        out: The directory of the result.
        requested: The options of the command.
    """
    uses_seed = "seed" in plan.method.settings
    # With a KV budget layers are measured on text, which is drawn whatever the method is.
    draws = uses_seed or bool(plan.losses)
    seed = plan.seed if draws else None

    used = {
        "kv_heads": plan.kv_heads,
        "method": plan.method.name,
        "seed": seed,
        "dtype": plan.dtype,
        "output": requested.get("output") or out.name,
    }
    if maps is not None:
        used["device"] = maps.description["device"]
    return used


def provenance(
    plan: Plan, maps: StoredMaps | None, out: Path, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Record of how a result was made, JSON-ready.

    Args:
        plan: The conversion.
        maps: Those of its method; None if it reads nothing.
        out: The directory of the result.
        request: The command's arguments (`argv`) and options (`options`).
    """
    planned = plan_record(plan)
    requested = request.get("options", {})
    record: dict[str, Any] = {
        **stamp("gqa-convert", request.get("argv", ())),
        "source": {"model": planned["model"], "revision": planned["revision"]},
        "model_type": planned["model_type"],
        "family": planned["family"],
        "options": {**requested, **options_used(plan, maps, out, requested)},
        "heads": planned["heads"],
        "kv_cache": planned["kv_cache"],
        "config_edits": planned["config_edits"],
        "changed_tensors": [tensor.name for tensor in plan.changed_tensors],
        "versions": {
            **versions("torch", "transformers", "safetensors"),
            "python": platform.python_version(),
        },
    }

    # Where training looks for its teacher; without the user's name.
    if plan.checkpoint.hub_id is None:
        record["source"]["path"] = relative_path(plan.checkpoint.directory, out)

    optional = {"recast": planned["recast"]}
    if maps is not None:
        optional |= {
            "maps": maps.description,
            "layer_errors": maps.errors,
            "layer_drifts": maps.drifts,
            "quality": maps.quality,
        }
    return record | {name: value for name, value in optional.items() if value}
