"""What the commands share: sizes as options, one line for every error, exit codes. Imports no torch."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from gqa.checkpoint.errors import RefusedError, explain, one_line

Option = Callable[[Callable[..., Any]], Callable[..., Any]]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class ByteSize(click.ParamType[int]):
    """`5GB`, `500MiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS or float(match[1]) == 0:
            self.fail(f"{value!r} is not a size; give a number with KB, MB, GB, KiB, MiB or GiB, like 5GB", param, ctx)
        size = float(match[1]) * _UNITS[match[2].upper()]
        return int(min(max(size, 1), 2**62))


class Several(click.ParamType[tuple[Any, ...]]):
    """`1,8,32`: values of another type, one or more."""

    name = "list"

    def __init__(self, kind: Any) -> None:
        self._kind = click.types.convert_type(kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        words = filter(None, map(str.strip, str(value).split(",")))
        found = dict.fromkeys(self._kind.convert(word, param, ctx) for word in words)
        if not found:
            self.fail(f"{value!r} names nothing; give one or more, separated by commas", param, ctx)
        return tuple(found)


def with_options(*groups: Sequence[Option]) -> Option:
    """Groups of click options as one decorator; --help lists them in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


version_option = click.version_option(
    package_name="gqa-convert", message="%(prog)s %(version)s", help="Print the version and exit."
)


def progress_bar(total: int, unit: str, description: str, quiet: bool) -> Any:
    """On stderr, or in the cell of a notebook, only where a person looks at it."""
    from tqdm.auto import tqdm

    return tqdm(
        total=total, unit=unit, unit_scale=True, desc=description, file=sys.stderr, leave=False,
        disable=quiet or not watched(),
    )  # fmt: skip


def watched() -> bool:
    """Whether a person looks at what is written as it comes: at a terminal, or in a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or "IPKernelApp" in getattr(shell, "config", ())


def fail(program: str, message: str, code: int) -> NoReturn:
    click.echo(one_line(f"{program}: {message}"), err=True)
    sys.exit(code)


def _terminated(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def run(command: click.Command, program: str, interrupted: str) -> None:
    """Run a command.

    Exit codes: 0 done, 2 wrong usage or refused, 130 interrupted (143 terminated), 1 anything else.
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        command.main(prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        fail(program, f"{error.format_message().rstrip('.')}; see {program} --help", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        fail(program, f"interrupted; {interrupted}", 130)
    except RefusedError as error:
        fail(program, str(error), 2)
    except OSError as error:
        fail(program, str(error), 1)
    except Exception as error:  # a defect of ours: one line all the same, the traceback on request
        from gqa.checkpoint.devices import out_of_memory

        if {"-v", "--verbose"} & set(sys.argv):
            traceback.print_exc()
        if out_of_memory(error):
            fail(program, f"out of memory: {explain(error)}", 1)
        fail(program, f"unexpected {type(error).__name__}: {explain(error)}; -v shows where, please report it", 1)
