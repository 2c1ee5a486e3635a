"""Records as tables: aligned in a terminal, or for a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gqa.checkpoint.console import WIDTH

_NAME, _LEAST = 32, 16  # characters of a name in a table that is cut, and the fewest


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right. `short`: number of columns, from the left,
    that a terminal shows without --verbose.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    short: int | None = None

    def brief(self) -> Table:
        """The table with its `short` columns."""
        rows = tuple(row[: self.short] for row in self.rows)
        return replace(self, header=self.header[: self.short], rows=rows)

    def text(self) -> str:
        """Lines of at most WIDTH characters: columns that do not fit beside each other stand below, the first again;
        long names lose their middle.
        """
        columns = [list(column) for column in zip(self.header, *self.rows, strict=True)]
        room = WIDTH - sum(2 + max(map(len, column)) for column in columns[1:])
        names = [_cut(cell, room if room >= _LEAST else _NAME) for cell in columns[0]]
        first = [name.ljust(max(map(len, names))) for name in names]
        blocks, block = [], first
        for column in columns[1:]:
            cells = [_cut(cell, WIDTH - 2 - len(first[0])) for cell in column]
            added = [f"  {cell:>{max(map(len, cells))}}" for cell in cells]
            if len(block[0] + added[0]) > WIDTH:
                blocks.append(block)
                block = first
            block = [line + more for line, more in zip(block, added, strict=True)]
        lines = [line.rstrip() for one in [*blocks, block] for line in one]
        return "\n".join([_cut(self.title, WIDTH), *lines, *filter(None, [wrapped(self.note)])])


def wrapped(text: str, indent: str = "") -> str:
    """Wrap at the terminal's width, indenting all lines but the first; "95 %" is not split."""
    lines = textwrap.wrap(text.replace(" %", "\xa0%"), WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0", " ")


def _cut(text: str, length: int) -> str:
    """Shorten a long text in its middle; names of conversions differ at the end, of which more stays."""
    tail = (length - 2) * 2 // 3
    return text if len(text) <= length else f"{text[: length - 2 - tail]}..{text[-tail:]}"


Column = tuple[str, Callable[[Any], str]]  # a title, and the cell of a record


def cell(record: Any, function: Callable[[Any], str], missing: str = "") -> str:
    """Cell of a record; `missing` if the record lacks the number."""
    try:
        return function(record)
    except (KeyError, TypeError):  # not measured, or null
        return missing


def table(
    title: str, columns: Sequence[Column], records: Collection[Any], note: str = "", missing: str = "",
    short: int | None = None,
) -> Table:  # fmt: skip
    """A row for each record, without the columns that are empty in all rows."""
    columns = [column for column in columns if any(cell(record, column[1]) for record in records)]
    rows = tuple(tuple(cell(record, function, missing) for _, function in columns) for record in records)
    return Table(title, tuple(name for name, _ in columns), rows, note, short)


def number(value: Any) -> str:
    """Five significant digits: more depend on the batch size. Strings are returned as they are."""
    if isinstance(value, str):
        return value
    if not 1 <= value < 1e5:
        return f"{value:.4g}"
    return f"{value:,.{4 - int(math.log10(value))}f}"
