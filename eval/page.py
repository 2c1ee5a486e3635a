"""Records as tables for a terminal, and the report of gqa-eval and gqa-ablate: one HTML page
without other files (page.html.jinja).
"""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from base64 import b64encode
from collections.abc import Callable, Collection, Sequence
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

Column = tuple[str, Callable[[Any], str]]  # a title, and the cell of a record


@dataclass(frozen=True)
class Verdict:
    """A line of a report about one model. `level`: None if its quality was not measured."""

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
        first = [cell.ljust(max(map(len, first))) for cell in first]
        blocks, block = [], first
        for column in columns:
            cells = [f"  {cell:>{max(map(len, column))}}" for cell in column]
            if block is not first and len(block[0] + cells[0]) > width:
                blocks.append(block)
                block = first
            block = [line + cell for line, cell in zip(block, cells, strict=True)]
        lines = [line.rstrip() for lines in [*blocks, block] for line in lines]
        return "\n".join([self.title, *lines, *filter(None, [wrap(self.note, width)])])


def line_width(stream: TextIO) -> int:
    """Columns of a terminal; lines of other streams have no limit."""
    return shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize


def wrap(text: str, width: int, indent: str = "") -> str:
    """Wrap at `width`, indenting all lines but the first."""
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)


def table(title: str, columns: Sequence[Column], records: Collection[Any], note: str = "") -> Table:
    """A row for each record, without the columns that are empty in all rows.

    A cell is empty where its record lacks the number. Title, note and cells have no line breaks and
    control characters, whatever names are in them.
    """

    def cell(record: Any, function: Callable[[Any], str]) -> str:
        try:
            return one_line(function(record))
        except (KeyError, TypeError):  # not measured, or null
            return ""

    cells = {
        one_line(name): [cell(record, function) for record in records] for name, function in columns
    }
    cells = {name: column for name, column in cells.items() if any(column)}
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

    Content, of which the template leaves out what is missing: title, lead, foot: Text. verdicts:
        `Verdict`s. tables: `Table`s; the first is unfolded. pictures: Names and captions. samples:
        Each prompt with the models' texts, base model first, as (name, prefix equal to the base
        model's text, rest). commands: To reproduce it.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_visible_text,
    )
    environment.filters["base64"] = lambda name: b64encode(
        (directory / f"{name}.svg").read_bytes()
    ).decode()
    write_text(directory / PAGE, environment.get_template("page.html.jinja").render(content))


def _visible_text(value: Any) -> Any:
    """Text as the template inserts it, with its control characters written out; other values as
    they are.
    """
    return visible(value) if type(value) is str else value
