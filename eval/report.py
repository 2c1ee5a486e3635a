"""Record as tables: in a terminal, and in report.md beside results.json and the plots."""

from __future__ import annotations

import json
import math
import string
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError, listing, one_line
from gqa.checkpoint.write import finite, write_text
from gqa.convert.summary import size

Record = dict[str, Any]

PICTURES = ("by_context", "recall", "attention_error", "decode")


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def text(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        shown = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
            for cells in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join([self.title, *(line.rstrip() for line in shown), *([self.note] if self.note else [])])

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(map(_escaped, cells)) + " |"

        rule = "|" + "---|" + "---:|" * (len(self.header) - 1)
        parts = [f"## {_escaped(self.title)}", "", line(self.header), rule, *(line(row) for row in self.rows)]
        return "\n".join([*parts, *(["", _escaped(self.note)] if self.note else [])])


def _escaped(text: str) -> str:
    """Names of models and files as they are, in Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in text)


class _Formats(string.Formatter):
    """Format strings with three more formats: `size` of bytes, `number` of five digits, `ms` of seconds. Words stay as
    they are where a number is expected.
    """

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, str):
            return value
        if spec == "size":
            return size(value)
        if spec == "number":
            return number(value)
        if spec.endswith("ms"):
            return f"{value * 1e3:{spec.removesuffix('ms')}f}"
        return str(super().format_field(value, spec))


def shown(record: Any, columns: Iterable[str], missing: str = "") -> tuple[str, ...]:
    """Cells of a row by their format strings; `missing` where the record has no such numbers."""
    cells = []
    for column in columns:
        try:
            cells.append(_Formats().vformat(column, (), record))
        except (KeyError, TypeError):  # not measured, or null
            cells.append(missing)
    return tuple(cells)


def number(value: float) -> str:
    """Five digits: more are not the same in every batch size."""
    if not 1 <= value < 1e5:
        return f"{value:.4g}"
    return f"{value:,.{4 - int(math.log10(value))}f}"


_QUALITY = {
    "model": "{name}", "KV heads": "{heads[kv]}", "perplexity": "{quality[token_perplexity]:number}",
    "x baseline": "{against_baseline[ratio]:.4g}",
    "95 % interval": "{against_baseline[ratio_low]:.4g} - {against_baseline[ratio_high]:.4g}",
    "nats/token": "{quality[nats_per_token]:.4f}", "difference": "{against_baseline[log_ratio]:+.4f}",
}  # fmt: skip
_TEXT_QUALITY = {"bits/byte": "{quality[bits_per_byte]:.4f}", "word perplexity": "{quality[word_perplexity]:number}"}
_DISTRIBUTIONS = {
    "model": "{name}", "mean KL": "{kl[mean]:.4g} ± {kl[mean_error]:.1g}", "median": "{kl[median]:.4g}",
    "90 %": "{kl[p90]:.4g}", "99 %": "{kl[p99]:.4g}", "99.9 %": "{kl[p99.9]:.4g}", "max": "{kl[maximum]:.4g}",
    "top-1 agreement": "{same_top:.2%}", "RMS dp": "{delta_p_percent[rms]:.2f} %",
    "RMS dlnp": "{log_probability_rms:.3f}", "corr": "{log_probability_correlation:.4f}",
}  # fmt: skip
_CACHE = {
    "model": "{name}", "KV heads": "{heads[kv]}", "weights": "{weight_bytes:size}",
    "KV/token": "{bytes_per_token:size}", "of baseline": "{share}", "KV at context": "{at_context}",
    "context": "{context}",
}  # fmt: skip
_KINDS = {
    "text": "the text, second copy", "samples": "own samples, second copy", "random": "random tokens, second copy",
    "look-up": "values by their keys", "passkey": "a passkey",
}  # fmt: skip
_DECODE = {
    "model": "{name}", "batch": "{batch}", "context": "{context:,}", "prefill": "{prefill_seconds:,.1ms} ms",
    "per token": "{seconds_per_token:.2ms} ms", "min - max": "{fastest:.2ms} - {slowest:.2ms}",
    "tokens/s": "{tokens_per_second:,.0f}", "x baseline": "{faster:.2f}", "KV share": "{cache_share:.0%}",
    "of bandwidth": "{roofline_fraction:.0%}",
}  # fmt: skip


def tables(results: Record, every: bool = False) -> Iterator[Table]:
    """What was measured; `every` adds the tables that are too long for a terminal."""
    models: list[Record] = results["models"]
    if "text" in results:
        yield _quality(models, results["text"])
    if any("kl" in m.get("against_baseline", {}) for m in models):
        yield _distributions(models)
    if "recall" in results:
        yield _recall(models, results["recall"])
    yield _cache(models, results.get("memory"))
    if any("decode" in m for m in models):
        yield _decode(models)
    if any("tasks" in m for m in models):
        yield _tasks(models)
    if every and any(m.get("attention_error") for m in models):
        yield _attention(models)
    if every and any("by_context" in m for m in models):
        yield _context(models)


def table(title: str, columns: dict[str, str], records: Iterable[Any], note: str, missing: str = "") -> Table:
    """A line for each record, by the format strings of the `columns`."""
    return Table(title, tuple(columns), tuple(shown(record, columns.values(), missing) for record in records), note)


def _quality(models: list[Record], text: Record) -> Table:
    stride = f", stride {text['stride']:,}" if text["stride"] else ""
    kind = "source and target texts" if text["protocol"] == "pairs" else f"{text['protocol']} windows"
    cut = f" ({text['cut']:,} are longer and cut)" if text["cut"] else ""
    dtypes = " and ".join(dict.fromkeys(m["dtype"] for m in models if "dtype" in m))
    note = (
        f"{kind} of {text['context']:,} tokens{stride}{cut}: {text['tokens']:,} tokens scored, "
        f"{text['documents']:,} documents, {text['bytes']:,} bytes; in {dtypes}"
    )
    whole = models[0]["quality"]["bits_per_byte"] is not None
    return table(f"Quality on {text['data']}", _QUALITY | (_TEXT_QUALITY if whole else {}), models, note)


def _distributions(models: list[Record]) -> Table:
    compared = [model["against_baseline"] | {"name": model["name"]} for model in models[1:]]
    note = "KL(baseline || model) in nats; dp, dlnp: change of the true token's probability and its logarithm"
    if lost := compared[0].get("stored_baseline"):
        note += f"; the stored baseline's rounding alone is a KL of {lost['kl_lost_mean']:.1g}"
    return table(f"Next-token distributions against {models[0]['name']}", _DISTRIBUTIONS, compared, note)


def _recall(models: list[Record], settings: Record) -> Table:
    if "refused" in settings:
        return Table("Recall from the context", ("not measured",), ((settings["refused"],),))
    header = ("recall of", "tokens before", *(m["name"] for m in models))
    rows = [
        (_KINDS[lines[0]["kind"]], f"{lines[0]['distance']:,}",
         *(f"{line['accuracy']:.1%} ({line['nats']:.2f})" for line in lines))
        for lines in zip(*(m["recall"] for m in models), strict=True)
    ]  # fmt: skip
    told = (f"{m['greedy']['tokens']:.1f} of {m['greedy']['longest']:.1f} tokens" for m in models)
    rows.append(("greedy text", "", *told))
    note = (
        f"share of answers that are the most probable token, and nats per answer, in up to {settings['context']:,} "
        "tokens; greedy text: how long a model says what the first one says (which rounding alone may make it leave)"
    )
    return Table("Recall from the context", header, tuple(rows), note)


def _cache(models: list[Record], memory: Record | None) -> Table:
    columns, caches = dict(_CACHE), [m["kv_cache"] for m in models if "kv_cache" in m]
    measured = [cache["measured"]["tokens"] for cache in caches if "measured" in cache]
    if measured:
        columns |= {
            f"measured, {measured[0]:,} tokens": "{measured[bytes]:size}",
            "formula": "{measured[formula]:size}",
        }
    remarks = [cache["remark"] for cache in caches if cache["remark"]]
    if memory:
        columns |= {"batch": "{most}", "longest": "{longest}"}
        ranks = f" on each of {memory['ranks']} ranks" if memory["ranks"] > 1 else ""
        remarks.append(
            f"{memory['bytes'] / 1e9:.4g} GB{ranks} hold weights and KV cache (activations are not counted): batch of "
            f"sequences of {memory['context']:,} tokens, and longest single sequence, whatever the model's positions"
        )
        remarks += [cache["fits"]["impossible"] for cache in caches if "impossible" in cache["fits"]]
    first = models[0].get("kv_cache", {}).get("bytes_per_token")
    note = "; ".join(dict.fromkeys(remarks))
    return table("Memory", columns, (_cached(model, first) for model in models), note, missing="?")


def _cached(model: Record, first: int | None) -> Record:
    """A model with what its cache takes, in words where there is no number."""
    if "kv_cache" not in model:
        return model
    cache: Record = model["kv_cache"]
    limit = cache["context"]
    found = {
        "share": f"{cache['bytes_per_token'] / first:.3g}" if first else "",
        "at_context": size(cache["bytes_at_context"]) if limit else "",
        "context": f"{limit:,}" if limit else "no limit",
    }
    if fits := cache.get("fits"):
        longest = "no limit" if fits["longest"] is None else f"{fits['longest']:,}"
        most, longest = ("-", "-") if "impossible" in fits else (f"{fits['batch']:,}", longest)
        found |= {"most": most, "longest": longest}
    return {**model, **cache, **found}


def _decode(models: list[Record]) -> Table:
    turns = zip(*(m["decode"]["points"] for m in models), strict=True)
    records = [
        point | {
            "name": model["name"],
            "faster": points[0]["seconds_per_token"] / point["seconds_per_token"],
            "cache_share": point["cache_bytes"] / point["bytes_per_step"],
            "roofline_fraction": point["roofline_seconds"] / point["seconds_per_token"],
        }
        for points in turns for model, point in zip(models, points, strict=True)
    ]  # fmt: skip
    decode, first = models[0]["decode"], models[0]["decode"]["points"][0]
    bandwidth = first["bytes_per_step"] / first["roofline_seconds"]
    note = (
        f"median of {decode['repeats']} interleaved repeats of {decode['steps']} tokens, {first['attention']}, "
        f"{first['dtype']}; KV share: of the bytes that one step must read (the rest are weights); of bandwidth: "
        f"the time that reading them takes at the measured {bandwidth / 1e9:.1f} GB/s against the time taken"
    )
    return table("Decoding", _DECODE, records, note)


def _tasks(models: list[Record]) -> Table:
    header = ("task", "metric", *(model["name"] for model in models))
    rows = [
        (task, metric.removesuffix(",none"), *(_metric(m["tasks"][task]["metrics"], metric) for m in models))
        for task, found in models[0]["tasks"].items() for metric in found["metrics"] if "_stderr," not in metric
    ]  # fmt: skip
    return Table("Tasks (lm-evaluation-harness)", header, tuple(rows))


def _metric(metrics: Record, name: str) -> str:
    value, error = metrics[name], metrics.get(name.replace(",", "_stderr,"))
    told = number(value) if isinstance(value, float | int) else str(value)
    return f"{told} ± {error:.2g}" if isinstance(error, float) and math.isfinite(error) else told


def _attention(models: list[Record]) -> Table:
    compared = [m for m in models if m.get("attention_error")]
    header = ("module", *(f"{m['name']} {kind}" for m in compared for kind in ("own", "accumulated")))
    rows = [
        (lines[0]["module"], *(f"{line[kind]:.4f}" for line in lines for kind in ("own", "accumulated")))
        for lines in zip(*(m["attention_error"] for m in compared), strict=True)
    ]
    note = "relative error of each attention output; own: all read the baseline's input; accumulated: each its own"
    return Table("Attention outputs", header, tuple(rows), note)


def _context(models: list[Record]) -> Table:
    header = ("tokens read before", *(m["name"] for m in models), "tokens scored")
    rows = [
        (f"{bins[0]['from']:,} - {bins[0]['to']:,}", *(f"{b['nats']:.4f}" for b in bins), f"{bins[0]['tokens']:,}")
        for bins in zip(*(m["by_context"] for m in models), strict=True)
    ]
    return Table("Nats per token by position", header, tuple(rows))


def as_json(results: Record, indent: int | None = None) -> str:
    """JSON that any reader takes: NaN becomes null, infinity a string."""
    return json.dumps(finite(results, infinity=str), indent=indent, allow_nan=False)


def nearest(path: Path) -> Path:
    """The path itself, or the nearest parent that is there: where it would be made."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def check_output(directory: Path) -> None:
    """Find out before hours of measuring what would keep a report from being written. Leaves nothing behind.

    Raises OutputError, and RefusedError where files that are no report's would be overwritten.
    """
    try:
        tempfile.TemporaryFile(dir=nearest(directory)).close()
    except OSError as error:
        raise OutputError(f"no report can be written to {directory}: {error.strerror}") from None
    found = None
    with suppress(OSError, ValueError):
        found = json.loads((directory / _FILES[0]).read_text(encoding="utf-8"))
    taken = [name for name in _FILES if (directory / name).exists()]
    if taken and not (isinstance(found, dict) and {"schema", "command", "models"} <= found.keys()):
        raise RefusedError(f"{directory} holds {listing(taken)} of something else; give another directory")


_FILES = ("results.json", "report.md", *(f"{name}.{suffix}" for name in PICTURES for suffix in ("svg", "png")))


def measured_with(record: Record) -> str:
    """When and with what, as `gqa.eval.evaluate.environment` has it."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return f"{record['created']}, {record['device']}, {record['threads']} threads; {versions}"


def no_pictures() -> str:
    """Why a report has no pictures; nothing where it has."""
    if find_spec("matplotlib"):
        return ""
    return "no pictures, for which matplotlib is missing: pip install 'gqa-convert[report]'"


def write_report(results: Record, directory: Path) -> list[str]:
    """results.json, report.md and, where matplotlib is installed, pictures; returns the names of what was written.

    An earlier report is replaced, other files in the directory stay. All are made aside first, so that what keeps one
    from being written leaves the directory as it was.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".gqa-eval-", dir=nearest(directory)) as aside:
            made = _make_report(results, Path(aside))
            directory.mkdir(parents=True, exist_ok=True)
            for name in made:
                (Path(aside) / name).replace(directory / name)
    except OSError as error:
        raise OutputError(f"no report was written to {directory}: {error.strerror or error}") from None
    for name in set(_FILES) - set(made):  # of an earlier report, and not of this one
        (directory / name).unlink(missing_ok=True)
    return made


def _make_report(results: Record, directory: Path) -> list[str]:
    pictures: list[tuple[str, str]] = []
    if not (remark := no_pictures()):
        from gqa.eval import plots

        pictures = plots.draw(results, directory)
    names = ", ".join(model["name"] for model in results["models"])
    parts = [f"# {_escaped(names)}", "", f"    {one_line(results['command'])}", ""]
    for table in tables(results, every=True):
        parts += [table.markdown(), ""]
    parts += [f"![{title}]({name}.svg)\n" for name, title in pictures]
    parts += [f"{remark}\n"] if remark else []
    parts += [f"{measured_with(results)}."]
    write_text(directory / "report.md", "\n".join(parts) + "\n")
    write_text(directory / "results.json", as_json(results, indent=2) + "\n")
    return [name for name in _FILES if (directory / name).exists()]
