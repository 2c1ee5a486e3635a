"""Verdicts and tables of an evaluation's record; report.html and results.json."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError, listing, one_line
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.provenance import command_line
from gqa.checkpoint.write import finite, locked, write_text
from gqa.convert.summary import size
from gqa.eval.page import PAGE, Page, made_aside, nearest
from gqa.eval.tables import Column, Table, number, table, wrapped

Record = dict[str, Any]

_FILES = ("results.json", PAGE)
_RECALL = "Recall from the context"
_KINDS = {  # of questions: column of the table, and row of the table by distance
    "text": ("text", "the text twice"), "samples": ("samples", "own samples twice"),
    "random": ("random", "random tokens twice"), "look-up": ("values", "values by their keys"),
    "passkey": ("passkeys", "a passkey"),
}  # fmt: skip


def verdicts(results: Record) -> list[str]:
    """One line for each converted model: the cache it saves and the quality it loses."""
    first, *converted = results["models"]
    lines = [(model["name"], verdict(first, model)) for model in converted]
    return [line if len(lines) == 1 else f"{name}: {line}" for name, line in lines if line]


def verdict(first: Record, model: Record) -> str:
    """The cache that a model saves against the first, and the quality it loses, in one line."""
    parts, heads = [], ""
    if "heads" in first and "heads" in model:
        heads = f"{model['heads']['kv']} of {first['heads']['kv']} heads: "
        factor = cache_bytes(first) / cache_bytes(model)
        times, change = (factor, "smaller") if factor > 1 else (1 / factor, "larger")
        saved = "the same KV cache" if factor == 1 else f"KV cache {times:.3g}x {change}"
        bits = [m["kv_cache"].get("bits", 0) for m in (first, model)]  # a study has one dtype
        if min(bits) >= 16 and bits[0] != bits[1]:  # a name tells a quantised one
            saved += f" ({bits[1]} bits, not {bits[0]}, as stored)"
        parts.append(saved)
    if "quality" in model:
        ratio = model["against_baseline"]
        bounds = f" (95 %: {_times(ratio['ratio_low'])}-{_times(ratio['ratio_high'])})" if "ratio_low" in ratio else ""
        parts.append(f"perplexity x{_times(ratio['ratio'])}{bounds}")
    if "recall" in model:
        before, after = recalled(first), recalled(model)
        kind = "text" if "text" in after else "samples"
        parts.append(
            f"recall {before[kind]:.0%} -> {after[kind]:.0%} (random tokens {before.get('random', math.nan):.0%} -> "
            f"{after.get('random', math.nan):.0%})"
        )
    return heads + ", ".join(parts)


def cache_bytes(model: Record) -> int:
    """KV cache bytes of one token, plus one source token for an encoder-decoder."""
    return int(model["kv_cache"]["bytes_per_token"] + model["kv_cache"].get("cross_bytes_per_token", 0))


def _times(ratio: float) -> str:
    """Two decimals below 10, whole numbers from 100."""
    return f"{ratio:,.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def recalled(model: Record) -> dict[str, float]:
    """Accuracy of each kind of question over all distances."""
    answers, right = dict[str, int](), dict[str, float]()
    for line in model["recall"]:
        kind = line["kind"]
        answers[kind] = answers.get(kind, 0) + line["answers"]
        right[kind] = right.get(kind, 0.0) + line["accuracy"] * line["answers"]
    return {kind: right[kind] / answers[kind] for kind in answers}


def as_text(results: Record, every: bool = False) -> str:
    """Verdicts and tables for a terminal; `every` table and column."""
    lead = "\n".join(wrapped(line, "  ") for line in verdicts(results))
    return "\n\n".join(filter(None, [lead, *(table.text() for table in tables(results, every))]))


def tables(results: Record, every: bool = False) -> list[Table]:
    """Tables of a record: those of the terminal with their short columns, or `every` table and column."""
    models: list[Record] = results["models"]
    measured = {name for model in models for name, value in model.items() if value}
    built = []
    if "text" in results:
        built.append(_quality(models, results["text"]))
    if any("kl" in model.get("against_baseline", {}) for model in models):
        built.append(_distributions(models))
    if "recall" in measured:
        built += [_recall(models, results["recall"]), *([_distances(models)] if every else [])]
    built.append(_cache(models, results.get("memory")))
    if "decode" in measured:
        built.append(_decode(models))
    for part, title in (("recall", _RECALL), ("decode", "Decoding")):
        if "refused" in results.get(part, {}):
            built.append(Table(title, ("not measured",), ((results[part]["refused"],),)))
    return built if every else [each.brief() for each in built]


_NAME: Column = ("model", lambda m: str(m["name"]))
_QUALITY: list[Column] = [
    _NAME,
    ("KV heads", lambda m: str(m["heads"]["kv"])),
    ("perplexity", lambda m: number(m["quality"]["token_perplexity"])),
    ("x baseline", lambda m: f"{m['against_baseline']['ratio']:.4g}"),
    ("95 % interval", lambda m: "{ratio_low:.4g} - {ratio_high:.4g}".format_map(m["against_baseline"])),
    ("nats/token", lambda m: f"{m['quality']['nats_per_token']:.4f}"),
    ("difference", lambda m: f"{m['against_baseline']['log_ratio']:+.4f}"),
    ("bits/byte", lambda m: f"{m['quality']['bits_per_byte']:.4f}"),
    ("word perplexity", lambda m: number(m["quality"]["word_perplexity"])),
]


def _quality(models: list[Record], text: Record) -> Table:
    dtypes = " and ".join(dict.fromkeys(m["dtype"] for m in models if "dtype" in m))
    note = f"{what_is_scored(text)}; in {dtypes}"
    return table(f"Quality on {text['data']}", _QUALITY, models, note, short=5)


def what_is_scored(text: Record) -> str:
    """Protocol, windows and size of the text, in words."""
    kind = "source and target texts" if text["protocol"] == "pairs" else f"{text['protocol']} windows"
    cut = f" ({text['cut']:,} are longer and cut)" if text.get("cut") else ""
    return (
        f"{kind} of {text['context']:,} tokens{cut}: {text['tokens']:,} tokens scored, "
        f"{text['documents']:,} documents, {text['bytes']:,} bytes"
    )


_DISTRIBUTIONS: list[Column] = [
    _NAME,
    ("mean KL", lambda m: "{mean:.4g} ± {mean_error:.1g}".format_map(m["against_baseline"]["kl"])),
    ("top-1 agreement", lambda m: f"{m['against_baseline']['same_top']:.2%}"),
    ("acceptance", lambda m: f"{m['against_baseline']['acceptance']:.2%}"),
]


def _distributions(models: list[Record]) -> Table:
    note = (
        "KL(baseline || model) in nats; acceptance: share of tokens drafted by the model that the baseline accepts in "
        "speculative decoding at temperature 1"
    )
    return table(f"Next-token distributions against {models[0]['name']}", _DISTRIBUTIONS, models[1:], note)


def _recall(models: list[Record], settings: Record) -> Table:
    records = [model | recalled(model) for model in models]
    columns: list[Column] = [_NAME]
    columns += [(name, lambda m, kind=kind: f"{m[kind]:.1%}") for kind, (name, _) in _KINDS.items()]  # type: ignore[misc]
    columns.append(("greedy", lambda m: f"{m['greedy']['tokens']:.1f}"))
    note = (
        "share of answers that the context tells and that are the most probable token, at all distances up to "
        f"{settings['context']:,} tokens: second copies of the text, of what {models[0]['name']} writes and of random "
        "tokens, values by their keys, passkeys; greedy: tokens for which a model says what the first one says, of "
        f"{models[0]['greedy']['longest']:.0f} (rounding alone may make it leave)"
    )
    return table(_RECALL, columns, records, note)


def _distances(models: list[Record]) -> Table:
    header = ("recall of", "tokens before", *(m["name"] for m in models))
    rows = [
        (_KINDS[lines[0]["kind"]][1], f"{lines[0]['distance']:,}",
         *(f"{line['accuracy']:.1%} ({line['nats']:.2f})" for line in lines))
        for lines in zip(*(m["recall"] for m in models), strict=True)
    ]  # fmt: skip
    note = "share of answers that are the most probable token, and nats per answer"
    return Table("Recall by distance", header, tuple(rows), note)


def _cache(models: list[Record], memory: Record | None) -> Table:
    caches = [model["kv_cache"] for model in models if "kv_cache" in model]
    remarks = [cache["remark"] for cache in caches if cache["remark"]]
    if memory:
        ranks = f" on each of {memory['ranks']} ranks" if memory["ranks"] > 1 else ""
        dtype = "" if memory["precision"] == "auto" else f" in {memory['precision']}"
        remarks.append(
            f"{memory['bytes'] / 1e9:.4g} GB{ranks} hold weights and KV cache{dtype} (activations are not counted): "
            f"batch of sequences of {memory['context']:,} tokens, and longest single sequence, whatever the model's "
            "positions"
        )
        remarks += [cache["fits"]["impossible"] for cache in caches if "impossible" in cache["fits"]]
    columns: list[Column] = [
        _NAME,
        ("weights", lambda m: size(m["weight_bytes"])),
        ("KV/token", lambda m: size(m["kv_cache"]["bytes_per_token"])),
        ("of source", lambda m: size(b) if (b := m["kv_cache"]["cross_bytes_per_token"]) else ""),
        ("batch", lambda m: _fits(m["kv_cache"]["fits"], "batch")),
        ("longest", lambda m: _fits(m["kv_cache"]["fits"], "longest")),
        ("of baseline", lambda m: f"{cache_bytes(m) / cache_bytes(models[0]):.3g}"),
        ("KV at context", lambda m: size(m["kv_cache"]["bytes_at_context"]) if m["kv_cache"]["context"] else ""),
        ("context", lambda m: f"{m['kv_cache']['context']:,}" if m["kv_cache"]["context"] else "no limit"),
    ]
    return table("Memory", columns, models, "; ".join(dict.fromkeys(remarks)), missing="?", short=5)


def _fits(fits: Record, name: str) -> str:
    """A batch or a length; words if there is no number."""
    none = "-" if "impossible" in fits else "no limit"
    return none if fits[name] is None else f"{fits[name]:,}"


_DECODE: list[Column] = [
    _NAME,
    ("batch", lambda p: str(p["batch"])),
    ("context", lambda p: f"{p['context']:,}"),
    ("per token", lambda p: f"{1e3 * p['seconds_per_token']:.2f} ms"),
    ("x baseline", lambda p: f"{p['faster']:.2f}"),
    ("prefill", lambda p: f"{1e3 * p['prefill_seconds']:,.1f} ms"),
    ("min - max", lambda p: f"{1e3 * p['fastest']:.2f} - {1e3 * p['slowest']:.2f}"),
    ("tokens/s", lambda p: f"{p['tokens_per_second']:,.0f}"),
]


def _decode(models: list[Record]) -> Table:
    records = [
        point | {"name": model["name"], "faster": points[0]["seconds_per_token"] / point["seconds_per_token"]}
        for points in zip(*(m["decode"]["points"] for m in models), strict=True)
        for model, point in zip(models, points, strict=True)
    ]
    decode = models[0]["decode"]
    note = "median of {repeats} interleaved repeats of {steps} tokens, {attention}, {dtype}"
    return table("Decoding", _DECODE, records, note.format_map(decode | decode["points"][0]), short=5)


def as_json(results: Record, indent: int | None = None) -> str:
    """Strict JSON: NaN becomes null, infinity a string."""
    return json.dumps(finite(results, infinity=str), indent=indent, allow_nan=False)


@contextmanager
def reserved(directory: Path | None, overwrite: bool) -> Iterator[None]:
    """Check that a report can be written to `directory`, and lock it until it is written.

    Raises OutputError if it cannot, RefusedError if there is a report already and no `overwrite`, or if another run has
    the lock.
    """
    if directory is None:
        yield
        return
    path = directory.absolute()
    try:
        tempfile.TemporaryFile(dir=nearest(path)).close()
    except OSError as error:
        raise OutputError(f"no report can be written to {directory}: {error.strerror}") from error
    lock = nearest(path.parent) / f".{path.name}.gqa-eval.lock"
    refusal = f"another run writes a report to {directory}; wait for it, or give another directory"
    with locked(lock, refusal) if ranks().is_main_process else nullcontext():
        if (existing := [name for name in _FILES if (path / name).exists()]) and not overwrite:
            raise RefusedError(
                f"{directory} holds {listing(existing)}; give --overwrite to replace them, or another directory"
            )
        yield


def write_report(results: Record, directory: Path) -> list[str]:
    """Write results.json and report.html; returns their names. Other files in the directory stay."""
    first, *converted = results["models"]
    argv = results["argv"]
    page = Page(
        title=" against ".join(filter(None, (", ".join(m["name"] for m in converted), first["name"]))),
        verdicts=verdicts(results),
        tables=tables(results, every=True),
        samples=list(texts_beside(results["models"])),
        commands=[one_line(command_line("gqa-eval", argv), 4000)] if argv else [],
        foot=f"{measured_with(results)}.",
    )
    try:
        with made_aside(directory) as aside:
            page.write(aside)
            write_text(aside / "results.json", as_json(results, indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"no report was written to {directory}: {error.strerror or error}") from error
    return list(_FILES)


def measured_with(record: Record) -> str:
    """Time, device and versions of `gqa.eval.evaluate.environment`, in words."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    threads = f"{record['threads']} thread{'s' * (record['threads'] > 1)}"
    return f"{record['created']}, {record['device']}, {threads}; {versions}"


def texts_beside(models: list[Record]) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each prompt, with (name, prefix equal to the first model's text, rest) of the models' greedy texts."""
    for lines in zip(*(model.get("samples", []) for model in models), strict=True):
        texts = [line["text"] for line in lines]
        same = [len(os.path.commonprefix([text, texts[0]])) for text in texts]  # noqa: RUF071 - of characters
        rows = zip(models, texts, same, strict=True)
        yield lines[0]["prompt"], [(model["name"], text[:end], text[end:]) for model, text, end in rows]
