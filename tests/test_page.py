"""The page of a report: whole, in one file, and whatever a model is called."""

from __future__ import annotations

from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gqa.eval import page as report
from gqa.eval.tables import Table

SVG = "{http://www.w3.org/2000/svg}svg"
VOID = {"meta", "link", "img"}


class Page(HTMLParser):
    """What a page has: tables as rows of cells, pictures as SVG, what is folded (title and whether it is open)."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.pictures: list[str] = []
        self.folds: list[tuple[str, bool]] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"{self._open} are not closed"

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        more = dict(given)
        self.tags.add(tag)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "details":
            self.folds.append(("", "open" in more))
        elif tag == "img":
            kind, _, data = str(more["src"]).partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.pictures.append(b64decode(data).decode())
        assert not {"src", "href"} & more.keys() or str(more.get("src") or more["href"]).startswith("data:")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data
        elif "summary" in self._open:
            self.folds[-1] = (self.folds[-1][0] + data, self.folds[-1][1])


def checked(html: str) -> Page:
    """A page whose tables have rows of one length and whose pictures are SVG."""
    found = Page(html)
    assert all(len({len(row) for row in table}) == 1 for table in found.tables)
    assert all(ElementTree.fromstring(picture).tag == SVG for picture in found.pictures)
    assert "prefers-color-scheme: dark" in html
    return found


def made(directory: Path, **parts: Any) -> tuple[str, Page]:
    report.Page(**{"title": "t", "verdicts": [], "tables": [], **parts}).write(directory)
    html = (directory / "report.html").read_text()
    return html, checked(html)


def test_text_of_a_page_stays_text(tmp_path: Path) -> None:
    (tmp_path / "x.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    table = Table("<b>", ("<i>",), (("<script>alert(1)</script>",),), "<em>")
    html, found = made(
        tmp_path, title="<u>", verdicts=["<cite>"], lead="<dfn>", commands=["<q>"], tables=[table], foot="<s>",
        pictures=[("x", '"><a')], samples=[("<code>", [("<kbd>", "<a>", "<strong>")])],
    )  # fmt: skip
    assert html.count("<script>") == 1
    assert not found.tags & {"a", "b", "i", "u", "q", "s", "em", "code", "kbd", "strong", "cite", "dfn"}
    assert found.tables == [[["<i>"], ["<script>alert(1)</script>"]]]


def test_only_the_first_table_is_unfolded(tmp_path: Path) -> None:
    tables = [Table(title, ("a",), (("1",),)) for title in ("one", "two", "three")]
    assert made(tmp_path, tables=tables)[1].folds == [("one", True), ("two", False), ("three", False)]
