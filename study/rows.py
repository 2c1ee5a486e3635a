"""The rows of a study: one per cell, appended to results.jsonl as soon as the cell is measured.

`pandas.read_json("results.jsonl", lines=True)` reads it. A failed cell is measured again; its
latest row counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.write import finite, locked, system_errors
from gqa.core.errors import RefusedError, differences
from gqa.core.json_text import parse_json
from gqa.core.work import LOCK, MARK, claim, is_ours, read_mark, remove
from gqa.eval.page import PAGE
from gqa.study.options import ADVICE, Cell

Row = dict[str, Any]

ROWS, WORK = "results.jsonl", ".work"
FILES = (PAGE, "alphas.svg", "tradeoff.svg", ROWS)
PURPOSE, CONVERSION = "study", "conversion"  # of marked directories: .work, and each one in it


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
        return {cell: latest[cell] for cell in sorted(latest, key=lambda cell: cell.order)}
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(f"{path} holds no rows of a study; give another directory") from error


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


def check_directory(directory: Path, identity: Row, overwrite: bool) -> None:
    """Raise RefusedError if the directory contains files but no study, or, unless `overwrite`, rows
    of a study whose options differ from `identity`. Also if its `.work` was made by somebody else.
    """
    advice = "give another directory with -o"
    if directory.exists() and not directory.is_dir():
        raise RefusedError(f"{directory} exists and is not a directory; {advice}")
    if directory.is_dir() and any(directory.iterdir()) and not is_study(directory):
        raise RefusedError(f"{directory} exists and holds no study; {advice}")
    work = directory / WORK
    if os.path.lexists(work) and not is_ours(work, PURPOSE):
        raise RefusedError(f"{work} was not made by gqa-ablate; move it away or {advice}")

    before = next((row["options"] for row in read_rows(directory).values()), identity)
    if not overwrite and (changed := differences(identity, before)):
        raise RefusedError(
            f"{directory} holds another study: {'; '.join(changed)}; give another directory with "
            "-o, the same options, or start over with --overwrite"
        )


def is_study(directory: Path) -> bool:
    """Whether gqa-ablate made what is in a directory: it has rows of a study, and then its report
    and pictures are ours too; or the marked `.work` of a study that has no rows yet, and then there
    are no others.
    """
    if read_rows(directory):
        return True
    others = [name for name in FILES if name != ROWS and (directory / name).exists()]
    return read_mark(directory / WORK) is not None and not others


@contextmanager
def locked_work(directory: Path) -> Iterator[Path]:
    """Lock and yield the directory for intermediate files; remove it at the end if it is empty.

    Raises RefusedError if another process runs the same study, OutputError if nothing can be
    written.
    """
    work = directory / WORK
    with system_errors(f"{directory} cannot be written", ADVICE):
        claim(work, PURPOSE)
    try:
        with locked(
            work / LOCK, f"another run is working on {directory}; wait for it or give another -o"
        ):
            yield work
            if {path.name for path in work.iterdir()} <= {MARK, LOCK}:
                (work / MARK).unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # it is not empty
            work.rmdir()


def remove_work(work: Path, keep: Collection[str] = ()) -> None:
    """Remove the conversions of a study but those to `keep`, and what was trained from them.

    Nothing else in `work`.
    """
    for path in work.iterdir():
        if path.name not in keep and path.is_dir() and is_ours(path, CONVERSION):
            remove(path, CONVERSION)
