"""KV cache and attention of decoding, one token at a time: what makes `sample_sequences` fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import sdpa_mask

from gqa.core.compat import attention_name
from gqa.models.attention_functions import attend_sdpa, register
from gqa.models.loading import cache_name

_CACHE_ROOM = 64  # tokens by which a KV cache grows


# ------------------------------------------------------------------------------------------- cache


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """KV cache of a layer with room for up to _CACHE_ROOM more tokens.

    DynamicLayer copies all keys and values at every token.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys (B, G, t, d) and values (B, G, t, e); return those of all tokens.

        The attribute `buffer` of what is returned has the room too, filled with zeros.
        """
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        states = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*states)
            self._buffers = [new[:, :, :0] for new in states]

        room = self._buffers[0].shape[2]
        if end > room:
            more = end + _CACHE_ROOM - room
            self._buffers = [pad(buffer, (0, 0, 0, more)) for buffer in self._buffers]

        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[:, :, begin:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        # attend_one_query reads the whole buffer, since matmul would copy the slice.
        for part, buffer in zip((self.keys, self.values), self._buffers, strict=True):
            part.buffer = buffer  # type: ignore[attr-defined]
        return self.keys, self.values


def growing_cache(model: Any) -> dict[str, Any]:
    """The argument of generate() for a cache of `GrowingLayer`s, by its name.

    Empty for encoder-decoders, and for models whose caches have layers other than DynamicLayer and
    sliding ones: generate() then makes the cache.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = {type(layer) for layer in cache.layers}
    is_supported = kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    if model.config.is_encoder_decoder or not is_supported:
        return {}

    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
    return {cache_name(model): cache}


# --------------------------------------------------------------------------------------- attention


@contextmanager
def fast_attention(model: Any) -> Iterator[None]:
    """Let a model attend faster within the block.

    On CPUs with `attend_one_query`, which is four times as fast as torch's kernel for one query in
    bfloat16; on CUDA without cuDNN kernels, which are compiled for each length.
    """
    if model.device.type == "cuda":
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        ):
            yield
    elif model.device.type == "cpu" and attention_name(model) == "sdpa":
        model.set_attn_implementation("gqa_steps")
        try:
            yield
        finally:
            model.set_attn_implementation("sdpa")
    else:
        yield


def _attend_steps(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Attention for transformers: `attend_one_query` for a step of one token, `attend_sdpa` for
    others, and for variants of attention.
    """
    is_step = q.shape[2] == 1
    variants = ("position_bias", "softcap", "cache")
    is_variant = any(options.get(name) is not None for name in variants)
    if is_step and not is_variant:
        return attend_one_query(q, k, v, mask, options.get("scaling"))
    return attend_sdpa(module, q, k, v, mask, **options)


register("gqa_steps", _attend_steps, sdpa_mask)


def attend_one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention of one query per sequence.

    Args:
        query: (B, H, 1, d).
        key: (B, G, T, d).
        value: (B, G, T, e).
        mask: (B, 1 or H, 1, T), bool or to be added to the scores.
        scaling: Of the scores; by default 1 / sqrt(d).

    Returns:
        (B, 1, H, e).
    """
    groups = key.shape[1]
    length = key.shape[2]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5

    # The rest of the buffer of a `GrowingLayer` is zero.
    key = getattr(key, "buffer", key)
    value = getattr(value, "buffer", value)

    per_group = query.unflatten(1, (groups, -1)).squeeze(3)  # (B, G, H / G, d)
    scores = ((per_group * scaling) @ key.mT)[..., :length]  # (B, G, H / G, T)
    if mask is not None:
        scores = _masked(scores, mask)

    attention = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    padding = value.shape[2] - length
    output: Tensor = pad(attention, (0, padding)) @ value
    return output.flatten(1, 2)[:, None]


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores (B, G, H / G, T) with a mask (B, 1 or H, 1, T), bool or to be added."""
    if mask.shape[1] > 1:
        groups = scores.shape[1]
        mask = mask.unflatten(1, (groups, -1)).squeeze(3)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask
