"""click's commands, options and arguments with our --help and our errors: options stand in groups,
names are not broken, and a missing value is an error in the words of its dataclass.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

_HELP = "Help"  # the group of --version and --help themselves
_NAME_COLUMNS = 24  # of --help; a longer name has a line of its own


class GroupedOption(click.Option):
    """An option below a heading of --help.

    alias: A further name, which --help does not show.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        group: str,
        missing: str = "",
        alias: str = "",
        **arguments: Any,
    ) -> None:
        super().__init__([*names, alias] if alias else names, **arguments)
        self.group = group
        self._missing = missing
        self.alias = alias

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = copy.copy(self)
        shown.opts = [name for name in self.opts if name != self.alias]
        return super(GroupedOption, shown).get_help_record(ctx)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        with _message_if_missing(self._missing, ctx):
            return super().process_value(ctx, value)


class Argument(click.Argument):
    """An argument whose absence is an error in the words of its dataclass."""

    def __init__(self, names: Sequence[str], *, missing: str = "", **arguments: Any) -> None:
        super().__init__(names, **arguments)
        self._missing = missing

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        with _message_if_missing(self._missing, ctx):
            return super().process_value(ctx, value)


@contextmanager
def _message_if_missing(message: str, ctx: click.Context) -> Iterator[None]:
    """Errors for a parameter that must be given and is not have this message, if there is one."""
    try:
        yield
    except click.MissingParameter as error:
        if not message:
            raise
        raise click.UsageError(message, ctx) from error


_UNBROKEN_HYPHEN = "\u2011"  # at which no line is broken


class _HelpFormatter(click.HelpFormatter):
    """Breaks lines of --help at spaces alone, so that options and names stay whole."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", _UNBROKEN_HYPHEN))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        unbroken = [(names, text.replace("-", _UNBROKEN_HYPHEN)) for names, text in rows]
        super().write_dl(unbroken, col_max, col_spacing)

    def write(self, string: str) -> None:
        super().write(string.replace(_UNBROKEN_HYPHEN, "-"))


class _HelpContext(click.Context):
    """A context whose --help does not break names."""

    formatter_class = _HelpFormatter


class GroupedCommand(click.Command):
    """A command whose --help has options in groups, all in the same columns, and an epilog that is
    printed as it is.
    """

    context_class = _HelpContext

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None or isinstance(
                parameter, click.Argument
            ):  # the text above says what they are
                continue
            group = parameter.group if isinstance(parameter, GroupedOption) else _HELP
            names, text = row
            groups.setdefault(group, []).append((names.ljust(_NAME_COLUMNS), text))

        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows, col_max=_NAME_COLUMNS)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog)
