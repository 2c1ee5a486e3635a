"""Records as tables for a terminal, and the report of gqa-eval and gqa-ablate: one HTML page without other files
(page.html.jinja).
"""

from __future__ import annotations

import math
import textwrap
from base64 import b64encode
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from gqa.checkpoint.write import write_text

PAGE = "report.html"
WIDTH = 80  # characters per line of a table
_NAME, _LEAST = 32, 16  # characters of a name in a table that is cut, and the fewest

Column = tuple[str, Callable[[Any], str]]  # a title, and the cell of a record


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is left-aligned, the others right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

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
    """Wrap at WIDTH, indenting all lines but the first; "95 %" is not split."""
    lines = textwrap.wrap(text.replace(" %", "\xa0%"), WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0", " ")


def _cut(text: str, length: int) -> str:
    """Shorten a long text in its middle; names of conversions differ at the end, of which more stays."""
    tail = (length - 2) * 2 // 3
    return text if len(text) <= length else f"{text[: length - 2 - tail]}..{text[-tail:]}"


def table(title: str, columns: Sequence[Column], records: Collection[Any], note: str = "") -> Table:
    """A row for each record, without the columns that are empty in all rows. A cell is empty where its record lacks the
    number.
    """

    def cell(record: Any, function: Callable[[Any], str]) -> str:
        try:
            return function(record)
        except (KeyError, TypeError):  # not measured, or null
            return ""

    cells = {name: [cell(record, function) for record in records] for name, function in columns}
    cells = {name: column for name, column in cells.items() if any(column)}
    return Table(title, tuple(cells), tuple(zip(*cells.values(), strict=True)), note)


def number(value: Any) -> str:
    """Five significant digits: more depend on the batch size. Strings are returned as they are."""
    if isinstance(value, str):
        return value
    if not 1 <= value < 1e5:
        return f"{value:.4g}"
    return f"{value:,.{4 - int(math.log10(value))}f}"


def write_page(
    directory: Path, *, title: str, verdicts: Sequence[str], tables: Sequence[Table], foot: str, lead: str = "",
    pictures: Sequence[tuple[str, str]] = (), samples: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = (),
    commands: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write report.html into the directory that has the pictures as NAME.svg; all text is escaped.

    Args:
        verdicts: One line each.
        tables: The first is unfolded.
        pictures: Names and captions.
        samples: Each prompt with the models' texts, base model first, as (name, prefix equal to the base model's text,
            rest).
        commands: To reproduce it.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["base64"] = lambda name: b64encode((directory / f"{name}.svg").read_bytes()).decode()
    html = environment.get_template("page.html.jinja").render(
        title=title, verdicts=verdicts, tables=tables, foot=foot, lead=lead, pictures=pictures, samples=samples,
        commands=commands,
    )  # fmt: skip
    write_text(directory / PAGE, html)
