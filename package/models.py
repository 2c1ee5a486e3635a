"""Models that callers hold in memory, and errors in the words of Python."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.hub import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"


def in_memory(model: object) -> bool:
    """Whether it is a loaded model. Raises RefusedError for what is neither that nor a path nor a hub id."""
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
def saved(model: Model, tokenizer: Any = None) -> Iterator[tuple[str, Any]]:
    """The model's path or hub id, and None. A model in memory is saved to a temporary directory, which is the second:
    the copy is deleted when the block ends, and the directory when nothing refers to it.

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
    """The path or hub id of a model; of one in memory the last part of where it is from, or else its class."""
    if not in_memory(model):
        return str(os.fspath(model))
    name = Path(str(getattr(model, "name_or_path", "") or "")).name
    return name if name.strip(".") else type(model).__name__


def _save(model: Any, path: Path) -> None:
    """Save the model without a change to it: `save_pretrained` changes its config, which is a copy meanwhile."""
    if any(".base_layer." in name for name in model.state_dict()):
        raise RefusedError(f"{name_of(model)} holds an adapter, which would be saved alone; merge it first")
    configs = {name: vars(model)[name] for name in ("config", "generation_config") if name in vars(model)}
    try:
        vars(model).update(copy.deepcopy(configs))
        model.save_pretrained(path)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise RefusedError(f"transformers cannot save {name_of(model)}: {explain(error)}") from error
    finally:
        vars(model).update(configs)


@contextmanager
def called_from_python(quiet: bool = False) -> Iterator[None]:
    """Errors name parameters, not flags of the command: `overwrite`, not `--overwrite`. Logging and progress bars of
    transformers and huggingface_hub are as before when the block ends; if `quiet`, there are no bars.
    """
    import huggingface_hub
    from transformers.utils import logging

    utils: Any = huggingface_hub.utils
    token, hub_bars = without_bars.set(quiet), not utils.are_progress_bars_disabled()
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    try:
        yield
    except RefusedError as error:
        error.args = (re.sub(r"(?<![\w-])--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), str(error)),)
        raise
    finally:
        without_bars.reset(token)
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
        (utils.enable_progress_bars if hub_bars else utils.disable_progress_bars)()
