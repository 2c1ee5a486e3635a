"""Our custom modelling code: classes with grouped-query attention for model types that transformers has without.

The file lies beside the weights, whose config names its classes in `auto_map`, so that transformers loads it with
`trust_remote_code=True`. This tool's own commands need no such trust: they run the installed text, never the file
beside the weights. Nothing is registered with transformers' Auto classes, here or on loading: who meets one of these
model types asks here for its class.
"""

import re
import sys
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from gqa.checkpoint import modelling
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.modelling.text import BY_LAYER, DECILM, NAMES, auto_classes, class_of, text_of
from gqa.checkpoint.provenance import version

PREFIX = "gqa_"
MODEL_TYPES = frozenset(PREFIX + source for source in NAMES)


def listed_as(model_type: str) -> str:
    """Under which model type families list this one: ours with heads by layer are as transformers' are."""
    source = model_type.removeprefix(PREFIX)
    return source if source in BY_LAYER else model_type


def loads_as_decilm(model_type: str) -> bool:
    """Whether vLLM and llama.cpp load models of this type, whose layers have numbers of heads of their own."""
    return model_type in MODEL_TYPES and model_type.removeprefix(PREFIX) in DECILM


def file_of(model_type: str) -> tuple[str, str]:
    """Name and text of the file beside the weights, whose first line says where it is from."""
    origin = f"# Written by gqa-convert {version()}. It needs nothing but torch and transformers.\n"
    return f"modeling_{model_type}.py", origin + text_of(model_type.removeprefix(PREFIX))


def auto_map(model_type: str) -> dict[str, str]:
    """What config.json says about where transformers finds the classes."""
    source, file = model_type.removeprefix(PREFIX), f"modeling_{model_type}"
    classes = {"AutoConfig": f"{NAMES[source].classes}Config"} | auto_classes(source)
    return {auto: f"{file}.{class_of(source, name)}" for auto, name in classes.items()}


# Where this process keeps the files that it runs, until it ends: save_pretrained copies them from there.
_folder = cache(partial(TemporaryDirectory, prefix="gqa-modelling-", ignore_cleanup_errors=True))


@cache
def _classes(model_type: str) -> dict[str, Any]:
    """What the file defines, run as a module; its classes tell save_pretrained to write the file too."""
    name, text = file_of(model_type)
    path = Path(_folder().name) / name
    path.write_text(text, encoding="utf-8")
    module = ModuleType(f"{modelling.__name__}.{path.stem}")
    sys.modules[module.__name__], module.__file__ = module, str(path)
    exec(compile(text, path, "exec"), vars(module))
    for auto, found in auto_map(model_type).items():
        vars(module)[found.rpartition(".")[2]].register_for_auto_class(auto)
    return vars(module)


def config_class(model_type: str) -> Any:
    """The config class of a model type, ours or transformers'; None where neither has it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in MODEL_TYPES:
        return _classes(model_type)[f"GQA{NAMES[model_type.removeprefix(PREFIX)].classes}Config"]
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - `get` finds none


def custom_class(architecture: str, model_type: object) -> Any:
    """The class of ours that a config names, or None."""
    return _classes(str(model_type)).get(architecture) if model_type in MODEL_TYPES else None


# The Auto class whose class stands in where a config names none that ours know, first come.
_USUAL = ("AutoModelForSeq2SeqLM", "AutoModelForCausalLM")


def stand_in(architectures: list[str] | None, model_type: str) -> str:
    """The name of our class for that of a config of the source. Raises RefusedError where it has another head."""
    source = model_type.removeprefix(PREFIX)
    classes = auto_classes(source)
    for name in architectures or ():
        if re.search("For.*(Classification|QuestionAnswering)$", name) and name not in classes.values():
            raise RefusedError(f"custom modelling code has no class with the head of {name}")
    named = [name for name in architectures or () if name in classes.values()]
    return class_of(source, (named + [classes[auto] for auto in _USUAL if auto in classes])[0])
