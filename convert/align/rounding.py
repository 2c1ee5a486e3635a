"""A KV cache of few bits, by what it does to predictions: attention reads what such a cache gives back.

Each key and each value of a head is cut into equal parts of at most 64 numbers, of which the smallest and the step are
kept in 16 bits, and every number as a multiple of the step (asymmetric rounding to nearest; KIVI, arXiv 2402.02750,
section 3.1, with both by token). Engines round a little otherwise: this is what the bits cost, not what an engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gqa.convert.heads.kv_cache import parts_of


def rounded(heads: Tensor, bits: int) -> Tensor:
    """(..., d) keys or values -> the same as a cache of `bits` for each number gives them back.

    Its gradient is that of the identity (the straight-through estimator: Bengio et al., arXiv 1308.3432, section 3).
    """
    grouped = heads.detach().float().unflatten(-1, (parts_of(heads.shape[-1]), -1))
    least, most = (edge.half().float() for edge in (grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)))
    step = ((most - least) / (2**bits - 1)).half().float().clamp_min(2.0**-24)  # the smallest number of 16 bits
    codes = ((grouped - least) / step).round().clamp(0, 2**bits - 1)
    found: Tensor = (codes * step + least).flatten(-2).to(heads.dtype)
    return found + (heads - heads.detach()) if heads.requires_grad else found


def reading(attend: Callable[..., Tensor], bits: int) -> Callable[..., Tensor]:
    """An attention function as `gqa.convert.align.attention` has them, of a cache of `bits`."""

    def of_cache(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
        return attend(module, q, rounded(k, bits), rounded(v, bits), mask, **options)

    return of_cache
