"""Which class of transformers a checkpoint is, by its config, and what such models can do."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gqa.checkpoint.model_config import check_numbers, culprit, has_run_flags, without_run_flags
from gqa.checkpoint.read import read_json
from gqa.core.compat import reset_run_flags
from gqa.core.console import quiet_transformers
from gqa.core.errors import RefusedError, explain
from gqa.models.custom_code import MODEL_TYPES, config_class, custom_class

# Auto classes that predict tokens have one of these in their names.
_PREDICTING = re.compile("CausalLM|Seq2SeqLM|LMHead|PreTraining|ImageTextToText|MultimodalLM")


def read_auto_config(directory: str, trust_remote_code: bool = False) -> Any:
    """transformers' config object of the model in a directory.

    Its class may be ours. It lacks the entries that say how a model is run (`RUN_FLAGS`). Raises
    RefusedError.
    """
    raw = read_json(Path(directory), "config.json")
    check_numbers(raw, Path(directory).name)

    model_type = raw.get("model_type")
    known_class: Any = config_class(model_type) if isinstance(model_type, str) else None

    try:
        config = _load_config(directory, raw, known_class, trust_remote_code)
    except Exception as error:  # whatever a library, or code of a checkpoint, raises about a config
        entry = ""
        if known_class:
            entry = culprit(raw, lambda other: known_class.from_dict(without_run_flags(other)))
        cause = f" because of {entry}" if entry else ""
        raise RefusedError(
            f"transformers cannot read config.json of {directory}{cause}: {explain(error)}; "
            "correct it"
        ) from error
    config.name_or_path = directory
    return config


def _load_config(
    directory: str, raw: dict[str, Any], known_class: Any, trust_remote_code: bool
) -> Any:
    """transformers' config object of the model in a directory.

    Args:
        directory: The directory.
        raw: Its config.json.
        known_class: The config class, ours or transformers'; None if neither has one.
        trust_remote_code: Whether code of the checkpoint may run.
    """
    from transformers import AutoConfig

    code = raw.get("auto_map")
    has_code = isinstance(code, dict) and "AutoConfig" in code
    with quiet_transformers(), directory_without_flags(directory) as config_directory:
        if raw.get("model_type") in MODEL_TYPES:
            return known_class.from_pretrained(config_directory)

        if trust_remote_code and has_code:
            # The code is next to the config itself, so flags are reset after that is read.
            has_flags = config_directory != directory
            options = {}
            if has_flags:
                # Some implementations of attention refuse output_attentions.
                options["output_attentions"] = False
            config = AutoConfig.from_pretrained(directory, trust_remote_code=True, **options)
            if has_flags:
                reset_run_flags(config)
            return config

        source = config_directory if known_class else directory
        return AutoConfig.from_pretrained(source)


@contextmanager
def directory_without_flags(directory: str) -> Iterator[str]:
    """A directory with the config.json of a directory, but without `RUN_FLAGS`.

    It is a temporary one, or `directory` itself if its config has none.
    """
    raw = read_json(Path(directory), "config.json")
    if not has_run_flags(raw):
        yield directory
        return

    with tempfile.TemporaryDirectory(prefix="gqa-config-") as config_directory:
        text = json.dumps(without_run_flags(raw))
        Path(config_directory, "config.json").write_text(text, encoding="utf-8")
        yield config_directory


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    """The class that a config names, else the one of its model type that predicts tokens.

    An Auto class if the class is code of the checkpoint, or transformers has none.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    name = _first_architecture(config)
    ours = custom_class(name, config.model_type)
    if ours:
        return ours

    if trust_remote_code and getattr(config, "auto_map", None):
        return getattr(transformers, _auto_class_name(config.auto_map, name))

    cls = getattr(transformers, name, None)
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
        return cls

    auto = transformers.AutoModelForCausalLM
    classes = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
        classes = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return classes.get(type(config), auto)


def _first_architecture(config: Any) -> str:
    """The first entry of `architectures`, the name of a class; empty if there is none."""
    names = config.architectures
    if not isinstance(names, list) or not names:
        return ""
    name = names[0]
    return name if isinstance(name, str) else ""


def _auto_class_name(auto_map: Any, architecture: str) -> str:
    """The Auto class of transformers that loads the class `architecture`, which is code of the
    checkpoint; if `auto_map` has none, one that predicts tokens, or else the first.
    """
    import transformers

    default = "AutoModelForCausalLM"
    if not isinstance(auto_map, dict):
        return default

    names: list[str] = [name for name in auto_map if name.startswith("AutoModelFor")]
    names = [name for name in names if hasattr(transformers, name)]
    for name in names:
        class_name = str(auto_map[name]).rpartition(".")[2]  # of `module.Class`
        if class_name == architecture:
            return name

    if default in names or not names:
        return default
    return names[0]


def is_auto(cls: Any) -> bool:
    """Whether a class is one of transformers' Auto classes, which choose the class of a
    checkpoint.
    """
    return hasattr(cls, "from_config")


def predicts_tokens(config: Any, trust_remote_code: bool = False) -> bool:
    """Whether the class that a config names reads token ids and has a head that predicts them.

    Classifiers, reward models, base classes and models of sound do not.
    """
    from transformers import GenerationMixin

    cls = model_class(config, trust_remote_code)
    if is_auto(cls):
        return bool(_PREDICTING.search(cls.__name__))
    return issubclass(cls, GenerationMixin) and cls.main_input_name == "input_ids"


def check_predicts_tokens(config: Any, name: str, trust_remote_code: bool = False) -> None:
    """Raise RefusedError for a model that can be neither evaluated nor decoded nor trained."""
    if not predicts_tokens(config, trust_remote_code):
        kind = model_class(config, trust_remote_code).__name__
        raise RefusedError(
            f"{name} is a {kind}, which does not predict the next token of a text; pass one with "
            "a language-model head (like ...ForCausalLM)"
        )


def positions(config: Any) -> int | None:
    """Maximum number of positions of a model; None if it has no limit.

    `config`: its config of transformers.
    """
    text_config = config.get_text_config(decoder=True)
    return getattr(text_config, "max_position_embeddings", None) or None
