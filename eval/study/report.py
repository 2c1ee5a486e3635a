"""The report of a study: the recommendation, tables and pictures, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.provenance import command_line
from gqa.eval.page import PAGE, Page, made_aside, no_pictures
from gqa.eval.report import measured_with, what_is_scored
from gqa.eval.study.directory import ROWS, Row, read_rows, writing
from gqa.eval.study.options import UNMERGED, Cell
from gqa.eval.study.recommendation import BASE, loss, measured, recommend
from gqa.eval.tables import Column, Table, number, table

CELL_COLUMNS: list[Column] = [
    ("method", lambda r: BASE if r["method"] == UNMERGED else r["method"]),
    ("KV heads", lambda r: str(r["groups"])),
    ("alpha", lambda r: f"{r['alpha']:g}"),
]
_CACHE: Column = ("KV bytes/token", lambda r: f"{r['kv_bytes_per_token']:,.0f}")
_COLUMNS: list[Column] = [
    *CELL_COLUMNS,
    ("error", lambda r: r["error"] or ""),
    ("trains", lambda r: r["train"] or ""),
    ("train tokens", lambda r: f"{r['train_tokens']:,}"),
    ("nats/token", lambda r: f"{r['loss']:.4f}"),
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
    _CACHE,
    ("s converting", lambda r: f"{r['seconds_converting']:,.1f}"),
    ("s training", lambda r: f"{r['seconds_training']:,.1f}"),
    ("s measuring", lambda r: f"{r['seconds_evaluating']:,.1f}"),
]


def open_rows(directory: Path) -> list[Row]:
    """The rows of a study, the base model's first. Raises RefusedError if it is missing or not measured."""
    rows = [*read_rows(directory).values()]
    if not rows or not Cell.of(rows[0]).is_base_model or rows[0]["error"]:
        raise RefusedError(f"{directory} has no measured study; pass MODEL to start one")
    return rows


def short_table(rows: Sequence[Row]) -> Table:
    """Losses by method and number of heads, with a column for each alpha, for the terminal."""
    note = "nats per token on held-out text"
    if failed := sum(bool(row["error"]) for row in rows):
        note += f"; {failed} of {len(rows)} cells failed, as the report says"
    return _by_alpha(rows, f"Study of {rows[0]['options']['model']}", lambda row: f"{loss(row):.4f}", note)


def _recall(rows: Sequence[Row]) -> Table:
    """Recall of second copies, laid out as the short table."""
    note = f"share of tokens right at all distances within {rows[0]['text']['context']:,} tokens"
    return _by_alpha(rows, "Recall: second copies of the text", lambda row: f"{row['recall_text']:.1%}", note)


def _by_alpha(rows: Sequence[Row], title: str, format_row: Callable[[Row], str], note: str) -> Table:
    records: dict[Any, Row] = {}
    for row in measured(rows):
        records.setdefault((row["groups"], row["method"]), row | {"at": {}})["at"][row["alpha"]] = format_row(row)
    columns: list[Column] = [*CELL_COLUMNS[:2], _CACHE]
    for alpha in sorted({row["alpha"] for row in rows}):
        columns.append((f"alpha {alpha:g}", lambda r, alpha=alpha: r["at"][alpha]))  # type: ignore[misc]
    return table(title, columns, [*records.values()], note)


def _cells(rows: Sequence[Row]) -> Table:
    """One line a cell."""
    note = f"base model: {loss(rows[0]):.4f} nats per token; {what_is_scored(rows[0]['text'])}, held out"
    if any(row.get("kl") is not None for row in rows):
        note += "; KL from the base model in nats; accepted: share of tokens drafted for the base model"
    if refused := rows[0].get("recall_refused"):
        note += f"; recall is not measured: {refused}"
    return table("Cells", _COLUMNS, rows, note)


def write_study_report(directory: Path, max_loss_increase: float) -> tuple[list[Row], list[str]]:
    """Write report.html and, with matplotlib, pictures beside the rows; return the rows, and the names of all files.

    Raises RefusedError where there are no rows, OutputError.
    """
    rows = open_rows(directory)
    with writing(directory), made_aside(directory) as aside:
        pictures: list[tuple[str, str]] = []
        if not (remark := no_pictures()):
            from gqa.eval.study.plots import draw_study

            pictures = draw_study(rows, aside)
        environments = sorted((row["environment"] for row in rows), key=lambda one: str(one["created"]))
        commands = [one_line(command_line("gqa-ablate", one["argv"]), 4000) for one in environments if one["argv"]]
        names = ("seconds_converting", "seconds_training", "seconds_evaluating")
        seconds = sum(row.get(name) or 0 for row in rows for name in names)
        _, recommendation = recommend(rows, max_loss_increase)
        Page(
            title=f"{rows[0]['options']['model']}: methods, groups and training",
            verdicts=[f"{line[:12].strip().capitalize()}: {line[12:]}." for line in recommendation.splitlines()],
            lead=f"{len(rows)} cells, measured in {seconds:,.0f} seconds.",
            pictures=pictures,
            tables=[short_table(rows), *([_recall(rows)] if "recall_text" in rows[0] else []), _cells(rows)],
            commands=list(dict.fromkeys(commands)),
            foot=" ".join([*filter(None, [remark]), f"{measured_with(environments[-1])}."]),
        ).write(aside)
        return rows, [*sorted((path.name for path in aside.iterdir()), key=lambda name: (name != PAGE, name)), ROWS]
