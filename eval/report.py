"""Results as tables: in a terminal, and in report.md beside results.json and the plots."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError, listing, one_line
from gqa.checkpoint.write import write_text
from gqa.convert.summary import size

Results = dict[str, Any]

PICTURES = ("by_context", "attention_error", "decode")


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


def tables(results: Results, every: bool = False) -> Iterator[Table]:
    """What was measured; `every` adds the tables that are too long for a terminal."""
    models: list[Results] = results["models"]
    if "text" in results:
        yield _quality(models, results["text"])
    if any("kl" in m.get("against_baseline", {}) for m in models):
        yield _distributions(models)
    yield _cache(models, results.get("memory"))
    if any("decode" in m for m in models):
        yield _decode(models)
    if any("tasks" in m for m in models):
        yield _tasks(models)
    if every and any(m.get("attention_error") for m in models):
        yield _attention(models)
    if every and any("by_context" in m for m in models):
        yield _context(models)


def _quality(models: list[Results], text: Results) -> Table:
    per_byte = models[0]["quality"]["bits_per_byte"] is not None
    header: tuple[str, ...] = (
        "model",
        "KV heads",
        "perplexity",
        "x baseline",
        "95 % interval",
        "nats/token",
        "difference",
    )
    rows = []
    for model in models:
        quality, compared = model["quality"], model.get("against_baseline")
        cells = [model["name"], _heads(model), number(quality["token_perplexity"])]
        cells += [f"{compared['ratio']:.4g}", _interval(compared)] if compared else ["", ""]
        cells += [f"{quality['nats_per_token']:.4f}", f"{compared['log_ratio']:+.4f}" if compared else ""]
        if per_byte:
            cells += [f"{quality['bits_per_byte']:.4f}", number(quality["word_perplexity"])]
        rows.append(tuple(cells))
    if per_byte:
        header += ("bits/byte", "word perplexity")
    return Table(f"Quality on {text['data']}", header, tuple(rows), _protocol(text, models))


def _protocol(text: Results, models: list[Results]) -> str:
    stride = f", stride {text['stride']:,}" if text["stride"] else ""
    kind = "source and target texts" if text["protocol"] == "pairs" else f"{text['protocol']} windows"
    cut = f" ({text['cut']:,} are longer and cut)" if text["cut"] else ""
    dtypes = " and ".join(dict.fromkeys(m["dtype"] for m in models if "dtype" in m))
    return (
        f"{kind} of {text['context']:,} tokens{stride}{cut}: {text['tokens']:,} tokens scored, "
        f"{text['documents']:,} documents, {text['bytes']:,} bytes; in {dtypes}"
    )


def _interval(compared: Results) -> str:
    return f"{compared['ratio_low']:.4g} - {compared['ratio_high']:.4g}" if "ratio_low" in compared else ""


def _heads(model: Results) -> str:
    return str(model["heads"]["kv"]) if "heads" in model else "?"


def _distributions(models: list[Results]) -> Table:
    header = ("model", "mean KL", "median", "90 %", "99 %", "99.9 %", "max", "same top", "RMS dp", "RMS dlnp", "corr")
    rows = []
    for model in models[1:]:
        found = model["against_baseline"]
        kl = found["kl"]
        rows.append(
            (
                model["name"],
                f"{kl['mean']:.4g} ± {kl['mean_error']:.1g}",
                *(f"{kl[key]:.4g}" for key in ("median", "p90", "p99", "p99.9", "maximum")),
                f"{found['same_top']:.2%}",
                f"{found['delta_p_percent']['rms']:.2f} %",
                f"{found['log_probability_rms']:.3f}",
                f"{found['log_probability_correlation']:.4f}",
            )
        )
    lost = [m["against_baseline"].get("stored_baseline") for m in models[1:]]
    note = "KL(baseline || model) in nats; dp, dlnp: change of the true token's probability and its logarithm"
    if lost and lost[0]:
        note += f"; the stored baseline's rounding alone is a KL of {lost[0]['kl_lost_mean']:.1g}"
    return Table(f"Next-token distributions against {models[0]['name']}", header, tuple(rows), note)


def _cache(models: list[Results], memory: Results | None) -> Table:
    header: tuple[str, ...] = ("model", "KV heads", "weights", "KV/token", "of baseline", "KV at context", "context")
    measured = [m["kv_cache"]["measured"]["tokens"] for m in models if "measured" in m.get("kv_cache", {})]
    if measured:
        header += (f"measured, {measured[0]:,} tokens", "formula")
    if memory:
        header += ("batch", "longest")
    first = models[0].get("kv_cache", {}).get("bytes_per_token")
    rows = [tuple(_cache_cells(model, first, len(header))) for model in models]
    caches = [m["kv_cache"] for m in models if "kv_cache" in m]
    remarks = [cache["remark"] for cache in caches if cache["remark"]]
    if memory:
        ranks = f" on each of {memory['ranks']} ranks" if memory["ranks"] > 1 else ""
        remarks.append(
            f"{memory['bytes'] / 1e9:.4g} GB{ranks} hold weights and KV cache (activations are not counted): batch of "
            f"sequences of {memory['context']:,} tokens, and longest single sequence, whatever the model's positions"
        )
        remarks += [cache["fits"]["impossible"] for cache in caches if "impossible" in cache["fits"]]
    return Table("Memory", header, tuple(rows), "; ".join(dict.fromkeys(remarks)))


def _cache_cells(model: Results, first: int | None, count: int) -> list[str]:
    cells = [model["name"], _heads(model), size(model["weight_bytes"])]
    cache = model.get("kv_cache")
    if not cache:
        return cells + ["?"] * (count - len(cells))
    cells += [size(cache["bytes_per_token"]), f"{cache['bytes_per_token'] / first:.3g}" if first else ""]
    cells += [size(cache["bytes_at_context"]), f"{cache['context']:,}"] if cache["context"] else ["", "no limit"]
    if "measured" in cache:
        cells += [size(cache["measured"]["bytes"]), size(cache["measured"]["formula"])]
    if fits := cache.get("fits"):
        longest = "no limit" if fits["longest"] is None else f"{fits['longest']:,}"
        cells += ["-", "-"] if "impossible" in fits else [f"{fits['batch']:,}", longest]
    return cells


def _decode(models: list[Results]) -> Table:
    header = ("model", "batch", "context", "prefill", "per token", "min - max", "tokens/s", "x baseline", "KV share",
              "of bandwidth")  # fmt: skip
    rows = []
    for points in zip(*(m["decode"]["points"] for m in models), strict=True):
        for model, point in zip(models, points, strict=True):
            rows.append(
                (
                    model["name"], f"{point['batch']}", f"{point['context']:,}",
                    f"{point['prefill_seconds'] * 1e3:,.1f} ms",
                    f"{point['seconds_per_token'] * 1e3:.2f} ms",
                    f"{point['fastest'] * 1e3:.2f} - {point['slowest'] * 1e3:.2f}",
                    f"{point['tokens_per_second']:,.0f}",
                    f"{points[0]['seconds_per_token'] / point['seconds_per_token']:.2f}",
                    f"{point['cache_bytes'] / point['bytes_per_step']:.0%}",
                    f"{point['roofline_seconds'] / point['seconds_per_token']:.0%}",
                )
            )  # fmt: skip
    decode, first = models[0]["decode"], models[0]["decode"]["points"][0]
    bandwidth = first["bytes_per_step"] / first["roofline_seconds"]
    note = (
        f"median of {decode['repeats']} interleaved repeats of {decode['steps']} tokens, {first['attention']}, "
        f"{first['dtype']}; KV share: of the bytes that one step must read (the rest are weights); of bandwidth: "
        f"the time that reading them takes at the measured {bandwidth / 1e9:.1f} GB/s against the time taken"
    )
    return Table("Decoding", header, tuple(rows), note)


def _tasks(models: list[Results]) -> Table:
    header = ("task", "metric", *(model["name"] for model in models))
    rows = []
    for task, found in models[0]["tasks"].items():
        for metric in found["metrics"]:
            if "_stderr," not in metric:
                cells = (_metric(m["tasks"][task]["metrics"], metric) for m in models)
                rows.append((task, metric.removesuffix(",none"), *cells))
    return Table("Tasks (lm-evaluation-harness)", header, tuple(rows))


def _metric(metrics: Results, name: str) -> str:
    value, error = metrics[name], metrics.get(name.replace(",", "_stderr,"))
    shown = number(value) if isinstance(value, float | int) else str(value)
    return f"{shown} ± {error:.2g}" if isinstance(error, float) and math.isfinite(error) else shown


def _attention(models: list[Results]) -> Table:
    compared = [m for m in models if m.get("attention_error")]
    header = ("module", *(f"{m['name']} {kind}" for m in compared for kind in ("own", "accumulated")))
    rows = [
        (lines[0]["module"], *(f"{line[kind]:.4f}" for line in lines for kind in ("own", "accumulated")))
        for lines in zip(*(m["attention_error"] for m in compared), strict=True)
    ]
    note = "relative error of each attention output; own: all read the baseline's input; accumulated: each its own"
    return Table("Attention outputs", header, tuple(rows), note)


def _context(models: list[Results]) -> Table:
    header = ("tokens read before", *(m["name"] for m in models), "tokens scored")
    rows = [
        (f"{bins[0]['from']:,} - {bins[0]['to']:,}", *(f"{b['nats']:.4f}" for b in bins), f"{bins[0]['tokens']:,}")
        for bins in zip(*(m["by_context"] for m in models), strict=True)
    ]
    return Table("Nats per token by position", header, tuple(rows))


def number(value: float | None) -> str:
    """Five digits: more are not the same in every batch size."""
    if value is None:
        return ""
    if not 1 <= value < 1e5:
        return f"{value:.4g}"
    return f"{value:,.{4 - int(math.log10(value))}f}"


def as_json(results: Results, indent: int | None = None) -> str:
    """JSON that any reader takes: NaN becomes null, infinity a string."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None if math.isnan(value) else str(value)
        return value

    return json.dumps(plain(results), indent=indent, allow_nan=False)


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
    taken = [name for name in _FILES if (directory / name).exists()]
    if taken and not _is_report(directory):
        raise RefusedError(f"{directory} holds {listing(taken)} of something else; give another directory")


def _is_report(directory: Path) -> bool:
    try:
        found = json.loads((directory / _FILES[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"schema", "command", "models"} <= found.keys()


_FILES = ("results.json", "report.md", *(f"{name}.{suffix}" for name in PICTURES for suffix in ("svg", "png")))


def no_pictures() -> str:
    """Why a report has no pictures; nothing where it has."""
    if find_spec("matplotlib"):
        return ""
    return "no pictures, for which matplotlib is missing: pip install 'gqa-convert[report]'"


def write_report(results: Results, directory: Path) -> list[str]:
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


def _make_report(results: Results, directory: Path) -> list[str]:
    pictures: list[tuple[str, str]] = []
    if not (remark := no_pictures()):
        from gqa.eval import plots

        pictures = plots.draw(results, directory)
    names = ", ".join(model["name"] for model in results["models"])
    parts = [f"# {_escaped(names)}", "", f"    {one_line(results['command'])}", ""]
    for table in tables(results, every=True):
        parts += [table.markdown(), ""]
    parts += [f"![{title}]({name}.svg)\n" for name, title in pictures]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts += [f"{remark}\n"] if remark else []
    parts += [f"{results['created']}, {results['device']}, {results['threads']} threads; {versions}."]
    write_text(directory / "report.md", "\n".join(parts) + "\n")
    write_text(directory / "results.json", as_json(results, indent=2) + "\n")
    return [name for name in _FILES if (directory / name).exists()]
