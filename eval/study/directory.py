"""A study on disk: results.jsonl, to which a row is appended as soon as a cell is measured.

`pandas.read_json("results.jsonl", lines=True)` reads it. A cell that failed is measured again; its latest row counts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.write import finite, locked
from gqa.eval.page import PAGE
from gqa.eval.study.options import Cell

Row = dict[str, Any]

ROWS, WORK = "results.jsonl", ".work"
FILES = (ROWS, PAGE, "tradeoff.svg", "alphas.svg")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn an OSError into an OutputError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(
            f"{directory} cannot be written: {reason}; rows that were measured are kept, the same command continues"
        ) from error


def read_rows(directory: Path) -> dict[Cell, Row]:
    """The latest row of each cell, in the order of the grid. Raises RefusedError if results.jsonl is not a study's."""
    path = directory / ROWS
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A killed run may have left half a line.
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        latest = {Cell.of(row): row for row in rows}
        measured = [Cell.of(row) for row in rows if not row["error"]]
        _ = [row["options"] for row in rows]
        ordered = dict(sorted(latest.items(), key=lambda item: item[0].order))
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(f"{path} holds no rows of a study; give another directory") from error
    if len({*measured}) < len(measured):
        raise RefusedError(
            f"{path} holds several measurements of one method, number of heads and alpha, as studies of other versions "
            "do; give another directory"
        )
    return ordered


def append_row(directory: Path, row: Row) -> None:
    """Append a row and fsync; half a line of a killed run is cut off first. Raises OutputError."""
    with writing(directory), (directory / ROWS).open("ab+") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(json.dumps(finite(row)).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def remove_study(directory: Path) -> None:
    """Raises RefusedError if the directory holds something else, or another process runs the study."""
    check_directory(directory)
    if directory.exists():
        with locked_work(directory) as work:
            for name in FILES:
                (directory / name).unlink(missing_ok=True)
            clear(work)


def clear(work: Path) -> None:
    """Remove intermediate files, but not the lock."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


def check_directory(directory: Path) -> None:
    """Raise RefusedError if the directory holds files and no study."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    if directory.exists() and (not directory.is_dir() or (not {ROWS, WORK} & {*names} and names)):
        raise RefusedError(f"{directory} exists and holds no study; give another directory with -o")
    read_rows(directory)


@contextmanager
def locked_work(directory: Path) -> Iterator[Path]:
    """Lock and yield the directory for intermediate files; remove it at the end if it is empty.

    Raises RefusedError where another process runs the same study, OutputError where nothing can be written.
    """
    work = directory / WORK
    with writing(directory):
        work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(work / "lock", f"another run is working on {directory}; wait for it or give another -o"):
            yield work
    finally:
        with suppress(OSError):  # it is not empty
            work.rmdir()
