"""What the result says about itself: a model card for people and a provenance file for programs."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import (
    PROVENANCE,
    comparison,
    format_card,
    source_card,
    stamp,
    version,
    versions,
    without_place,
)
from gqa.checkpoint.read import TORCH_DTYPES
from gqa.convert.heads.layout import groups_text
from gqa.convert.plan import Plan
from gqa.convert.recast.parts import CUSTOM_CODE
from gqa.convert.summary import plan_record, size

_ATTENTION_TAGS = {"multi-head-attention", "grouped-query-attention", "multi-query-attention", "gqa-convert"}


def command(plan: Plan) -> str:
    """The command that makes the same weights, without the paths of the machine that made these (shards may differ)."""
    kept = [plan.groups] if isinstance(plan.groups, int) else plan.groups
    words = ["gqa-convert", "--groups", ",".join(map(str, kept))]
    if plan.fewest < plan.config.main.kv:
        words += ["--method", plan.merging.method]
        words += ["--seed", str(plan.merging.seed)] if plan.merging.how.redraws else []
        words += _calibration(plan.merging.maps.description) if plan.merging.maps else []
    if plan.checkpoint.way == CUSTOM_CODE and isinstance(plan.groups, int):
        kinds = plan.new_config.get("grouped_attention")
        words += ["--remote-code", *(["--attention", ",".join(kinds)] if kinds else [])]
    words += ["--dtype", TORCH_DTYPES[plan.dtype]] if plan.dtype else []
    words += ["--revision", plan.checkpoint.revision] if plan.checkpoint.revision else []
    return shlex.join([*words, plan.checkpoint.hub_id or plan.checkpoint.name])


def _calibration(told: Mapping[str, Any]) -> list[str]:
    """The options that made maps, as far as the maps say."""
    words = ["--grouping", told["grouping"]]
    if text := told.get("text"):
        sources = ",".join(map(without_place, text["sources"]))
        words += ["--data", sources, "--tokens", str(text["tokens"])]
        words += ["--context", str(text["length"]), "--seed", str(text["seed"])]
        words += [] if text.get("repeats") else ["--no-repeats"]
        words += ["--trust-remote-code"] if text.get("trust_remote_code") else []
        words += ["--ridge", str(told["ridge"]), "--precision", told["dtype"]]
    if how := told.get("refinement"):
        words += ["--refine-steps", str(how["steps"]), "--refine-batch", str(how["batch"])]
        words += ["--refine-learning-rate", str(how["learning_rate"])]
        words += ["--refine-precision", "bfloat16" if how["autocast"] else "float32"]
    return words


def _told_of_maps(told: Mapping[str, Any]) -> dict[str, Any]:
    text = told.get("text")
    named = {"text": text | {"sources": [*map(without_place, text["sources"])]}} if text else {}
    return {**told, **named}


def _place(plan: Plan, out: Path) -> str | None:
    """The way from the result to a local base model, where training looks for its teacher; None where it would tell
    whose directories they are.
    """
    assert plan.checkpoint.directory is not None
    base, result = plan.checkpoint.directory.resolve(), out.resolve()
    if base.drive != result.drive:
        return None
    way = Path(os.path.relpath(base, result))
    return None if Path.home().name in way.parts and Path.home().name != "root" else way.as_posix()


def provenance(plan: Plan, checksums: dict[str, dict[str, str]] | None, out: Path) -> str:
    """How the result at `out` was made, as JSON: enough to make it again."""
    told = plan_record(plan)
    record: dict[str, Any] = {
        **stamp("gqa-convert", command(plan)),
        "source": {name: told[name] for name in ("model", "revision")},
        **{name: told[name] for name in ("model_type", "family")},
        "options": {
            "groups": plan.groups,
            "method": plan.method,
            "seed": plan.merging.seed if plan.merging.how.redraws and plan.method == plan.merging.method else None,
            "dtype": plan.dtype,
        },
        **{name: told[name] for name in ("heads", "config_edits")},
        "changed_tensors": [t.name for t in plan.changed],
        "versions": versions("torch", "transformers", "safetensors") | {"python": platform.python_version()},
    }
    if plan.checkpoint.hub_id is None:
        record["source"]["path"] = _place(plan, out)
    maps = plan.merging.maps
    beside = {"recast": told["recast"], "maps": maps and _told_of_maps(maps.description), "sha256": checksums}
    record |= {name: value for name, value in beside.items() if value}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def model_card(plan: Plan, name: str) -> str:
    """README.md: the source card's metadata kept, what was done, and the source's own card below it."""
    metadata, original = source_card(plan.checkpoint)
    base, main, kept = plan.checkpoint.hub_id, plan.config.main, groups_text(plan.groups)
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
    what = {
        "none": f"with its own {main.kv} key/value heads: nothing was merged",
        "repeat": f"with {kept} instead of {main.kv} key/value heads, each repeated: the same logits",
    }.get(plan.method) or (
        f"with {kept} instead of {main.kv} key/value heads, {plan.merging.how.result} (method {plan.method})"
    )
    lines = [
        f"# {name}",
        "",
        f"`{base or plan.checkpoint.name}` {what} ({main.query} query heads; gqa-convert {version()}).",
        "",
    ]
    if plan.checkpoint.way:
        source, target = plan.checkpoint.classes
        code = "whose code is in this repository" if plan.checkpoint.way == CUSTOM_CODE else "a class of transformers"
        cannot = "have fewer key/value heads" if isinstance(plan.groups, int) else "have different numbers of them"
        lines.append(f"- Class: {target}, {code}; the source is {source}, which cannot {cannot}")
    lines += [*comparison(("base model", "this model"), _numbers(plan)), "", f"- Provenance: `{PROVENANCE}`"]
    if plan.fewest < main.kv:
        lines += ["", "Merging heads costs quality until the model is trained a little further; measure before use."]
    return format_card(fields, lines, command(plan), original)


def _numbers(plan: Plan) -> dict[str, tuple[str, str]]:
    """What is known of both models from their headers."""
    before, after = plan.cache_before, plan.cache_after
    rows = {
        "key/value heads": (str(plan.config.main.kv), groups_text(plan.groups)),
        "KV cache per token": (size(before.bytes_per_token), size(after.bytes_per_token)),
    }
    if context := after.context:
        rows[f"KV cache at {context:,} tokens"] = size(before.bytes_at(context)), size(after.bytes_at(context))
    return rows | {
        "parameters": (f"{plan.checkpoint.parameters:,}", f"{plan.parameters_after:,}"),
        "weights": (size(plan.checkpoint.nbytes), size(plan.total_bytes)),
    }
