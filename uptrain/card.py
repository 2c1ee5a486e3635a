"""The model card of a trained model (`gqa.models.card` says what all cards have)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gqa.checkpoint.provenance import UPTRAINING
from gqa.checkpoint.read import Checkpoint
from gqa.convert.card import cache_rows, limits
from gqa.convert.heads.family import kv_heads_text
from gqa.convert.summary import describe_quality, loss_of, measured_text
from gqa.core.errors import plural
from gqa.core.escape import code_span, markdown
from gqa.core.options import is_default_flag
from gqa.corpus.specs import is_self
from gqa.models.card import (
    CARD,
    SourceCard,
    format_card,
    hub_metadata,
    loading_code,
    making_of,
    model_name,
    source_card,
    table,
)
from gqa.uptrain.options import UptrainOptions

__all__ = ["CARD", "trained_card"]

Record = Mapping[str, Any]
# Losses on validation text, by their name in the record.
_MEASURES = {
    "distillation": "KL divergence from the teacher",
    "validation": "cross-entropy",
}


def trained_card(checkpoint: Checkpoint, name: str, model_class: Any, record: Record) -> str:
    """Text of README.md for the training `record` of a checkpoint, whose result is `name`."""
    conversion = Conversion(record["conversion"])
    source = source_card(checkpoint)

    base_models = _base_models(checkpoint, conversion, source)
    side_files = checkpoint.side_files
    metadata = hub_metadata(source, base_models, model_class, ["gqa-uptrain"], side_files)

    parts = [
        _summary(checkpoint, conversion, record),
        loading_code(model_class, name, side_files),
    ]
    if changes := conversion.changes():
        parts += ["## What changed", table(changes)]
    parts += ["## Quality", *_quality(conversion, record)]
    parts += [
        "## How it was made",
        *making_of(record["tool"], record["argv"], _options(record), UPTRAINING),
    ]
    if conversion.heads:
        parts += ["## Limits", limits("trade-off")]
    return format_card(metadata, name, parts, source.text)


class Conversion:
    """What is used of gqa_conversion.json, which users edit: nothing in it need have the type that
    gqa wrote.
    """

    def __init__(self, record: Any) -> None:
        self._record = record if isinstance(record, dict) else {}

    def _part(self, name: str) -> Record:
        """An object in the record; empty if it is none."""
        part = self._record.get(name)
        return part if isinstance(part, dict) else {}

    @property
    def base(self) -> str:
        """Name of the base model: its model id or that of its directory.

        Empty if there is no record.
        """
        name = self._part("source").get("model")
        return name if isinstance(name, str) else ""

    @property
    def base_is_on_hub(self) -> bool:
        """Whether the name of the base model is a model id."""
        return bool(self.base) and "path" not in self._part("source")

    @property
    def method(self) -> str:
        """The conversion's method; empty if it is not known."""
        method = self._part("options").get("method")
        return method if isinstance(method, str) else ""

    @property
    def heads(self) -> tuple[str, str] | None:
        """KV heads before and after, in words; None if they are not known."""
        before = self._part("heads").get("kv_before")
        after = self._part("heads").get("kv_after")
        counts: list[Any] = after if isinstance(after, list) else [after]
        if not isinstance(before, int) or not counts:
            return None
        if not all(isinstance(count, int) for count in counts):
            return None

        groups = tuple(counts) if len(counts) > 1 else counts[0]
        return str(before), kv_heads_text(groups)

    def changes(self) -> list[tuple[str, str, str]]:
        """Rows of a table: KV heads and bytes of the cache."""
        if not self.heads:
            return []
        return [
            ("", "base model", "this model"),
            ("key/value heads", *self.heads),
            *cache_rows(self._part("kv_cache")),
        ]

    def quality(self) -> str:
        """The quality that the conversion measured, with its verdict, in words; empty if it
        measured none.
        """
        quality = self._part("quality")
        try:
            sources = [str(source) for source in self._part("maps")["text"]["sources"]]
            text = describe_quality(quality, measured_text(sources))
            level = loss_of(quality).level
        except (KeyError, TypeError, ValueError):
            return ""
        return f"{text}: {level}" if level else ""


def _base_models(checkpoint: Checkpoint, conversion: Conversion, source: SourceCard) -> list[str]:
    """Hub ids of what the result is made from, as far as they are known."""
    if checkpoint.hub_id:
        return [checkpoint.hub_id]
    if conversion.base_is_on_hub:
        return [conversion.base]
    return [*source.base_models]


def _summary(checkpoint: Checkpoint, conversion: Conversion, record: Record) -> str:
    """A paragraph that says what the model is."""
    start = f"This is {model_name(record['model'], checkpoint.hub_id is not None)}, further "
    if conversion.base and conversion.heads:
        before, after = conversion.heads
        base = model_name(conversion.base, conversion.base_is_on_hub)
        start = f"This is {base} with {after} instead of {before} key/value heads"
        if conversion.method:
            start += f" (`gqa-convert`, method {code_span(conversion.method)})"
        start += ", then "
    text = f"{start}{training_text(record)}."

    losses = record["losses"]
    if losses["validation_before"] is not None and not losses["best_step"]:
        measure = _MEASURES[losses["chosen_by"]]
        text += (
            f" No step of the training lowered the {measure} on validation text: the weights are "
            "unchanged."
        )
    return text


def training_text(record: Record) -> str:
    """How the model was trained, as the rest of a sentence."""
    teacher = record["teacher"]
    if record["teacher_is_base"]:
        goal = "distilled from the base model"
    elif teacher and teacher == record["model"]:
        goal = "distilled from another model of the same name"
    elif teacher:
        goal = f"distilled from {code_span(teacher)}"
    else:
        goal = "trained on text"

    data = ", ".join(record["data"])
    source = "generated text" if is_self(record["data"][0]) else code_span(data)
    steps = plural(record["steps"], "step")
    amount = f"{record['tokens']:,} tokens of {source} in {steps}{_share_of_data(record)}"

    was_trained_before = isinstance(record["trained_before"], dict)
    again = ", after an earlier training" if was_trained_before else ""
    return f"{goal} (`gqa-uptrain`): {amount}{again}"


def _share_of_data(record: Record) -> str:
    """How much of the data was trained on, in brackets; empty for data without a known size."""
    parts = []
    if record["alpha"]:
        parts.append(f"alpha {record['alpha']:g}")

    distinct = record["distinct_tokens"]
    if distinct is not None:
        parts.append(f"{distinct:,} of the {record['data_tokens']:,} tokens of the data")
        if record["options"].get("repeats"):
            parts.append("with repeated passages")
        elif record["tokens"] > distinct:
            parts.append(f"read {record['tokens'] / distinct:.2f} times")
    return f" ({', '.join(parts)})" if parts else ""


def _quality(conversion: Conversion, record: Record) -> list[str]:
    """Paragraphs: what the training gained, and what is known of the quality against the base
    model.
    """
    losses = record["losses"]
    rows = []
    for name, title in _MEASURES.items():
        before = losses.get(f"{name}_before")
        after = losses.get(f"{name}_after")
        if before is not None and after is not None:
            rows.append((title, f"{before:.4f}", f"{after:.4f}"))

    if rows:
        chosen = _MEASURES[losses["chosen_by"]]
        parts = [
            "On validation text, in nats per token:",
            table([("", "before training", "after training"), *rows]),
            f"The weights are those of the step with the lowest {chosen}.",
        ]
    else:
        parts = ["There was no validation text, so it was not measured what the training gained."]

    measured = conversion.quality()
    if measured:
        parts.append(
            "Before training, measured by the conversion against the base model: "
            f"{markdown(measured)}."
        )
    parts.append(
        "The perplexity of this model was not compared with that of the base model; `gqa-eval` of "
        "both does that."
    )
    return parts


def _options(record: Record) -> dict[str, Any]:
    """The options that determine the result."""
    fields = UptrainOptions.__dataclass_fields__
    options = {}
    for name, value in record["options"].items():
        is_unused = name == "lora_rank" and record["options"]["train"] != "lora"
        is_unused |= is_default_flag(UptrainOptions, name, value)
        if not fields[name].metadata["may_change"] and not is_unused:
            options[name] = value
    return options
