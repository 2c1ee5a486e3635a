"""Shared by the functions: options, models in memory, errors that name parameters instead of
flags.
"""

from __future__ import annotations

import copy
import difflib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from gqa.checkpoint.hub import without_bars
from gqa.core.errors import RefusedError
from gqa.core.options import parameters_in_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"
T = TypeVar("T")
_FUNCTIONS = {
    "ConvertOptions": "convert_model",
    "TrainOptions": "uptrain_model",
    "EvaluateOptions": "evaluate",
    "AblateOptions": "ablate",
}


@contextmanager
def options_of_call(
    kind: type[T], options: dict[str, Any], tokenizer: Any = None, **models: Any
) -> Iterator[tuple[T, object]]:
    """Yield the options of a call, and what keeps temporary directories while it is referenced: its
    own, and that of a result among the models. Models in memory are copied to its own until the
    block ends. `models`: the fields that name models; the first may be a `kind` with all options
    instead.

    Raises TypeError for unknown options. Errors name parameters, not options of the command.
    Meanwhile transformers logs errors only.
    """
    from transformers.utils import logging

    from gqa.models.loading import quiet_transformers

    directory = TemporaryDirectory(prefix="gqa-", ignore_cleanup_errors=True)
    copies = list[Path]()

    def path_of(model: Any) -> Any:
        if isinstance(model, tuple):
            return tuple(map(path_of, model))
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)
        copies.append(path := Path(directory.name, str(len(copies)), _name(model)))
        saved = copy.copy(model)  # `save_pretrained` changes the config
        configs = {
            name: vars(model)[name]
            for name in ("config", "generation_config")
            if name in vars(model)
        }
        vars(saved).update(copy.deepcopy(configs))
        with quiet_transformers():
            saved.save_pretrained(path)
            if tokenizer is not None:
                tokenizer.save_pretrained(path)
        return str(path)

    options = _by_name(kind, options)
    first = next(iter(models.values()))
    verbosity = logging.get_verbosity()
    bars = without_bars.set(bool(getattr(first, "quiet", options.get("quiet"))))
    logging.set_verbosity_error()
    try:
        if isinstance(first, kind) and (options or models.get("teacher", "auto") != "auto"):
            given = ", ".join(options) or "teacher"
            raise TypeError(
                f"{kind.__name__} holds all options: change it instead of giving {given} too"
            )
        if isinstance(first, kind):
            settings = first
        else:
            settings = kind(**{name: path_of(model) for name, model in models.items()}, **options)
        if tokenizer is not None and not copies:
            raise RefusedError(
                "tokenizer is for loaded models, and the model is a path; leave it out"
            )
        if getattr(settings, "dry_run", False):
            raise RefusedError("dry_run is for the command line; leave it out")
        with parameters_in_errors(kind):
            yield settings, (directory, first if isinstance(first, os.PathLike) else None)
    finally:
        logging.set_verbosity(verbosity)
        without_bars.reset(bars)
        for path in copies:
            shutil.rmtree(path, ignore_errors=True)
        if not copies:
            directory.cleanup()


def _by_name(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call by the names of fields: `groups` is `kv_heads`, as on the command line.

    Raises TypeError, which names what is allowed, for others.
    """
    function = _FUNCTIONS[kind.__name__]
    known = [field.name for field in fields(kind)]
    named = dict(options)
    if "groups" in named and "kv_heads" in known:
        if "kv_heads" in named:
            raise TypeError(
                f"{function}() got both kv_heads and groups, which are the same: give one"
            )
        named["kv_heads"] = named.pop("groups")
    for name in named:
        if name not in known:
            similar = difflib.get_close_matches(name, [*known, "groups"], 1)
            hint = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(known)}"
            raise TypeError(f"{function}() has no option {name}; {hint}")
    return named


def _name(model: Any) -> str:
    """Last path component of a loaded model's name, or else its class.

    Raises RefusedError if it is not a model.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise RefusedError(
            f"the model is a {type(model).__name__}; give a directory, "
            "a hub id or a PreTrainedModel of transformers "
            "(for a peft adapter, the result of merge_and_unload)"
        )
    name = Path(str(model.name_or_path or "")).name
    return name if name.strip(".") else type(model).__name__
