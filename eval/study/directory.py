"""A study on disk: results.jsonl, to which a row is appended as soon as a cell is measured, whatever happens after.

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
from gqa.checkpoint.locks import locked
from gqa.checkpoint.write import finite
from gqa.eval.page import PAGE
from gqa.eval.study.study import Cell

Row = dict[str, Any]

ROWS, WORK = "results.jsonl", ".work"
PICTURES = ("tradeoff", "alphas")
FILES = (ROWS, PAGE, *(f"{name}.{suffix}" for name in PICTURES for suffix in ("svg", "png")))


class UnwrittenError(OutputError):
    """The study's directory cannot be written."""


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn an OSError into an UnwrittenError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UnwrittenError(
            f"{directory} cannot be written: {reason}; rows that were measured are kept, the same command continues"
        ) from error


class Rows:
    """The rows in `directory`, the latest of each cell, in the order of the grid."""

    def __init__(self, directory: Path) -> None:
        """Raises RefusedError if results.jsonl is not a study's."""
        self._path = directory / ROWS
        try:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
            rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            self._rows = {Cell.of(row): row for row in rows}
            _ = [(cell.order, row["error"], row["options"]) for cell, row in self._rows.items()]
        except (ValueError, KeyError, TypeError) as error:
            message = f"{self._path} holds something else than rows of a study; give another directory"
            raise RefusedError(message) from error

    def __iter__(self) -> Iterator[Row]:
        return iter(row for _, row in sorted(self._rows.items(), key=lambda item: item[0].order))

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """Append a row and fsync; half a line of a killed run is cut off first. Raises UnwrittenError."""
        line = json.dumps(finite(row)).encode() + b"\n"
        with writing(self._path.parent), self._path.open("ab+") as stream:
            stream.seek(0)
            whole = stream.read().rfind(b"\n") + 1
            try:
                stream.truncate(whole)
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                with suppress(OSError):
                    stream.truncate(whole)
                raise
        self._rows[Cell.of(row)] = finite(row)


def forget(directory: Path) -> None:
    """Remove a study. Raises RefusedError if the directory holds something else, or another process runs the study."""
    check_directory(directory)
    if directory.exists():
        with locked_work(directory) as work:
            for name in FILES:
                (directory / name).unlink(missing_ok=True)
            for path in work.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path)


def check_directory(directory: Path) -> None:
    """Raise RefusedError if the directory holds files and no study."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    if directory.exists() and (not directory.is_dir() or (not {ROWS, WORK} & {*names} and names)):
        raise RefusedError(f"{directory} exists and holds no study; give another directory with -o")
    Rows(directory)


@contextmanager
def locked_work(directory: Path) -> Iterator[Path]:
    """Lock and yield the directory for intermediate files; remove it at the end if it is empty.

    Raises RefusedError where another process runs the same study, UnwrittenError where nothing can be written.
    """
    work = directory / WORK
    with writing(directory):
        work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(work / "lock", f"another run is working on {directory}; wait for it or give another -o"):
            yield work
    finally:
        with suppress(OSError):  # there is something in it
            work.rmdir()
