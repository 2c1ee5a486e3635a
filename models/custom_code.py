"""Custom modeling code: classes with grouped-query attention for model types whose class in
transformers has none.

A file of `modeling` lies beside the weights, and `auto_map` of config.json names its classes, so
transformers loads them with `trust_remote_code=True`. Our own commands need no trust: they import
the installed file, never the one beside the weights. Nothing is registered with transformers' Auto
classes.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gqa.core.errors import RefusedError
from gqa.models import modeling

PREFIX = "gqa_"
# Llama-like model types whose layers can have different numbers of heads: they build attention as
# `attention(config, layer)`.
BY_LAYER = (
    "llama",
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "granite",
    "mistral",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
)
# Those whose attention is grouped in all layers alike.
_GROUPED = (
    "gpt2",
    "opt",
    "bart",
    "mbart",
    "marian",
    "pegasus",
    "m2m_100",
    "t5",
    "mt5",
)
# Our model types -> the file of `modeling` with their classes.
_FILE_OF = {
    **dict.fromkeys([PREFIX + source for source in _GROUPED], "modeling_gqa"),
    **dict.fromkeys([PREFIX + source for source in BY_LAYER], "modeling_gqa_by_layer"),
}
MODEL_TYPES = frozenset(_FILE_OF)


def listed_as(model_type: str) -> str:
    """The model type under which families list a config: `llama` for our `gqa_llama`, whose layers
    may have different numbers of heads. Other types of ours (`gqa_gpt2`) are listed themselves.
    """
    source = model_type.removeprefix(PREFIX)
    return source if source in BY_LAYER else model_type


def loads_as_decilm(model_type: str) -> bool:
    """Whether vLLM and llama.cpp load models of this type, whose layers have different numbers of
    heads.
    """
    return model_type == f"{PREFIX}llama"


def file_of(model_type: str) -> tuple[str, str]:
    """Name and text of the file beside the weights."""
    name = f"{_FILE_OF[model_type]}.py"
    return name, (Path(modeling.__path__[0]) / name).read_text(encoding="utf-8")


def class_name(model_type: str, source: str) -> str:
    """The name of our class for the class `source` of transformers."""
    if model_type == f"{PREFIX}llama" and source == "LlamaForCausalLM":
        return "DeciLMForCausalLM"  # which serving engines load
    return f"GQA{source}"


@cache
def auto_classes(model_type: str) -> dict[str, str]:
    """Auto classes of transformers -> the class that each has for the source of a model type of
    ours: without a head, or with one that predicts tokens.
    """
    from transformers.models.auto import configuration_auto, modeling_auto

    names = {
        "AutoConfig": configuration_auto.CONFIG_MAPPING_NAMES,
        "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    source = model_type.removeprefix(PREFIX)
    return {auto: mapping[source] for auto, mapping in names.items() if source in mapping}


def auto_map(model_type: str) -> dict[str, str]:
    """`auto_map` of config.json: where transformers finds the classes."""
    file = _FILE_OF[model_type]
    return {
        auto: f"{file}.{class_name(model_type, name)}"
        for auto, name in auto_classes(model_type).items()
    }


@cache
def _module(model_type: str) -> ModuleType:
    """The installed file, whose classes of the model type have save_pretrained copy it."""
    module = import_module(f"{modeling.__name__}.{_FILE_OF[model_type]}")
    for auto, name in auto_classes(model_type).items():
        getattr(module, class_name(model_type, name)).register_for_auto_class(auto)
    return module


def config_class(model_type: str) -> Any:
    """The config class of a model type, ours or transformers'; None where neither has it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in MODEL_TYPES:
        source = auto_classes(model_type)["AutoConfig"]
        return getattr(_module(model_type), class_name(model_type, source))
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - `get` finds none


def custom_class(architecture: str, model_type: object) -> Any:
    """The class of ours that a config names, or None."""
    if model_type not in MODEL_TYPES:
        return None

    ours = str(model_type)
    names = {class_name(ours, source) for source in auto_classes(ours).values()}
    return getattr(_module(ours), architecture) if architecture in names else None


def our_architecture(architectures: list[str] | None, model_type: str) -> str:
    """The name of our class that replaces a class of transformers.

    Args:
        architectures: The classes that the source's config names. If none of them is known, ours is
            the one that predicts tokens.
        model_type: Ours.

    Raises:
        RefusedError: The source's class has another head.
    """
    classes = auto_classes(model_type)
    for name in architectures or ():
        has_other_head = re.search("For.*(Classification|QuestionAnswering)$", name)
        if has_other_head and name not in classes.values():
            raise RefusedError(
                f"{name} does not predict tokens, and only models that do can have custom modeling "
                "code; convert a checkpoint that predicts tokens"
            )

    for name in architectures or ():
        if name in classes.values():
            return class_name(model_type, name)
    language_model = classes.get("AutoModelForSeq2SeqLM") or classes["AutoModelForCausalLM"]
    return class_name(model_type, language_model)
