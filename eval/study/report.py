"""The report of a study: tables, pictures and the recommendation, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas

from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.provenance import command_line
from gqa.eval.page import PAGE, Page, made_aside, no_pictures
from gqa.eval.report import measured_with, texts_beside, verdict, what_is_scored
from gqa.eval.study.directory import ROWS, Row, Rows, writing
from gqa.eval.study.study import Cell
from gqa.eval.study.tradeoff import BASE, Bounds, Recommendation, name, points, recommend
from gqa.eval.tables import Column, Table, not_measured, number, table

CELL_COLUMNS: list[Column] = [
    ("method", lambda r: r["method"]),
    ("KV heads", lambda r: f"{r['groups']:.3g}"),
    ("seed", lambda r: str(r["seed"])),
    ("trains", lambda r: r["train"]),
    ("teacher", lambda r: r["teacher"]),
    ("alpha", lambda r: f"{r['alpha']:g}"),
    ("cache bits", lambda r: f"{r['bits']:d}"),
]
_COLUMNS = [
    *CELL_COLUMNS,
    ("train tokens", lambda r: f"{r['train_tokens']:,}"),
    ("nats/token", lambda r: r["loss"] if r["error"] else f"{r['loss']:.4f}"),
    ("above base", lambda r: f"{r['loss_increase']:+.4f}"),
    ("95 % of the ratio", lambda r: f"{r['perplexity_ratio_low']:.4g} - {r['perplexity_ratio_high']:.4g}"),
    ("perplexity", lambda r: number(r["perplexity"])),
    ("bits/byte", lambda r: f"{r['bits_per_byte']:.4f}"),
    ("KL", lambda r: f"{r['kl']:.4f}"),
    ("top-1 agreement", lambda r: f"{r['top1_agreement']:.1%}"),
    ("accepted", lambda r: f"{r['acceptance']:.1%}"),
    ("text recalled", lambda r: f"{r['recall_text']:.1%}"),
    ("samples", lambda r: f"{r['recall_samples']:.1%}"),
    ("random", lambda r: f"{r['recall_random']:.1%}"),
    ("look-ups", lambda r: f"{r['recall_look_up']:.1%}"),
    ("passkeys", lambda r: f"{r['recall_passkey']:.1%}"),
    ("greedy tokens", lambda r: f"{r['greedy_tokens']:.1f}"),
    ("KV bytes/token", lambda r: f"{r['kv_bytes_per_token']:,.0f}"),
    ("tokens/s", lambda r: f"{r['decode_tokens_per_second']:,.0f}"),
    ("x base", lambda r: f"{r['decode_ratio']:.2f}"),
    ("s converting", lambda r: f"{r['seconds_converting']:,.1f}"),
    ("s training", lambda r: f"{r['seconds_training']:,.1f}"),
    ("s measuring", lambda r: f"{r['seconds_evaluating']:,.1f}"),
]


@dataclass(frozen=True)
class Results:
    """The rows of a directory."""

    directory: Path
    rows: list[Row]

    @cached_property
    def points(self) -> pandas.DataFrame:
        return points(self.rows)

    @cached_property
    def source(self) -> Row:
        """The row of the base model."""
        return next(row for row in self.rows if is_base(row))

    @property
    def name(self) -> str:
        return str(self.rows[0]["options"]["model"])

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row["error"]]


def is_base(row: Row) -> bool:
    """Whether a row is the base model's with an unquantised cache."""
    return Cell.of(row).is_source and not row["bits"] and not row["error"]


def open_results(directory: Path) -> Results:
    """Read a study. Raises RefusedError if there is none, or its base model is not measured."""
    rows = list(Rows(directory))
    if not any(map(is_base, rows)):
        raise RefusedError(f"{directory} holds no study of which anything is measured: name a MODEL to make one")
    return Results(directory, rows)


def _tables(results: Results) -> Iterator[Table]:
    """Tables of the report, the short one first."""
    yield short_table(results)
    yield _recall(results)
    if failed := results.failed:
        columns = [*CELL_COLUMNS, ("why", lambda r: r["error"])]
        yield table("Cells that failed", columns, failed, "the same command tries them again", filled=True)
    yield _cells(results)


def short_table(results: Results) -> Table:
    """Losses by method and number of heads, with a column for each alpha, for the terminal."""
    note = "nats per token on held-out text, means over seeds ± half of their range"
    if failed := len(results.failed):
        note += f"; {failed} of {len(results.rows)} cells failed, as the report says"
    columns = [column for column in _COLUMNS if column[0] in ("KV bytes/token", "tokens/s")]
    return _by_alpha(results, f"Study of {results.name}", _loss, columns, note)


def _recall(results: Results) -> Table:
    """Recall of second copies, laid out as the short table."""
    title, source = "Recall: second copies of the text", results.source
    if "recall_text" not in source:
        return not_measured(title, source.get("recall_refused", "this study has no numbers of it"))
    note = (
        f"share of tokens right at all distances within {source['text']['context']:,} tokens, means over seeds; where "
        f"they stand first the base model gets {source['recall_first_reading']:.1%} right"
    )
    return _by_alpha(results, title, lambda point: f"{point.recall_text:.1%}", [], note)


def _by_alpha(
    results: Results, title: str, format_point: Callable[[Any], str], extra: list[Column], note: str
) -> Table:  # fmt: skip
    points = results.points
    records = [
        group.iloc[0].dropna().to_dict() | {"at": {point.alpha: format_point(point) for point in group.itertuples()}}
        for _, group in points.groupby(["groups", "series"], sort=False)
    ]
    columns: list[Column] = [("method", lambda r: r["series"]), CELL_COLUMNS[1], *extra]
    for alpha in sorted(points.alpha.unique()):
        columns.append((f"alpha {alpha:g}", lambda r, alpha=alpha: r["at"][alpha]))  # type: ignore[misc]
    return table(title, columns, records, note, filled=True)


def _loss(point: Any) -> str:
    return f"{point.loss:.4f}" + (f" ± {(point.highest - point.lowest) / 2:.3f}" if point.seeds > 1 else "")


def _cells(results: Results) -> Table:
    """One line a cell."""
    source = results.source
    note = f"base model: {source['loss']:.4f} nats per token; {what_is_scored(source['text'])}, held out"
    if any(row.get("kl") is not None for row in results.rows):
        note += "; KL from the base model in nats; accepted: share of tokens drafted for the base model"
    if "decode_tokens_before" in source:
        batch = source["options"]["decode_batch"]
        note += f"; tokens/s: decoding {batch} sequences after {source['decode_tokens_before']:,} tokens"
    rows = [row | {"loss": "failed"} if row["error"] else row for row in results.rows]
    return table("Cells", _COLUMNS, rows, note, filled=True)


def write_study_report(results: Results, bounds: Bounds) -> list[str]:
    """Write report.html and, with matplotlib, pictures beside the rows; returns all names. Raises OutputError."""
    with writing(results.directory), made_aside(results.directory) as aside:
        _make(results, aside, bounds)
        return [*sorted((path.name for path in aside.iterdir()), key=lambda name: (name != PAGE, name)), ROWS]


def _make(results: Results, directory: Path, bounds: Bounds) -> None:
    pictures: list[tuple[str, str]] = []
    if not (remark := no_pictures()):
        from gqa.eval.study.plots import draw_study

        pictures = draw_study(results.points, results.source, directory)
    advised, rows = recommend(results.points, results.source, bounds), results.rows
    environments = sorted((row["environment"] for row in rows), key=lambda one: str(one["created"]))
    commands = [one_line(command_line("gqa-ablate", one["argv"]), 4000) for one in environments if one["argv"]]
    names = ("seconds_converting", "seconds_training", "seconds_evaluating")
    seconds = sum(row.get(name) or 0 for row in rows for name in names)
    Page(
        title=f"{results.name}: methods, groups and training",
        verdicts=_verdicts(results, advised),
        lead=f"{len(rows)} cells, measured in {seconds:,.0f} seconds.",
        pictures=pictures,
        tables=list(_tables(results)),
        samples=_texts(results),
        commands=list(dict.fromkeys(commands)),
        foot=" ".join([*filter(None, [remark]), f"{measured_with(environments[-1])}."]),
    ).write(directory)


def _texts(results: Results) -> list[Any]:
    """Greedy texts of the base model and of the best result for each smaller number of heads."""
    source, points = results.source, results.points
    if "samples" not in source or "samples" not in points.columns:
        return []
    converted = points[(points.groups < source["groups"]) & points.samples.notna()]
    best = converted.sort_values("loss").drop_duplicates("groups")
    models = [{"name": name(point), "samples": point.samples} for point in best.itertuples()]
    return list(texts_beside([{"name": BASE, **source}, *models]))


def _verdicts(results: Results, advised: Recommendation) -> list[str]:
    """The recommendation with its costs, and the reasons."""
    chosen, source = advised.chosen, results.source
    lines = [f"{label}: {line}." if label else f"{line}." for label, line in advised.lines]
    lines = [line[:1].upper() + line[1:] for line in lines]
    if chosen is None:
        return lines

    def record(row: Any, groups: float, **parts: Any) -> Row:
        recalls = {"recall": row["recall_by_distance"]} if "recall_by_distance" in source else {}
        cache = {"bytes_per_token": row["kv_bytes_per_token"]}
        return {"heads": {"kv": f"{groups:.3g}"}, "kv_cache": cache, **recalls, **parts}

    ratio = {name: chosen[f"perplexity_{name}"] for name in ("ratio", "ratio_low", "ratio_high")}
    ratio = {name: value for name, value in ratio.items() if pandas.notna(value)}  # one window has no bounds
    costs = verdict(record(source, source["groups"]), record(chosen, chosen.groups, quality={}, against_baseline=ratio))
    trained = f"trained on {100 * chosen.alpha:g} % of the text" if chosen.alpha else "untrained"
    return [f"Recommended: {chosen.series}, {trained}. {costs}.", *lines[1:]]
