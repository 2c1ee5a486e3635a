"""report.html: one file that opens without a network, with pictures in it and tables that sort."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from gqa.eval.report import Table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 68rem; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
pre { background: #f4f4f4; padding: .75rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
td { white-space: nowrap; }
.words { text-align: left; }
td.long { white-space: normal; min-width: 12rem; }
th { background: #f4f4f4; vertical-align: bottom; }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: normal; }
th button:focus-visible { outline: 2px solid #0072B2; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
figure { margin: 2rem 0; }
figure img { max-width: 100%; height: auto; }
figcaption, .note { color: #444; font-size: .9rem; }
"""
_SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.querySelectorAll("th button").forEach((button, column) => button.addEventListener("click", () => {
    const head = button.closest("th"), up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[column].textContent.replaceAll(",", "");
    const compare = (a, b) => {
      const x = parseFloat(a), y = parseFloat(b);
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a.localeCompare(b);
      return x - y;
    };
    [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(value(a), value(b))).forEach(row => body.append(row));
  }));
}
"""


def page(title: str, lead: str, parts: Sequence[Table], figures: Sequence[tuple[Path, str]], foot: str) -> str:
    """A whole HTML document. `figures`: SVG files and their captions; `lead` and `foot` are plain text."""
    shown = [
        f'<figure><img alt="{escape(caption)}" src="data:image/svg+xml;base64,{b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for path, caption in figures
    ]
    tables = [_table(part) for part in parts]
    body = "\n".join([tables[0], *shown, *tables[1:]] if tables else shown)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{_paragraphs(lead)}\n{body}\n"
        f'<p class="note">{escape(foot)}</p>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n'
    )


def _paragraphs(text: str) -> str:
    """Paragraphs are separated by blank lines; indented ones are commands."""
    return "\n".join(
        f"<pre>{escape(part.strip())}</pre>" if part.startswith("    ") else f"<p>{escape(part)}</p>"
        for part in text.split("\n\n")
    )


def _table(table: Table) -> str:
    kinds = [_kind(column) for column in zip(*table.rows, strict=True)]
    head = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{escape(name)}</button></th>'
        for kind, name in zip(kinds, table.header, strict=True)
    )
    rows = "\n".join(_line(row, kinds) for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>\n{note}"
    )


def _line(cells: Sequence[str], kinds: Sequence[str]) -> str:
    shown = (f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(shown)}</tr>"


def _kind(column: Sequence[str]) -> str:
    """numbers, of which a few may be words as `failed` is; words on one line; or words that are too long for that."""
    if 2 * sum(bool(re.search("[a-z]{3}", cell)) for cell in column) <= len(column):
        return "numbers"
    return "words" if max(map(len, column)) <= 30 else "long words"
