"""Read the head counts of config.json, and check them.

The file is read through transformers' config classes, because keys that it lacks have the defaults
of the class (32 heads in the text part of LLaVA):

- `transformers_config(raw)`: transformers' object of the whole model, unchecked;
- `read_outer_config(raw, name)`: the same, with errors that name the wrong entry;
- `read_config(raw, name)`: a `ModelConfig` with family, head counts and the config of the text
  part. What cannot be converted is refused.

(`read_auto_config` in models/classes.py also reads models whose class is code of the checkpoint.)
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from gqa.checkpoint.model_config import (
    MAX_COUNT,
    check_numbers,
    culprit,
    is_number,
    without_run_flags,
    wrong,
)
from gqa.convert.heads.families.table import FAMILIES, NESTED, REFUSED
from gqa.convert.heads.family import Family, Symmetry
from gqa.convert.heads.layouts import LayerHeads
from gqa.core.console import quiet_transformers
from gqa.core.errors import CorruptError, EntryError, RefusedError, explain, listing
from gqa.models.custom_code import config_class, listed_as

MAX_DIM = 65_536  # largest dimension of a head; published models have 32 to 1,024


@dataclass(frozen=True)
class ModelConfig:
    """config.json, and what transformers and this package make of it.

    Attributes:
        raw: config.json.
        owner: The path in `raw` of the config with the head counts.
        text_config: transformers' config object of the text model.
        family: How the model type stores and counts its heads.
    """

    raw: dict[str, Any]
    owner: tuple[str, ...]
    text_config: Any
    family: Family

    @property
    def layers(self) -> int:
        return int(getattr(self.text_config, self.family.layers_field))

    @property
    def symmetry(self) -> Symmetry | str:
        """How its heads can be changed, or why they cannot."""
        return self.family.symmetry(self.text_config)

    @property
    def why_not_layerwise(self) -> str | None:
        """Why the model cannot be run layer by layer on text; None if no reason is known."""
        return self.family.not_layerwise.get(listed_as(self.text_config.model_type))

    def heads(self, layer: int) -> LayerHeads:
        """Heads of one layer.

        Layers beyond the last (multi-token prediction) have those of the main type.
        """
        if layer >= self.layers:
            return self.main_heads
        return self.family.heads(self.text_config, layer)

    def shares_kv(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of an earlier one and has none of its own."""
        sharing = int(getattr(self.text_config, "num_kv_shared_layers", 0) or 0)  # the last layers
        return self.layers - sharing <= layer < self.layers

    @cached_property
    def main_heads(self) -> LayerHeads:
        """Heads of the main layer type, to which `--kv-heads` refers: of the first layer that has
        as many KV heads as the config states, else of the first layer.
        """
        by_layer = [self.family.heads(self.text_config, layer) for layer in range(self.layers)]

        # Where layers differ in heads, num_key_value_heads is that of the main type. (Families with
        # `edits` count in other keys, and all their layers are alike.)
        if self.family.edits is None:
            count = self.text_config.to_dict().get("num_key_value_heads")
            for heads in by_layer:
                if heads.kv == count:
                    return heads
        return by_layer[0]

    @property
    def average_kv(self) -> float:
        """KV heads per layer: of the main type; of our types with heads by layer the average."""
        is_by_layer_type = listed_as(self.text_config.model_type) != self.text_config.model_type
        if not is_by_layer_type:
            return self.main_heads.kv

        average = sum(self.heads(layer).kv for layer in range(self.layers)) / self.layers
        if average.is_integer():
            return int(average)
        return round(average, 2)


def read_config(raw: dict[str, Any], name: str) -> ModelConfig:
    """Find the family and the owner of the head counts, and check what is computed with.

    Raises RefusedError with the reason, and CorruptError, a kind of it, for impossible values.
    """
    config = _parse(raw, name)
    _check(config, name)
    return config


def check_config(raw: dict[str, Any], name: str) -> None:
    """Raise CorruptError for a config with which nothing can be computed.

    Model types that cannot be converted pass.
    """
    try:
        read_config(raw, name)
    except CorruptError:
        raise
    except RefusedError:
        return


def _parse(raw: dict[str, Any], name: str) -> ModelConfig:
    """As `read_config`, but the values of the text part are not checked yet."""
    text_config: Any = read_outer_config(raw, name)
    model_type: Any = raw["model_type"]
    path = NESTED.get(model_type, ())
    for step in path:
        text_config = getattr(text_config, step, None)
        model_type = getattr(text_config, "model_type", None)
        if not isinstance(model_type, str):
            raise CorruptError(f"{name}: {step} of config.json has no model_type; correct it")

    refuse_model_type(model_type, text_config, name)
    family = next((family for family in FAMILIES if family.matches(model_type, text_config)), None)
    if family is None:
        model_types = chain.from_iterable(family.symmetries for family in FAMILIES)
        supported = listing(model_types, 8)
        raise RefusedError(
            f"{name} is of model type {model_type}, which is not supported ({supported}); "
            "docs/models.md lists what is supported"
        )

    owner = path
    if config_at(raw, path) is None:  # config.json leaves it out
        owner = ()
    return ModelConfig(raw, owner, text_config, family)


def read_outer_config(raw: dict[str, Any], name: str) -> Any:
    """transformers' config object of the whole model; no code of a checkpoint is imported.

    Raises RefusedError.
    """
    check_numbers(raw, name)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CorruptError(
            f"{name}: config.json has no model_type; docs/models.md lists what is supported"
        )
    refuse_model_type(model_type, None, name)
    if config_class(model_type) is None:
        remote = ""
        if "auto_map" in raw:
            remote = " (its classes come with the checkpoint: auto_map)"
        raise RefusedError(
            f"{name} is of model type {model_type!r}, which transformers does not have{remote}; "
            "docs/models.md lists what is supported"
        )

    try:
        return transformers_config(raw)
    except Exception as error:  # any error of a config class means that the config is wrong
        entry = culprit(raw, transformers_config)
        cause = f" because of {entry}" if entry else ""
        raise EntryError(
            f"{name}: transformers cannot read config.json as {model_type}{cause}: "
            f"{explain(error)}; correct it"
        ) from error


# Entries that are read for the whole model, beside those of `_ALLOWED_VALUES`.
_READ_FOR_ALL_LAYERS = (
    "rope_parameters",
    "use_sliding_window",
    "attn_logit_softcapping",
    "initializer_range",
)

# What arithmetic on values of the wrong type raises.
_ERRORS_OF_WRONG_VALUES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
)


def _is_positive_integer(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_window(value: Any) -> bool:
    return value is False or (type(value) is int and value >= -1)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _is_list_of_integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, int) for part in value)


def _is_factor(value: Any) -> bool:
    return is_number(value) and value > 0


# Entries of the text part's config that this package computes with, where they are set: what they
# may be.
_ALLOWED_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_size": (_is_positive_integer, "a positive integer"),
    "vocab_size": (_is_positive_integer, "a positive integer"),
    "max_position_embeddings": (_is_positive_integer, "a positive integer"),
    "sliding_window": (_is_window, "a number of tokens"),  # 0, -1 and false stand for none
    "attention_chunk_size": (_is_count, "a number of tokens"),
    "num_kv_shared_layers": (_is_count, "a number of layers"),
    "layer_types": (_is_names, "a list of names"),
    "layers_block_type": (_is_names, "a list of names"),
    "no_rope_layers": (_is_list_of_integers, "a list of 0 and 1"),
    "embedding_multiplier": (_is_factor, "a positive number"),
    "residual_multiplier": (_is_factor, "a positive number"),
}


def _check(config: ModelConfig, name: str) -> None:
    """Raise CorruptError for values that transformers' config classes accept, although nothing can
    be computed with them: impossible numbers of layers or heads, and entries of the wrong type.
    """
    _check_layers(config, name)
    _check_entries(config, name)
    _check_head_counts(config, name)
    _check_rotary(config, name)


def _check_layers(config: ModelConfig, name: str) -> None:
    """Raise CorruptError for an impossible number of layers."""
    layers = getattr(config.text_config, config.family.layers_field)
    if type(layers) is not int or not 0 < layers <= MAX_COUNT:
        raise CorruptError(
            f"{name}: config.json has {layers or 'no'} layers, but 1 to {MAX_COUNT} are allowed; "
            "correct it"
        )


def _check_entries(config: ModelConfig, name: str) -> None:
    """Raise CorruptError for entries with values that nothing can be computed with, RefusedError
    for those that should be equal in all layers and are not.
    """
    for key in (*_ALLOWED_VALUES, *_READ_FOR_ALL_LAYERS):
        try:
            getattr(config.text_config, key, None)
        except RuntimeError as error:  # transformers': `per_layer_config` has several values
            raise RefusedError(
                f"{name}: per_layer_config of config.json gives layers a {key} of their own, "
                f"which is not supported; convert a model that has one {key} for all layers"
            ) from error

    for key, (is_allowed, allowed) in _ALLOWED_VALUES.items():
        value = getattr(config.text_config, key, None)
        if value is not None and not is_allowed(value):
            raise wrong(name, key, value, f"{allowed} is allowed")

    shared = getattr(config.text_config, "num_kv_shared_layers", None) or 0
    if shared >= config.layers:
        allowed = f"a number below that of the layers, {config.layers}, is allowed"
        raise wrong(name, "num_kv_shared_layers", shared, allowed)


def _check_head_counts(config: ModelConfig, name: str) -> None:
    """Raise CorruptError for numbers of heads of a layer that make no sense."""
    try:
        heads = {config.heads(layer) for layer in range(config.layers)}
    except _ERRORS_OF_WRONG_VALUES as error:
        entry = culprit(config.raw, _read_heads)
        cause = f" because of {entry}" if entry else ""
        raise EntryError(
            f"{name}: the head counts in config.json make no sense{cause}: {explain(error)}; "
            "correct them"
        ) from error
    _check_heads(heads, name)


def _check_rotary(config: ModelConfig, name: str) -> None:
    """Raise CorruptError if no rotary embedding can be made of the config."""
    try:
        _read_rotary(config)
    except _ERRORS_OF_WRONG_VALUES as error:
        value = getattr(config.text_config, "rope_parameters", None)
        reason = f"no rotary embedding can be made of that ({explain(error)})"
        raise wrong(name, "rope_parameters", value, reason) from error


def _read_heads(raw: dict[str, Any]) -> object:
    """The heads of every layer of a config. Raises whatever its values cause."""
    config = _parse(raw, "")
    return [config.heads(layer) for layer in range(config.layers)]


def _read_rotary(config: ModelConfig) -> None:
    """Make the rotary embedding of each kind of layer.

    Raises whatever values of the config cause.
    """
    symmetry = config.symmetry
    if not isinstance(symmetry, Symmetry):
        return

    kinds = getattr(config.text_config, "layer_types", None) or [""]
    for kind in set(kinds):
        layer = kinds.index(kind)
        if layer < config.layers:
            rotary = symmetry.rotary(config.text_config, layer, config.heads(layer).key_dim)
            if not all(map(math.isfinite, rotary.frequencies)):
                raise ValueError("its frequencies are not finite")
            if not math.isfinite(rotary.factor) or rotary.factor <= 0:
                raise ValueError(f"its attention factor is {rotary.factor:g}, not above 0")


def _check_heads(heads: Iterable[LayerHeads], name: str) -> None:
    """Raise CorruptError for numbers of heads that do not go together."""
    for layer in heads:
        numbers = (layer.query, layer.kv, layer.key_dim, layer.value_dim)
        if not all(map(_is_positive_integer, numbers)) or layer.query % layer.kv:
            raise CorruptError(
                f"{name}: config.json asks for {layer.query} query and {layer.kv} KV heads of "
                f"dimension {layer.key_dim}, but all of these must be positive integers, and the "
                "number of KV heads must divide that of query heads; correct config.json, or "
                "download it again"
            )

        if layer.query > MAX_COUNT:  # numbers of KV heads are counted up to it
            raise CorruptError(
                f"{name}: config.json asks for {layer.query} query heads, but at most {MAX_COUNT} "
                "are allowed; correct it"
            )
        dim = max(layer.key_dim, layer.value_dim)
        if dim > MAX_DIM:  # a list of each dimension's frequency is made
            raise CorruptError(
                f"{name}: config.json asks for heads of dimension {dim}, but at most {MAX_DIM} is "
                "allowed; correct it"
            )


def refuse_model_type(model_type: str, text_config: Any, name: str) -> None:
    """Raise for architectures known not to be convertible, with the reason and what to do
    instead.
    """
    reason = REFUSED.get(model_type)
    # Multi-head latent attention, under any model type.
    has_latent_attention = getattr(text_config, "kv_lora_rank", None)
    if not reason and has_latent_attention:
        reason = REFUSED["deepseek_v3"]
    if not reason:
        return

    has_advice = "; " in reason
    advice = "" if has_advice else "; docs/models.md lists what can be converted"
    raise RefusedError(f"{name} ({model_type}) cannot be converted: {reason}{advice}")


def config_at(raw: Any, path: tuple[str, ...]) -> Any:
    """The config at `path` in a config; None if there is none."""
    part = raw
    for step in path:
        if not isinstance(part, dict):
            return None
        part = part.get(step)
    return part if isinstance(part, dict) else None


def transformers_config(raw: dict[str, Any]) -> Any:
    """The config object of a config.json of a model type that transformers has, or that is ours,
    without the entries that say how the model is run (`RUN_FLAGS`).
    """
    config = _cached_config(json.dumps(without_run_flags(raw)))
    return copy.deepcopy(config)  # callers may change it


@lru_cache(maxsize=8)
def _cached_config(text: str) -> Any:
    """Cached, since a conversion needs the same config several times and transformers reads it
    slowly.
    """

    def restore_float(part: dict[str, Any]) -> Any:
        """transformers writes infinities, which JSON lacks, as `{"__float__": "Infinity"}`."""
        return float(part["__float__"]) if "__float__" in part else part

    raw = json.loads(text, object_hook=restore_float)
    with quiet_transformers():
        config = config_class(raw["model_type"]).from_dict(raw)
        config.to_dict()  # raises for values that it accepted but cannot write
    return config
