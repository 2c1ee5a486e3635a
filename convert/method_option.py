"""Options that only some methods use, in every command that has them: who uses which, and what nobody uses refused."""

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.core import ParameterSource

from gqa.checkpoint.console import Option
from gqa.checkpoint.errors import RefusedError
from gqa.convert.methods import METHODS, Method


class MethodOption(Option):
    """An option that not every method uses: `used_by` says of one whether it does."""

    def __init__(self, *names: Any, used_by: Callable[[Method], bool], **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.used_by = used_by


def only_for(used_by: Callable[[Method], bool]) -> dict[str, Any]:
    """What makes `gqa.checkpoint.console.option` one of those methods."""
    return {"cls": MethodOption, "used_by": used_by}


OF_TEXT = only_for(lambda method: method.reads_text)
OF_MAPS = only_for(lambda method: method.aligns)
OF_DRAWS = only_for(lambda method: method.draws)
OF_REFINED = only_for(lambda method: method.refines)


def is_given(name: str) -> bool:
    """Whether a parameter of the command that runs was given, rather than left at its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_unused(methods: Iterable[str], where: str) -> None:
    """Raises RefusedError for an option of the command that is given and that none of `methods` uses; `where` says in
    words what was asked for instead.
    """
    known = [METHODS[name] for name in methods]
    for found in click.get_current_context().command.params:
        if isinstance(found, MethodOption) and is_given(str(found.name)) and not any(map(found.used_by, known)):
            users = ", ".join(name for name, method in METHODS.items() if found.used_by(method))
            told = f"it goes with --method {users}" if known else "leave one of the two out"
            raise RefusedError(f"{found.opts[0]} is not used by {where}; {told}")
