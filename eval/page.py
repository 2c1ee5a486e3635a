"""The report of gqa-eval and gqa-ablate: one HTML page without other files (page.html.jinja)."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import jinja2

from gqa.checkpoint.write import write_text
from gqa.eval.tables import Table

PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Page:
    """Content of a report, from top to bottom; all text is escaped.

    verdicts: one line each; pictures: names and captions; tables: the first is unfolded; samples: each prompt with the
    models' texts, base model first, as (name, prefix equal to the base model's text, rest); commands: to reproduce it.
    """

    title: str
    verdicts: Sequence[str]
    lead: str = ""
    pictures: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table]
    samples: Sequence[tuple[str, Sequence[tuple[str, str, str]]]] = ()
    commands: Sequence[str] = ()
    foot: str = ""

    def write(self, directory: Path) -> None:
        """Write report.html into the directory that has the pictures as NAME.svg."""
        environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
        environment.filters["kinds"] = _kinds
        environment.filters["base64"] = lambda name: b64encode((directory / f"{name}.svg").read_bytes()).decode()
        write_text(directory / PAGE, environment.get_template("page.html.jinja").render(vars(self)))


@contextmanager
def made_aside(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory whose files replace those of `directory` at the end; an error leaves `directory`
    unchanged.
    """
    with TemporaryDirectory(prefix=".report-", dir=nearest(directory)) as aside:
        yield Path(aside)
        directory.mkdir(parents=True, exist_ok=True)
        for path in Path(aside).iterdir():
            path.replace(directory / path.name)


def nearest(path: Path) -> Path:
    """The path itself, or its nearest existing parent."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def no_pictures() -> str:
    """Why a report has no pictures; empty if it has."""
    if find_spec("matplotlib"):
        return ""
    return "no pictures, for which matplotlib is missing: pip install 'gqa[report]'"


def _kinds(table: Table) -> list[str]:
    """CSS class of each column: numbers (with at most half of the cells words), words, or long words."""

    def kind(column: Sequence[str]) -> str:
        if 2 * sum(bool(re.search("[a-z]{3}", cell)) for cell in column) <= len(column):
            return "numbers"
        return "words" if max(map(len, column)) <= 30 else "long words"

    return [kind(column) for column in zip(*table.rows, strict=True)]
