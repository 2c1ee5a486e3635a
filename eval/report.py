"""Verdicts and tables of an evaluation's record; report.html, results.json and pictures."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError, listing, one_line
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.locks import locked
from gqa.checkpoint.provenance import command_line
from gqa.checkpoint.write import finite, write_text
from gqa.convert.summary import size
from gqa.eval.page import PAGE, Page, made_aside, nearest, no_pictures
from gqa.eval.tables import Column, Table, not_measured, number, table, wrapped

Record = dict[str, Any]

PICTURES = ("recall", "decode")

_KINDS = {
    "text": ("text", "the text twice"), "samples": ("samples", "own samples twice"),
    "random": ("random", "random tokens twice"), "look-up": ("values", "values by their keys"),
    "passkey": ("passkeys", "a passkey"),
}  # fmt: skip
# Parts that may be refused, and their titles.
_WRITTEN, _DECODING = "What is written for the sources", "Decoding"
_REFUSED = {"written": _WRITTEN, "decode": _DECODING}
NAME: Column = ("model", lambda m: str(m["name"]))


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
        before, after = (cache_bytes(m) for m in (first, model))
        times, change = (before / after, "smaller") if after < before else (after / before, "larger")
        saved = "the same KV cache" if before == after else f"KV cache {times:.3g}x {change}"
        bits = [m["kv_cache"].get("bits", 0) for m in (first, model)]  # a study has one dtype
        whole = min(bits) >= 16 and bits[0] != bits[1]  # a name tells a quantised one
        parts.append(f"{saved} ({bits[1]} bits, not {bits[0]}, as stored)" if whole else saved)
    if "quality" in model:
        ratio = model["against_baseline"]
        bounds = f" (95 %: {_times(ratio['ratio_low'])}-{_times(ratio['ratio_high'])})" if "ratio_low" in ratio else ""
        parts.append(f"perplexity x{_times(ratio['ratio'])}{bounds}")
    if "recall" in model:
        kinds = (next(kind for kind in ("text", "samples") if kind in recalled(model)), "random")
        shares = [tuple(recalled(m).get(kind, math.nan) for m in (first, model)) for kind in kinds]
        changes = [f"{before:.0%} -> {after:.0%}" for before, after in shares]
        parts.append(f"recall {changes[0]} (random tokens {changes[1]})")
    return heads + ", ".join(parts)


def cache_bytes(model: Record) -> int:
    """KV cache bytes of one token, plus one source token for an encoder-decoder."""
    return int(model["kv_cache"]["bytes_per_token"] + model["kv_cache"].get("cross_bytes_per_token", 0))


def _times(ratio: float) -> str:
    """Two decimals below 10, whole numbers from 100."""
    return f"{ratio:,.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def recalled(model: Record) -> dict[str, float]:
    """Accuracy of each kind of question over all distances."""
    shares: dict[str, float] = {}
    for kind in dict.fromkeys(line["kind"] for line in model["recall"]):
        lines = [line for line in model["recall"] if line["kind"] == kind]
        right = sum(line["accuracy"] * line["answers"] for line in lines)
        shares[kind] = right / sum(line["answers"] for line in lines)
    return shares


def as_text(results: Record, every: bool = False) -> str:
    """Verdicts and tables for a terminal; `every` table and column."""
    lead = "\n".join(wrapped(line, "  ") for line in verdicts(results))
    return "\n\n".join(filter(None, [lead, *(table.text() for table in tables(results, every))]))


def tables(results: Record, every: bool = False) -> list[Table]:
    """Tables of a record: those of the terminal with their short columns, or `every` table and column."""
    models: list[Record] = results["models"]
    measured = {name for model in models for name, value in model.items() if value}
    built = [
        _quality(models, results["text"]) if "text" in results else None,
        _distributions(models) if any("kl" in m.get("against_baseline", {}) for m in models) else None,
        _recall(models, results["recall"]) if "recall" in results else None,
        _written(models) if "recall" not in results and "greedy" in measured else None,
        _distances(models) if every and "recall" in measured else None,
        _cache(models, results.get("memory")),
        _decode(models) if "decode" in measured else None,
    ]
    built += [not_measured(title, results[part]["refused"]) for part, title in _REFUSED.items() if part in results]
    return [part if every else part.brief() for part in built if part]


def _quality(models: list[Record], text: Record) -> Table:
    columns: list[Column] = [
        NAME,
        ("KV heads", lambda m: str(m["heads"]["kv"])),
        ("perplexity", lambda m: number(m["quality"]["token_perplexity"])),
        ("x baseline", lambda m: f"{m['against_baseline']['ratio']:.4g}"),
        ("95 % interval", lambda m: "{ratio_low:.4g} - {ratio_high:.4g}".format_map(m["against_baseline"])),
        ("nats/token", lambda m: f"{m['quality']['nats_per_token']:.4f}"),
        ("difference", lambda m: f"{m['against_baseline']['log_ratio']:+.4f}"),
    ]
    if models[0]["quality"]["bits_per_byte"] is not None:
        columns += [
            ("bits/byte", lambda m: f"{m['quality']['bits_per_byte']:.4f}"),
            ("word perplexity", lambda m: number(m["quality"]["word_perplexity"])),
        ]
    dtypes = " and ".join(dict.fromkeys(m["dtype"] for m in models if "dtype" in m))
    return table(f"Quality on {text['data']}", columns, models, f"{what_is_scored(text)}; in {dtypes}", short=5)


def what_is_scored(text: Record) -> str:
    """Protocol, windows and size of the text, in words."""
    kind = "source and target texts" if text["protocol"] == "pairs" else f"{text['protocol']} windows"
    cut = f" ({text['cut']:,} are longer and cut)" if text.get("cut") else ""
    return (
        f"{kind} of {text['context']:,} tokens{cut}: {text['tokens']:,} tokens scored, "
        f"{text['documents']:,} documents, {text['bytes']:,} bytes"
    )


_DISTRIBUTIONS: list[Column] = [
    NAME,
    ("mean KL", lambda m: "{mean:.4g} ± {mean_error:.1g}".format_map(m["kl"])),
    ("top-1 agreement", lambda m: f"{m['same_top']:.2%}"),
    ("acceptance", lambda m: f"{m['acceptance']:.2%}"),
]


def _distributions(models: list[Record]) -> Table:
    compared = [model["against_baseline"] | {"name": model["name"]} for model in models[1:]]
    note = (
        "KL(baseline || model) in nats; acceptance: share of tokens drafted by the model that the baseline accepts in "
        "speculative decoding at temperature 1"
    )
    return table(f"Next-token distributions against {models[0]['name']}", _DISTRIBUTIONS, compared, note)


def _recall(models: list[Record], settings: Record) -> Table:
    if "refused" in settings:
        return not_measured("Recall from the context", settings["refused"])
    columns = [NAME]
    for kind, (name, _) in _KINDS.items():
        if kind != "text" or kind in recalled(models[0]):
            columns.append((name, lambda m, kind=kind: f"{recalled(m)[kind]:.1%}"))  # type: ignore[misc]
    columns.append(("greedy", lambda m: f"{m['greedy']['tokens']:.1f}"))
    note = (
        "share of answers that the context tells and that are the most probable token, at all distances up to "
        f"{settings['context']:,} tokens: second copies of the text, of what {models[0]['name']} writes and of random "
        "tokens, values by their keys, passkeys; greedy: tokens for which a model says what the first one says, of "
        f"{models[0]['greedy']['longest']:.0f} (rounding alone may make it leave)"
    )
    return table("Recall from the context", columns, models, note)


def _written(models: list[Record]) -> Table:
    """Greedy agreement of encoder-decoders."""
    columns: list[Column] = [
        NAME,
        ("greedy", lambda m: f"{m['greedy']['tokens']:.1f}"),
        ("whole", lambda m: f"{m['greedy']['whole']:.0%}"),
    ]
    greedy = models[0]["greedy"]
    note = (
        f"always the most probable token; greedy: tokens for which a model says what {models[0]['name']} says, of "
        f"{greedy['longest']:.0f} on average; whole: texts that are the same to their end, of {greedy['texts']:,}"
    )
    return table(_WRITTEN, columns, models, note)


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
    caches = [m["kv_cache"] for m in models if "kv_cache" in m]
    first = cache_bytes(models[0]) if "kv_cache" in models[0] else None
    remarks = [cache["remark"] for cache in caches if cache["remark"]]

    def share(model: Record) -> str:
        model_bytes = cache_bytes(model)
        return f"{model_bytes / first:.3g}" if first else ""

    columns: list[Column] = [
        NAME,
        ("weights", lambda m: size(m["weight_bytes"])),
        ("KV/token", lambda m: size(m["kv_cache"]["bytes_per_token"])),
    ]
    if any(cache.get("cross_bytes_per_token") for cache in caches):
        columns.append(("of source", lambda m: size(m["kv_cache"]["cross_bytes_per_token"])))
    if memory:
        columns += [
            ("batch", lambda m: _fits(m["kv_cache"]["fits"], "batch")),
            ("longest", lambda m: _fits(m["kv_cache"]["fits"], "longest")),
        ]
        ranks = f" on each of {memory['ranks']} ranks" if memory["ranks"] > 1 else ""
        dtype = "" if memory["precision"] == "auto" else f" in {memory['precision']}"
        remarks.append(
            f"{memory['bytes'] / 1e9:.4g} GB{ranks} hold weights and KV cache{dtype} (activations are not counted): "
            f"batch of sequences of {memory['context']:,} tokens, and longest single sequence, whatever the model's "
            "positions"
        )
        remarks += [cache["fits"]["impossible"] for cache in caches if "impossible" in cache["fits"]]
    columns += [
        ("of baseline", share),
        ("KV at context", lambda m: size(m["kv_cache"]["bytes_at_context"]) if m["kv_cache"]["context"] else ""),
        ("context", lambda m: f"{m['kv_cache']['context']:,}" if m["kv_cache"]["context"] else "no limit"),
    ]
    return table("Memory", columns, models, "; ".join(dict.fromkeys(remarks)), missing="?", short=5)


def _fits(fits: Record, name: str) -> str:
    """A batch or a length; words if there is no number."""
    none = "-" if "impossible" in fits else "no limit"
    return none if fits[name] is None else f"{fits[name]:,}"


def _decode(models: list[Record]) -> Table:
    turns = zip(*(m["decode"]["points"] for m in models), strict=True)
    records = [
        point | {"name": model["name"], "faster": points[0]["seconds_per_token"] / point["seconds_per_token"]}
        for points in turns for model, point in zip(models, points, strict=True)
    ]  # fmt: skip
    columns: list[Column] = [
        NAME,
        ("batch", lambda p: str(p["batch"])),
        ("context", lambda p: f"{p['context']:,}"),
        ("per token", lambda p: f"{1e3 * p['seconds_per_token']:.2f} ms"),
        ("x baseline", lambda p: f"{p['faster']:.2f}"),
        ("prefill", lambda p: f"{1e3 * p['prefill_seconds']:,.1f} ms"),
        ("min - max", lambda p: f"{1e3 * p['fastest']:.2f} - {1e3 * p['slowest']:.2f}"),
        ("tokens/s", lambda p: f"{p['tokens_per_second']:,.0f}"),
    ]
    decode, first = models[0]["decode"], models[0]["decode"]["points"][0]
    note = (
        f"median of {decode['repeats']} interleaved repeats of {decode['steps']} tokens, {first['attention']}, "
        f"{first['dtype']}"
    )
    return table(_DECODING, columns, records, note, short=5)


def as_json(results: Record, indent: int | None = None) -> str:
    """Strict JSON: NaN becomes null, infinity a string."""
    return json.dumps(finite(results, infinity=str), indent=indent, allow_nan=False)


def check_output(directory: Path, overwrite: bool) -> None:
    """Check, before hours of measuring, that a report can be written to `directory`.

    Raises OutputError if it cannot, RefusedError if it would replace other files, or an earlier report without
    `overwrite`.
    """
    try:
        tempfile.TemporaryFile(dir=nearest(directory)).close()
    except OSError as error:
        raise OutputError(f"no report can be written to {directory}: {error.strerror}") from error
    earlier = None
    with suppress(OSError, ValueError):
        earlier = json.loads((directory / _FILES[0]).read_text(encoding="utf-8"))
    existing = [name for name in _FILES if (directory / name).exists()]
    if existing and not (isinstance(earlier, dict) and {"schema", "argv", "models"} <= earlier.keys()):
        raise RefusedError(f"{directory} holds {listing(existing)} of something else; give another directory")
    if existing and not overwrite:
        raise RefusedError(f"{directory} holds an earlier report; give --overwrite to replace it, or another directory")


@contextmanager
def reserved(directory: Path | None, overwrite: bool) -> Iterator[None]:
    """Check the output and lock it until the report is written. Raises the errors of `check_output`, and RefusedError
    if another run has the lock.
    """
    if directory is None:
        yield
        return
    check_output(directory, overwrite)
    path = directory.absolute()
    lock = nearest(path.parent) / f".{path.name}.gqa-eval.lock"
    refusal = f"another run writes a report to {directory}; wait for it, or give another directory"
    with locked(lock, refusal) if ranks().is_main_process else nullcontext():
        check_output(directory, overwrite)  # it may have finished meanwhile
        yield


_FILES = ("results.json", PAGE, *(f"{name}.{suffix}" for name in PICTURES for suffix in ("svg", "png")))


def measured_with(record: Record) -> str:
    """Time, device and versions of `gqa.eval.evaluate.environment`, in words."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    threads = f"{record['threads']} thread{'s' * (record['threads'] > 1)}"
    return f"{record['created']}, {record['device']}, {threads}; {versions}"


def write_report(results: Record, directory: Path) -> list[str]:
    """Write results.json, report.html and, with matplotlib, pictures; returns their names.

    Replaces an earlier report; other files in the directory stay.
    """
    try:
        with made_aside(directory) as aside:
            names = _make_report(results, aside)
    except OSError as error:
        raise OutputError(f"no report was written to {directory}: {error.strerror or error}") from error
    for name in set(_FILES) - set(names):  # of an earlier report, and not of this one
        (directory / name).unlink(missing_ok=True)
    return names


def texts_beside(models: list[Record]) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each prompt, with (name, prefix equal to the first model's text, rest) of the models' greedy texts."""
    for lines in zip(*(model.get("samples", []) for model in models), strict=True):
        texts = [line["text"] for line in lines]
        same = [len(os.path.commonprefix([text, texts[0]])) for text in texts]  # noqa: RUF071 - of characters
        rows = zip(models, texts, same, strict=True)
        yield lines[0]["prompt"], [(model["name"], text[:end], text[end:]) for model, text, end in rows]


def _make_report(results: Record, directory: Path) -> list[str]:
    pictures: list[tuple[str, str]] = []
    if not (remark := no_pictures()):
        from gqa.eval import plots

        pictures = plots.draw(results, directory)
    first, *converted = results["models"]
    Page(
        title=" against ".join(filter(None, (", ".join(m["name"] for m in converted), first["name"]))),
        verdicts=verdicts(results),
        pictures=pictures,
        tables=tables(results, every=True),
        samples=list(texts_beside(results["models"])),
        commands=[one_line(command_line("gqa-eval", argv), 4000)] if (argv := results["argv"]) else [],
        foot=" ".join([*filter(None, [remark]), f"{measured_with(results)}."]),
    ).write(directory)
    write_text(directory / "results.json", as_json(results, indent=2) + "\n")
    return [name for name in _FILES if (directory / name).exists()]
