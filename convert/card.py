"""The model card of a converted model (`gqa.models.card` says what all cards have)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gqa.checkpoint.provenance import PROVENANCE
from gqa.convert.head_maps import StoredMaps
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.family import kv_heads_text
from gqa.convert.options import ConvertOptions, options_of
from gqa.convert.plan import Plan
from gqa.convert.summary import (
    BY_LAYER,
    cache_change,
    cache_record,
    quality_loss,
    quality_text,
    size,
)
from gqa.convert.verdict import MEANINGS, Level
from gqa.core.escape import code_span, markdown
from gqa.core.options import is_default_flag
from gqa.models.card import (
    format_card,
    hub_metadata,
    loading_code,
    making_of,
    model_name,
    source_card,
    table,
)
from gqa.models.classes import model_class

_ATTENTION_TAGS = {
    "multi-head-attention",
    "grouped-query-attention",
    "multi-query-attention",
    "gqa-convert",
}


def model_card(plan: Plan, maps: StoredMaps | None, name: str, request: Mapping[str, Any]) -> str:
    """Text of README.md of a result.

    Args:
        plan: The conversion.
        maps: Those of its method; None if it reads nothing.
        name: The name of the result.
        request: The command's arguments (`argv`) and options (`options`).
    """
    checkpoint = plan.checkpoint
    source = source_card(checkpoint)
    cls = model_class(transformers_config(plan.new_config))

    base_models = [checkpoint.hub_id] if checkpoint.hub_id else source.base_models
    own_tags = _tags(plan)
    metadata = hub_metadata(source, base_models, cls, own_tags, checkpoint.side_files)
    # The base model's own tags may say what kind of attention it has.
    outdated = _ATTENTION_TAGS.difference(own_tags)
    metadata["tags"] = [tag for tag in metadata["tags"] if tag not in outdated]

    parts = [
        _summary(plan),
        loading_code(cls, name, checkpoint.side_files),
        "## What changed",
        table(_changes(plan)),
        *_notes(plan),
    ]
    if plan.method.merges:
        parts += ["## Quality", _quality(maps)]
    parts += [
        "## How it was made",
        *making_of("gqa-convert", request["argv"], _options(plan, request), PROVENANCE),
    ]
    if plan.method.merges:
        parts += ["## Limits", limits(quality_loss(maps).level)]
    return format_card(metadata, name, parts, source.text)


def limits(level: Level | None) -> str:
    """Markdown: what a user of a model with fewer heads has to know."""
    points = [
        "Fewer key/value heads cost quality, and perplexity does not show all of it: "
        "measure the tasks, the languages and the context length that you need "
        "before you rely on the model.",
        "What the base model is not fit for, this model is not fit for either.",
    ]
    if level in (None, "damaged"):
        points.insert(0, "The model needs training before use.")
    return "\n".join(f"- {point}" for point in points)


def cache_rows(cache: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of a table: the KV cache of the base model and of the converted one.

    `cache`: the entry `kv_cache` of a conversion's record. Users edit records, so what is no number
    is left out.
    """
    titles = {"bytes_per_token": "KV cache per token"}
    if cache.get("cross_bytes_per_token_after"):
        titles["cross_bytes_per_token"] = "KV cache per token of the source"
    context = cache.get("context")
    if isinstance(context, int) and context:
        titles["bytes_at_context"] = f"KV cache at {context:,} tokens"

    rows = []
    for name, title in titles.items():
        before = cache.get(f"{name}_before")
        after = cache.get(f"{name}_after")
        if isinstance(before, int) and isinstance(after, int):
            rows.append((title, size(before), size(after)))
    return rows


def quality_paragraph(level: Level, text: str) -> str:
    """Markdown: the verdict, and the measured numbers.

    `text`: the numbers in the words of `describe_quality`.
    """
    return (
        f"**{level.capitalize()}** ({MEANINGS[level]}). "
        f"Compared with the base model: {markdown(text)}. Recall is the share of a repeated "
        "passage that is predicted correctly."
    )


def _tags(plan: Plan) -> list[str]:
    """Tags at the hub: the tool, and the kind of attention."""
    kind = "grouped-query-attention"  # also where layers differ
    if plan.kv_heads == plan.config.main_heads.query:
        kind = "multi-head-attention"
    elif plan.kv_heads == 1:
        kind = "multi-query-attention"
    return ["gqa-convert", kind]


def _summary(plan: Plan) -> str:
    """One paragraph: the base model, and what became of its heads and its KV cache."""
    main = plan.config.main_heads
    instead = f"with {kv_heads_text(plan.kv_heads)} instead of {main.kv} key/value heads"
    if plan.method.merges:
        change = f"{instead}, {plan.method.result} (`--method {plan.method.name}`)"
    elif plan.fewest > main.kv:
        change = f"{instead}, {plan.method.result}"
    else:
        change = f"with its original {main.kv} key/value heads: {plan.method.result}"

    checkpoint = plan.checkpoint
    is_on_hub = checkpoint.hub_id is not None
    base = model_name(checkpoint.hub_id or checkpoint.name, is_on_hub)

    ratio = plan.cache_before.bytes_at(1) / max(plan.cache_after.bytes_at(1), 1)
    cache = ""
    if ratio != 1:
        cache = f" The KV cache takes {cache_change(ratio)} memory."
    return f"This is {base} {change}. It has {main.query} query heads.{cache}"


def _changes(plan: Plan) -> list[tuple[str, str, str]]:
    """Rows of a table: what differs from the base model."""
    base = plan.checkpoint
    return [
        ("", "base model", "this model"),
        ("key/value heads", str(plan.config.main_heads.kv), kv_heads_text(plan.kv_heads)),
        *cache_rows(cache_record(plan.cache_before, plan.cache_after)),
        ("parameters", f"{base.parameters:,}", f"{plan.parameters_after:,}"),
        ("weights", size(base.nbytes), size(plan.total_bytes)),
    ]


def _notes(plan: Plan) -> list[str]:
    """Paragraphs about the class of the model."""
    notes = []
    differs_by_layer = isinstance(plan.kv_heads, tuple)
    view_kind = plan.checkpoint.view_kind
    if view_kind:
        source, target = map(str, plan.checkpoint.classes)
        code = "whose code is in this repository"
        if view_kind == "native":
            code = "a class of transformers"
        which = "layers with different numbers of" if differs_by_layer else "fewer"
        notes.append(
            f"The class is {code_span(target)}, {code}; that of the base model, "
            f"{code_span(source)}, cannot have {which} KV heads."
        )

    if differs_by_layer:
        notes.append(BY_LAYER)
    return notes


def _quality(maps: StoredMaps | None) -> str:
    """A paragraph about the measured quality, or that it was not measured."""
    level = quality_loss(maps).level
    if level is None:
        return (
            "Quality was not measured. Merging heads costs quality: evaluate and train the model "
            "before use."
        )
    return quality_paragraph(level, quality_text(maps))


def _options(plan: Plan, request: Mapping[str, Any]) -> dict[str, Any]:
    """The options that made the result what it is: those of the method, and the stored dtype.

    Whether quality is checked belongs to them: the check takes a part of the generated text.
    """
    options: dict[str, Any] = {"kv_heads": plan.kv_heads}
    if plan.method.merges:
        options["method"] = plan.method.name
    used = {"dtype", *options_of(plan.method)}
    for name in ConvertOptions.__dataclass_fields__:
        value = request["options"].get(name)
        if name in used and not is_default_flag(ConvertOptions, name, value):
            options[name] = value
    return options
