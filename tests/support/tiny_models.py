"""Tiny random models of every supported family, for tests that compare a converted checkpoint with
its source.

Every model has 4 query heads; `build(tiny, kv_heads)` makes the one with 4 (multi-head), 2 or 1
key/value heads. `tests/support/tiny_configs.py` holds the table: what a family needs besides the
sizes that all share.
"""

import copy
import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqa.models.custom_code import MODEL_TYPES, config_class
from support.tiny_configs import (
    COMMON,
    CUSTOM,
    FAMILIES,
    LENGTH,
    SPECIAL_IDS,
    TOWER,
    TOWERS,
    VARIANTS,
    Tiny,
)
from support.tiny_nested import NESTED

__all__ = [
    "LEFT_OUT",
    "QUERY_HEADS",
    "TINY",
    "Tiny",
    "build",
    "config",
    "inputs",
    "logits",
    "model_class",
]

QUERY_HEADS: int = COMMON["num_attention_heads"]
FIRST_PLAIN_TOKEN = 10  # ids below are the special ones of COMMON and of the nested models

# What the class of transformers itself does not run, or does not read from config.json, before a
# version.
_BROKEN_BEFORE = {"paddleocr_vl_text": "5.20"}


def _is_there(tiny: Tiny) -> bool:
    """Whether this transformers has the class: the lowest that is supported lacks some that came
    later.
    """
    broken = _BROKEN_BEFORE.get(tiny.name, _BROKEN_BEFORE.get(tiny.name.partition("+")[0]))
    if broken and Version(transformers.__version__) < Version(broken):
        return False
    return tiny.model_type in MODEL_TYPES or tiny.model_type in CONFIG_MAPPING


_ALL = (*FAMILIES, *VARIANTS, *NESTED, *CUSTOM)
TINY: dict[str, Tiny] = {tiny.name: tiny for tiny in _ALL if _is_there(tiny)}
# None with the versions of constraints.txt.
LEFT_OUT = frozenset(tiny.model_type for tiny in _ALL if tiny.name not in TINY)


def _has_field(cls: type[PreTrainedConfig], name: str) -> bool:
    return name in cls.attribute_map or any(
        name in vars(base).get("__annotations__", {}) for base in cls.__mro__
    )


def _section(raw: dict[str, Any], path: str) -> dict[str, Any]:
    """The sub-config at a dotted path, made where it is absent."""
    for key in filter(None, path.split(".")):
        raw = raw.setdefault(key, {})
    return raw


def _fill(section: dict[str, Any], cls: type[PreTrainedConfig], values: Mapping[str, Any]) -> None:
    """Takes the values where the class has the field and the section does not state it."""
    given = {cls.attribute_map.get(name, name) for name in section}
    for name, value in values.items():
        target = cls.attribute_map.get(name, name)
        if _has_field(cls, name) and target not in given:
            section[target] = value


@cache
def _default(model_type: str) -> PreTrainedConfig:
    made = config_class(model_type)()
    assert isinstance(made, PreTrainedConfig)
    return made


def _fill_around(raw: dict[str, Any], tiny: Tiny, path: str) -> None:
    """Special ids of the config at a dotted path, and the sizes of its towers."""
    whole = _default(tiny.model_type)
    for key in filter(None, path.split(".")):
        whole = getattr(whole, key)
    _fill(_section(raw, path), type(whole), SPECIAL_IDS)
    for name in (f"{path}.{tower}".lstrip(".") for tower in TOWERS):
        tower = getattr(whole, name.rpartition(".")[2], None)
        if isinstance(tower, PreTrainedConfig) and name not in tiny.owners:
            section = _section(raw, name)
            _fill(section, config_class(section.get("model_type", tower.model_type)), TOWER)


def raw_config(tiny: Tiny, kv_heads: int) -> dict[str, Any]:
    """The keyword arguments of the config class: the common sizes where the class knows them, then
    the family's.
    """
    raw: dict[str, Any] = copy.deepcopy(dict(tiny.options))
    for path in tiny.owners:
        section = _section(raw, path)
        _fill(section, config_class(section.get("model_type", tiny.model_type)), COMMON)
        _fill_around(raw, tiny, path.rpartition(".")[0])
    for key, value in tiny.kv(kv_heads).items():
        path, _, name = key.rpartition(".")
        _section(raw, path)[name] = value
    return raw


def config(tiny: Tiny, kv_heads: int) -> PreTrainedConfig:
    """The config of the model with `kv_heads` key/value heads."""
    made = config_class(tiny.model_type)(**raw_config(tiny, kv_heads))
    assert isinstance(made, PreTrainedConfig)
    return made


def model_class(tiny: Tiny) -> type[PreTrainedModel]:
    """The transformers class; some (bare text models) are not exported at the top level."""
    cls = getattr(transformers, tiny.model_class, None)
    if cls is None:
        package = type(config(tiny, QUERY_HEADS)).__module__.replace("configuration_", "modeling_")
        cls = getattr(importlib.import_module(package), tiny.model_class)
    assert issubclass(cls, PreTrainedModel)
    model: type[PreTrainedModel] = cls
    return model


@torch.no_grad()
def _randomize(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Gives every parameter a random value, so that none is neutral (norms all 1, biases all 0) by
    accident.

    The scale keeps activations near 1 at every depth. A parameter that starts as a constant (norm
    weights at 1, or at 0 where the model adds 1; biases) varies around it; other vectors (SSM decay
    rates, sinks) around their initial value, since their range matters.
    """
    head = model.get_output_embeddings()
    fixed = model._keys_to_ignore_on_save or ()  # sinusoids, which no checkpoint holds
    for name, parameter in (item for item in model.named_parameters() if item[0] not in fixed):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2 or bool((parameter == 1).all()):
            parameter.add_(0.2 * noise)
        elif ("embed" in name or name.endswith("wte.weight")) and parameter is not getattr(
            head, "weight", None
        ):
            parameter.copy_(noise)
        else:
            fan_in = (
                parameter[0].numel()
                if parameter.ndim == 2 or "conv" in name
                else parameter.shape[-1]
            )
            parameter.copy_(noise * fan_in**-0.5)


def build(
    tiny: Tiny, kv_heads: int, seed: int = 0, attention: str | None = None
) -> PreTrainedModel:
    """A float32 model in eval mode; equal arguments give equal weights.

    Raises what transformers raises.

    `attention` is an implementation; by default the first that works for the family.
    """
    settings = config(tiny, kv_heads)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(tiny)._from_config(
            settings, attn_implementation=attention or tiny.attention[0], dtype=torch.float32
        )
    _randomize(model, torch.Generator().manual_seed(seed))
    return model.eval()


def inputs(tiny: Tiny, batch: int = 2, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Random token ids that avoid special, image and padding ids, and whatever else the class asks
    for.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(FIRST_PLAIN_TOKEN, tiny.tokens, shape, generator=generator)

    def shape(extra: tuple[int, ...]) -> tuple[int, ...]:
        return batch, *(length if size == LENGTH else size for size in extra)

    made = {name: tokens(batch, length, *extra) for name, extra in tiny.token_inputs.items()}
    for name, extra in tiny.float_inputs.items():
        made[name] = torch.randn(shape(extra), generator=generator)
    for name, (value, extra) in tiny.fixed_inputs.items():
        made[name] = torch.full(shape(extra), value)
    return made


@torch.no_grad()
def logits(tiny: Tiny, model: PreTrainedModel, given: Mapping[str, Tensor]) -> Tensor:
    """The output to compare: logits, or the hidden states of a model without a head."""
    output = (model.get_submodule(tiny.part) if tiny.part else model)(**given)
    value = output.get("logits", output.get("last_hidden_state"))
    assert isinstance(value, Tensor)
    # Chameleon bans its image tokens
    return value.masked_fill(value == torch.finfo(value.dtype).min, 0.0)
