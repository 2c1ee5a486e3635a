"""The formats of a KV cache that `--cache-bits` names: how each rounds a value, and its bytes.

Imports no torch: --help and the checks of options need the names alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CacheBits = int | str  # what --cache-bits calls a format: a key of CACHE_FORMATS

QUANTIZATION_GROUP = 64  # numbers that share a scale, at most
SCALE_BYTES = 4  # minimum and step of a group, 16 bits each


@dataclass(frozen=True)
class CacheFormat:
    """How a KV cache stores the keys and values of a head.

    Attributes:
        name: What tables call it: `model (int8)`.
        round: Keys or values (..., d) -> what attention reads of them, in their dtype.
        bytes_per_head: d -> bytes of a key or a value of d numbers, with scales.
    """

    name: str
    round: Callable[[Tensor], Tensor]
    bytes_per_head: Callable[[int], int]


def in_groups(bits: int) -> CacheFormat:
    """The format of `bits` per number, with a minimum and a step for each group of numbers."""
    return CacheFormat(
        f"int{bits}",
        round=partial(round_in_groups, bits=bits),
        bytes_per_head=partial(bytes_in_groups, bits=bits),
    )


def groups_per_head(dim: int) -> int:
    """Number of equal quantization groups in a head's key or value of `dim` numbers."""
    fewest = math.ceil(dim / QUANTIZATION_GROUP)
    return next(count for count in range(fewest, dim + 1) if dim % count == 0)


def bytes_in_groups(dim: int, bits: int) -> int:
    """Bytes of a key or a value of `dim` numbers in groups, with scales."""
    packed = math.ceil(dim * bits / 8)
    scales = SCALE_BYTES * groups_per_head(dim)
    return packed + scales


def round_in_groups(heads: Tensor, bits: int) -> Tensor:
    """Keys or values (..., d), quantized to `bits` per number and dequantized.

    Each key and each value of a head is split into equal groups of at most 64 numbers. A group
    stores its minimum and step in 16 bits (float16, or bfloat16 beyond its range), and every number
    as a multiple of the step (asymmetric rounding to nearest, per token; KIVI, arXiv 2402.02750,
    section 3.1). Engines round slightly differently: this measures the cost of the bits, not an
    engine.
    """
    import torch

    grouped = heads.float().unflatten(-1, (groups_per_head(heads.shape[-1]), -1))
    least = _stored_in_16_bits(grouped.amin(-1, keepdim=True))
    most = _stored_in_16_bits(grouped.amax(-1, keepdim=True))

    largest_code = 2**bits - 1
    step = _stored_in_16_bits((most - least) / largest_code)
    step = step.clamp_min(2.0**-24)  # the smallest positive float16

    codes = ((grouped - least) / step).round().clamp(0, largest_code)
    numbers: Tensor = (codes * step + least).flatten(-2)

    # A step that was rounded up may lead beyond the largest float16.
    limit = torch.finfo(heads.dtype).max
    return numbers.clamp(-limit, limit).to(heads.dtype)


def _stored_in_16_bits(numbers: Tensor) -> Tensor:
    """Float32 numbers rounded to float16; those beyond its range (65,504) to bfloat16, as engines
    do that keep the cache of a bfloat16 model in bfloat16. NaN and infinity stay.
    """
    import torch

    rounded = numbers.half().float()
    return torch.where(rounded.isfinite(), rounded, numbers.bfloat16().float())


def round_to_fp8(heads: Tensor) -> Tensor:
    """Keys or values, rounded to float8_e4m3fn with scale 1.0: vLLM's FP8 cache uncalibrated.

    Numbers beyond 448, the largest of the type, become 448, as in vLLM's kernels
    (`__NV_SATFINITE`). The cast alone makes NaN of them in some versions of torch.
    """
    import torch

    largest = torch.finfo(torch.float8_e4m3fn).max
    return heads.float().clamp(-largest, largest).to(torch.float8_e4m3fn).to(heads.dtype)


def one_byte_each(dim: int) -> int:
    """Bytes of a key or a value of `dim` numbers of one byte, without scales."""
    return dim


# By what --cache-bits calls them.
CACHE_FORMATS: dict[CacheBits, CacheFormat] = {
    2: in_groups(2),
    3: in_groups(3),
    4: in_groups(4),
    5: in_groups(5),
    6: in_groups(6),
    7: in_groups(7),
    8: in_groups(8),
    "fp8": CacheFormat("fp8", round=round_to_fp8, bytes_per_head=one_byte_each),
}
