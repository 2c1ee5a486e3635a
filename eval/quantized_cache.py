"""A KV cache quantized to few bits, simulated.

Each key and each value of a head is split into equal groups of at most 64 numbers. A group stores
its minimum and step in 16 bits (float16, or bfloat16 beyond its range), and every number as a
multiple of the step (asymmetric rounding to nearest, per token; KIVI, arXiv 2402.02750, section
3.1). Engines round slightly differently: this measures the cost of the bits, not an engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.convert.heads.kv_cache import groups_per_head
from gqa.core.compat import attention_name
from gqa.core.errors import RefusedError
from gqa.models.attention_functions import PLAIN, register


def fake_quantize(heads: Tensor, bits: int) -> Tensor:
    """Quantize keys or values (..., d) to `bits` per number and dequantize them."""
    grouped = heads.float().unflatten(-1, (groups_per_head(heads.shape[-1]), -1))
    least = stored_in_16_bits(grouped.amin(-1, keepdim=True))
    most = stored_in_16_bits(grouped.amax(-1, keepdim=True))

    largest_code = 2**bits - 1
    step = stored_in_16_bits((most - least) / largest_code)
    step = step.clamp_min(2.0**-24)  # the smallest positive float16

    codes = ((grouped - least) / step).round().clamp(0, largest_code)
    numbers: Tensor = (codes * step + least).flatten(-2)

    # A step that was rounded up may lead beyond the largest float16.
    limit = torch.finfo(heads.dtype).max
    return numbers.clamp(-limit, limit).to(heads.dtype)


def stored_in_16_bits(numbers: Tensor) -> Tensor:
    """Float32 numbers rounded to float16; those beyond its range (65,504) to bfloat16, as engines
    do that keep the cache of a bfloat16 model in bfloat16. NaN and infinity stay.
    """
    rounded = numbers.half().float()
    return torch.where(rounded.isfinite(), rounded, numbers.bfloat16().float())


@torch.no_grad()
def quantize_cache(model: PreTrainedModel, bits: int, layers: int, name: str) -> None:
    """Replace the model's attention with one whose keys and values are quantized to `bits`.

    Args:
        model: A loaded model with sdpa or eager attention.
        bits: Of each number of a key or a value.
        layers: Number of layers with a KV cache.
        name: What messages call the model.

    Raises:
        RefusedError: The model has another attention implementation, or fewer than `layers` layers
            call it.
    """
    plain = attention_name(model)
    if plain not in PLAIN:
        raise RefusedError(
            f"--cache-bits works only with sdpa or eager attention, but {name} has {plain}; "
            "remove --cache-bits"
        )
    attend, mask = PLAIN[plain]
    calls = 0

    def attend_quantized(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
    ) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(module, q, fake_quantize(k, bits), fake_quantize(v, bits), *rest, **options)

    quantized = f"gqa_cache{bits}_{plain}"
    register(quantized, attend_quantized, mask)
    model.set_attn_implementation(quantized)

    # Not every layer of every model calls the function: two tokens show which do.
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    if calls < layers:
        raise RefusedError(
            "--cache-bits works only if all layers call transformers' attention functions, but "
            f"{calls} of {layers} layers of {name} do; remove --cache-bits"
        )
