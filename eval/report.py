"""Verdicts and tables of an evaluation's record; report.html and results.json."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, TextIO

from gqa.checkpoint.output_directory import OutputDirectory
from gqa.checkpoint.write import finite
from gqa.convert.summary import ratio_text, size
from gqa.convert.verdict import LEGEND, Level, Loss
from gqa.core.devices import ranks
from gqa.core.errors import plural
from gqa.core.escape import shell_line
from gqa.eval.metrics import (
    RECALL_KINDS,
    Metric,
    main_kind,
    metrics_of_table,
    recall_by_kind,
)
from gqa.eval.options import EvaluateOptions
from gqa.eval.page import Column, Table, Verdict, line_width, table, wrap, write_page

Record = dict[str, Any]

_RESULTS = "results.json"
_LEVEL_COLUMNS = 11  # of the longest verdict and two spaces
_NAMED = 2  # most models that the title of a report names


def verdicts(results: Record) -> list[Verdict]:
    """A verdict on each converted model: the cache it saves against the first, and the quality it
    loses.
    """
    first, *converted = results["models"]
    lines = []
    for model in converted:
        text = _saved_and_lost(first, model)
        if text:
            lines.append(Verdict(f"{model['name']}: {text}", _level(first, model)))
    return lines


def is_measured(model: Record) -> bool:
    """Whether a model's record has its quality, its recall or the time of its decoding."""
    return "quality" in model or "recall" in model or bool(_decode_points(model))


def _decode_points(model: Record) -> list[Record]:
    """The points at which decoding was timed."""
    points: list[Record] = model.get("decode", {}).get("points", [])
    return points


def _level(first: Record, model: Record) -> Level | None:
    """How good a converted model is; None if its cache is larger than that of the first: then it is
    not a conversion to fewer heads, and probably the base model.
    """
    if "kv_cache" in model and "kv_cache" in first and cache_bytes(model) > cache_bytes(first):
        return None
    return loss_of_model(first, model).level


def loss_of_model(first: Record, model: Record) -> Loss:
    """The quality that a model has lost against the first, as far as it was measured."""
    against = model.get("against_baseline", {})
    recall_loss = None
    if "recall" in first and "recall" in model:
        before = recall_by_kind(first)
        after = recall_by_kind(model)
        kind = main_kind(after)
        recall_loss = before[kind] - after[kind]
    return Loss(against.get("ratio"), against.get("ratio_high"), recall_loss)


def _saved_and_lost(first: Record, model: Record) -> str:
    """The heads and the cache of a model against the first, and its quality, in words."""
    parts = []
    if "heads" in first and "heads" in model:
        parts.append(_compared_heads(first["heads"]["kv"], model["heads"]["kv"]))
        parts.append(_saved_cache(first, model))
    if "quality" in model:
        parts.append(f"perplexity x{ratio_text(model['against_baseline'])}")

    if "recall" in model:
        before = recall_by_kind(first)
        after = recall_by_kind(model)
        kind = main_kind(after)
        random_before = before.get("random", math.nan)
        random_after = after.get("random", math.nan)
        parts.append(
            f"recall {before[kind]:.0%} -> {after[kind]:.0%} "
            f"(random tokens {random_before:.0%} -> {random_after:.0%})"
        )
    elif "quality" in model and not _is_encoder_decoder(model):
        parts.append("recall not measured")
    return ", ".join(parts)


def _compared_heads(before: float, after: float) -> str:
    """`2 of 8 KV heads`, `all 8 KV heads`, or `2 -> 8 KV heads` if there are more."""
    if after == before:
        return f"all {after} KV heads"
    if after > before:
        return f"{before} -> {after} KV heads"
    return f"{after} of {before} KV heads"


def _is_encoder_decoder(model: Record) -> bool:
    """Whether a model has cross-attention: no recall is measured of such models."""
    return bool(model.get("kv_cache", {}).get("cross_bytes_per_token"))


def _saved_cache(first: Record, model: Record) -> str:
    """How many times smaller or larger the KV cache of a model is than that of the first."""
    factor = cache_bytes(first) / cache_bytes(model)
    if factor == 1:
        return "the same KV cache"
    if factor > 1:
        return f"KV cache {factor:.3g}x smaller"
    return f"KV cache {1 / factor:.3g}x larger"


def cache_bytes(model: Mapping[str, Any]) -> int:
    """KV cache bytes of one token, plus one source token for an encoder-decoder."""
    cache = model["kv_cache"]
    return int(cache["bytes_per_token"] + cache.get("cross_bytes_per_token", 0))


def as_text(results: Record, stream: TextIO | None = None) -> str:
    """Verdicts and tables, as wide as `stream`, by default stdout."""
    width = line_width(stream or sys.stdout)
    lines = []
    shown = verdicts(results)
    for verdict in shown:
        level = f"{verdict.level:{_LEVEL_COLUMNS}}" if verdict.level else ""
        lines.append(wrap(level + verdict.text, width, " " * len(level)))

    if any(verdict.level for verdict in shown):
        lines.append(wrap(LEGEND, width))

    paragraphs = [table.text(width) for table in tables(results)]
    if lines:
        paragraphs.insert(0, "\n".join(lines))
    return "\n\n".join(paragraphs)


def tables(results: Record) -> list[Table]:
    """Tables of what a record has measurements of, and of the memory that models take."""
    models: list[Record] = results["models"]
    built = []
    if any("quality" in model for model in models):
        built.append(_quality(models, results["text"]))
    if _is_any_measured(metrics_of_table("distributions"), models):
        built.append(_distributions(models))
    if any(model.get("recall") for model in models):
        built.append(_recall(models, results["recall"]))
    built.append(_cache(models, results.get("memory")))
    if all(_decode_points(model) for model in models):
        built.append(_decode(models))
    return built


_NAME = Column("model", "{name}")


def _is_any_measured(metrics: Sequence[Metric], models: Sequence[Record]) -> bool:
    return any(metric.is_measured(model) for metric, model in product(metrics, models))


def _columns(metrics: Sequence[Metric]) -> list[Column]:
    """Columns of metrics, of the records of models."""
    columns = list[Column]()
    for metric in metrics:
        columns += [_of_section(column, metric.section) for column in metric.columns]
    return columns


def _of_section(column: Column, section: str) -> Column:
    """A column of the numbers in a section, as a column of the records that have the section."""
    return Column(column.title, lambda model: column.cell(model[section]))


def _quality(models: list[Record], text: Record) -> Table:
    metrics = metrics_of_table("quality")
    note = "; ".join([describe_text(text), f"in {_distinct(models, 'dtype')}", *_notes(metrics)])
    columns = [_NAME, Column("KV heads", "{heads[kv]}"), *_columns(metrics)]
    return table(f"Quality on {text['data']}", columns, models, note)


def _distinct(records: Sequence[Record], key: str) -> str:
    """The different values that records have: `float32`, or `float32 and bfloat16`."""
    return " and ".join(dict.fromkeys(record[key] for record in records if key in record))


def _notes(metrics: Sequence[Metric]) -> list[str]:
    return [metric.note for metric in metrics if metric.note]


def _distributions(models: list[Record]) -> Table:
    metrics = metrics_of_table("distributions")
    title = f"Next-token distributions against {models[0]['name']}"
    return table(title, [_NAME, *_columns(metrics)], models[1:], "; ".join(_notes(metrics)))


def describe_text(text: Record) -> str:
    """Size of the text, and how it is cut, in words."""
    tokens = plural(text["tokens"], "token")
    size_of_text = plural(text["bytes"], "byte")
    if text["protocol"] == "rolling":
        documents = plural(text["documents"], "document")
        described = (
            f"{tokens} of {documents} ({size_of_text}) scored in windows of {text['context']:,}"
        )
        average = text["tokens"] / max(text["documents"], 1)
        if average < text["context"]:  # no window is longer than its document
            described += f" and less: documents have {average:,.0f} tokens on average"
        return described

    targets = plural(text["documents"], "target text")
    cut = f", to which {text['cut']:,} were cut" if text.get("cut") else ""
    return (
        f"{tokens} of {targets} ({size_of_text}) scored; "
        f"sources and targets have at most {text['context']:,} tokens{cut}"
    )


def _recall(models: list[Record], settings: Record) -> Table:
    baseline = models[0]["name"]
    longest = models[0]["greedy"]["longest"]
    note = (
        "share of tokens predicted correctly where the context contains them, in windows of "
        f"{settings['context']:,}. text, generated, random: second copies of passages of the text, "
        f"of text generated by {baseline}, of random tokens; values: looked up by key in a list; "
        f"passkeys: words hidden in text. greedy: number of tokens, at most {longest:.0f}, "
        f"before greedy decoding differs from that of {baseline} (rounding alone can cause a "
        "difference)"
    )
    columns = [
        _NAME,
        *(Column(kind.name, f"{{{kind.name}:.1%}}") for kind in RECALL_KINDS),
        Column("greedy", "{greedy[tokens]:.1f}"),
    ]
    records = [model | recall_by_kind(model) for model in models if "recall" in model]
    return table("Recall from the context", columns, records, note)


def _cache(models: list[Record], memory: Record | None) -> Table:
    def of_source(model: Mapping[str, Any]) -> str:
        cross_bytes = model["kv_cache"]["cross_bytes_per_token"]
        return size(cross_bytes) if cross_bytes else ""

    def cache_left(model: Mapping[str, Any]) -> str:
        return f"{100 * cache_bytes(model) / cache_bytes(models[0]):.3g}%"

    note = ""
    if memory:
        note = (
            f"sequences: of {memory['context']:,} tokens, as many as fit into "
            f"{size(memory['bytes'])} with the weights (activations not counted)"
        )
        if any(model.get("kv_cache", {}).get("fits", {}).get("batch") == 0 for model in models):
            note += "; 0: not even one fits"
    context = next((model["kv_cache"]["context"] for model in models if "kv_cache" in model), 0)
    columns = [
        _NAME,
        Column("weights", lambda model: size(model["weight_bytes"])),
        Column("KV/token", lambda model: size(model["kv_cache"]["bytes_per_token"])),
        Column("of source", of_source),
    ]
    if len(models) > 1:
        columns.append(Column("cache left", cache_left))
    columns += [
        Column(f"KV at {context:,}", lambda model: size(model["kv_cache"]["bytes_at_context"])),
        Column("sequences", "{kv_cache[fits][batch]:,}"),
    ]
    return table("Memory", columns, models, note)


def _decode(models: list[Record]) -> Table:
    def range_text(point: Mapping[str, Any]) -> str:
        return f"{1e3 * point['fastest']:.2f} - {1e3 * point['slowest']:.2f}"

    columns = [
        _NAME,
        Column("batch", "{batch}"),
        Column("context", "{context:,}"),
        Column("per token", lambda point: f"{1e3 * point['seconds_per_token']:.2f} ms"),
        Column("min - max", range_text),
    ]
    if len(models) > 1:
        columns.append(Column("speedup", "{speedup:.2f}"))
    columns.append(Column("prefill", lambda point: f"{1e3 * point['prefill_seconds']:,.1f} ms"))

    points_of_models = [_decode_points(model) for model in models]
    records = []
    # Not strict: an interruption may come between two models
    for points in zip(*points_of_models, strict=False):
        for model, point in zip(models, points, strict=True):
            factor = points[0]["seconds_per_token"] / point["seconds_per_token"]
            records.append(point | {"name": model["name"], "speedup": factor})

    decode = models[0]["decode"]
    note = (
        f"median of {decode['repeats']} interleaved repeats of {decode['steps']} tokens, "
        f"{_distinct(records, 'attention')}, {_distinct(records, 'dtype')}"
    )
    return table("Decoding", columns, records, note)


def open_report(options: EvaluateOptions) -> AbstractContextManager[OutputDirectory | None]:
    """Reserve the directory of the report, if there is to be one, on rank 0.

    Raises RefusedError and OutputError.
    """
    if not options.output or not ranks().is_main_process:
        return nullcontext()
    return OutputDirectory(options.output, None, options.overwrite, records=_RESULTS)


def write_report(results: Record, report: OutputDirectory) -> None:
    """Write report.html and results.json, which lists both."""
    argv = results["argv"]
    commands = [shell_line(["gqa-eval", *argv])] if argv else []
    write_page(
        report.work,
        title=_title(results["models"]),
        verdicts=verdicts(results),
        tables=tables(results),
        samples=list(compare_samples(results["models"])),
        commands=commands,
        foot=f"{describe_environment(results)}.",
    )
    report.commit(_RESULTS, finite(results, infinity=str))


def _title(models: Sequence[Record]) -> str:
    """The models by name, or their number if they are many."""
    first, *others = [model["name"] for model in models]
    if not others:
        return str(first)
    compared = " and ".join(others) if len(others) <= _NAMED else plural(len(others), "model")
    return f"{compared} compared with {first}"


def describe_environment(record: Record) -> str:
    """Time, device and versions of `gqa.eval.evaluate.environment`, in words."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return (
        f"{record['created']}, {record['device']}, {plural(record['threads'], 'thread')}; "
        f"{versions}"
    )


def compare_samples(models: list[Record]) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each prompt, with (name, prefix equal to the first model's text, rest) of the models' greedy
    texts.
    """
    models = [model for model in models if "samples" in model]
    samples_of_models = [model["samples"] for model in models]
    for samples in zip(*samples_of_models, strict=True):
        first_text = samples[0]["text"]
        shown = []
        for model, sample in zip(models, samples, strict=True):
            text = sample["text"]
            # Of characters, not of paths.
            end = len(os.path.commonprefix([text, first_text]))  # noqa: RUF071
            shown.append((model["name"], text[:end], text[end:]))
        yield samples[0]["prompt"], shown
