"""Records as tables for a terminal, and the report of gqa-eval and gqa-ablate: one HTML page
without other files (page.html.jinja).
"""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jinja2

from gqa.checkpoint.write import write_text
from gqa.convert.verdict import Level
from gqa.core.errors import one_line
from gqa.core.escape import visible

PAGE = "report.html"
_LONGEST_NOTE = 4000


@dataclass(frozen=True)
class Column:
    """A column of a table of records.

    title: Its head.
    show: A cell, as a format string for the entries of a record, like `{kl[mean]:.4f}`, or as a
        function of the record.
    """

    title: str
    show: str | Callable[[Mapping[str, Any]], str]

    def cell(self, record: Mapping[str, Any]) -> str:
        """The number of a record as one line of text; empty if the record lacks it, or has null."""
        try:
            if isinstance(self.show, str):
                return one_line(self.show.format_map(record))
            return one_line(self.show(record))
        except (KeyError, TypeError):
            return ""


@dataclass(frozen=True)
class Verdict:
    """A line of a report about one model.

    level: How good it is; None if its quality was not measured, or it has the larger cache.
    """

    text: str
    level: Level | None = None


@dataclass(frozen=True)
class Table:
    """Cells as text of one line each; the first column is left-aligned, the others right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def text(self, width: int | None = None) -> str:
        """Lines of at most `width` characters, by default `line_width` of stdout: columns that do
        not fit continue below, after the first column again.
        """
        width = width or line_width(sys.stdout)
        first, *columns = (list(column) for column in zip(self.header, *self.rows, strict=True))
        names = _aligned(first, left=True)

        blocks = []
        block = names
        for column in columns:
            cells = ["  " + cell for cell in _aligned(column)]
            fits = len(block[0]) + len(cells[0]) <= width
            if not fits and block is not names:
                blocks.append(block)
                block = names
            block = [line + cell for line, cell in zip(block, cells, strict=True)]
        blocks.append(block)

        lines = [self.title]
        for block in blocks:
            lines += [line.rstrip() for line in block]
        if self.note:
            lines.append(wrap(self.note, width))
        return "\n".join(lines)


def _aligned(cells: Sequence[str], left: bool = False) -> list[str]:
    """Cells of one column, all as wide as the longest."""
    width = max(map(len, cells))
    if left:
        return [cell.ljust(width) for cell in cells]
    return [cell.rjust(width) for cell in cells]


def line_width(stream: TextIO) -> int:
    """Columns of a terminal; lines of other streams have no limit."""
    return shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize


def wrap(text: str, width: int, indent: str = "") -> str:
    """Wrap at `width`, indenting all lines but the first."""
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)


def table(
    title: str,
    columns: Sequence[Column],
    records: Collection[Mapping[str, Any]],
    note: str = "",
) -> Table:
    """A row for each record, without the columns that are empty in all rows.

    Title, note and cells have no line breaks and control characters, whatever names are in them.
    """
    cells: dict[str, list[str]] = {}
    for column in columns:
        column_cells = [column.cell(record) for record in records]
        if any(column_cells):
            cells[one_line(column.title)] = column_cells
    return Table(
        one_line(title),
        tuple(cells),
        tuple(zip(*cells.values(), strict=True)),
        one_line(note, _LONGEST_NOTE),
    )


def format_number(value: float) -> str:
    """Five significant digits: more depend on the batch size."""
    if not 1 <= value < 1e5:
        return f"{value:.4g}"
    return f"{value:,.{4 - int(math.log10(value))}f}"


def write_page(directory: Path, **content: Any) -> None:
    """Write report.html into the directory that has the pictures as NAME.svg.

    All text is escaped, and its control characters are written out.

    Args:
        directory: Where the page is written, and where pictures are read.
        content: What the page shows. The template leaves out what is missing:
            title, lead, foot: Text.
            verdicts: `Verdict`s.
            tables: `Table`s; the first is unfolded.
            pictures: Names and captions.
            samples: Each prompt with the models' texts, base model first, as (name, prefix equal
                to the base model's text, rest).
            commands: To reproduce it.
    """

    def picture_as_base64(name: str) -> str:
        return b64encode((directory / f"{name}.svg").read_bytes()).decode()

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_visible_text,
    )
    environment.filters["base64"] = picture_as_base64
    write_text(directory / PAGE, environment.get_template("page.html.jinja").render(content))


def _visible_text(value: Any) -> Any:
    """Text as the template inserts it, with its control characters written out; other values as
    they are.
    """
    return visible(value) if type(value) is str else value
