"""The rows of a study on disk: one a cell, there as soon as the cell is measured, whatever happens afterwards.

rows.jsonl is what counts: a line is appended and made durable. rows.csv and rows.parquet are written anew from it, each
beside the old one and then renamed.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.write import finite, replacing, write_bytes
from gqa.eval.study.study import Cell

Row = dict[str, Any]

LINES, TABLE, PARQUET = "rows.jsonl", "rows.csv", "rows.parquet"


class UnwrittenError(OutputError):
    """A study cannot be written to: nothing that is measured could be kept."""


class Rows:
    """The rows in `directory`, the latest of each cell, in the order of the grid."""

    def __init__(self, directory: Path) -> None:
        """Raises RefusedError where rows.jsonl is none of a study's."""
        self._directory = directory
        found, self._bytes = read_lines(directory / LINES)
        self._found: dict[Cell, Row] = {Cell.of(row): row for row in found}

    def __iter__(self) -> Iterator[Row]:
        return iter(sorted(self._found.values(), key=lambda row: Cell.of(row).order))

    def __len__(self) -> int:
        return len(self._found)

    def done(self) -> set[Cell]:
        """Cells that need not be measured again; those that failed are tried again."""
        return {cell for cell, row in self._found.items() if not row["error"]}

    def add(self, row: Row) -> None:
        """Durable when this returns. Raises UnwrittenError; the rows before are kept as they were."""
        row = finite(row)
        path, line = self._directory / LINES, f"{json.dumps(row)}\n".encode()
        try:
            with path.open("ab", buffering=0) as stream:
                stream.truncate(self._bytes)  # what a killed run left of a line
                write_bytes(stream, line)
                os.fsync(stream.fileno())
        except OSError as error:
            with suppress(OSError):
                os.truncate(path, self._bytes)
            raise no_place(self._directory, error) from None
        self._found[Cell.of(row)] = row
        self._bytes += len(line)
        try:
            self._write_tables()
        except OSError as error:
            raise no_place(self._directory, error) from None

    def update(self, columns: Mapping[int, Row]) -> None:
        """Columns of all rows with so many heads, anew; durable when this returns. Raises UnwrittenError."""
        before = {cell: dict(row) for cell, row in self._found.items()}
        for row in self._found.values():
            row.update(finite(columns.get(row["groups"], {})))
        if self._found != before:
            self.finish()

    def finish(self) -> None:
        """rows.jsonl in the order of the grid, one row a cell. Raises UnwrittenError."""
        try:
            lines = "".join(f"{json.dumps(row)}\n" for row in self).encode()
            _replace(self._directory / LINES, lines)
            self._bytes = len(lines)
            self._write_tables()
        except OSError as error:
            raise no_place(self._directory, error) from None

    def _write_tables(self) -> None:
        rows = list(self)
        _replace(self._directory / TABLE, as_csv(rows).encode())
        _replace(self._directory / PARQUET, as_parquet(rows))


def no_place(directory: Path, error: OSError) -> UnwrittenError:
    """The one line for what keeps a study from being written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    told = f"no space left for {directory}" if full else f"{directory} cannot be written: {error.strerror or error}"
    return UnwrittenError(f"{told}; the rows that are there are kept, the same command continues")


def read_lines(path: Path) -> tuple[list[Row], int]:
    """The rows of whole lines, and their bytes; a killed run may have left half a line after them.

    Raises RefusedError where there is something else.
    """
    if not path.exists():
        return [], 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    try:
        rows: list[Row] = [json.loads(line) for line in data[:whole].decode().splitlines()]
        for row in rows:
            _ = Cell.of(row).order, row["error"]
    except (ValueError, KeyError, TypeError):
        raise RefusedError(f"{path} holds something else than rows of a study; give another directory") from None
    return rows, whole


def columns(rows: Iterable[Row]) -> list[str]:
    """All that any row has; failed rows have fewer."""
    found: dict[str, None] = {}
    for row in sorted(rows, key=len, reverse=True):
        found |= dict.fromkeys(row)
    return list(found)


def as_csv(rows: list[Row]) -> str:
    """One line a row; lists as JSON."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns(rows), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})
    return stream.getvalue()


def as_parquet(rows: list[Row]) -> bytes:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    names = columns(rows)
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    stream = io.BytesIO()
    parquet.write_table(table, stream)
    return stream.getvalue()


def _replace(path: Path, data: bytes) -> None:
    with replacing(path) as temporary, temporary.open("wb", buffering=0) as stream:
        write_bytes(stream, data)
