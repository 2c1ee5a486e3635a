"""Describe a plan: as text and as one JSON object (--dry-run and --json print them), and next to the result as a model
card and a provenance file.
"""

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import one_line
from gqa.checkpoint.loading import model_class
from gqa.checkpoint.provenance import (
    PROVENANCE,
    format_card,
    loading_code,
    relative_path,
    request_text,
    source_card,
    stamp,
    version,
    versions,
)
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.family import groups_text
from gqa.convert.options import ConvertOptions
from gqa.convert.plan import Plan
from gqa.corpus.sources import is_self

_DAMAGED = 3.0  # perplexity ratio above which a result is of no use without training
_BY_LAYER = (
    "`config.num_key_value_heads` raises an error in transformers, since layers differ; "
    "`config.per_layer_config[i].num_key_value_heads` is the number of layer i."
)
_ATTENTION_TAGS = {"multi-head-attention", "grouped-query-attention", "multi-query-attention", "gqa-convert"}


def size(count: float) -> str:
    """Format bytes: `2.0 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def kv_line(plan: Plan) -> str:
    """KV-cache bytes before and after, per token and at the model's context."""
    both = plan.cache_before, plan.cache_after
    before, after = (cache.bytes_per_token for cache in both)
    ratio = both[0].bytes_at(1) / max(both[1].bytes_at(1), 1)
    change = "the same" if ratio == 1 else f"{ratio:.3g}x less" if ratio > 1 else f"{1 / ratio:.3g}x more"
    text = f"{size(before)} per token before, {size(after)} after ({change})"
    if plan.cache_after.cross:
        text += f", with {' and '.join(size(cache.cross_bytes_per_token) for cache in both)} per token of the source"
    if context := plan.cache_after.context:
        text += f"; {' and '.join(size(cache.bytes_at(context)) for cache in both)} at {context:,} tokens"
    return text


def ratio_text(ratio: Mapping[str, float]) -> str:
    """`1.24 (95% interval 1.22-1.26)`: two decimals below 10, whole numbers from 100."""
    value, *bounds = (
        f"{ratio[name]:,.{2 if ratio[name] < 10 else 1 if ratio[name] < 100 else 0}f}"
        for name in ("ratio", "ratio_low", "ratio_high")
        if name in ratio
    )
    return f"{value} (95% interval {'-'.join(bounds)})" if bounds else value


def quality_text(plan: Plan) -> str:
    """The measured quality of the result: `perplexity x1.24 (95% interval 1.22-1.26), recall 79% (base model 80%), on
    self-generated text`; empty if it was not measured.
    """
    maps = plan.merging.maps
    if maps is None or maps.quality is None:
        return ""
    quality, sources = maps.quality, maps.description["text"]["sources"]
    parts = [f"perplexity x{ratio_text(quality)}"]
    if recall := quality.get("recall"):
        parts.append(f"recall {recall['converted']:.0%} (base model {recall['base']:.0%})")
    text = "self-generated text" if all(map(is_self, sources)) else f"held-out blocks of {', '.join(sources)}"
    return ", ".join([*parts, f"on {text}"])


def quality_warnings(plan: Plan) -> Iterator[str]:
    """A warning if the result is of no use as it is."""
    maps = plan.merging.maps
    if maps and maps.quality and not maps.quality["ratio"] <= _DAMAGED:
        yield f"this model is damaged: {'' if plan.merging.traits.refines else 'use --method refined or '}train it"


def errors_text(plan: Plan) -> str:
    """The error of each layer that was fitted to text; empty if none was."""
    errors = plan.merging.maps.errors if plan.merging.maps else ()
    cells = ["-" if error is None else f"{error:.2g}" for error in errors]
    rows = [" ".join(f"{cell:6}" for cell in cells[start : start + 10]) for start in range(0, len(cells), 10)]
    title = "layers      relative squared error of the attention output, layer by layer:"
    return "\n            ".join([title, *(row.rstrip() for row in rows)]) if cells else ""


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
            {"name": t.name, "shape": list(t.shape), "source_shapes": [list(t.source.shape)]} for t in plan.changed
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
            "cross_bytes_per_token_before": before.cross_bytes_per_token,
            "cross_bytes_per_token_after": after.cross_bytes_per_token,
            "context": context,
            "bytes_at_context_before": before.bytes_at(context) if context else None,
            "bytes_at_context_after": after.bytes_at(context) if context else None,
        },
        "warnings": list(plan.warnings),
    } | ({"allotment": {"kv_budget": kv_budget, "heads": plan.groups, "nats": plan.losses}} if plan.losses else {})


def plan_text(plan: Plan, tensors: bool) -> str:
    """The plan as text; `tensors`: list every changed tensor with its shapes instead of their number."""
    record, classes = plan_record(plan), " -> ".join(map(str, plan.checkpoint.classes))
    heads, saved = record["heads"], record["parameters"]["saved"]
    lines = [
        f"model       {record['model']} ({record['model_type']}: {record['family']})",
        *([f"class       {classes}, {plan.checkpoint.way}"] if record["recast"] else []),
        f"heads       {heads['query']} query, {heads['kv_before']} -> {groups_text(plan.groups)} key/value "
        f"(method {plan.method})",
        f"KV cache    {kv_line(plan)}",
        "parameters  {before:,} -> {after:,}".format(**record["parameters"])
        + (f" ({saved:,} saved)" if saved >= 0 else f" ({-saved:,} more)"),
        *(one_line("config      {key}: {before} -> {after}".format(**edit), 200) for edit in record["config_edits"]),
        *("shard       {file}: {bytes:,} bytes, {tensors} tensors".format(**shard) for shard in record["shards"]),
        *([f"note        {_BY_LAYER}"] if isinstance(plan.groups, tuple) else []),
    ]
    if not tensors:
        lines.append(f"tensors     {len(record['changed_tensors'])} changed")
    for tensor in plan.changed if tensors else ():
        lines.append(f"tensor      {tensor.name}: {list(tensor.source.shape)} -> {list(tensor.shape)} {tensor.dtype}")
    return "\n".join(map(one_line, lines))


def options_used(plan: Plan, out: Path, requested: Mapping[str, Any]) -> dict[str, Any]:
    """What was chosen where an option was left open, and None for a seed from which nothing was drawn."""
    merges = plan.method == plan.merging.method
    # With a KV budget text is drawn too, on which layers are measured, whatever the method is.
    draws = (merges and plan.merging.traits.draws) or bool(plan.losses)
    used = {
        "kv_heads": plan.groups,
        "method": plan.method,
        "seed": plan.merging.seed if draws else None,
        "dtype": plan.dtype,
        "output": requested.get("output") or out.name,
    }
    if plan.merging.maps:
        used["device"] = plan.merging.maps.description["device"]
    return used


def provenance(plan: Plan, out: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Record of how the result at `out` was made, JSON-ready; `request`: the command's arguments and options."""
    planned, maps = plan_record(plan), plan.merging.maps
    record: dict[str, Any] = {
        **stamp("gqa-convert", request.get("argv", ())),
        "source": {name: planned[name] for name in ("model", "revision")},
        **{name: planned[name] for name in ("model_type", "family")},
        "options": {
            **request.get("options", {}),
            **options_used(plan, out, request.get("options", {})),
        },
        **{name: planned[name] for name in ("heads", "config_edits")},
        "changed_tensors": [t.name for t in plan.changed],
        "versions": versions("torch", "transformers", "safetensors") | {"python": platform.python_version()},
    }
    if plan.checkpoint.hub_id is None:  # where training looks for its teacher; without the user's name
        record["source"]["path"] = relative_path(plan.checkpoint.directory, out)
    optional = {
        "recast": planned["recast"],
        "maps": maps and maps.description,
        "layer_errors": maps and maps.errors,
        "quality": maps and maps.quality,
    }
    return record | {name: value for name, value in optional.items() if value}


def model_card(plan: Plan, name: str, request: Mapping[str, Any]) -> str:
    """Text of README.md: the source card's metadata, a summary of the conversion, and the source's card below it."""
    metadata, original = source_card(plan.checkpoint)
    base, main, kv_heads = plan.checkpoint.hub_id, plan.config.main, groups_text(plan.groups)
    before, after = plan.cache_before, plan.cache_after
    rows = [
        ("", "base model", "this model"),
        ("---", "---:", "---:"),
        ("key/value heads", str(main.kv), kv_heads),
        ("KV cache per token", size(before.bytes_per_token), size(after.bytes_per_token)),
    ]
    if after.cross:
        sizes = size(before.cross_bytes_per_token), size(after.cross_bytes_per_token)
        rows.append(("KV cache per token of the source", *sizes))
    if context := after.context:
        rows.append((f"KV cache at {context:,} tokens", size(before.bytes_at(context)), size(after.bytes_at(context))))
    rows.append(("parameters", f"{plan.checkpoint.parameters:,}", f"{plan.parameters_after:,}"))
    rows.append(("weights", size(plan.checkpoint.nbytes), size(plan.total_bytes)))
    fields = {key: value for key, value in metadata.items() if key not in ("base_model", "model-index", "tags")}
    kind = {1: "multi-query-attention", main.query: "multi-head-attention"}
    tags = [tag for tag in metadata.get("tags", []) if tag not in _ATTENTION_TAGS]
    tags += ["gqa-convert", kind.get(plan.fewest, "grouped-query-attention")]
    fields |= {
        "base_model": base or metadata.get("base_model"),
        "base_model_relation": "finetune" if base else None,
        "library_name": metadata.get("library_name", "transformers"),
        "tags": tags,
    }
    summary = {
        "none": f"with its original {main.kv} key/value heads: no heads are merged",
        "repeat": f"with {kv_heads} instead of {main.kv} key/value heads, by repeating each: the same logits",
    }.get(plan.method) or (
        f"with {kv_heads} instead of {main.kv} key/value heads, {plan.merging.traits.result} (`--method {plan.method}`)"
    )
    parts = [
        f"# {name}",
        f"`{base or plan.checkpoint.name}` {summary}; {main.query} query heads. Made by gqa-convert {version()}.",
        loading_code(model_class(transformers_config(plan.new_config)), name, plan.checkpoint.side_files),
        "\n".join(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    if plan.checkpoint.way:
        source, target = plan.checkpoint.classes
        code = "a class of transformers" if plan.checkpoint.way == "native" else "whose code is in this repository"
        which = "fewer" if isinstance(plan.groups, int) else "layers with different numbers of"
        parts.append(f"The class is {target}, {code}; the source, {source}, cannot have {which} key/value heads.")
    if isinstance(plan.groups, tuple):
        parts.append(_BY_LAYER)
    options = {"kv_heads": plan.groups, "method": plan.method}
    if plan.fewest < main.kv:
        quality = quality_text(plan)
        advice = "Quality was not measured. Merging heads costs quality: evaluate and train the model before use."
        measured = f"Compared with the base model: {quality} (recall: share of a repeated passage predicted right)."
        parts.append(measured if quality else advice)
        uses = {option: one.metadata["methods"] for option, one in ConvertOptions.__dataclass_fields__.items()}
        used = [option for option, use in uses.items() if use and getattr(plan.merging.traits, use)]
        options |= {option: request["options"][option] for option in used}
    parts += [request_text("gqa-convert", request["argv"], options), f"All options and versions are in `{PROVENANCE}`."]
    return format_card(fields, *parts, original=original)
