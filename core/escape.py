"""Text out of checkpoints and data files, made safe for one medium each.

None of it is trusted: a directory, a tensor or a column may have any name.

    medium            function
    terminal, logs    `one_line` of `gqa.core.errors`, which `console.print_lines` calls
    shell commands    `shell_line`
    Markdown          `markdown` (prose), `code_span`, `code_block`, `python_string` (in Python)
    HTML              `visible`, and then the template engine's own escapes
"""

import os
import re
import shlex
from collections.abc import Iterable

from gqa.core.errors import one_line

_LONGEST_COMMAND = 4000

# Control characters except tabs and line breaks, halves of surrogate pairs, separators that some
# programs take for line breaks, and characters that reverse the direction of the text around them.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)

# What starts or ends markup inside a line; `:` so that no address becomes a link by itself, which a
# colon before a space never is. Parentheses mean nothing without brackets, and `>` after a word or
# an arrow's dash nothing without `<`.
_MARKUP = re.compile(r"[\\`*_\[\]<#|~$&!@]|:(?=\S)|(?<!\S)>")


def visible(text: str) -> str:
    """Text of several lines with its control characters written out, like `\\x1b`."""
    return _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shell_line(words: Iterable[str]) -> str:
    """A command as one line for a shell.

    Words with control characters are quoted as `$'...'`, which Bash and Zsh read, so that the line
    can be printed and still be used as it is.
    """
    return " ".join(map(_shell_word, words))


def _shell_word(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    escaped = [_shell_character(character) for character in word]
    return f"$'{''.join(escaped)}'"


def _shell_character(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    # Octal numbers have at most three digits: what follows is never taken for a part of them.
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))


def markdown(text: str, limit: int = 300) -> str:
    """Plain text for a line of Markdown: nothing in it is markup, HTML or a link."""
    escaped = _MARKUP.sub(lambda match: f"\\{match[0]}", one_line(text, limit))
    return re.sub(r"(?i)\bwww\.", r"www\\.", escaped)


def code_span(text: str, limit: int = 300) -> str:
    """Text as inline code of Markdown, outside of tables."""
    line = one_line(text, limit)
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    needs_space = line[:1] in ("", "`", " ") or line[-1:] in ("`", " ")
    return f"{fence} {line} {fence}" if needs_space else f"{fence}{line}{fence}"


def code_block(lines: Iterable[str], language: str = "") -> str:
    """Lines as a block of code of Markdown."""
    code = "\n".join(one_line(line, _LONGEST_COMMAND) for line in lines)
    longest = max(map(len, re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def python_string(text: str) -> str:
    """A literal of Python for a text; in double quotes where the text needs no escapes."""
    return f'"{text}"' if re.fullmatch(r"[\w ./~-]*", text, re.ASCII) else repr(text)
