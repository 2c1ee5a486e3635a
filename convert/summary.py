"""A plan in words and as one JSON object; what --dry-run and --json print."""

from __future__ import annotations

from typing import Any

from gqa.checkpoint.errors import one_line
from gqa.convert.plan import OutputTensor, Plan


def size(count: float) -> str:
    """`2.0 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def kv_line(plan: Plan) -> str:
    """KV-cache bytes before and after, per token and at the model's context."""
    before, after = plan.cache_before, plan.cache_after
    ratio = before.bytes_per_token / max(after.bytes_per_token, 1)
    change = "the same" if ratio == 1 else f"{ratio:.3g}x less" if ratio > 1 else f"{1 / ratio:.3g}x more"
    text = f"{size(before.bytes_per_token)} per token before, {size(after.bytes_per_token)} after ({change})"
    if after.context:
        text += (
            f"; {size(before.bytes_at(after.context))} and {size(after.bytes_at(after.context))} "
            f"at {after.context:,} tokens"
        )
    return text


def tensor_parallel(groups: int, query: int, ranks: int) -> tuple[bool, str]:
    """Whether `ranks` can hold the result, and what each holds (what vLLM and transformers require)."""
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
    """The plan as one JSON-ready object."""
    main, before, after = plan.config.main, plan.cache_before, plan.cache_after
    return {
        "model": plan.checkpoint.hub_id or plan.checkpoint.name,
        "revision": plan.checkpoint.revision,
        "model_type": plan.config.text.model_type,
        "family": plan.config.family.name,
        "recast": recast_record(plan),
        "method": plan.method,
        "heads": {"query": main.query, "kv_before": main.kv, "kv_after": plan.groups},
        "config_edits": [{"key": e.key, "before": e.before, "after": e.after} for e in plan.config_edits],
        "changed_tensors": [
            {"name": t.name, "shape": list(t.shape), "source_shapes": [list(spec.shape) for spec in t.sources]}
            for t in plan.changed
        ],
        "shards": [{"file": s.file, "bytes": s.nbytes, "tensors": len(s.tensors)} for s in plan.shards],
        "total_bytes": plan.total_bytes,
        "parameters": {
            "before": plan.parameters_before,
            "after": plan.parameters_after,
            "saved": plan.parameters_before - plan.parameters_after,
        },
        "kv_cache": {
            "bytes_per_token_before": before.bytes_per_token,
            "bytes_per_token_after": after.bytes_per_token,
            "context": after.context,
            "bytes_at_context_before": before.bytes_at(after.context) if after.context else None,
            "bytes_at_context_after": after.bytes_at(after.context) if after.context else None,
        },
        "warnings": list(plan.warnings),
        "engine_notes": list(plan.engine_notes),
    }


def recast_record(plan: Plan) -> dict[str, Any] | None:
    """Both classes of a model that is written for another class, and the way; None where it keeps its own."""
    if plan.checkpoint.way is None:
        return None
    source, target = (vars(known) for known in plan.checkpoint.classes)
    return {"from": source, "to": target, "way": plan.checkpoint.way}


def plan_text(plan: Plan, tensors: bool = True) -> str:
    """The plan for people, every changed tensor with its shapes listed or only counted."""
    main = plan.config.main
    lines = [
        f"model       {plan.checkpoint.hub_id or plan.checkpoint.name} "
        f"({plan.config.text.model_type}: {plan.config.family.name})",
        *_recast_line(plan),
        f"heads       {main.query} query, {main.kv} -> {plan.groups} key/value (method {plan.method})",
        f"KV cache    {kv_line(plan)}",
        f"parameters  {plan.parameters_before:,} -> {plan.parameters_after:,} ({_saved(plan)})",
        *(f"config      {e.key}: {e.before} -> {e.after}" for e in plan.config_edits),
        *(f"shard       {s.file}: {s.nbytes:,} bytes, {len(s.tensors)} tensors" for s in plan.shards),
    ]
    lines += [f"note        {note}" for note in plan.engine_notes]
    if plan.method == "none":
        lines.append("identity    these are the source's own key/value heads")
    changed = plan.changed
    lines += [_tensor_line(t) for t in changed] if tensors else [f"tensors     {len(changed)} changed"]
    return "\n".join(map(one_line, lines))


def _recast_line(plan: Plan) -> list[str]:
    if plan.checkpoint.way is None:
        return []
    source, target = plan.checkpoint.classes
    return [f"class       {source} -> {target}, {plan.checkpoint.way}"]


def _saved(plan: Plan) -> str:
    saved = plan.parameters_before - plan.parameters_after
    return f"{saved:,} saved" if saved >= 0 else f"{-saved:,} more"


def _tensor_line(tensor: OutputTensor) -> str:
    several = f"{len(tensor.sources)} x " if len(tensor.sources) > 1 else ""
    before = f"{several}{list(tensor.sources[0].shape)}"
    return f"tensor      {tensor.name}: {before} -> {list(tensor.shape)} {tensor.dtype}"
