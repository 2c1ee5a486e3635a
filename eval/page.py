"""A report as one HTML page that needs no other file, as gqa-eval and gqa-ablate write it (page.html.jinja)."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import jinja2

from gqa.eval.tables import Table

PAGE = "report.html"


@dataclass(frozen=True)
class Figure:
    """A picture as the page holds it: `data` is its SVG in base64."""

    caption: str
    data: str


@dataclass(frozen=True)
class Written:
    """What a model writes after a prompt: as far as it is the `same` as the first model's text, and the rest of it."""

    name: str
    same: str
    rest: str


@dataclass(frozen=True)
class Sample:
    """A prompt and what each model writes after it, the first of them being the base model."""

    prompt: str
    texts: Sequence[Written]


def page(
    *,
    title: str,
    verdicts: Sequence[str],
    tables: Sequence[Table],
    figures: Sequence[Figure] = (),
    samples: Sequence[Sample] = (),
    commands: Sequence[str] = (),
    lead: str = "",
    foot: str = "",
) -> str:
    """A whole HTML document, all text escaped. From above: the verdicts (a line each), the lead, pictures (the one that
    shows the verdict first), tables of which the first is unfolded, samples, the commands that made it, the foot.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["kinds"] = _kinds
    return environment.get_template("page.html.jinja").render(
        title=title, verdicts=verdicts, tables=tables, figures=figures, samples=samples, commands=commands, lead=lead,
        foot=foot,
    )  # fmt: skip


def figures(pictures: Iterable[tuple[str, str]], directory: Path) -> list[Figure]:
    """Of pictures (name, caption) that are drawn in a directory as NAME.svg."""
    return [Figure(caption, b64encode((directory / f"{name}.svg").read_bytes()).decode()) for name, caption in pictures]


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
    return next(place for place in (path, *path.parents) if place.exists())


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
