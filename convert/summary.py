"""A plan in words and as one JSON object; what --dry-run and --json print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gqa.checkpoint.errors import one_line
from gqa.convert.heads.layout import Groups, groups_text
from gqa.convert.plan import Plan


def size(count: float) -> str:
    """`2.0 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def kv_line(plan: Plan) -> str:
    """KV-cache bytes before and after, per token and at the model's context."""
    both = plan.cache_before, plan.cache_after
    before, after = (cache.bytes_per_token for cache in both)
    ratio = before / max(after, 1)
    change = "the same" if ratio == 1 else f"{ratio:.3g}x less" if ratio > 1 else f"{1 / ratio:.3g}x more"
    text = f"{size(before)} per token before, {size(after)} after ({change})"
    if context := plan.cache_after.context:
        text += f"; {' and '.join(size(cache.bytes_at(context)) for cache in both)} at {context:,} tokens"
    return text


def allotment_text(heads: Sequence[int], losses: Sequence[Mapping[int, float]]) -> str:
    """The heads of every layer, and what it would lose if it alone had the fewest."""
    fewest = min(min(layer) for layer in losses)
    layers = enumerate(zip(heads, losses, strict=True))
    told = [f"{number:3d} {kept:2d} {layer[fewest]:.4f}" for number, (kept, layer) in layers]
    rows = [told[start : start + 5] for start in range(0, len(told), 5)]
    title = f"layers      KV heads, and nats a token that are lost if that layer alone has {fewest}\n"
    return title + "\n".join("            " + "  ".join(row) for row in rows)


def tensor_parallel(groups: Groups, query: int, ranks: int) -> tuple[bool, str]:
    """Whether `ranks` can hold the result, and what each holds (what vLLM and transformers require)."""
    if isinstance(groups, tuple):  # the layer that fits least says it
        return min((tensor_parallel(kept, query, ranks) for kept in sorted({*groups})), key=lambda told: told[0])
    if query % ranks:
        return False, f"tensor parallel {ranks}: not possible, {ranks} does not divide the {query} query heads"
    if groups % ranks == 0:
        return True, f"tensor parallel {ranks}: {groups // ranks} of {groups} KV heads a rank"
    if ranks % groups == 0:
        return True, (
            f"tensor parallel {ranks}: the {groups} KV heads are replicated, one a rank; "
            f"nothing is saved beyond {groups} ranks (vLLM does this, transformers refuses it)"
        )
    return False, f"tensor parallel {ranks}: not possible, neither {groups} % {ranks} nor {ranks} % {groups} is 0"


def plan_record(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON-ready object, from which the text and the provenance of a result are made."""
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
        "config_edits": [edit._asdict() for edit in plan.config_edits],
        "changed_tensors": [
            {"name": t.name, "shape": list(t.shape), "source_shapes": [list(spec.shape) for spec in t.sources]}
            for t in plan.changed
        ],
        "shards": [{"file": s.file, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in plan.shards],
        "total_bytes": plan.total_bytes,
        "parameters": {
            "before": plan.checkpoint.parameters,
            "after": plan.parameters_after,
            "saved": plan.checkpoint.parameters - plan.parameters_after,
        },
        "kv_cache": {
            "bytes_per_token_before": before.bytes_per_token,
            "bytes_per_token_after": after.bytes_per_token,
            "context": context,
            "bytes_at_context_before": before.bytes_at(context) if context else None,
            "bytes_at_context_after": after.bytes_at(context) if context else None,
        },
        "warnings": list(plan.warnings),
        "engine_notes": list(plan.engine_notes),
    }


def plan_text(plan: Plan, tensors: bool = True) -> str:
    """The same for people, every changed tensor with its shapes listed or only counted."""
    told, classes = plan_record(plan), " -> ".join(map(str, plan.checkpoint.classes))
    heads, saved = told["heads"], told["parameters"]["saved"]
    lines = [
        f"model       {told['model']} ({told['model_type']}: {told['family']})",
        *([f"class       {classes}, {plan.checkpoint.way}"] if told["recast"] else []),
        f"heads       {heads['query']} query, {heads['kv_before']} -> {groups_text(plan.groups)} key/value "
        f"(method {plan.method})",
        f"KV cache    {kv_line(plan)}",
        "parameters  {before:,} -> {after:,}".format(**told["parameters"])
        + (f" ({saved:,} saved)" if saved >= 0 else f" ({-saved:,} more)"),
        *(one_line("config      {key}: {before} -> {after}".format(**edit), 200) for edit in told["config_edits"]),
        *("shard       {file}: {bytes:,} bytes, {tensors} tensors".format(**shard) for shard in told["shards"]),
        *(f"note        {note}" for note in plan.engine_notes),
    ]
    if plan.method == "none":
        lines.append("identity    these are the source's own key/value heads")
    if not tensors:
        lines.append(f"tensors     {len(told['changed_tensors'])} changed")
    for tensor in plan.changed if tensors else ():
        several = f"{len(tensor.sources)} x " if len(tensor.sources) > 1 else ""
        before = f"{several}{list(tensor.sources[0].shape)}"
        lines.append(f"tensor      {tensor.name}: {before} -> {list(tensor.shape)} {tensor.dtype}")
    return "\n".join(map(one_line, lines))
