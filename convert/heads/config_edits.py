"""Edit the head counts of config.json minimally.

The file is edited as plain JSON, because transformers 5 writes configs that version 4 misreads.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gqa.checkpoint.model_config import parts, without_keys
from gqa.convert.heads.config import ModelConfig, config_at, read_config
from gqa.convert.heads.family import Edits, KVCounts
from gqa.convert.heads.layouts import LayerHeads
from gqa.core.errors import RefusedError
from gqa.models.custom_code import loads_as_decilm

# Keys that say how weights are quantized; the last is that of MLX
QUANTIZATION = {"quantization_config", "compression_config", "quantization"}


def valid_kv_heads(config: ModelConfig) -> list[int]:
    """Every G that the family can represent: divisors of Hk, and multiples of Hk that divide H."""
    main = config.main_heads
    layers = {main, *(config.heads(layer) for layer in range(config.layers))}

    def fits(kv_heads: int) -> bool:
        """Whether each layer can have its share of KV heads."""
        for heads in layers:
            kv, rest = divmod(heads.kv * kv_heads, main.kv)
            if not kv or rest or heads.query % kv:
                return False
            if heads.kv % kv and kv % heads.kv:  # neither merged nor repeated evenly
                return False
        return kv_heads == main.kv or _new_counts(config, {}, kv_heads) is not None

    return [kv_heads for kv_heads in range(1, main.query + 1) if fits(kv_heads)]


def target_heads(config: ModelConfig, layer: int, kv_heads: KVCounts) -> LayerHeads:
    """Heads of a layer after the conversion.

    A single G keeps the ratio of KV heads between layer types.
    """
    heads = config.heads(layer)
    if isinstance(kv_heads, int):
        return replace(heads, kv=heads.kv * kv_heads // config.main_heads.kv)
    if layer >= len(kv_heads):  # it predicts further tokens
        return replace(heads, kv=max(kv_heads))
    return replace(heads, kv=kv_heads[layer])


def edit_config(
    config: ModelConfig,
    kv_heads: KVCounts,
    name: str,
    dtype: str | None = None,
    quantized: bool = False,
) -> tuple[ModelConfig, list[dict[str, Any]]]:
    """The config of a result, edited minimally.

    Args:
        config: The config of the base model.
        kv_heads: KV heads of the result.
        name: The checkpoint's name, for errors.
        dtype: The dtype to state, if it changes.
        quantized: Whether tensors are quantized; keys of quantization go unless they are.

    Returns:
        The new config, read back through transformers and checked, and its changes: dictionaries of
        a `key`, dotted from the top of config.json, and its values `before` and `after`.

    Raises:
        RefusedError: transformers reads other head counts from the edited file.
    """
    raw = copy.deepcopy(config.raw) if quantized else without_quantization(config.raw)
    if dtype:
        _set_dtype(raw, dtype)
    _set_counts(raw, config, kv_heads)

    new = read_config(raw, name)
    for layer in range(config.layers):
        actual = new.heads(layer)
        expected = target_heads(config, layer, kv_heads)
        if actual != expected:
            raise RefusedError(
                f"{name}: transformers reads {actual.kv} KV heads in layer {layer} from the "
                f"edited config, but {expected.kv} were expected; please report this config"
            )
    return new, list(_difference("", config.raw, raw))


def _set_dtype(raw: dict[str, Any], dtype: str) -> None:
    """Change the dtype wherever config.json states it."""
    for part in parts(raw):
        for key in ("torch_dtype", "dtype"):
            if isinstance(part.get(key), str):
                part[key] = dtype


def _set_counts(raw: dict[str, Any], config: ModelConfig, kv_heads: KVCounts) -> None:
    """Change the counts of KV heads in config.json."""
    owner: dict[str, Any] = config_at(raw, config.owner)
    most = kv_heads if isinstance(kv_heads, int) else max(kv_heads)

    # 1. The number of all layers.
    for dotted, value in (_new_counts(config, owner, most) or {}).items():
        *steps, key = dotted.split(".")
        part = owner
        for step in steps:
            part[step] = part.get(step) or {}  # it may be null
            part = part[step]
        part[key] = value
        if config.owner and not steps and key in raw:
            raw[key] = value  # some larger models state the counts of their text part twice

    # 2. Those of layers that differ.
    if isinstance(kv_heads, tuple):
        owner["per_layer_config"] = {
            str(layer): {"num_key_value_heads": count}
            for layer, count in enumerate(kv_heads)
            if count < most
        }
    else:  # the base model's layers keep their ratio
        for override in (owner.get("per_layer_config") or {}).values():
            count = override.get("num_key_value_heads")
            if count is not None:
                override["num_key_value_heads"] = count * kv_heads // config.main_heads.kv

    # 3. For llama.cpp's converter, which reads nothing but config.json.
    if loads_as_decilm(config.text_config.model_type):
        counts = [target_heads(config, layer, kv_heads).kv for layer in range(config.layers)]
        owner["num_key_value_heads_per_layer"] = counts


def _new_counts(config: ModelConfig, owner: dict[str, Any], kv_heads: int) -> Edits | None:
    """New values by dotted key below the owner of the head counts.

    None if `kv_heads` heads are impossible.
    """
    if config.family.edits is not None:
        return config.family.edits(kv_heads, config.main_heads, config.text_config)

    first, *rest = config.family.kv_fields
    counts = {first: kv_heads}
    for key in rest:
        count = owner.get(key)
        if isinstance(count, int):
            counts[key] = count * kv_heads // config.main_heads.kv
    return counts


def _difference(prefix: str, before: Any, after: Any) -> Iterator[dict[str, Any]]:
    """The changes from one JSON value to another, as `edit_config` returns them."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        yield {"key": prefix, "before": before, "after": after}
        return

    for key in after | before:
        is_equal = key in before and key in after and before[key] == after[key]
        if not is_equal:
            dotted = f"{prefix}.{key}" if prefix else key
            yield from _difference(dotted, before.get(key), after.get(key))


def without_quantization(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config, and of every config inside it, without the keys that say how weights are
    quantized.
    """
    return without_keys(raw, QUANTIZATION)
