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
# Options -> the function that takes them.
_FUNCTIONS = {
    "ConvertOptions": "convert_model",
    "UptrainOptions": "uptrain_model",
    "EvaluateOptions": "evaluate_models",
    "AblateOptions": "ablate_model",
}


@contextmanager
def options_of_call(
    kind: type[T], options: dict[str, Any], tokenizer: Any = None, **models: Any
) -> Iterator[tuple[T, object]]:
    """Yield the options of a call, and what keeps temporary directories while it is referenced: its
    own, and that of a result among the models.

    Models in memory are copied to the call's own directory until the block ends. Errors name
    parameters, not options of the command. Meanwhile transformers logs errors only.

    Args:
        kind: The class of the options.
        options: Options by name.
        tokenizer: That of the models in memory.
        models: The fields that name models; the first may be a `kind` with all options instead.

    Raises:
        TypeError: An option is unknown, or given beside a `kind`.
    """
    from transformers.utils import logging

    options = _by_name(kind, options)
    first = next(iter(models.values()))
    copies = _Copies(tokenizer)
    verbosity = logging.get_verbosity()
    bars = without_bars.set(bool(getattr(first, "quiet", options.get("quiet"))))
    logging.set_verbosity_error()
    try:
        if isinstance(first, kind):
            if options or models.get("teacher", "auto") != "auto":
                names = ", ".join(options) or "teacher"
                raise TypeError(
                    f"{kind.__name__} holds all options; change it instead of passing {names} too"
                )
            settings = first
        else:
            paths = {name: copies.path_of(model) for name, model in models.items()}
            settings = kind(**paths, **options)

        if tokenizer is not None and not copies.paths:
            raise RefusedError(
                "tokenizer is only for loaded models, but the model is a path; remove tokenizer"
            )
        if getattr(settings, "dry_run", False):
            raise RefusedError("dry_run is only for the command line; remove it")

        result = first if isinstance(first, os.PathLike) else None
        with parameters_in_errors(kind):
            yield settings, (copies.directory, result)
    finally:
        logging.set_verbosity(verbosity)
        without_bars.reset(bars)
        copies.remove()


class _Copies:
    """Copies of models in memory, in a temporary directory.

    Attributes:
        directory: The directory; its `TemporaryDirectory` removes it when nothing refers to it.
        paths: The copies.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.directory = TemporaryDirectory(prefix="gqa-", ignore_cleanup_errors=True)
        self.paths = list[Path]()
        self._tokenizer = tokenizer

    def path_of(self, model: Any) -> Any:
        """The path or model id of a model, which is copied if it is in memory; of a tuple of models
        a tuple.
        """
        if isinstance(model, tuple):
            return tuple(map(self.path_of, model))
        if isinstance(model, str | os.PathLike):
            return os.fspath(model)

        path = Path(self.directory.name, str(len(self.paths)), _name(model))
        self.paths.append(path)
        self._save(model, path)
        return str(path)

    def remove(self) -> None:
        """Remove the copies, and the directory if there were none.

        If there were, the result may be in the directory too.
        """
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)
        if not self.paths:
            self.directory.cleanup()

    def _save(self, model: Any, path: Path) -> None:
        from gqa.core.console import quiet_transformers

        # `save_pretrained` changes the configs of a model: those of a copy.
        saved = copy.copy(model)
        for name in ("config", "generation_config"):
            if name in vars(model):
                vars(saved)[name] = copy.deepcopy(vars(model)[name])

        with quiet_transformers():
            saved.save_pretrained(path)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(path)


def _by_name(kind: type, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call by the names of fields: `groups` is `kv_heads`, as on the command line.

    Raises TypeError, which names what is allowed, for others.
    """
    function = _FUNCTIONS[kind.__name__]
    known = [field.name for field in fields(kind)]

    by_field = dict(options)
    if "groups" in by_field and "kv_heads" in known:
        if "kv_heads" in by_field:
            raise TypeError(
                f"{function}() got both kv_heads and groups, which are the same; pass one"
            )
        by_field["kv_heads"] = by_field.pop("groups")

    for name in by_field:
        if name not in known:
            similar = difflib.get_close_matches(name, [*known, "groups"], 1)
            hint = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(known)}"
            raise TypeError(f"{function}() has no option {name}; {hint}")
    return by_field


def _name(model: Any) -> str:
    """Last path component of a loaded model's name, or else its class.

    Raises RefusedError if it is not a model.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise RefusedError(
            f"the model is a {type(model).__name__}; pass a directory, a model id or a "
            "PreTrainedModel of transformers (for a peft adapter, the result of merge_and_unload)"
        )
    name = Path(str(model.name_or_path or "")).name
    return name if name.strip(".") else type(model).__name__
