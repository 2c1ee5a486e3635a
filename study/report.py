"""The report of a study from its rows: the recommendation (the smallest KV cache within a bound of
the loss), tables and pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gqa.checkpoint.write import system_errors
from gqa.convert.summary import size
from gqa.convert.verdict import Level, Loss
from gqa.core.errors import RefusedError, one_line
from gqa.core.escape import shell_line
from gqa.eval.page import Column, Table, Verdict, format_number, table, write_page
from gqa.eval.report import describe_environment, describe_text, main_kind
from gqa.study.options import ADVICE, BASE, UNMERGED, Cell
from gqa.study.rows import FILES, Row, read_rows

_LONGEST_LINE = 4000
_CELL: list[Column] = [
    ("method", lambda r: BASE if r["method"] == UNMERGED else r["method"]),
    ("KV heads", lambda r: str(r["groups"])),
    ("alpha", lambda r: f"{r['alpha']:g}"),
]
_CACHE: Column = ("KV bytes/token", lambda r: f"{r['kv_bytes_per_token']:,.0f}")
_COLUMNS: list[Column] = [
    *_CELL,
    ("error", lambda r: r["error"] or ""),
    ("verdict", lambda r: r["level"] or ""),
    ("trains", lambda r: r["train"] or ""),
    ("train tokens", lambda r: f"{r['train_tokens']:,}"),
    ("nats/token", lambda r: f"{r['loss']:.4f}"),
    ("above base", lambda r: f"{r['loss_increase']:+.4f}"),
    (
        "95% of the ratio",
        lambda r: f"{r['perplexity_ratio_low']:.4g} - {r['perplexity_ratio_high']:.4g}",
    ),
    ("perplexity", lambda r: format_number(r["perplexity"])),
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


def measured(rows: Sequence[Row]) -> list[Row]:
    """Rows with a finite loss."""
    return [row for row in rows if not row["error"] and row["loss"] is not None]


loss, cache_bytes = itemgetter("loss"), itemgetter("kv_bytes_per_token")  # of a row


@dataclass(frozen=True)
class Line:
    """A line of the recommendation; `level` is that of the combination that it describes."""

    title: str
    text: str
    level: Level | None = None

    def __str__(self) -> str:
        level = f"{self.level}: " if self.level else ""
        return one_line(f"{self.title:12}{level}{self.text}", _LONGEST_LINE)


def recommend(rows: Sequence[Row], max_loss_increase: float) -> tuple[Row | None, list[Line]]:
    """The row with the smallest KV cache within so many nats per token above the base model; then
    with the fewest training tokens, then with the least loss. None if there is none smaller than
    the base model. And why.
    """
    base = rows[0]
    smaller = [row for row in measured(rows) if cache_bytes(row) < cache_bytes(base)]
    within = [row for row in smaller if row["loss_increase"] <= max_loss_increase]
    limit = f"within {max_loss_increase:g} nats per token of the base model"
    if not smaller:
        return None, [
            Line("recommended", "nothing: no KV cache smaller than the base model's was measured")
        ]
    if not within:
        return None, [
            Line("recommended", f"nothing: none of {len(smaller)} combinations is {limit}"),
            _describe("closest", min(smaller, key=loss), base),
            Line(
                "advice",
                "raise --max-loss-increase, or add longer training or other methods to the study",
            ),
        ]

    row = min(within, key=lambda row: (cache_bytes(row), row["train_tokens"], loss(row)))
    lines = [_describe("recommended", row, base)]
    lines.append(Line("why", f"{len(within)} of {len(smaller)} combinations are {limit}"))
    if below := [other for other in smaller if cache_bytes(other) < cache_bytes(row)]:
        lines.append(_describe("smaller", min(below, key=loss), base))
    best = min((other for other in within if cache_bytes(other) == cache_bytes(row)), key=loss)
    if loss(best) < loss(row):
        lines.append(_describe("better", best, base))
    lines += [Line("command", command) for command in row.get("commands", [])]
    return row, lines


def loss_of_row(row: Row, base: Row) -> Loss:
    """The quality that a row's model has lost against the base model, as far as it was measured."""
    recall = {
        name.removeprefix("recall_") for name in row if name in ("recall_text", "recall_samples")
    }
    column = f"recall_{main_kind(recall)}"
    recall_loss = base[column] - row[column] if column in row and column in base else None
    return Loss(row.get("perplexity_ratio"), row.get("perplexity_ratio_high"), recall_loss)


def _describe(title: str, row: Row, base: Row) -> Line:
    """A row, its quality and its cache, in words."""
    trained = f"alpha {row['alpha']:g}" if row["alpha"] else "untrained"
    loses = (
        f"{row['loss_increase']:+.4f} nats per token (perplexity x{row['perplexity_ratio']:.3g})"
    )
    recall = f", recall {row['recall_text']:.1%}" if "recall_text" in row else ""
    cache = (
        f"KV cache {size(cache_bytes(row))} per token ({cache_bytes(row) / cache_bytes(base):.0%})"
    )
    text = (
        f"{row['method']}, {row['groups']} of {base['groups']} KV heads, {trained}: "
        f"{loses}{recall}, {cache}"
    )
    return Line(title, text, loss_of_row(row, base).level)


def short_table(rows: Sequence[Row]) -> Table:
    """Losses by method and number of heads, with a column for each alpha, for the terminal."""
    note = "nats per token on held-out text"
    if failed := sum(bool(row["error"]) for row in rows):
        note += f"; {failed} of {len(rows) - 1} combinations failed (see the report)"
    records: dict[Any, Row] = {}
    for row in measured(rows):
        records.setdefault((row["groups"], row["method"]), row | {"at": {}})["at"][row["alpha"]] = (
            loss(row)
        )
    columns: list[Column] = [*_CELL[:2], _CACHE]
    for alpha in sorted({row["alpha"] for row in rows}):
        columns.append((f"alpha {alpha:g}", lambda r, alpha=alpha: f"{r['at'][alpha]:.4f}"))  # type: ignore[misc]
    return table(f"Study of {rows[0]['options']['model']}", columns, [*records.values()], note)


def _cells(rows: Sequence[Row]) -> Table:
    """A line for each cell."""
    note = (
        f"base model: {loss(rows[0]):.4f} nats per token; {describe_text(rows[0]['text'])}, held "
        "out"
    )
    if any(row.get("kl") is not None for row in rows):
        note += (
            "; KL from the base model in nats; accepted: share of drafted tokens that the base "
            "model accepts"
        )
    if refused := rows[0].get("recall_refused"):
        note += f"; recall was not measured: {refused}"
    levels = [
        {"level": None if row is rows[0] or row["error"] else loss_of_row(row, rows[0]).level}
        for row in rows
    ]
    records = [row | level for row, level in zip(rows, levels, strict=True)]
    return table("All combinations", _COLUMNS, records, note)


def write_study_report(
    directory: Path, max_loss_increase: float
) -> tuple[list[Row], str, list[str]]:
    """Write report.html and, with matplotlib, pictures beside the rows; return the rows, the
    recommendation with the commands that follow it, and the names of all files.

    Raises RefusedError where there are no rows, OutputError.
    """
    rows = [*read_rows(directory).values()]
    if not rows or not Cell.of(rows[0]).is_base_model or rows[0]["error"]:
        raise RefusedError(f"{directory} has no measured study; pass MODEL to start one")
    _, lines = recommend(rows, max_loss_increase)
    errors = system_errors(f"{directory} cannot be written", ADVICE)
    with errors, TemporaryDirectory(prefix=".report-", dir=directory) as scratch:
        aside = Path(scratch)
        pictures: list[tuple[str, str]] = []
        remark = "No pictures: they need matplotlib (pip install 'gqa[report]')."
        if find_spec("matplotlib"):
            from gqa.study.plots import draw_study

            remark = ""
            pictures = draw_study(measured(rows), aside)
        environments = sorted(
            (row["environment"] for row in rows), key=lambda one: str(one["created"])
        )
        runs = [shell_line(["gqa-ablate", *one["argv"]]) for one in environments if one["argv"]]
        write_page(
            aside,
            title=f"{rows[0]['options']['model']}: methods, KV heads and training",
            verdicts=[
                Verdict(f"{line.title.capitalize()}: {line.text}", line.level) for line in lines
            ],
            lead=f"{len(rows) - 1} combinations and the base model.",
            pictures=pictures,
            tables=[short_table(rows), _cells(rows)],
            commands=[*dict.fromkeys(runs)],
            foot=" ".join([*filter(None, [remark]), f"{describe_environment(environments[-1])}."]),
        )
        for path in aside.iterdir():
            path.replace(directory / path.name)
    recommendation = "\n".join(map(str, lines))
    return rows, recommendation, [name for name in FILES if (directory / name).exists()]
