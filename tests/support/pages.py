"""The blocks and commands of a page of the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from markdown_it import MarkdownIt


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The first lines and the texts of a page's blocks."""
    tokens = MarkdownIt().parse(page.read_text())
    return [
        ((t.map or [0])[0] + 2, t.content)
        for t in tokens
        if t.type == "fence" and t.info in languages
    ]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page's blocks."""
    for _, text in blocks(page, "", "sh", "bash"):
        code = re.sub(r"[ \t]#.*|^#.*", "", text.replace("\\\n", " "), flags=re.MULTILINE)
        words = shlex.shlex(code, posix=True, punctuation_chars="&|;\n")
        words.whitespace, words.whitespace_split = " \t", True
        yield from (
            [*group]
            for ends, group in groupby(words, lambda word: {*word} <= {*"&|;\n"})
            if not ends
        )
