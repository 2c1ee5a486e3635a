"""Records as tables: aligned in a terminal, as Markdown, or for a page."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gqa.convert.summary import size


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def text(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        shown = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
            for cells in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join([self.title, *(line.rstrip() for line in shown), *([self.note] if self.note else [])])

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(map(_escaped, cells)) + " |"

        rule = "|" + "---|" + "---:|" * (len(self.header) - 1)
        parts = [f"## {_escaped(self.title)}", "", line(self.header), rule, *(line(row) for row in self.rows)]
        return "\n".join([*parts, *(["", _escaped(self.note)] if self.note else [])])


def _escaped(text: str) -> str:
    """Names of models and files as they are, in Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in text)


class _Formats(string.Formatter):
    """Format strings with three more formats: `size` of bytes, `number` of five digits, `ms` of seconds. Words stay as
    they are where a number is expected.
    """

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, str):
            return value
        if spec == "size":
            return size(value)
        if spec == "number":
            return number(value)
        if spec.endswith("ms"):
            return f"{value * 1e3:{spec.removesuffix('ms')}f}"
        return str(super().format_field(value, spec))


def shown(record: Any, columns: Iterable[str], missing: str = "") -> tuple[str, ...]:
    """Cells of a row by their format strings; `missing` where the record has no such numbers."""
    cells = []
    for column in columns:
        try:
            cells.append(_Formats().vformat(column, (), record))
        except (KeyError, TypeError):  # not measured, or null
            cells.append(missing)
    return tuple(cells)


def number(value: float) -> str:
    """Five digits: more are not the same in every batch size."""
    if not 1 <= value < 1e5:
        return f"{value:.4g}"
    return f"{value:,.{4 - int(math.log10(value))}f}"


def table(title: str, columns: dict[str, str], records: Iterable[Any], note: str, missing: str = "") -> Table:
    """A line for each record, by the format strings of the `columns`."""
    return Table(title, tuple(columns), tuple(shown(record, columns.values(), missing) for record in records), note)
