"""Simulate a KV cache quantised to few bits, to evaluate a model with it.

Each key and each value of a head is split into equal groups of at most 64 numbers. A group stores its minimum and step
in 16 bits, and every number as a multiple of the step (asymmetric rounding to nearest, per token; KIVI, arXiv
2402.02750, section 3.1). Engines round slightly differently: this measures the cost of the bits, not an engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.compat import attention_name
from gqa.checkpoint.errors import RefusedError
from gqa.convert.heads.config import groups_per_head
from gqa.convert.merge.layerwise import PLAIN, register


def fake_quantise(heads: Tensor, bits: int) -> Tensor:
    """Quantise keys or values (..., d) to `bits` per number and dequantise them."""
    grouped = heads.float().unflatten(-1, (groups_per_head(heads.shape[-1]), -1))
    least, most = (edge.half().float() for edge in (grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)))
    step = ((most - least) / (2**bits - 1)).half().float().clamp_min(2.0**-24)  # the smallest positive float16
    codes = ((grouped - least) / step).round().clamp(0, 2**bits - 1)
    numbers: Tensor = (codes * step + least).flatten(-2).to(heads.dtype)
    return numbers


@torch.no_grad()
def quantise_cache(model: PreTrainedModel, bits: int, layers: int, name: str) -> None:
    """Replace the model's attention with one whose keys and values are quantised to `bits`.

    Raises RefusedError for other attention implementations, or if fewer than `layers` layers call it.
    """
    plain, calls = attention_name(model), 0
    if plain not in PLAIN:
        raise RefusedError(f"--cache-bits needs sdpa or eager attention, {name} has {plain}; leave it out")
    attend, mask = PLAIN[plain]

    def attend_quantised(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(module, q, fake_quantise(k, bits), fake_quantise(v, bits), *rest, **options)

    register(f"gqa_cache{bits}_{plain}", attend_quantised, mask)
    model.set_attn_implementation(f"gqa_cache{bits}_{plain}")
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    if calls < layers:
        raise RefusedError(
            f"--cache-bits: {calls} of {layers} layers of {name} call transformers' attention functions; leave it out "
            "for this model"
        )
