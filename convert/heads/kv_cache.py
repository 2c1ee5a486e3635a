"""KV-cache size from the config: what a conversion saves.

bytes = sum over layers of heads x (key dim + value dim) x tokens x bytes per number; a sliding-window layer holds at
most its window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.headers import BITS
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.modules import AttentionModule


@dataclass(frozen=True)
class CachedLayer:
    """KV heads of one layer, the numbers one token takes in one head (key and value), and the window, if any."""

    heads: int
    numbers: int
    window: int | None


@dataclass(frozen=True)
class KVCache:
    layers: tuple[CachedLayer, ...]
    bytes_per_number: int
    context: int | None
    remark: str | None = None  # where transformers caches other heads than the model's key/value heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes while no window is full."""
        return sum(layer.heads * layer.numbers for layer in self.layers) * self.bytes_per_number

    def bytes_at(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens`."""
        numbers = sum(layer.heads * layer.numbers * min(tokens, layer.window or tokens) for layer in self.layers)
        return numbers * self.bytes_per_number


def cached_layers(modules: Iterable[AttentionModule], config: ModelConfig) -> set[int]:
    """Layers whose keys and values grow with the tokens written, and that are no extra prediction layers."""
    return {m.layer for m in modules if m.kind == "decoder-self" and m.layer < config.layers}


def kv_cache(config: ModelConfig, found: Iterable[int], dtype: str) -> KVCache:
    """The cache of a model whose layers `found` have keys and values of their own, kept in `dtype`."""
    text, main, every = config.text, config.main, config.family.caches_all_heads
    block_types = getattr(text, "layers_block_type", None) or []
    if "hybrid" in block_types:  # one stored block, shared by several layers that each keep a cache
        found = [layer for layer, kind in enumerate(block_types) if kind == "hybrid"]
    layers = []
    for layer in sorted(layer for layer in found if not config.shares_kv(layer)):
        heads = config.heads(layer)
        cached = heads.query if every else heads.kv
        layers.append(CachedLayer(cached, heads.key_dim + heads.value_dim, _window(text, layer)))
    remark = f"transformers caches {main.query} heads a layer, other engines only the {main.kv} key/value heads"
    context = getattr(text, "max_position_embeddings", None)
    return KVCache(tuple(layers), BITS[dtype] // 8, context, remark if every and main.kv < main.query else None)


def _window(text: Any, layer: int) -> int | None:
    types = getattr(text, "layer_types", None)
    if types and layer < len(types):
        if "chunked" in types[layer]:
            return getattr(text, "attention_chunk_size", None)
        return getattr(text, "sliding_window", None) if "sliding" in types[layer] else None
    return getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
