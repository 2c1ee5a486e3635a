"""Where the result of a conversion goes."""

from __future__ import annotations

from pathlib import Path

from gqa.checkpoint.hub import default_output
from gqa.convert.heads.family import heads_suffix
from gqa.convert.options import ConvertOptions
from gqa.convert.plan import Plan


def output_of(options: ConvertOptions, plan: Plan) -> Path:
    """`output`, or the default directory."""
    return options.output or default_directory(options, plan, plan.method_name)


def default_directory(options: ConvertOptions, plan: Plan, method: str) -> Path:
    """`MODEL-gqa4-refined` next to a local model, in the working directory for a hub id.

    `MODEL-mqa-refined` for one head; `MODEL-gqa32` if none are merged; `MODEL-kv56-refined` if
    heads differ by layer and 56 % of them remain, or with `--kv-budget 0.56`.
    """
    if options.kv_budget:  # known before the heads of each layer are chosen
        suffix = f"-kv{100 * options.kv_budget:.0f}"
    elif isinstance(plan.kv_heads, tuple):
        heads = sum(plan.kv_heads) / len(plan.kv_heads)
        suffix = f"-kv{100 * heads / plan.config.main_heads.kv:.0f}"
    else:
        suffix = heads_suffix(plan.kv_heads)
    if plan.merge_method is not None:
        suffix += f"-{method}"
    return default_output(plan.checkpoint.hub_id or options.model, suffix)
