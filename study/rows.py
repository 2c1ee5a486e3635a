"""The rows of a study: one per cell, appended to results.jsonl as soon as the cell is measured.

`pandas.read_json("results.jsonl", lines=True)` reads it. A failed cell is measured again; its
latest row counts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import NoneType
from typing import Any

from gqa.checkpoint.write import finite, system_errors
from gqa.core.errors import CorruptError, RefusedError
from gqa.core.json_text import parse_json
from gqa.eval.page import PAGE
from gqa.study.options import ADVICE, ELSEWHERE, Cell

Row = dict[str, Any]

ROWS = "results.jsonl"
FILES = (PAGE, "alphas.svg", "tradeoff.svg", ROWS)
# What a line must have to be a row, and the types of their values
_REQUIRED: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "groups": (int,),
    "alpha": (int, float),
    "error": (str, NoneType),
    "options": (dict,),
}


def read_rows(directory: Path) -> dict[Cell, Row]:
    """The latest row of each cell, in the order of the grid.

    Raises RefusedError if a line is no row, which names it.
    """
    path = directory / ROWS
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise RefusedError(
            f"{path} is not UTF-8 text, so it is not the results file of a study; {ELSEWHERE}"
        ) from error

    latest: dict[Cell, Row] = {}
    for number, line in enumerate(_whole_lines(text), 1):
        try:
            row = _parse_row(line)
        except RefusedError as error:
            what = f"line {number} of {path} is not a row of a study ({error})"
            raise RefusedError(f"{what}; remove it, or {ELSEWHERE}") from error
        latest[Cell.of(row)] = row
    return dict(sorted(latest.items(), key=lambda item: item[0].order))


def _parse_row(line: str) -> Row:
    """The row that a line is. Raises RefusedError that says why it is none."""
    try:
        row = parse_json(line, "it")
    except CorruptError as error:
        reason, _, _ = str(error).partition(" (")
        raise RefusedError(reason) from error

    if not isinstance(row, dict):
        raise RefusedError("it is not a JSON object")
    for name, kinds in _REQUIRED.items():
        if name not in row:
            raise RefusedError(f"it has no {name!r}")
        if not isinstance(row[name], kinds):
            raise RefusedError(f"its {name!r} is {row[name]!r}")
    return row


def _whole_lines(text: str) -> list[str]:
    """Lines without half a row, which a run that was killed leaves at the end."""
    begin = '{"method"'  # of every row

    def is_half_a_row(line: str) -> bool:
        return line[-1] != "\n" and begin.startswith(line[: len(begin)])

    return [line for line in text.splitlines(keepends=True) if not is_half_a_row(line)]


def append_row(directory: Path, row: Row) -> None:
    """Append a row and fsync; first cut off the half line of a killed run. Raises OutputError."""
    with (
        system_errors(f"{directory} cannot be written", ADVICE),
        (directory / ROWS).open("ab+") as stream,
    ):
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(json.dumps(finite(row)).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
