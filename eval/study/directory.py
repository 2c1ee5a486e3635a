"""A study on disk: its record, and a row for each cell, there as soon as the cell is measured, whatever happens after.

rows.jsonl is the table of results: `pandas.read_json("rows.jsonl", lines=True)`. A line is appended and made durable;
the half line that a killed run may leave at its end is dropped.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.write import finite, locked, replacing, write_bytes
from gqa.eval.study.study import Cell

Row = dict[str, Any]

SCHEMA = 1
RECORD, SPEEDS, ROWS, WORK = "study.json", "speeds.json", "rows.jsonl", ".work"


class UnwrittenError(OutputError):
    """A study cannot be written to: nothing that is measured could be kept."""


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Raises UnwrittenError, in one line, for what keeps a study from being written."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        told = f"no space left for {directory}" if full else f"{directory} cannot be written: {error.strerror or error}"
        raise UnwrittenError(f"{told}; the rows that are there are kept, the same command continues") from None


class Rows:
    """The rows in `directory`, the latest of each cell, in the order of the grid."""

    def __init__(self, directory: Path) -> None:
        """Raises RefusedError where rows.jsonl is none of a study's."""
        self._directory, self._path = directory, directory / ROWS
        data = self._path.read_bytes() if self._path.exists() else b""
        self._bytes = data.rfind(b"\n") + 1
        try:
            rows = [json.loads(line) for line in data[: self._bytes].decode().splitlines()]
            self._found = {Cell.of(row): row for row in rows}
            _ = [(cell.order, row["error"]) for cell, row in self._found.items()]
        except (ValueError, KeyError, TypeError):
            told = f"{self._path} holds something else than rows of a study; give another directory"
            raise RefusedError(told) from None

    def __iter__(self) -> Iterator[Row]:
        return iter(row for _, row in sorted(self._found.items(), key=lambda item: item[0].order))

    def __len__(self) -> int:
        return len(self._found)

    def add(self, row: Row) -> None:
        """Durable when this returns. Raises UnwrittenError; the rows before are kept as they were."""
        row = finite(row)
        line = f"{json.dumps(row)}\n".encode()
        with writing(self._directory), self._path.open("ab", buffering=0) as stream:
            stream.truncate(self._bytes)  # what a killed run left of a line
            try:
                write_bytes(stream, line)
                os.fsync(stream.fileno())
            except OSError:
                with suppress(OSError):
                    stream.truncate(self._bytes)
                raise
        self._found[Cell.of(row)] = row
        self._bytes += len(line)

    def rewrite(self, columns: Mapping[str, Row]) -> None:
        """In the order of the grid, one row a cell, with the columns of its number of heads anew. Raises
        UnwrittenError; durable when this returns.
        """
        for row in self._found.values():
            row.update(finite(columns.get(str(row["groups"]), {})))
        data = "".join(f"{json.dumps(row)}\n" for row in self).encode()
        with writing(self._directory), replacing(self._path) as fresh:
            fresh.write_bytes(data)
        self._bytes = len(data)


def read_record(directory: Path) -> Row | None:
    """study.json; None where there is none. Raises RefusedError where it is none of a study's."""
    path = directory / RECORD
    if not path.exists():
        return None
    try:
        record: Row = json.loads(path.read_text())
        known = record["schema"] == SCHEMA and {"identity", "runs"} <= record.keys()
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise RefusedError(f"{path} is no record of a study that this version can continue; give another directory")
    return record


def read_speeds(directory: Path) -> dict[str, Row]:
    """speeds.json: columns by the number of heads; none where it is not there."""
    path = directory / SPEEDS
    known: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}
    return known


def write_json(directory: Path, name: str, value: Row) -> None:
    with writing(directory), replacing(directory / name) as fresh:
        fresh.write_text(json.dumps(value, indent=2) + "\n")


def forget(directory: Path) -> None:
    """Remove a study. Raises RefusedError where the directory holds something else."""
    if not directory.exists():
        return
    if read_record(directory) is None and is_foreign(directory):
        raise RefusedError(f"{directory} holds no study: --overwrite will not remove it; give another with -o")
    shutil.rmtree(directory)


def is_foreign(directory: Path) -> bool:
    """Whether there is something that no study has left before its record was written."""
    return directory.exists() and not (directory.is_dir() and all(path.name == WORK for path in directory.iterdir()))


@contextmanager
def held(directory: Path) -> Iterator[Path]:
    """The place for work, for this process alone; it goes at the end where nothing is left in it.

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
