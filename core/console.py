"""Shared by the commands: version, progress, one-line errors, exit codes, a silent transformers.

Imports no torch.
"""

import io
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from typing import Any, NoReturn, Self

import click

from gqa.core.errors import (
    DivergedError,
    RefusedError,
    StoppedError,
    alternatives,
    explain,
    one_line,
)

_LOG_SECONDS = 30.0  # between lines of progress in a log
_LONGEST_LINE = 4000  # characters
_LONGEST_STAGE = 60  # characters of the name of a stage
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def version_option(command: click.Command) -> click.Command:
    """Add --version, which also prints the versions of torch and transformers."""
    torch = installed("torch")
    transformers = installed("transformers")
    versions = f"%(prog)s %(version)s (torch {torch}, transformers {transformers})"
    text = "Print the versions of gqa, torch and transformers, and exit."
    return click.version_option(installed("gqa"), message=versions, help=text)(command)


def print_lines(lines: Iterable[str], err: bool = False) -> None:
    """Print lines for people.

    Together with `Watcher` and `print_json` this is the only way in which anything is printed:
    names out of checkpoints and data files never reach the terminal with line breaks or escape
    sequences.
    """
    for line in lines:
        click.echo(one_line(line, _LONGEST_LINE), err=err)


def print_json(record: Any) -> None:
    """Print one JSON object for programs; all but ASCII is escaped.

    Raises ValueError for NaN and infinity.
    """
    click.echo(json.dumps(record, allow_nan=False))


# How tqdm shows progress on a terminal. The remaining time comes first, so that a narrow terminal
# never cuts it off; the bar fills the remaining columns.
_BAR = "{desc} {percentage:3.0f}% eta {remaining} {n_fmt}/{total_fmt} {rate_fmt}{postfix} |{bar}|"
# A line of progress in a log.
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} elapsed, about {remaining} left{postfix}"


class Watcher:
    """Warnings on stderr and, unless `quiet`, progress: a tqdm bar, or in a log a line every
    `_LOG_SECONDS`.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._next_line = 0.0
        self._bar: Any = None

    def stage(self, name: str, total: int, unit: str = "token", done: int = 0) -> None:
        """Begin a stage of the work.

        Args:
            name: What is done in it.
            total: Its number of units; 0 if unknown.
            unit: What is counted: tokens, layers or others.
            done: Units that are done already.
        """
        from tqdm.auto import tqdm

        self.close()

        interactive = is_interactive()
        if interactive:
            style = _BAR
            file: Any = sys.stderr
            interval = 0.1
        else:
            style = _LINE
            file = io.StringIO()  # `update` prints the lines of a log itself
            interval = _LOG_SECONDS

        bar_format = style if total else None
        prints_lines = not interactive and not self._quiet
        self._next_line = time.monotonic() + _LOG_SECONDS if prints_lines else float("inf")
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=unit,
            unit_scale=total > 9999,  # 19.4k instead of 19400
            file=file,
            leave=False,
            dynamic_ncols=interactive,
            bar_format=bar_format,
            disable=self._quiet,
            mininterval=interval,
            miniters=1,
            desc=one_line(name, _LONGEST_STAGE),
        )

    def update(self, count: int = 1, note: str = "") -> None:
        """Count more units as done; callable from any thread.

        Args:
            count: How many.
            note: Shown next to the progress.
        """
        if note:
            self._bar.set_postfix_str(one_line(note), refresh=False)
        self._bar.update(count)

        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _LOG_SECONDS
            self.say(str(self._bar))

    def note(self, text: str) -> None:
        """Print a line unless `quiet`."""
        if not self._quiet:
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None and is_interactive():
            self._bar.clear()
        print_lines([text], err=True)

    def warn(self, text: str) -> None:
        """Print a warning, also if `quiet`."""
        self.say(f"warning: {text}")

    def close(self) -> None:
        """End the current stage."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


SILENT = Watcher(quiet=True)


def is_interactive() -> bool:
    """Whether a person watches the output: stderr is a terminal, or this runs in a notebook."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    in_notebook = "IPKernelApp" in getattr(get_shell(), "config", ())
    return sys.stderr.isatty() or in_notebook


def fail(program: str, message: str, code: int) -> NoReturn:
    """Print one line on stderr and exit."""
    click.echo(one_line(f"{program}: {message}"), err=True)
    sys.exit(code)


def operand(name: str) -> str:
    """A model as a word of a command to type: a path that begins with a dash would be an option."""
    return f"./{name}" if name.startswith("-") else name


class TerminatedError(SystemExit):
    """SIGTERM ends the command: as an exit, so that no handler of errors takes it for one."""

    code: int


def _terminate(number: int, frame: object) -> NoReturn:
    raise TerminatedError(128 + number)


def run(command: click.Command, program: str, interrupted: str) -> None:
    """Run a command.

    Exit codes: 0 done, 2 wrong usage or refused, 130 interrupted (143 terminated), 1 anything else.

    Args:
        command: The command.
        program: Its name.
        interrupted: What is said if it is interrupted: what is left, and how to go on.
    """
    signal.signal(signal.SIGTERM, _terminate)
    # Else torch prints a trace when another process has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        command.main(prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        message = _describe_usage(error)
        separator = "; see"
        if message.endswith("?"):  # a question is a sentence of its own
            separator = " See"
        fail(program, f"{message}{separator} {program} --help", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail(program, f"interrupted; {interrupted}", 130)
    except TerminatedError as error:
        fail(program, f"terminated; {interrupted}", error.code)
    except Exception as error:  # always one line; -v adds the traceback
        # The options may not have been read when the error occurred. -qv counts, too.
        is_verbose = any(re.fullmatch("--verbose|-[a-z]*v[a-z]*", word) for word in sys.argv)
        if is_verbose:
            print_lines(traceback.format_exc().rstrip("\n").split("\n"), err=True)
        message, code = _describe_failure(error)
        fail(program, message, code)


def _describe_usage(error: click.ClickException) -> str:
    """What is said of a wrong command line: first the option, then what is wrong with it."""
    if isinstance(error, click.NoSuchOption):
        message = f"there is no option {error.option_name}"
        similar = [name for name in error.possibilities or () if name not in _aliases(error.ctx)]
        if similar:
            message += f"; did you mean {alternatives(similar)}?"
        return message

    extra = re.match(r"Got unexpected extra arguments? \((.*)\)", error.format_message())
    if extra and isinstance(error, click.UsageError) and error.ctx:
        model = error.ctx.params.get("model")
        advice = f"{model} was read as MODEL, and all other values need the name of an option"
        if extra[1].startswith("#"):
            advice = "your shell passes comments on; leave out what follows the #"
        return f"too many arguments: {extra[1]}; {advice}"

    is_missing = isinstance(error, click.MissingParameter)
    if isinstance(error, click.BadParameter) and error.param is not None and not is_missing:
        names = [name for name in error.param.opts if name.startswith("--")]
        name = names[0] if names else error.param.human_readable_name
        return f"{name} {error.message.rstrip('.')}"

    return error.format_message().rstrip(".")


def _aliases(context: click.Context | None) -> set[str]:
    """Names of a command's options that --help does not show."""
    options = context.command.params if context else []
    return {getattr(option, "alias", "") for option in options}


def _describe_failure(error: Exception) -> tuple[str, int]:
    """What is said of an error that ended a command, and the exit code."""
    from gqa.core.devices import out_of_memory

    if isinstance(error, RefusedError):
        return str(error), 2
    if isinstance(error, StoppedError):
        return str(error), 128 + error.number
    if isinstance(error, OSError) and error.filename and error.strerror:
        name = os.fsdecode(error.filename)
        advice = "check that it exists, its permissions and the disk"
        return f"{name}: {error.strerror}; {advice}", 1
    if isinstance(error, OSError | DivergedError):
        return str(error), 1
    if out_of_memory(error):
        advice = "stop other programs that use this memory, or use a device with more of it"
        return f"out of memory: {explain(error)}; {advice}", 1

    kind = type(error).__name__
    advice = "please report it with the command and what -v prints"
    return f"unexpected {kind}: {explain(error)}; {advice}", 1


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the bars, tables and hints of transformers: our errors say what matters."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if has_bars:
            transformers_logging.enable_progress_bar()
