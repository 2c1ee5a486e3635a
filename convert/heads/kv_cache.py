"""KV-cache size from the config: what a conversion saves.

bytes = sum over layers of heads x (key dim + value dim) x tokens x bytes per number; a sliding-window layer holds at
most its window. Of an encoder-decoder self-attention holds the tokens that were written and cross-attention those
of the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gqa.checkpoint.files import BITS
from gqa.convert.heads.config import ModelConfig, transformers_config
from gqa.convert.heads.modules import AttentionModule

QUANTISATION_GROUP = 64  # numbers that share a scale, at most
SCALE_BYTES = 4  # minimum and step of a group


def groups_per_head(dim: int) -> int:
    """Number of equal quantisation groups in a head's key or value of `dim` numbers."""
    return next(count for count in range(-(-dim // QUANTISATION_GROUP), dim + 1) if dim % count == 0)


@dataclass(frozen=True)
class CachedLayer:
    """KV heads of one layer, the numbers of a key and of a value in one head, and the window, if any."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None

    def bytes_per_token(self, number: int, bits: int | None) -> int:
        """Bytes of all heads for one token, with `number` bytes per number or quantised to `bits`."""
        dims = self.key_dim, self.value_dim
        if bits is None:
            return self.heads * sum(dims) * number
        return self.heads * sum(-(-dim * bits // 8) + SCALE_BYTES * groups_per_head(dim) for dim in dims)


@dataclass(frozen=True)
class KVCache:
    """`cross`: cross-attention layers, which cache the keys and values of the source."""

    layers: tuple[CachedLayer, ...]
    bytes_per_number: int
    context: int | None
    remark: str | None = None  # where transformers caches other heads than the model's key/value heads
    bits: int | None = None  # of a number, where the cache is quantised; scales come on top
    cross: tuple[CachedLayer, ...] = ()

    def quantised(self, bits: int) -> KVCache:
        """The same with `bits` for each number, and scales."""
        return replace(self, bits=bits)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes while no window is full."""
        return sum(layer.bytes_per_token(self.bytes_per_number, self.bits) for layer in self.layers)

    @property
    def cross_bytes_per_token(self) -> int:
        """Bytes that one more token of the source takes; 0 without an encoder."""
        return sum(layer.bytes_per_token(self.bytes_per_number, self.bits) for layer in self.cross)

    def bytes_at(self, tokens: int, source: int | None = None) -> int:
        """Bytes for a sequence of `tokens`; an encoder-decoder also caches `source` tokens (default: as many)."""
        sizes = ((layer.bytes_per_token(self.bytes_per_number, self.bits), layer.window) for layer in self.layers)
        written = sum(size * min(tokens, window or tokens) for size, window in sizes)
        return written + self.cross_bytes_per_token * (tokens if source is None else source)


def cached_layers(modules: Iterable[AttentionModule], config: ModelConfig) -> set[int]:
    """Layers whose keys and values grow with the tokens written, and that are no extra prediction layers."""
    return {m.layer for m in modules if m.kind == "decoder-self" and m.layer < config.layers}


def kv_cache(config: ModelConfig, numbers: Iterable[int], dtype: str) -> KVCache:
    """The cache of a model whose layers of these `numbers` have keys and values of their own, kept in `dtype`."""
    text, main, all_heads = config.text, config.main, config.family.caches_all_heads
    block_types = getattr(text, "layers_block_type", None) or []
    if "hybrid" in block_types:  # one stored block, shared by several layers that each keep a cache
        numbers = [layer for layer, kind in enumerate(block_types) if kind == "hybrid"]
    crosses = config.family.cross_attention and transformers_config(config.raw).is_encoder_decoder
    layers, cross = list[CachedLayer](), list[CachedLayer]()
    for layer in sorted(layer for layer in numbers if not config.shares_kv(layer)):
        heads = config.heads(layer)
        cached, dims = heads.query if all_heads else heads.kv, (heads.key_dim, heads.value_dim)
        layers.append(CachedLayer(cached, *dims, _window(text, layer)))
        if crosses:
            cross.append(CachedLayer(cached, *dims, None))
    remark = f"transformers caches {main.query} heads a layer, other engines only the {main.kv} key/value heads"
    context = getattr(text, "max_position_embeddings", None)
    shown = remark if all_heads and main.kv < main.query else None
    return KVCache(tuple(layers), BITS[dtype] // 8, context, shown, cross=tuple(cross))


def _window(text: Any, layer: int) -> int | None:
    types = getattr(text, "layer_types", None)
    if types and layer < len(types):
        if "chunked" in types[layer]:
            return getattr(text, "attention_chunk_size", None)
        return getattr(text, "sliding_window", None) if "sliding" in types[layer] else None
    return getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
