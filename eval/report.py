"""Verdicts and tables of an evaluation's record; report.html and results.json."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from gqa.checkpoint.output_directory import OutputDirectory
from gqa.checkpoint.write import finite
from gqa.convert.summary import ratio_text, size
from gqa.convert.verdict import Loss
from gqa.core.devices import ranks
from gqa.core.errors import plural
from gqa.core.escape import shell_line
from gqa.eval.options import EvaluateOptions
from gqa.eval.page import Column, Table, Verdict, format_number, line_width, table, wrap, write_page

Record = dict[str, Any]

_RESULTS = "results.json"
_KINDS = {
    "text": "text",
    "samples": "samples",
    "random": "random",
    "look-up": "values",
    "passkey": "passkeys",
}


def verdicts(results: Record) -> list[Verdict]:
    """A verdict on each converted model: the cache it saves against the first, and the quality it
    loses.
    """
    first, *converted = results["models"]
    result = []
    for model in converted:
        text = _saved_and_lost(first, model)
        if text:
            name = f"{model['name']}: " if len(converted) > 1 else ""
            result.append(Verdict(name + text, loss_of_model(first, model).level))
    return result


def loss_of_model(first: Record, model: Record) -> Loss:
    """The quality that a model has lost against the first, as far as it was measured."""
    against = model.get("against_baseline", {}) if "quality" in model else {}
    recall_loss = None
    if "recall" in first and "recall" in model:
        before, after = recall_by_kind(first), recall_by_kind(model)
        kind = main_kind(after)
        recall_loss = before[kind] - after[kind]
    return Loss(against.get("ratio"), against.get("ratio_high"), recall_loss)


def main_kind(recall: Collection[str]) -> str:
    """The kind of recall that counts for a verdict: that of the text, or without one of
    self-generated text.
    """
    return "text" if "text" in recall else "samples"


def _saved_and_lost(first: Record, model: Record) -> str:
    parts, heads = [], ""
    if "heads" in first and "heads" in model:
        heads = f"{model['heads']['kv']} of {first['heads']['kv']} KV heads: "
        factor = cache_bytes(first) / cache_bytes(model)
        times, change = (factor, "smaller") if factor > 1 else (1 / factor, "larger")
        parts.append("the same KV cache" if factor == 1 else f"KV cache {times:.3g}x {change}")
    if "quality" in model:
        parts.append(f"perplexity x{ratio_text(model['against_baseline'])}")
    if "recall" in model:
        before, after = recall_by_kind(first), recall_by_kind(model)
        kind = main_kind(after)
        parts.append(
            f"recall {before[kind]:.0%} -> {after[kind]:.0%} (random tokens "
            f"{before.get('random', math.nan):.0%} -> "
            f"{after.get('random', math.nan):.0%})"
        )
    return heads + ", ".join(parts)


def cache_bytes(model: Record) -> int:
    """KV cache bytes of one token, plus one source token for an encoder-decoder."""
    return int(
        model["kv_cache"]["bytes_per_token"] + model["kv_cache"].get("cross_bytes_per_token", 0)
    )


def recall_by_kind(model: Record) -> dict[str, float]:
    """Accuracy of each kind of question over all distances."""
    answers, right = dict[str, int](), dict[str, float]()
    for line in model["recall"]:
        kind = line["kind"]
        answers[kind] = answers.get(kind, 0) + line["answers"]
        right[kind] = right.get(kind, 0.0) + line["accuracy"] * line["answers"]
    return {kind: right[kind] / answers[kind] for kind in answers}


def as_text(results: Record, stream: TextIO | None = None) -> str:
    """Verdicts and tables, as wide as `stream`, by default stdout."""
    width = line_width(stream or sys.stdout)
    lines = (f"{one.level}: {one.text}" if one.level else one.text for one in verdicts(results))
    lead = "\n".join(wrap(line, width, "  ") for line in lines)
    return "\n\n".join(filter(None, [lead, *(table.text(width) for table in tables(results))]))


def tables(results: Record) -> list[Table]:
    """Tables of what a record has measurements of, and of the memory that models take."""
    models: list[Record] = results["models"]
    measured = {name for model in models for name, value in model.items() if value}
    built = []
    if "text" in results:
        dtypes = " and ".join(dict.fromkeys(m["dtype"] for m in models if "dtype" in m))
        note = f"{describe_text(results['text'])}; in {dtypes}"
        built.append(table(f"Quality on {results['text']['data']}", _QUALITY, models, note))
    if any("kl" in model.get("against_baseline", {}) for model in models):
        title = f"Next-token distributions against {models[0]['name']}"
        built.append(table(title, _DISTRIBUTIONS, models[1:], _DISTRIBUTIONS_NOTE))
    if "recall" in measured:
        built.append(_recall(models, results["recall"]))
    built.append(_cache(models, results.get("memory")))
    if "decode" in measured:
        built.append(_decode(models))
    return built


_NAME: Column = ("model", lambda m: str(m["name"]))
_QUALITY: list[Column] = [
    _NAME,
    ("KV heads", lambda m: str(m["heads"]["kv"])),
    ("perplexity", lambda m: format_number(m["quality"]["token_perplexity"])),
    ("x baseline", lambda m: f"{m['against_baseline']['ratio']:.4g}"),
    (
        "95% interval",
        lambda m: "{ratio_low:.4g} - {ratio_high:.4g}".format_map(m["against_baseline"]),
    ),
    ("bits/byte", lambda m: f"{m['quality']['bits_per_byte']:.4f}"),
]
_DISTRIBUTIONS: list[Column] = [
    _NAME,
    ("mean KL", lambda m: "{mean:.4g} ± {mean_error:.1g}".format_map(m["against_baseline"]["kl"])),
    ("top-1 agreement", lambda m: f"{m['against_baseline']['same_top']:.2%}"),
    ("acceptance", lambda m: f"{m['against_baseline']['acceptance']:.2%}"),
]
_DISTRIBUTIONS_NOTE = (
    "KL(baseline || model) in nats over the tokens that both have; acceptance: "
    "share of tokens drafted by the model "
    "that the baseline accepts in speculative decoding at temperature 1"
)
_DECODE: list[Column] = [
    _NAME,
    ("batch", lambda p: str(p["batch"])),
    ("context", lambda p: f"{p['context']:,}"),
    ("per token", lambda p: f"{1e3 * p['seconds_per_token']:.2f} ms"),
    ("min - max", lambda p: f"{1e3 * p['fastest']:.2f} - {1e3 * p['slowest']:.2f}"),
    ("speedup", lambda p: f"{p['speedup']:.2f}"),
    ("prefill", lambda p: f"{1e3 * p['prefill_seconds']:,.1f} ms"),
]


def describe_text(text: Record) -> str:
    """Size of the text, and how it is cut, in words."""
    tokens, size = plural(text["tokens"], "token"), plural(text["bytes"], "byte")
    if text["protocol"] == "rolling":
        documents = plural(text["documents"], "document")
        return f"{tokens} of {documents} ({size}) scored in windows of {text['context']:,}"
    cut = f", to which {text['cut']:,} were cut" if text.get("cut") else ""
    return (
        f"{tokens} of {plural(text['documents'], 'target text')} ({size}) scored; "
        "sources and targets have at most "
        f"{text['context']:,} tokens{cut}"
    )


def _recall(models: list[Record], settings: Record) -> Table:
    columns: list[Column] = [_NAME]
    columns += [(name, lambda m, kind=kind: f"{m[kind]:.1%}") for kind, name in _KINDS.items()]  # type: ignore[misc]
    columns.append(("greedy", lambda m: f"{m['greedy']['tokens']:.1f}"))
    baseline, longest = models[0]["name"], models[0]["greedy"]["longest"]
    note = (
        "share of tokens predicted right where the context determines them, in windows of "
        f"{settings['context']:,}. text, samples, random: second copies of passages of the text, "
        f"of samples of {baseline}, of random tokens; values: looked up by key in a list; "
        f"passkeys: words hidden in text. greedy: tokens, of {longest:.0f}, before greedy decoding "
        f"differs from that of {baseline} (rounding alone can cause a difference)"
    )
    records = [model | recall_by_kind(model) for model in models if "recall" in model]
    return table("Recall from the context", columns, records, note)


def _cache(models: list[Record], memory: Record | None) -> Table:
    note = ""
    if memory:
        note = (
            f"batch: sequences of {memory['context']:,} tokens that fit into "
            f"{memory['bytes'] / 1e9:.4g} GB with the "
            "weights (activations not counted)"
        )
    context = next((m["kv_cache"]["context"] for m in models if "kv_cache" in m), 0)
    columns: list[Column] = [
        _NAME,
        ("weights", lambda m: size(m["weight_bytes"])),
        ("KV/token", lambda m: size(m["kv_cache"]["bytes_per_token"])),
        ("of source", lambda m: size(b) if (b := m["kv_cache"]["cross_bytes_per_token"]) else ""),
        (
            "x baseline",
            lambda m: f"{cache_bytes(m) / cache_bytes(models[0]):.3g}" if models[1:] else "",
        ),
        (f"KV at {context:,}", lambda m: size(m["kv_cache"]["bytes_at_context"])),
        ("batch", lambda m: f"{m['kv_cache']['fits']['batch']:,}"),
    ]
    return table("Memory", columns, models, note)


def _decode(models: list[Record]) -> Table:
    records = [
        point
        | {
            "name": model["name"],
            "speedup": points[0]["seconds_per_token"] / point["seconds_per_token"],
        }
        for points in zip(*(m["decode"]["points"] for m in models), strict=True)
        for model, point in zip(models, points, strict=True)
    ]
    columns = [column for column in _DECODE if models[1:] or column[0] != "speedup"]
    decode = models[0]["decode"]
    note = "median of {repeats} interleaved repeats of {steps} tokens, {attention}, {dtype}"
    return table("Decoding", columns, records, note.format_map(decode | decode["points"][0]))


def open_report(options: EvaluateOptions) -> AbstractContextManager[OutputDirectory | None]:
    """Reserve the directory of the report, if there is to be one, on rank 0.

    Raises RefusedError and OutputError.
    """
    if not options.output or not ranks().is_main_process:
        return nullcontext()
    return OutputDirectory(options.output, None, options.overwrite, records=_RESULTS)


def write_report(results: Record, report: OutputDirectory) -> None:
    """Write report.html and results.json, which lists both."""
    first, *converted = results["models"]
    argv = results["argv"]
    write_page(
        report.work,
        title=" against ".join(
            filter(None, (", ".join(m["name"] for m in converted), first["name"]))
        ),
        verdicts=verdicts(results),
        tables=tables(results),
        samples=list(compare_samples(results["models"])),
        commands=[shell_line(["gqa-eval", *argv])] if argv else [],
        foot=f"{describe_environment(results)}.",
    )
    report.commit(_RESULTS, finite(results, infinity=str))


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
    for lines in zip(*(model["samples"] for model in models), strict=True):
        texts = [line["text"] for line in lines]
        same = [len(os.path.commonprefix([text, texts[0]])) for text in texts]  # noqa: RUF071 - of characters
        rows = zip(models, texts, same, strict=True)
        yield (
            lines[0]["prompt"],
            [(model["name"], text[:end], text[end:]) for model, text, end in rows],
        )
