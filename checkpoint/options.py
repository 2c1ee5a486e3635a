"""Options of a command that are the fields of a frozen dataclass: declared once, given by name from Python, by words to
the command. Imports no torch.

    @dataclass(frozen=True)
    class Windows:
        context: int | None = option_field(None, "Tokens of a window.  [default: the model's]", type=Count(4))
        split: str | None = option_field(None)  # what --split is in all commands: `gqa.checkpoint.console.SHARED`
        kind: Literal["rolling", "strided"] = option_field("rolling", "How text is cut.", "--protocol")
        recall: bool | None = option_field(None, "Ask for what stands in the context.", "--recall/--no-recall")
        subject: str = ""  # no option

    WINDOWS = OptionsOf(Windows)

    @click.command(cls=Command)
    @with_options(WINDOWS.decorators())
    def command(**words: Any) -> None:
        windows = WINDOWS.read(words, subject="text")

What a field does not say, its type says: a Literal is a choice, a bool a flag, a tuple an option that is given several
times; int, float, str and Path are themselves.
"""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from gqa.checkpoint.console import SHARED, Decorator, option

T = TypeVar("T")


def option_field(default: Any, help: str | None = None, /, *flags: str, free: bool = False, **how: Any) -> Any:
    """A field of a dataclass that is an option too.

    Args:
        default: of both; MISSING where Python callers must give it. `default=` is another for the command.
        help: the line of --help; None for what options of that name have in common (`SHARED`).
        flags: `-o`, or the long name where it is not the field's own.
        free: may differ between a run and its continuation, as it is about where a run is kept and what is told of it.
        how: `type`, `metavar` and whatever else `gqa.checkpoint.console.option` takes.
    """
    how |= {"help": help} if help else {}
    return field(default=default, metadata={"flags": flags, "click": how, "free": free})


class OptionsOf(Generic[T]):
    """The options that fields of `kind` are in one command: all, or `only` some. `renamed`: fields that have another
    flag there, `context="--train-context"`. A parameter of the command has the field's name, or that of such a flag.
    """

    def __init__(self, kind: type[T], only: Collection[str] = (), **renamed: str) -> None:
        self._kind, self._renamed = kind, renamed
        found = [each for each in fields(kind) if each.metadata]  # type: ignore[arg-type]
        self._fields = {self._parameter(each): each for each in found if each.name in only or not only}

    def decorators(self) -> list[Decorator]:
        """The options, in the order of the fields."""
        types = get_type_hints(self._kind)
        return [self._option(name, found, types[found.name]) for name, found in self._fields.items()]

    def read(self, words: Mapping[str, Any], **more: Any) -> T:
        """What the parameters of the command say, and `more` that is no option there or is not what was said."""
        said = {found.name: words[name] for name, found in self._fields.items() if found.name not in more}
        return self._kind(**said, **more)

    def _parameter(self, found: Field[Any]) -> str:
        flag = self._renamed.get(found.name, found.name)
        return flag.partition("/")[0].lstrip("-").replace("-", "_")

    def _option(self, name: str, found: Field[Any], kind: Any) -> Decorator:
        how, (plain, *_) = dict(found.metadata["click"]), (*get_args(kind), kind)
        own = self._renamed.get(found.name, f"--{found.name.replace('_', '-')}")
        flags = found.metadata["flags"]
        if found.name in self._renamed or not any(flag.startswith("--") for flag in flags):
            flags = (*(flag for flag in flags if not flag.startswith("--")), own)
        if plain is bool:
            how = {"is_flag": True, "default": found.default, "show_default": found.default is not None} | how
        elif Literal in (get_origin(kind), get_origin(plain)):
            how.setdefault("type", click.Choice(get_args(plain) or get_args(kind)))
        elif "type" not in SHARED.get(own, {}):
            how |= {"type": how.get("type", plain), "multiple": get_origin(kind) is tuple}
        if found.default not in (None, (), MISSING):
            how.setdefault("default", found.default)
        return option(*flags, name, **how)
