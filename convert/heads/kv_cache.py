"""The size of the KV cache of a model, from its config.

bytes of a cache = sum over layers of heads x (key dim + value dim) x tokens x bytes per number; a
sliding-window layer caches at most its window. In an encoder-decoder, self-attention caches target
tokens, cross-attention source tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.files import BITS
from gqa.convert.heads.config import ModelConfig, transformers_config


@dataclass(frozen=True)
class CachedLayer:
    """What one layer caches.

    Attributes:
        heads: Its KV heads.
        key_dim: Numbers of a key of one head.
        value_dim: Numbers of a value of one head.
        window: Tokens that are cached at most; None without such a limit.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None

    def bytes_per_token(self, bytes_per_head: Callable[[int], int]) -> int:
        """Bytes of all heads for one token.

        bytes_per_head: Number of dimensions -> bytes of a key or a value with as many.
        """
        return self.heads * (bytes_per_head(self.key_dim) + bytes_per_head(self.value_dim))


@dataclass(frozen=True)
class KVCache:
    """The KV cache of a model.

    Attributes:
        layers: What each layer caches.
        bytes_per_number: Bytes of a number in it, unless it is quantized.
        context: Tokens of the model's longest text; None if it has no limit.
        quantized: Number of dimensions -> bytes of a key or a value with as many in a quantized
            cache; None if it is not quantized.
        cross: Whether each layer has cross-attention too, which caches the keys and values of the
            source.
    """

    layers: tuple[CachedLayer, ...]
    bytes_per_number: int
    context: int | None
    quantized: Callable[[int], int] | None = None
    cross: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token while no window is full."""
        return sum(self._layer_bytes(layer) for layer in self.layers)

    @property
    def cross_bytes_per_token(self) -> int:
        """Bytes of one more source token; 0 without an encoder."""
        return self.bytes_per_token if self.cross else 0

    def bytes_at(self, tokens: int) -> int:
        """Bytes for a sequence of `tokens`.

        An encoder-decoder also caches as many of the source.
        """
        size = self.cross_bytes_per_token * tokens
        for layer in self.layers:
            cached = min(tokens, layer.window or tokens)
            size += self._layer_bytes(layer) * cached
        return size

    def _layer_bytes(self, layer: CachedLayer) -> int:
        return layer.bytes_per_token(self.quantized or self._unquantized)

    def _unquantized(self, dim: int) -> int:
        return dim * self.bytes_per_number


def kv_cache(config: ModelConfig, numbers: Iterable[int], dtype: str) -> KVCache:
    """The KV cache of a model.

    Args:
        config: Its config.
        numbers: The layers with their own keys and values.
        dtype: The dtype of the cache, as safetensors names it.
    """
    text_config = config.text_config

    block_types = getattr(text_config, "layers_block_type", None) or []
    if "hybrid" in block_types:  # one stored block, shared by several layers that each keep a cache
        numbers = [layer for layer, kind in enumerate(block_types) if kind == "hybrid"]

    layers = []
    for layer in sorted(numbers):
        predicts_further_tokens = layer >= config.layers
        if predicts_further_tokens or config.shares_kv(layer):
            continue
        heads = config.heads(layer)
        window = _window(text_config, layer)
        layers.append(CachedLayer(heads.kv, heads.key_dim, heads.value_dim, window))

    has_cross_attention = bool(config.family.cross_attention)
    crosses = has_cross_attention and transformers_config(config.raw).is_encoder_decoder
    context = getattr(text_config, "max_position_embeddings", None)
    return KVCache(tuple(layers), BITS[dtype] // 8, context, cross=crosses)


def _window(text_config: Any, layer: int) -> int | None:
    """Tokens that a layer caches at most; None without such a limit."""
    types = getattr(text_config, "layer_types", None)
    if types and layer < len(types):
        chunked = "chunked" in types[layer]
        slides = "sliding" in types[layer]
    else:
        chunked = False
        slides = bool(getattr(text_config, "use_sliding_window", True))
    if not (chunked or slides):
        return None

    key = "attention_chunk_size" if chunked else "sliding_window"
    window = getattr(text_config, key, None) or 0
    return window if window > 0 else None
