"""A KV cache of few bits, by what it does to predictions: attention reads what such a cache gives back.

Each key and each value of a head is cut into equal parts of at most 64 numbers, of which the smallest and the step are
kept in 16 bits, and every number as a multiple of the step (asymmetric rounding to nearest; KIVI, arXiv 2402.02750,
section 3.1, with both by token). Engines round a little otherwise: this is what the bits cost, not what an engine does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from gqa.checkpoint.errors import RefusedError
from gqa.convert.align.attention import Attend, attend_eager, attend_sdpa, registered
from gqa.convert.heads.kv_cache import parts_of

_PLAIN: dict[str, tuple[Attend, Any]] = {"sdpa": (attend_sdpa, sdpa_mask), "eager": (attend_eager, eager_mask)}


def rounded(heads: Tensor, bits: int) -> Tensor:
    """(..., d) keys or values -> the same as a cache of `bits` for each number gives them back."""
    grouped = heads.float().unflatten(-1, (parts_of(heads.shape[-1]), -1))
    least, most = (edge.half().float() for edge in (grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)))
    step = ((most - least) / (2**bits - 1)).half().float().clamp_min(2.0**-24)  # the smallest number of 16 bits
    codes = ((grouped - least) / step).round().clamp(0, 2**bits - 1)
    found: Tensor = (codes * step + least).flatten(-2).to(heads.dtype)
    return found


@contextmanager
def quantised_attention(bits: Sequence[int]) -> Iterator[None]:
    """Meanwhile models may have caches of these bits (`quantise_cache`)."""
    named = {(f"gqa_cache{b}_{name}"): (b, *plain) for b in bits for name, plain in _PLAIN.items()}
    functions = {name: partial(_attend, attend, b) for name, (b, attend, _) in named.items()}
    with registered(functions, {name: mask for name, (_, _, mask) in named.items()}):
        yield


def quantise_cache(model: PreTrainedModel, bits: int, layers: int, name: str) -> None:
    """From now on the attention of a model reads a cache of `bits`; inside `quantised_attention`.

    Raises RefusedError where it cannot: another implementation of attention, or less than `layers` calls of it.
    """
    plain = model.config._attn_implementation
    if plain not in _PLAIN:
        raise RefusedError(f"--cache-bits goes with sdpa and eager attention, {name} has {plain}; give one of them")
    model.set_attn_implementation(f"gqa_cache{bits}_{plain}")
    calls: list[Tensor] = []
    _SEEN.append(calls)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        _SEEN.remove(calls)
    if len(calls) < layers:
        raise RefusedError(
            f"--cache-bits: {len(calls)} of {layers} layers of {name} call transformers' attention functions; leave it "
            "out for this model"
        )


_SEEN: list[list[Tensor]] = []  # who counts calls


def _attend(
    plain: Attend, bits: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    for calls in _SEEN:
        calls.append(query)
    return plain(module, query, rounded(key, bits), rounded(value, bits), mask, **options), None
