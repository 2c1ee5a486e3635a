"""The formats of a KV cache that `--simulate-cache` names: how each rounds a value, and its bytes.

Imports no torch: --help and the checks of options need the names alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CacheFormatName = int | str  # what --simulate-cache calls a format: a key of CACHE_FORMATS

QUANTIZATION_GROUP = 64  # numbers that share a scale, at most
SCALE_BYTES = 4  # minimum and step of a group, 16 bits each
_LEAST_SCALE = 1e-6  # of vLLM's caches
_SIGNS_SEED = 0x9E3779B9  # that of vLLM's `int4_per_token_head`


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


# ------------------------------------------------- vLLM's caches that have a scale for each head


def round_to_int8_per_head(heads: Tensor) -> Tensor:
    """Keys or values (..., d), rounded as in vLLM's `int8_per_token_head`: to multiples of a scale,
    which is the largest magnitude of the d numbers over 127.
    """
    numbers = heads.float()
    scale = (numbers.abs().amax(-1, keepdim=True) / 127).clamp_min(_LEAST_SCALE)
    codes = _round_halves_away(numbers / scale).clamp(-128, 127)
    rounded: Tensor = (codes * scale).to(heads.dtype)
    return rounded


def round_to_int4_per_head(heads: Tensor) -> Tensor:
    """Keys or values (..., d), rounded as in vLLM's `int4_per_token_head`: rotated, so that no
    number is far larger than the others; then to 16 equal steps between the least and the largest
    of the d numbers, one of which is 0 if it lies between them; and rotated back.

    vLLM keeps 4 of the last bits of a scale for the code of 0; this rounding of the scale is left
    out.
    """
    rotation = _rotation(heads.shape[-1]).to(heads.device)
    numbers = heads.float() @ rotation
    least = numbers.amin(-1, keepdim=True)
    most = numbers.amax(-1, keepdim=True)

    scale = ((most - least) / 15).clamp_min(_LEAST_SCALE)
    code_of_zero = _round_halves_away(-least / scale).clamp(0, 15)
    codes = _round_halves_away(numbers / scale + code_of_zero).clamp(0, 15)

    rounded: Tensor = ((codes - code_of_zero) * scale) @ rotation.T
    return rounded.to(heads.dtype)


@cache
def _rotation(dim: int) -> Tensor:
    """(d, d) orthogonal: random signs, then a Hadamard matrix, in each run of b numbers, where b is
    the largest power of two that divides d.
    """
    import torch

    size = dim & -dim
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat(
            [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
        )
    generator = torch.Generator().manual_seed(_SIGNS_SEED)
    signs = 2 * torch.bernoulli(torch.full((size,), 0.5), generator=generator) - 1
    in_a_run = signs[:, None] * hadamard / math.sqrt(size)
    rotation: Tensor = torch.block_diag(*[in_a_run] * (dim // size))
    return rotation


def _round_halves_away(numbers: Tensor) -> Tensor:
    """Numbers rounded to whole ones, halves away from zero."""
    rounded: Tensor = (numbers.abs() + 0.5).floor().copysign(numbers)
    return rounded


def bytes_per_scaled_head(dim: int, bits: int) -> int:
    """Bytes of a key or a value of `dim` numbers, with one scale of 32 bits."""
    return math.ceil(dim * bits / 8) + 4


# By what --simulate-cache calls them.
CACHE_FORMATS: dict[CacheFormatName, CacheFormat] = {
    2: in_groups(2),
    3: in_groups(3),
    4: in_groups(4),
    5: in_groups(5),
    6: in_groups(6),
    7: in_groups(7),
    8: in_groups(8),
    "fp8": CacheFormat("fp8", round=round_to_fp8, bytes_per_head=one_byte_each),
    "int8_per_token_head": CacheFormat(
        "int8_per_token_head",
        round=round_to_int8_per_head,
        bytes_per_head=partial(bytes_per_scaled_head, bits=8),
    ),
    "int4_per_token_head": CacheFormat(
        "int4_per_token_head",
        round=round_to_int4_per_head,
        bytes_per_head=partial(bytes_per_scaled_head, bits=4),
    ),
}
