"""Errors that a user can cause: one clear line each, never a traceback."""

from collections.abc import Iterable
from pathlib import Path


class RefusedError(ValueError):
    """A checkpoint, a text or an option that cannot be used; nothing is where the result would be.

    Exit code 2.
    """


class CorruptError(RefusedError):
    """A checkpoint whose files are broken or hostile."""


class MissingError(CorruptError):
    """A checkpoint that lacks a file."""


class EntryError(CorruptError):
    """A config.json that makes no sense.

    The message names the entry, where a single one is the cause.
    """


class NoMemoryError(RefusedError):
    """A device or the host ran out of memory, which may be otherwise the next time."""


class LayerwiseError(RefusedError):
    """A model that cannot be run layer by layer; `layerwise_error` makes it."""


def layerwise_error(subject: str, reason: str) -> LayerwiseError:
    """The error `SUBJECT cannot be run layer by layer: REASON`."""
    return LayerwiseError(f"{subject} cannot be run layer by layer: {reason}")


class TextError(RefusedError):
    """Text that cannot be used.

    One line: what was given, what is wrong with it or allowed, what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class OutputError(OSError):
    """The output could not be written, or failed verification. Exit code 1."""


def verification_error(problem: str) -> OutputError:
    """The error for a written result that is not what was planned; `problem` says in what."""
    return OutputError(
        f"the result failed verification: {problem}; repeat the command, and report this if it "
        "happens again"
    )


class CacheError(OutputError):
    """A cache of the Hugging Face libraries, below HF_HOME, cannot be written. Exit code 1."""


class UnfinishedError(OutputError):
    """A run stopped after work was done.

    What is done is stored; the message says where, and what continues it.
    """


class DivergedError(Exception):
    """Loss or gradients were not finite."""


class StoppedError(Exception):
    """A signal of this number stopped the run; the state was saved in `directory` after `step`."""

    def __init__(self, number: int, step: int, directory: Path) -> None:
        super().__init__(
            f"stopped; step {step} is saved in {directory}; the same command continues"
        )
        self.number = number


def listing(names: Iterable[object], limit: int = 8) -> str:
    """`a, b, c` in sorted order, truncated with a count: `a, b, c and 7 more`."""
    texts = sorted(str(name) for name in names)
    shown = ", ".join(texts[:limit])
    return shown if len(texts) <= limit else f"{shown} and {len(texts) - limit} more"


def plural(count: int, noun: str) -> str:
    """`1 document`, `2,000 documents`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def alternatives(values: Iterable[object]) -> str:
    """`1, 2, 4 or 8`."""
    texts = [str(value) for value in values]
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def explain(error: BaseException, limit: int = 300) -> str:
    """What an exception of a library says, in one line; its kind where it says nothing."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def one_line(text: str, limit: int = 1000) -> str:
    """Text with names out of a hostile file, safe to print: no line breaks, no terminal escapes,
    not endless.
    """
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} ... {text[-limit // 3 :]}"
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    """The character, or its escape sequence if it cannot be printed."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
