"""A report as one HTML page that needs no other file, as gqa-eval and gqa-ablate write it (page.html.jinja)."""

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
    """What is on it, from above; all text is escaped.

    verdicts: a line each; pictures: names and captions, the one that shows the verdict first; tables: of which the
    first is unfolded; samples: of each prompt what every model writes after it, the base model first: its name, the
    text as far as it is the base model's, and the rest; commands: that made it.
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
        """As report.html in the directory where each picture is, as NAME.svg."""
        environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
        environment.filters["kinds"] = _kinds
        environment.filters["base64"] = lambda name: b64encode((directory / f"{name}.svg").read_bytes()).decode()
        write_text(directory / PAGE, environment.get_template("page.html.jinja").render(vars(self)))


@contextmanager
def made_aside(directory: Path) -> Iterator[Path]:
    """A place where files are made; at the end they go to `directory`, in the place of earlier ones, and others stay
    there. What keeps one from being made leaves the directory as it was.
    """
    with TemporaryDirectory(prefix=".report-", dir=nearest(directory)) as aside:
        yield Path(aside)
        directory.mkdir(parents=True, exist_ok=True)
        for path in Path(aside).iterdir():
            path.replace(directory / path.name)


def nearest(path: Path) -> Path:
    """The path itself, or the nearest parent that is there: where it would be made."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def no_pictures() -> str:
    """Why a report has no pictures; nothing where it has."""
    if find_spec("matplotlib"):
        return ""
    return "no pictures, for which matplotlib is missing: pip install 'gqa[report]'"


def _kinds(table: Table) -> list[str]:
    """Of its columns: numbers, of which a few may be words as `failed` is; words on one line; or longer words."""

    def kind(column: Sequence[str]) -> str:
        if 2 * sum(bool(re.search("[a-z]{3}", cell)) for cell in column) <= len(column):
            return "numbers"
        return "words" if max(map(len, column)) <= 30 else "long words"

    return [kind(column) for column in zip(*table.rows, strict=True)]
