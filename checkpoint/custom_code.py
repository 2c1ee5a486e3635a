"""The classes of `modelling/`: known to transformers while this tool runs, and to checkpoints that carry them.

A checkpoint names them in `auto_map`, so that transformers loads it with `trust_remote_code=True`. This tool's own
commands need no such trust: they run the file that is installed, never the one beside the weights.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from gqa.checkpoint import modelling
from gqa.checkpoint.provenance import version

PREFIX = "gqa_"
MODEL_TYPES = frozenset(
    path.stem.removeprefix("modeling_") for path in Path(modelling.__path__[0]).glob(f"modeling_{PREFIX}*.py")
)
SOURCES = frozenset(model_type.removeprefix(PREFIX) for model_type in MODEL_TYPES)


def register(model_type: object) -> None:
    """Make transformers' Auto classes know one of our model types; nothing for any other."""
    if model_type in MODEL_TYPES:
        _register(str(model_type))


@cache
def _register(model_type: str) -> None:
    import transformers

    config, classes = _config_class(model_type), dict(auto_classes(model_type))
    transformers.AutoConfig.register(model_type, config)
    config.register_for_auto_class()  # so that save_pretrained writes the file too
    for auto, made in classes.items():
        getattr(transformers, auto).register(config, made)
        made.register_for_auto_class(auto)


@cache
def _module(model_type: str) -> Any:
    return importlib.import_module(f"gqa.checkpoint.modelling.modeling_{model_type}")


def _config_class(model_type: str) -> Any:
    """The config class that a file defines."""
    made = (value for value in vars(_module(model_type)).values() if isinstance(value, type))
    return next(value for value in made if getattr(value, "model_type", None) == model_type)


def auto_classes(model_type: str) -> Iterator[tuple[str, Any]]:
    """Names of transformers' Auto classes that know the class of transformers, and ours in its place."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    source, ours = CONFIG_MAPPING[model_type.removeprefix(PREFIX)], vars(_module(model_type))
    for name, auto in inspect.getmembers(modeling_auto, inspect.isclass):
        mapping = getattr(auto, "_model_mapping", None) or {}
        made = ours.get(f"GQA{mapping[source].__name__}") if source in mapping else None
        if made and name.startswith("AutoModel"):
            yield name, made


def remote_class(architecture: str, model_type: object) -> Any:
    """The class of ours that a config names, or None."""
    return getattr(_module(str(model_type)), architecture, None) if model_type in MODEL_TYPES else None


# The Auto class whose class stands in where a config names none that ours know, first come.
_USUAL = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForCausalLM")


def stand_in(architectures: list[str] | None, model_type: str) -> str:
    """The name of our class for that of a config of the source."""
    ours, classes = vars(_module(model_type)), dict(auto_classes(model_type))
    named = [f"GQA{name}" for name in architectures or () if f"GQA{name}" in ours]
    usual = [classes[auto].__name__ for auto in _USUAL if auto in classes]
    return str((named + usual)[0])


def auto_map(model_type: str) -> dict[str, str]:
    """What config.json says about where transformers finds the classes."""
    file = _module(model_type).__name__.rpartition(".")[2]
    made = {"AutoConfig": _config_class(model_type)} | dict(auto_classes(model_type))
    return {auto: f"{file}.{found.__name__}" for auto, found in made.items()}


def file_of(model_type: str) -> tuple[str, str]:
    """Name and text of the file that travels: the installed one below a line that says where it is from."""
    path = Path(str(_module(model_type).__file__))
    origin = f"# Written by gqa-convert {version()}. It needs nothing but torch and transformers.\n"
    return path.name, origin + path.read_text(encoding="utf-8")
