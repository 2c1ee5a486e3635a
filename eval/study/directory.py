"""A study on disk: its record, and a row for each cell, there as soon as the cell is measured, whatever happens after.

rows.jsonl is the table of results: `pandas.read_json("rows.jsonl", lines=True)`. It is written anew with each row: at
every moment it is the old one or the new one. The half line that earlier versions could leave at its end is dropped.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.locks import locked
from gqa.checkpoint.write import finite, replacing
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


def _replace(path: Path, lines: Iterable[str]) -> None:
    with writing(path.parent), replacing(path) as fresh:
        fresh.write_text("".join(f"{line}\n" for line in lines))


class Rows:
    """The rows in `directory`, the latest of each cell, in the order of the grid."""

    def __init__(self, directory: Path) -> None:
        """Raises RefusedError where rows.jsonl is none of a study's."""
        self._path = directory / ROWS
        try:
            lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("\n")]
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
        """Raises UnwrittenError, as `rewrite` does."""
        self._found[Cell.of(row)] = finite(row)
        self.rewrite({})

    def rewrite(self, columns: Mapping[str, Row]) -> None:
        """With the columns of each row's cache (`Cell.cache`) anew. Durable when this returns; raises UnwrittenError,
        and then the file is as it was.
        """
        for cell, row in self._found.items():
            row.update(finite(columns.get(cell.cache, {})))
        _replace(self._path, map(json.dumps, self))

    def keep_speeds(self, speeds: dict[str, Row]) -> None:
        """In the rows before they are known: a run that is killed between times them again."""
        self.rewrite(speeds)
        write_json(self._path.parent, SPEEDS, speeds)


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
    """speeds.json: columns by `Cell.cache`; none where it is not there."""
    path = directory / SPEEDS
    known: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}
    return known


def write_json(directory: Path, name: str, value: Row) -> None:
    _replace(directory / name, [json.dumps(value, indent=2)])


def forget(directory: Path) -> None:
    """Remove a study. Raises RefusedError where the directory holds something else, or another process runs it."""
    if not directory.exists():
        return
    if read_record(directory) is None and is_foreign(directory):
        raise RefusedError(f"{directory} holds no study: --overwrite will not remove it; give another with -o")
    with held(directory):
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
