"""Models that callers hold in memory, and errors in the words of Python."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.hub_errors import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"
T = TypeVar("T")


def read_options(kind: type[T], first: Any, fields: dict[str, Any], **models: Any) -> T:
    """The options of a call: `first` if it is such a dataclass, else made of its fields, where models have their names.
    Raises TypeError for both.
    """
    if not isinstance(first, kind):
        names = {name: tuple(map(name_of, m)) if isinstance(m, tuple) else name_of(m) for name, m in models.items()}
        return kind(**names, **fields)
    if fields:
        raise TypeError(f"{kind.__name__} says everything: change it instead of giving {', '.join(fields)} too")
    return first


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
def stored(model: Model, tokenizer: Any = None) -> Iterator[tuple[str, Any]]:
    """Where the model lies. One in memory is written to a temporary directory, which is given too: the model in it goes
    when the block ends, and the directory when nothing holds it.

    Raises RefusedError for a model that cannot be written, and for a tokenizer beside one that has its own.
    """
    if not in_memory(model):
        if tokenizer is not None:
            raise RefusedError(f"tokenizer is for models in memory, and {model} brings its own; leave it out")
        yield os.fspath(model), None
        return
    directory = TemporaryDirectory(prefix="gqa-", ignore_cleanup_errors=True)
    path = Path(directory.name, name_of(model))
    try:
        _save(model, path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        yield str(path), directory
    finally:
        shutil.rmtree(path, ignore_errors=True)


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
    configs = {name: vars(model)[name] for name in ("config", "generation_config") if name in vars(model)}
    try:
        vars(model).update(copy.deepcopy(configs))
        model.save_pretrained(place)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise RefusedError(f"transformers cannot save {name_of(model)}: {explain(error)}") from error
    finally:
        vars(model).update(configs)


@contextmanager
def called_from_python(quiet: bool = False) -> Iterator[None]:
    """Errors name parameters, not the command's flags: `overwrite`, not `--overwrite`. transformers logs errors only,
    as in the commands, and as it did when the block ends; if `quiet`, nothing shows bars.
    """
    from transformers.utils import logging

    utils: Any = import_module("huggingface_hub.utils")
    silent, fetching = without_bars.set(quiet), not utils.are_progress_bars_disabled()
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()  # and that of huggingface_hub, which is for `quiet` to judge
        if fetching:
            utils.enable_progress_bars()
        yield
    except RefusedError as error:
        error.args = (re.sub(r"(?<![\w-])--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), str(error)),)
        raise
    finally:
        without_bars.reset(silent)
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        (utils.enable_progress_bars if fetching else utils.disable_progress_bars)()
