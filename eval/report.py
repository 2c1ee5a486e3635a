"""Results as tables: in a terminal, and in report.md beside results.json and the plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa.convert.summary import size
from gqa.convert.writer import write_text

Results = dict[str, Any]


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
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rule = "|" + "---|" + "---:|" * (len(self.header) - 1)
        parts = [f"## {self.title}", "", line(self.header), rule, *(line(row) for row in self.rows)]
        return "\n".join([*parts, *(["", self.note] if self.note else [])])


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
    return Table(f"Quality on {text['data']}", header, tuple(rows), _protocol(text))


def _protocol(text: Results) -> str:
    stride = f", stride {text['stride']:,}" if text.get("stride") else ""
    return (
        f"{text['protocol']} windows of {text['context']:,} tokens{stride}: {text['tokens']:,} tokens scored, "
        f"{text['documents']:,} documents, {text['bytes']:,} bytes"
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
    if any("measured" in m.get("kv_cache", {}) for m in models):
        header += ("measured", "formula")
    if memory:
        header += (f"batch in {size(memory['bytes'])}", "longest")
    first = models[0].get("kv_cache", {}).get("bytes_per_token")
    rows = [tuple(_cache_cells(model, first, len(header))) for model in models]
    remarks = dict.fromkeys(m["kv_cache"]["remark"] for m in models if m.get("kv_cache", {}).get("remark"))
    if memory:
        ranks = f" on each of {memory['ranks']} ranks" if memory["ranks"] > 1 else ""
        remarks[
            f"{size(memory['bytes'])}{ranks} hold weights and KV cache (activations not counted): sequences of "
            f"{memory['context']:,} tokens, and the longest single sequence"
        ] = None
    return Table("Memory", header, tuple(rows), "; ".join(remarks))


def _cache_cells(model: Results, first: int | None, count: int) -> list[str]:
    cells = [model["name"], _heads(model), size(model["weight_bytes"])]
    cache = model.get("kv_cache")
    if not cache:
        return cells + ["?"] * (count - len(cells))
    cells += [size(cache["bytes_per_token"]), f"{cache['bytes_per_token'] / first:.3g}" if first else ""]
    cells += [size(cache["bytes_at_context"]), f"{cache['context']:,}"] if cache["context"] else ["", "no limit"]
    if "measured" in cache:
        cells += [size(cache["measured"]["bytes"]), size(cache["measured"]["formula"])]
    if "fits" in cache:
        longest = cache["fits"]["longest"]
        cells += [f"{cache['fits']['batch']:,}", "no limit" if longest is None else f"{longest:,}"]
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
    names = list(models[0]["tasks"])
    header = ("task", "metric", *(model["name"] for model in models))
    rows = []
    for name in names:
        for metric, value in models[0]["tasks"][name].items():
            if "_stderr" in metric or not isinstance(value, float | int):
                continue
            cells = [m["tasks"].get(name, {}).get(metric) for m in models]
            rows.append((name, metric.removesuffix(",none"), *(f"{cell:.4f}" for cell in cells)))
    return Table("Tasks (lm-evaluation-harness)", header, tuple(rows))


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
    """Four decimals for perplexities near those of good models, fewer for larger ones."""
    if value is None:
        return ""
    return f"{value:.4f}" if value < 100 else f"{value:,.1f}" if value < 1e6 else f"{value:.3g}"


def write_report(results: Results, directory: Path) -> list[str]:
    """results.json, report.md and, where matplotlib is installed, plots; returns the names of what was written."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "results.json", json.dumps(results, indent=2) + "\n")
    pictures = []
    try:
        from gqa.eval import plots
    except ModuleNotFoundError:  # matplotlib is an extra
        pass
    else:
        pictures = plots.draw(results, directory)
    parts = [f"# {results['models'][0]['name']} and its conversions", "", f"`{results['command']}`", ""]
    for table in tables(results, every=True):
        parts += [table.markdown(), ""]
    parts += [f"![{title}]({name}.svg)\n" for name, title in pictures]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts += [f"{results['created']}, {results['device']}, {results['threads']} threads; {versions}."]
    write_text(directory / "report.md", "\n".join(parts) + "\n")
    return ["results.json", "report.md", *(f"{name}.svg" for name, _ in pictures)]
