"""The report of a study from its rows: the recommendation, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gqa.checkpoint.write import system_errors
from gqa.core.errors import RefusedError
from gqa.core.escape import shell_line
from gqa.eval.metrics import METRICS
from gqa.eval.page import Column, Table, Verdict, table, write_page
from gqa.eval.report import describe_environment, describe_text
from gqa.study.columns import CACHE, COLUMNS, KV_HEADS, METHOD
from gqa.study.options import ADVICE, Cell
from gqa.study.recommendation import loss, loss_of_row, measured, recommend
from gqa.study.rows import FILES, ROWS, Row, read_rows

_NO_PICTURES = "No pictures: they need matplotlib (pip install matplotlib)."


def short_table(rows: Sequence[Row]) -> Table:
    """Losses by method and number of heads, with a column for each alpha, for the terminal."""
    note = "nats per token on validation text"
    failed = sum(bool(row["error"]) for row in rows)
    if failed:
        note += f"; {failed} of {len(rows) - 1} combinations failed (see the report)"

    # A line for all cells of a conversion: the first of them, with the losses of all by alpha.
    lines: dict[tuple[int, str], Row] = {}
    for row in measured(rows):
        conversion = (row["groups"], row["method"])
        line = lines.setdefault(conversion, {**row, "losses": {}})
        line["losses"][row["alpha"]] = loss(row)

    alphas = sorted({row["alpha"] for row in rows})
    columns = [METHOD, KV_HEADS, CACHE, *map(_loss_column, alphas)]
    return table(f"Study of {rows[0]['options']['model']}", columns, [*lines.values()], note)


def _loss_column(alpha: float) -> Column:
    """The losses of cells that are trained on this share of the data."""
    return Column(f"alpha {alpha:g}", lambda line: f"{line['losses'][alpha]:.4f}")


def _all_cells(rows: Sequence[Row]) -> Table:
    """A line for each cell."""
    base = rows[0]
    notes = [
        f"base model: {loss(base):.4f} nats per token; {describe_text(base['text'])}, held out",
        *_notes_of_metrics(rows),
    ]
    if "recall_refused" in base:
        reason, _, _ = base["recall_refused"].partition("; ")  # without what to do in gqa-eval
        notes.append(f"recall was not measured: {reason}")

    records = []
    for row in rows:
        level = None
        if row is not base and not row["error"]:
            level = loss_of_row(row, base).level
        records.append({**row, "level": level})
    return table("All combinations", COLUMNS, records, "; ".join(notes))


def _notes_of_metrics(rows: Sequence[Row]) -> list[str]:
    """What is said of the metrics that any row has."""
    notes = list[str]()
    for metric in METRICS:
        keys = [number.key for number in metric.row]
        if metric.study_note and any(_has_any(row, keys) for row in rows):
            notes.append(metric.study_note)
    return notes


def _has_any(row: Row, keys: Sequence[str]) -> bool:
    return any(row.get(key) is not None for key in keys)


def write_study_report(
    directory: Path, max_loss_increase: float
) -> tuple[list[Row], str, list[str]]:
    """Write report.html and, with matplotlib, pictures next to the rows; pictures of an earlier
    report are removed.

    Returns:
        The rows, the recommendation with the commands that follow it, and the names of the files of
        the study: what was written, and the rows.

    Raises:
        RefusedError: There are no rows.
        OutputError: The directory cannot be written.
    """
    rows = [*read_rows(directory).values()]
    if not rows or not Cell.of(rows[0]).is_base_model or rows[0]["error"]:
        raise RefusedError(f"{directory} has no measured study; pass MODEL to start one")

    _, lines = recommend(rows, max_loss_increase)
    verdicts = [Verdict(f"{line.title.capitalize()}: {line.text}", line.level) for line in lines]
    errors = system_errors(f"{directory} cannot be written", ADVICE)
    with errors, TemporaryDirectory(prefix=".report-", dir=directory) as scratch:
        _write_files(rows, verdicts, Path(scratch))
        written = {path.name for path in Path(scratch).iterdir()}
        for name in written:
            Path(scratch, name).replace(directory / name)
        earlier = {*FILES} - {ROWS} - written
        for name in earlier:
            (directory / name).unlink(missing_ok=True)

    recommendation = "\n".join(map(str, lines))
    return rows, recommendation, [name for name in FILES if name in {*written, ROWS}]


def _write_files(rows: Sequence[Row], verdicts: Sequence[Verdict], directory: Path) -> None:
    """Write report.html and, with matplotlib, the pictures in it."""
    remarks = []
    pictures: list[tuple[str, str]] = []
    if find_spec("matplotlib"):
        from gqa.study.plots import draw_study

        pictures = draw_study(measured(rows), directory)
    else:
        remarks.append(_NO_PICTURES)

    runs = _runs(rows)
    remarks.append(f"{describe_environment(runs[-1])}.")
    commands = [shell_line(["gqa-ablate", *run["argv"]]) for run in runs if run["argv"]]
    write_page(
        directory,
        title=f"{rows[0]['options']['model']}: methods, KV heads and training",
        verdicts=verdicts,
        lead=f"{len(rows) - 1} combinations and the base model.",
        pictures=pictures,
        tables=[short_table(rows), _all_cells(rows)],
        commands=[*dict.fromkeys(commands)],
        foot=" ".join(remarks),
    )


def _runs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The environments of the runs that measured the rows, by time: one for each row."""
    return sorted((row["environment"] for row in rows), key=lambda run: str(run["created"]))
