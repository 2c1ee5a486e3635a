"""The options of a command: a frozen dataclass, from which the command line is built and which
Python callers make too.

    @dataclass(frozen=True)
    class Windows(Options):
        model: str = option(MISSING, argument="MODEL")
        context: int | None = option(
            None, "Tokens.  [default: the model's]", tokens_type(4), group=MAIN
        )
        recall: bool | None = option(None, "Measure recall.", group="Recall", needs=("context",))

    @command(Windows)
    def windows(options: Windows) -> None:
        "What --help says."

A bool is a flag, a Literal a choice, a tuple takes several values; other types need a click type.
Imports no torch.
"""

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import click

from gqa.core.console import CONTEXT_SETTINGS, version_option
from gqa.core.errors import DivergedError, OutputError, RefusedError, alternatives

T = TypeVar("T")
# Headings of --help that all commands share. A group appears where its first option is declared.
MAIN = "Main options"  # what people need first
MODEL = "Model"
HARDWARE = "Hardware"
OUTPUT = "Output"
_HELP = "Help"  # --version and --help themselves
_NAME_COLUMNS = 24  # of --help; a longer name has a line of its own

# Units of numbers of tokens, and of sizes in bytes.
_COUNTS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "T": 10**12,
}
_SIZES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
# Words of bounds -> what a number within them satisfies.
_COMPARE = {
    "from": operator.ge,
    "above": operator.gt,
    "to": operator.le,
    "below": operator.lt,
}


class Number(click.ParamType[Any]):
    """A finite number within bounds.

    Args:
        kind: `int` or `float`.
        bounds: The bounds in words, like `from 1 to 8` or `above 0 below 1`.
    """

    name = "number"

    def __init__(self, kind: type, bounds: str = "") -> None:
        words = bounds.split()
        pairs = zip(words[::2], words[1::2], strict=True)
        self._bounds = [(_COMPARE[word], float(bound)) for word, bound in pairs]
        self._kind = kind
        noun = "whole number" if kind is int else "number"
        self._allowed = _bounds_text(noun, words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = value
        if isinstance(value, str):
            with suppress(ValueError):
                number = self._kind(value)
        if not self._contains(number):
            self.fail(f"{value!r} is not a {self._allowed}", param, ctx)
        return self._kind(number)

    def _contains(self, number: Any) -> bool:
        """Whether a value is a finite number of this kind, within the bounds."""
        kinds = (int,) if self._kind is int else (int, float)
        if not isinstance(number, kinds) or isinstance(number, bool):
            return False
        return abs(number) < math.inf and all(holds(number, bound) for holds, bound in self._bounds)


def _bounds_text(kind: str, words: Sequence[str]) -> str:
    """`number above 0 and at most 1,000`, of `above 0 to 1000`."""
    bounds = []
    for word, bound in zip(words[::2], words[1::2], strict=True):
        limit = f"{int(bound):,}" if bound.isdigit() else bound
        bounds.append(f"{word} {limit}")

    is_range = words[:1] == ["from"]  # `from 1 to 8` reads as it is
    if is_range:
        return " ".join([kind, *bounds])
    text = " and ".join(bounds)
    return " ".join([kind, text.replace("and to", "and at most")]).rstrip()


LARGEST = 10**9  # of what is counted one by one
COUNT = Number(int, f"from 1 to {LARGEST}")
SEED = Number(int, f"from 0 to {2**31 - 1}")
POSITIVE = Number(float, f"above 0 to {LARGEST}")
FROM_ZERO = Number(float, f"from 0 to {LARGEST}")
SHARE = Number(float, "from 0 to 1")
_FLAG = click.Choice((True, False))


class OneOf(click.Choice[str]):
    """One of several words. A mistyped one is answered with the word that is most like it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word. Raises BadParameter for another one."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            message = f"{value!r} is not one of {', '.join(self.choices)}"
            similar = get_close_matches(str(value), self.choices, n=1)
            if similar:
                message += f"; did you mean {similar[0]}?"
            raise click.BadParameter(message, ctx, param) from error


class Amount(click.ParamType[int]):
    """`64K`, `1.5GB`: a whole number, up to 10^15.

    Args:
        units: Factors by the letters that may follow the number.
        allowed: What is allowed, in words, for the error.
        least: The least allowed number.
        rounds: Whether fractions of one are rounded down, as in sizes: 79.6GiB is no whole number
            of bytes. Otherwise they are refused.
    """

    name = "amount"

    def __init__(
        self, units: Mapping[str, int], allowed: str, least: int = 1, rounds: bool = False
    ) -> None:
        self._units = units
        self._allowed = allowed
        self._least = least
        self._rounds = rounds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        amount = None
        if not isinstance(value, bool | float):
            amount = read_amount(str(value), self._units, self._rounds)
        if amount is None or not self._least <= amount <= 10**15:
            self.fail(f"{value!r} is not a {self._allowed}", param, ctx)
        return amount


def read_amount(text: str, units: Mapping[str, int] = _COUNTS, rounds: bool = False) -> int | None:
    """A number like 65536, 64K, 500M or 1B; None for what is no such number above zero, or no whole
    one unless it `rounds` down.
    """
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None:
        return None

    number, unit = match.groups()
    amount = Fraction(number) * units.get(unit, 0)
    if amount.denominator != 1 and not rounds:
        return None
    return int(amount) or None


def tokens_type(least: int = 1) -> Amount:
    """A number of tokens."""
    return Amount(
        _COUNTS,
        f"number of tokens from {least} to 1000T; pass one like 65536, 64K, 500M or 1B",
        least,
    )


# Fewer than a thousand bytes are a number without its unit
BYTES = Amount(
    _SIZES,
    "size; pass a number with KB, MB, GB, KiB, MiB or GiB, like 5GB",
    least=1000,
    rounds=True,
)


class Text(click.ParamType[Any]):
    """A name or a path, which need not exist.

    Args:
        kind: What it is converted to: `str` or `Path`.
        blank: Whether it may be whitespace.
    """

    name = "text"

    def __init__(self, kind: type = str, *, blank: bool = False) -> None:
        self._kind = kind
        self._blank = blank

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not self._is_name(text):
            self.fail(f"{value!r} is not a name or a path; pass text that is not blank", param, ctx)
        return self._kind(text)

    def _is_name(self, text: Any) -> bool:
        if not isinstance(text, str) or "\0" in text:
            return False
        if self._blank:
            return bool(text)
        return bool(text.strip())


class Several(click.ParamType[tuple[Any, ...]]):
    """`1,8,32`: values of another type, one or more.

    A file with a comma in its name is one value.
    """

    name = "list"

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self.kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        values: Sequence[Any]
        if isinstance(value, str) and not os.path.exists(value):
            words = [word.strip() for word in value.split(",")]
            values = [word for word in words if word]
        elif isinstance(value, list | tuple):
            values = value
        else:
            values = [value]

        if not values:
            self.fail(
                f"{value!r} is empty; pass one or more values, separated by commas", param, ctx
            )
        return tuple(self.kind.convert(entry, param, ctx) for entry in values)


class KVHeads(click.ParamType[int | tuple[int, ...]]):
    """`8`, or one number for each layer: `1,3,3,1`."""

    name = "kv heads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            counts = Several(COUNT).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(
                f"{value!r} is not a number of KV heads; pass a positive whole number, or one for "
                "each layer, like 3,1,1,3",
                param,
                ctx,
            )
        return counts if len(counts) > 1 else counts[0]


def option(
    default: Any,
    help: str = "",
    kind: click.ParamType[Any] | None = None,
    *,
    group: str = "",
    metavar: str = "",
    short: str = "",
    alias: str = "",
    argument: str = "",
    missing: str = "",
    free: bool = False,
    needs: Sequence[str] = (),
    methods: str = "",
    expert: bool = False,
) -> Any:
    """A field that is an option too.

    Args:
        default: MISSING where it must be given.
        help: What --help says. A default is added, unless it is in there, in other words.
        kind: The click type of a value, where the type of the field does not determine it.
        group: The heading of --help below which it stands; every option of a command needs one.
        metavar: What --help calls a value.
        short: `-o`.
        alias: Another name, `--groups`.
        argument: The metavar of an argument of the command, which is no option.
        missing: What an error says if the option or argument must be given and is not.
        free: May differ between a run and its continuation.
        needs: It means nothing unless one of these other options is given (`check_needs`, which the
            command has to call).
        methods: What it sets, if only some methods of conversion use it
            (`gqa.convert.methods.base.Method.settings`).
        expert: For Python callers only: no option of the command.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "kind": kind,
            "group": group,
            "metavar": metavar,
            "short": short,
            "alias": alias,
            "argument": argument,
            "missing": missing,
            "free": free,
            "needs": needs,
            "methods": methods,
            "expert": expert,
        },
    )


def same_as(kind: type, name: str, **changes: Any) -> Any:
    """The option of another command's dataclass, with some of its arguments changed."""
    original = field_of(kind, name)
    return option(**{"default": original.default, **original.metadata, **changes})


def field_of(kind: type, name: str) -> Field[Any]:
    """The field of this name of a dataclass."""
    return cast("Field[Any]", kind.__dataclass_fields__[name])  # type: ignore[attr-defined]


# Types of fields -> click types.
_USUAL_TYPES: dict[Any, click.ParamType[Any]] = {
    bool: _FLAG,
    str: Text(),
    Path: Text(Path),
}


@cache
def _types(kind: type) -> dict[str, tuple[click.ParamType[Any], bool]]:
    """By field, the type of its values, and whether it has several."""
    types = {}
    for name, hint in get_type_hints(kind).items():
        value, several = _value_type(hint)
        one = field_of(kind, name).metadata["kind"]
        if one is None and get_origin(value) is Literal:
            one = OneOf(get_args(value))
        elif one is None:
            one = _USUAL_TYPES.get(value)
        assert one is not None, f"{kind.__name__}.{name} needs a type"
        types[name] = (Several(one), True) if several else (one, False)
    return types


def _value_type(hint: Any) -> tuple[Any, bool]:
    """The type of one value of a field with this type, and whether the field has several.

    `X | None` has values of type X, `tuple[X, ...]` has several.
    """
    parts = [part for part in get_args(hint) if part is not NoneType]
    is_optional = parts and get_origin(hint) not in (Literal, tuple)
    plain = parts[0] if is_optional else hint

    several = get_origin(hint) is tuple or (get_origin(plain) is tuple and len(parts) == 1)
    if several:
        return get_args(plain)[0], True
    return plain, False


@dataclass(frozen=True)
class Options:
    """The base of such dataclasses: values are checked and converted, whoever gives them."""

    def __post_init__(self) -> None:
        """Raises RefusedError that names the field."""
        command: type = type(self)
        for name, (kind, _) in _types(command).items():
            value = getattr(self, name)
            default = field_of(command, name).default
            if value is None and default is MISSING:
                raise RefusedError(f"{name} is missing; pass a value")
            if value is None:  # not given, as on the command line
                object.__setattr__(self, name, default)
                continue
            if value == default and type(value) is type(default):
                continue
            try:
                object.__setattr__(self, name, kind.convert(value, None, None))
            except click.BadParameter as error:
                raise RefusedError(f"{name}: {error.message.rstrip('.')}") from error

    def is_set(self, name: str) -> bool:
        """Whether an option has another value than its default."""
        return bool(getattr(self, name) != field_of(type(self), name).default)

    def check_needs(self) -> None:
        """Raises RefusedError for an option that is given without any of those that it needs."""
        for one in fields(self):
            needs = one.metadata["needs"]
            if not needs or not self.is_set(one.name) or any(getattr(self, name) for name in needs):
                continue

            names = [
                field_of(type(self), name).metadata["argument"].strip("[]") or flag(name)
                for name in needs
            ]
            remedy = "both" if len(names) == 1 else "one of them too"
            raise RefusedError(
                f"{flag(one.name)} has no effect without {alternatives(names)}; pass {remedy}, or "
                f"remove {flag(one.name)}"
            )

    def binding(self) -> dict[str, Any]:
        """What a continued run must have in common with the one before, JSON-ready."""
        bound = {}
        for one in fields(self):
            if not one.metadata["free"]:
                value = getattr(self, one.name)
                bound[one.name] = list(value) if isinstance(value, tuple) else value
        return bound


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


@contextmanager
def parameters_in_errors(command: type) -> Iterator[None]:
    """Errors of the block are for Python callers: `kv_heads=3` instead of `--kv-heads 3`,
    `overwrite=True` instead of `--overwrite`, `output` instead of `-o`.
    """

    def parameter_of(match: re.Match[str]) -> str:
        no, word, rest = match.groups(default="")
        name = word.replace("-", "_")
        kind, _ = _types(command).get(name, (None, False))
        if kind is _FLAG:
            return f"{name}={not no}{rest}"
        return name + rest.replace(" ", "=")

    try:
        yield
    except (RefusedError, OutputError, DivergedError) as error:
        message = re.sub(r"(?<![\w-])-o\b", "output", str(error))
        message = re.sub(r"(?<![\w-])--(no-)?([a-z][a-z-]+)( [\dA-Z])?", parameter_of, message)
        error.args = (message,)
        raise


def default_text(default: Any) -> str:
    """How --help shows a default: `  [default: 0]`.

    Empty for what is off, or depends on other things.
    """
    if default is True:
        return "  [default: on]"
    # By identity: 0 and 0.0 are equal to False, and are defaults like others.
    if default in ((), None) or default is MISSING or default is False:
        return ""
    values = default if isinstance(default, tuple) else (default,)
    return f"  [default: {','.join(map(_shown, values))}]"


def _shown(value: Any) -> str:
    """A value as the user would type it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


class _GroupedOption(click.Option):
    """An option below a heading of --help."""

    def __init__(
        self, names: Sequence[str], *, group: str, missing: str = "", **arguments: Any
    ) -> None:
        super().__init__(names, **arguments)
        self.group = group
        self._missing = missing

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        with _message_if_missing(self._missing, ctx):
            return super().process_value(ctx, value)


class _Argument(click.Argument):
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


class _GroupedCommand(click.Command):
    """A command whose --help has options in groups, all in the same columns, and an epilog that is
    printed as it is.
    """

    context_class = _HelpContext

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            row = one.get_help_record(ctx)
            if row is None or isinstance(one, click.Argument):  # the text above says what they are
                continue
            group = one.group if isinstance(one, _GroupedOption) else _HELP
            names, text = row
            groups.setdefault(group, []).append((names.ljust(_NAME_COLUMNS), text))

        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows, col_max=_NAME_COLUMNS)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog)


def parameter(owner: type, one: Field[Any]) -> click.Parameter:
    """The option or argument of a command that `one`, a field of its dataclass, is."""
    name = one.name
    kind, several = _types(owner)[one.name]
    metadata = one.metadata
    required = one.default is MISSING
    if metadata["argument"]:
        nargs = -1 if several else 1
        return _Argument(
            [name],
            type=Text(),
            nargs=nargs,
            required=required,
            missing=metadata["missing"],
            metavar=metadata["argument"],
        )

    group = metadata["group"]
    assert group, f"{owner.__name__}.{one.name} needs a group of --help"

    names = [name, flag(name)]
    if metadata["short"]:
        names.insert(1, metadata["short"])
    if metadata["alias"]:
        names.append(metadata["alias"])
    text = metadata["help"]
    if "[default: " not in text:
        text += default_text(one.default)
    if kind is _FLAG:
        if one.default is not False:
            names[-1] += f"/--no-{flag(name)[2:]}"
        return _GroupedOption(names, group=group, is_flag=True, default=None, help=text)

    metavar = metadata["metavar"]
    if not metavar and several:
        metavar = "N[,...]"
    elif not metavar:
        metavar = "N" if isinstance(kind, Number) else None
    return _GroupedOption(
        names,
        group=group,
        type=kind,
        required=required,
        missing=metadata["missing"],
        help=text,
        metavar=metavar,
        multiple=several,
    )


def read(kind: type[T], params: Mapping[str, Any]) -> T:
    """The options that click has read; those that were not given have their defaults."""
    values = {name: value for name, value in params.items() if value not in (None, ())}
    for name, value in values.items():
        # One tuple for each time the option was given.
        if isinstance(value, tuple) and isinstance(value[0], tuple):
            values[name] = tuple(chain.from_iterable(value))
    return kind(**values)


def command(kind: type[T], epilog: str = "") -> Callable[[Callable[[T], Any]], click.Command]:
    """A command whose options are the fields of `kind`, of which the function gets one.

    Args:
        kind: The dataclass.
        epilog: What --help says after the options; its lines are printed as they are.
    """

    def decorate(function: Callable[[T], Any]) -> click.Command:
        def call(**params: Any) -> Any:
            return function(read(kind, params))

        public = [one for one in fields(kind) if not one.metadata["expert"]]  # type: ignore[arg-type]
        return version_option(
            _GroupedCommand(
                None,
                callback=call,
                params=[parameter(kind, one) for one in public],
                help=function.__doc__,
                epilog=epilog,
                context_settings=CONTEXT_SETTINGS,
            )
        )

    return decorate
