"""The blocks and commands of a page of the documentation, and tables in it that are generated."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt
from markdown_it.token import Token


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The first lines and the texts of a page's blocks."""
    return [
        ((fence.map or [0])[0] + 2, fence.content)
        for fence in _fences(page)
        if fence.info in languages
    ]


@cache
def _fences(page: Path) -> list[Token]:
    """All blocks of a page; what stands between them is not looked into."""
    tokens = MarkdownIt().disable("inline").parse(page.read_text())
    return [token for token in tokens if token.type == "fence"]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page's blocks, with the values of the page's variables."""
    values: dict[str, str] = {}
    for _, text in blocks(page, "", "sh", "bash"):
        code = re.sub(r"[ \t]#.*|^#.*", "", text.replace("\\\n", " "), flags=re.MULTILINE)
        words = shlex.shlex(code, posix=True, punctuation_chars="&|;\n")
        words.whitespace, words.whitespace_split = " \t", True
        for ends, group in groupby(words, lambda word: {*word} <= {*"&|;\n"}):
            if not ends:
                command = [Template(word).safe_substitute(values) for word in group]
                if len(command) == 1 and (variable := re.fullmatch(r"(\w+)=(.*)", command[0])):
                    values[variable[1]] = variable[2]
                else:
                    yield command


def with_table(page: str, header: str, rows: Iterable[Sequence[str]]) -> str:
    """A page whose table with this header has these rows: Markdown, in whose cells a bar would end
    the cell.
    """
    assert page.count(header) == 1, f"the page has no table with the header {header}"
    before, _, rest = page.partition(header)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    lines = (" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows)
    return before + header + "".join(f"| {line} |\n" for line in lines) + after
