"""A KV cache in one of the `CACHE_FORMATS`, simulated: attention reads rounded keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.core.compat import attention_name
from gqa.core.errors import RefusedError
from gqa.eval.cache_formats import CacheFormat
from gqa.models.attention_functions import PLAIN, register


@torch.no_grad()
def quantize_cache(
    model: PreTrainedModel, cache_format: CacheFormat, layers: int, name: str
) -> None:
    """Replace the model's attention with one that reads keys and values from a quantized cache.

    Args:
        model: A loaded model with sdpa or eager attention.
        cache_format: How the cache stores them.
        layers: Number of layers with a KV cache.
        name: What messages call the model.

    Raises:
        RefusedError: The model has another attention implementation, or fewer than `layers` layers
            call it.
    """
    plain = attention_name(model)
    if plain not in PLAIN:
        raise RefusedError(
            f"--simulate-cache works only with sdpa or eager attention, but {name} has {plain}; "
            "remove --simulate-cache"
        )
    attend, mask = PLAIN[plain]
    calls = 0

    def attend_quantized(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
    ) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(module, q, cache_format.round(k), cache_format.round(v), *rest, **options)

    quantized = f"gqa_cache_{cache_format.name}_{plain}"
    register(quantized, attend_quantized, mask)
    model.set_attn_implementation(quantized)

    # Not every layer of every model calls the function: two tokens show which do.
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    if calls < layers:
        raise RefusedError(
            "--simulate-cache works only if all layers call transformers' attention functions, but "
            f"{calls} of {layers} layers of {name} do; remove --simulate-cache"
        )
