"""The options of a command: a frozen dataclass, from which the command line is built and which
Python callers make too.

    @dataclass(frozen=True)
    class Windows(Options):
        model: str = option(MISSING, argument_metavar="MODEL")
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

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import click

from gqa.core.click_commands import Argument, GroupedCommand, GroupedOption
from gqa.core.console import CONTEXT_SETTINGS, version_option
from gqa.core.errors import DivergedError, OutputError, RefusedError, alternatives
from gqa.core.option_types import Number, OneOf, Several, Text

T = TypeVar("T")
# Headings of --help that all commands share. A group appears where its first option is declared.
MAIN = "Main options"  # what people need first
MODEL = "Model"
HARDWARE = "Hardware"
OUTPUT = "Output"

_FLAG = click.Choice((True, False))


def option(
    default: Any,
    help: str = "",
    value_type: click.ParamType[Any] | None = None,
    *,
    group: str = "",
    metavar: str = "",
    short: str = "",
    alias: str = "",
    argument_metavar: str = "",
    missing: str = "",
    may_change: bool = False,
    needs: Sequence[str] = (),
    setting: str = "",
    repeated: bool = True,
    expert: bool = False,
) -> Any:
    """A field that is an option too.

    Args:
        default: MISSING where it must be given.
        help: What --help says. A default is added, unless it is in there, in other words.
        value_type: The click type of a value, where the type of the field does not determine it.
        group: The heading of --help below which it stands; every option of a command needs one.
        metavar: What --help calls a value.
        short: `-o`.
        alias: Another name, which --help does not show: `--groups`.
        argument_metavar: Makes the field a positional argument (MODEL) instead of an option; this
            is its metavar.
        missing: What an error says if the option or argument must be given and is not.
        may_change: Whether it may differ between a run and its continuation.
        needs: It means nothing unless one of these other options is given. Only `check_needs`
            checks it, so a dataclass that uses it has to call that (EvaluateOptions does).
        setting: The entry of `gqa.convert.methods.base.Method.settings` that it belongs to, if only
            some methods of conversion use it; empty if all do.
        repeated: Whether the conversion that gqa-convert advises next has it too, if it was given.
        expert: For Python callers only: no option of the command.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "value_type": value_type,
            "group": group,
            "metavar": metavar,
            "short": short,
            "alias": alias,
            "argument_metavar": argument_metavar,
            "missing": missing,
            "may_change": may_change,
            "needs": needs,
            "setting": setting,
            "repeated": repeated,
            "expert": expert,
        },
    )


def same_as(options_class: type, name: str, **changes: Any) -> Any:
    """The option of another command's dataclass, with some of its arguments changed."""
    original = field_of(options_class, name)
    return option(**{"default": original.default, **original.metadata, **changes})


def field_of(options_class: type, name: str) -> Field[Any]:
    """The field of this name of a dataclass."""
    return cast("Field[Any]", options_class.__dataclass_fields__[name])  # type: ignore[attr-defined]


def is_default_flag(options_class: type, name: str, value: Any) -> bool:
    """Whether the value is that of a flag which was not given."""
    return isinstance(value, bool) and value == field_of(options_class, name).default


# Types of fields -> click types.
_USUAL_TYPES: dict[Any, click.ParamType[Any]] = {
    bool: _FLAG,
    str: Text(),
    Path: Text(Path),
}


@cache
def _types(options_class: type) -> dict[str, tuple[click.ParamType[Any], bool]]:
    """By field, the type of its values, and whether it has several."""
    types = {}
    for name, hint in get_type_hints(options_class).items():
        python_type, has_several = _value_type(hint)
        value_type = field_of(options_class, name).metadata["value_type"]
        if value_type is None and get_origin(python_type) is Literal:
            value_type = OneOf(get_args(python_type))
        elif value_type is None:
            value_type = _USUAL_TYPES.get(python_type)
        assert value_type is not None, f"{options_class.__name__}.{name} needs a type"

        if has_several:
            value_type = Several(value_type)
        types[name] = (value_type, has_several)
    return types


def _value_type(hint: Any) -> tuple[Any, bool]:
    """The type of one value of a field with this type, and whether the field has several.

    X -> (X, False)                     X | None -> (X, False)
    tuple[X, ...] -> (X, True)          tuple[X, ...] | None -> (X, True)
    X | tuple[X, ...] | None -> (X, False): its click type reads both.
    """
    parts = [part for part in get_args(hint) if part is not NoneType]
    is_union = get_origin(hint) not in (None, Literal, tuple)
    plain = parts[0] if is_union else hint

    is_tuple = get_origin(plain) is tuple
    if is_tuple and (not is_union or len(parts) == 1):
        return get_args(plain)[0], True
    return plain, False


@dataclass(frozen=True)
class Options:
    """The base of such dataclasses: values are checked and converted, whoever gives them."""

    def __post_init__(self) -> None:
        """Raises RefusedError that names the field."""
        options_class: type = type(self)
        for name, (value_type, _) in _types(options_class).items():
            value = getattr(self, name)
            default = field_of(options_class, name).default
            if value is None and default is MISSING:
                raise RefusedError(f"{name} is missing; pass a value")
            if value is None:  # not given, as on the command line
                object.__setattr__(self, name, default)
                continue
            if type(value) is type(default) and value == default:
                continue
            try:
                object.__setattr__(self, name, value_type.convert(value, None, None))
            except click.BadParameter as error:
                raise RefusedError(f"{name}: {error.message.rstrip('.')}") from error

    def is_set(self, name: str) -> bool:
        """Whether an option has another value than its default."""
        return bool(getattr(self, name) != field_of(type(self), name).default)

    def check_needs(self) -> None:
        """Raise RefusedError for an option that is given without any of those that it needs."""
        for entry in fields(self):
            needs = entry.metadata["needs"]
            if not needs or not self.is_set(entry.name):
                continue
            if any(getattr(self, name) for name in needs):
                continue

            names = [
                field_of(type(self), name).metadata["argument_metavar"].strip("[]") or flag(name)
                for name in needs
            ]
            remedy = "both" if len(names) == 1 else "one of them too"
            raise RefusedError(
                f"{flag(entry.name)} has no effect without {alternatives(names)}; pass {remedy}, "
                f"or remove {flag(entry.name)}"
            )

    def as_typed(self, name: str) -> str:
        """The option of a field that is set: `--no-check` if it was switched off."""
        if getattr(self, name) is False:
            return "--no-" + name.replace("_", "-")
        return flag(name)

    def identity_values(self) -> dict[str, Any]:
        """What a continued run must have in common with the one before, JSON-ready."""
        values = {}
        for entry in fields(self):
            if entry.metadata["may_change"]:
                continue
            value = getattr(self, entry.name)
            if isinstance(value, tuple):
                value = list(value)
            values[entry.name] = value
        return values


def flag(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


@contextmanager
def parameters_in_errors(options_class: type) -> Iterator[None]:
    """Errors of the block are for Python callers: `kv_heads=3` instead of `--kv-heads 3`,
    `overwrite=True` instead of `--overwrite`, `output` instead of `-o`.
    """

    def parameter_of(match: re.Match[str]) -> str:
        no, word, rest = match.groups(default="")
        name = word.replace("-", "_")
        value_type, _ = _types(options_class).get(name, (None, False))
        if value_type is _FLAG:
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


def parameter(options_class: type, entry: Field[Any]) -> click.Parameter:
    """The option or argument of a command that `entry`, a field of its dataclass, is."""
    name = entry.name
    value_type, has_several = _types(options_class)[name]
    metadata = entry.metadata
    required = entry.default is MISSING
    if metadata["argument_metavar"]:
        nargs = -1 if has_several else 1
        return Argument(
            [name],
            type=Text(),
            nargs=nargs,
            required=required,
            missing=metadata["missing"],
            metavar=metadata["argument_metavar"],
        )

    group = metadata["group"]
    assert group, f"{options_class.__name__}.{name} needs a group of --help"

    names = [name, flag(name)]
    if metadata["short"]:
        names.insert(1, metadata["short"])
    text = metadata["help"]
    if "[default: " not in text:
        text += default_text(entry.default)
    if value_type is _FLAG:
        if entry.default is not False:
            names[-1] += f"/--no-{flag(name)[2:]}"
        return GroupedOption(names, group=group, is_flag=True, default=None, help=text)

    metavar = metadata["metavar"]
    if not metavar and has_several:
        metavar = "N[,...]"
    elif not metavar:
        metavar = "N" if isinstance(value_type, Number) else None
    return GroupedOption(
        names,
        group=group,
        type=value_type,
        required=required,
        missing=metadata["missing"],
        help=text,
        metavar=metavar,
        multiple=has_several,
        alias=metadata["alias"],
    )


def options_from_click(options_class: type[T], params: Mapping[str, Any]) -> T:
    """The options that click has read; those that were not given have their defaults."""
    values = {name: value for name, value in params.items() if value not in (None, ())}
    for name, value in values.items():
        # One tuple for each time the option was given.
        if isinstance(value, tuple) and isinstance(value[0], tuple):
            values[name] = tuple(chain.from_iterable(value))
    return options_class(**values)


def command(
    options_class: type[T], epilog: str = ""
) -> Callable[[Callable[[T], Any]], click.Command]:
    """A command whose options are the fields of `options_class`, of which the function gets one.

    Args:
        options_class: The dataclass.
        epilog: What --help says after the options; its lines are printed as they are.
    """

    def decorate(function: Callable[[T], Any]) -> click.Command:
        def call(**params: Any) -> Any:
            return function(options_from_click(options_class, params))

        public = [entry for entry in fields(options_class) if not entry.metadata["expert"]]  # type: ignore[arg-type]
        return version_option(
            GroupedCommand(
                None,
                callback=call,
                params=[parameter(options_class, entry) for entry in public],
                help=function.__doc__,
                epilog=epilog,
                context_settings=CONTEXT_SETTINGS,
            )
        )

    return decorate
