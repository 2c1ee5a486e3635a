"""The rows of a study: one per cell, appended to results.jsonl as soon as the cell is measured.

`pandas.read_json("results.jsonl", lines=True)` reads it. A failed cell is measured again; its
latest row counts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gqa.checkpoint.write import finite, system_errors
from gqa.core.errors import RefusedError
from gqa.core.json_text import parse_json
from gqa.eval.page import PAGE
from gqa.study.options import ADVICE, Cell

Row = dict[str, Any]

ROWS = "results.jsonl"
FILES = (PAGE, "alphas.svg", "tradeoff.svg", ROWS)


def read_rows(directory: Path) -> dict[Cell, Row]:
    """The latest row of each cell, in the order of the grid.

    Raises RefusedError if the file has other contents.
    """
    path = directory / ROWS
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        latest: dict[Cell, Row] = {}
        for line in _whole_lines(text):
            row = parse_json(line, ROWS)
            latest[Cell.of(row)] = {"error": row["error"], "options": row["options"], **row}
        return dict(sorted(latest.items(), key=lambda item: item[0].order))
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{path} holds no rows of a study; choose another directory with -o"
        ) from error


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
