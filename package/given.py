"""What the functions are given: models in memory or in a place, and options by the names of a command's."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from gqa.checkpoint.console import KVHeads, Several
from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.hub_errors import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"

_SCRATCH = "gqa-"


def in_memory(model: object) -> bool:
    """Whether it is a loaded model. Raises RefusedError for what is neither that nor the name of a place."""
    if isinstance(model, str | os.PathLike):
        return False
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return True
    wrapped = " (merge its adapter first: merge_and_unload)" if hasattr(model, "merge_and_unload") else ""
    raise RefusedError(
        f"the model is a {type(model).__name__}{wrapped}; give a directory, a hub id or a PreTrainedModel of "
        "transformers"
    )


@contextmanager
def stored(model: Model, tokenizer: Any = None) -> Iterator[str]:
    """Where the model lies; one in memory is written to a temporary directory, which goes when the block ends.

    Raises RefusedError for a model that cannot be written, and for a tokenizer beside one that has its own.
    """
    if not in_memory(model):
        if tokenizer is not None:
            raise RefusedError(f"tokenizer is for models in memory, and {model} brings its own; leave it out")
        yield os.fspath(model)
        return
    with scratch() as parent:
        place = Path(parent, name_of(model))
        _save(model, place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        yield str(place)


def scratch() -> TemporaryDirectory[str]:
    """A temporary directory that goes when nothing holds it."""
    return TemporaryDirectory(prefix=_SCRATCH, ignore_cleanup_errors=True)


def name_of(model: Any) -> str:
    """Where a model lies; what one in memory is called: where it is from, else its class."""
    if not in_memory(model):
        return str(os.fspath(model))
    name = Path(str(getattr(model, "name_or_path", "") or "")).name
    return name if name.strip(".") else type(model).__name__


def _save(model: Any, place: Path) -> None:
    """`save_pretrained` writes to the config of the model, which here is a copy meanwhile."""
    if any(".base_layer." in name for name in model.state_dict()):
        raise RefusedError(f"{name_of(model)} holds an adapter, which would be saved alone; merge it first")
    kept = {name: vars(model)[name] for name in ("config", "generation_config") if name in vars(model)}
    try:
        vars(model).update(copy.deepcopy(kept))
        model.save_pretrained(place)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise RefusedError(f"transformers cannot save {name_of(model)}: {explain(error)}") from None
    finally:
        vars(model).update(kept)


@contextmanager
def undisturbed(progress: bool = True) -> Iterator[None]:
    """transformers says errors only, as in the commands, and logs again as it did when the block ends; without
    `progress` nothing shows bars.
    """
    from transformers.utils import logging

    utils: Any = import_module("huggingface_hub.utils")
    silent, fetching = without_bars.set(not progress), not utils.are_progress_bars_disabled()
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()  # and that of huggingface_hub, which is for `quiet` to judge
        if fetching:
            utils.enable_progress_bars()
        yield
    finally:
        without_bars.reset(silent)
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        (utils.enable_progress_bars if fetching else utils.disable_progress_bars)()


def asked(
    command: click.Command, places: Mapping[str, Any], values: Mapping[str, Any], of_terminals: Collection[str],
    **more: Any,
) -> click.Context:  # fmt: skip
    """A command with its options as it would read them (`params`).

    `places` are its arguments; `values` are by the names of options; None is as if nothing were said. Those
    `of_terminals` are not for Python, `more` are said whatever the caller may say.
    Raises TypeError for a name that there is none of, and RefusedError, in the command's own words, for a value that it
    would not take.
    """
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in of_terminals]
    known = {key_of(option).replace("-", "_"): key_of(option) for option in options if option.expose_value}
    keys = {str(option.name): key_of(option) for option in options} | known
    for name in values:
        if name not in keys:
            raise TypeError(f"{name!r} is no option; choose {', '.join(sorted(known))}")
    try:
        words = words_of(command, {keys.get(name, name): value for name, value in {**places, **values, **more}.items()})
        return command.make_context(command.name, words)
    except click.UsageError as error:
        raise RefusedError(error.format_message().rstrip(".")) from None


def key_of(param: click.Parameter) -> str:
    """The long name of an option, or that of the argument."""
    return param.opts[-1].lstrip("-") if isinstance(param, click.Option) else str(param.name)


def words_of(command: click.Command, said: Mapping[str, Any]) -> list[str]:
    """What says options and, after `--`, arguments on a command line, by the names that recipes have for them
    (`key_of`); None is not said. Raises click.BadParameter for what cannot be said.
    """
    words: list[str] = []
    places: list[str] = []
    for param in command.params:
        value = said.get(key_of(param))
        if isinstance(value, dict):
            raise click.BadParameter(f"{value!r} are options, and a value is meant", param=param)
        if isinstance(param, click.Option):
            words += [] if value is None else _option_words(param, value)
        elif value is not None:
            places += map(str, value if isinstance(value, list | tuple) else [value])
    return [*words, "--", *places]


def _option_words(option: click.Option, value: Any) -> list[str]:
    flag = option.opts[-1]
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter(f"{value!r} is neither True nor False", param=option)
        return [flag] if value else option.secondary_opts[-1:]
    if not isinstance(value, list | tuple):
        return [f"{flag}={value}"]
    if option.multiple:
        return [f"{flag}={one}" for one in value]
    if not isinstance(option.type, Several | KVHeads):
        raise click.BadParameter(f"{value!r} are several, and one is meant", param=option)
    return [f"{flag}={','.join(map(str, value))}"]
