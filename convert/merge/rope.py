"""Rotary embeddings as linear algebra: pairs of dimensions are complex numbers that are turned."""

from __future__ import annotations

import torch
from torch import Tensor

from gqa.convert.heads.rotary import Rotary
from gqa.core.errors import CorruptError


def pairs(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """The two dimensions of every frequency, (n / 2,) each.

    Raises CorruptError for an odd number of rotated dimensions.
    """
    if rotary.dims % 2:
        raise CorruptError(
            f"config.json has {rotary.dims} rotated dimensions in a head, but they come in pairs; "
            "correct it"
        )
    if rotary.pairing == "half":
        half = rotary.dims // 2
        return torch.arange(half), torch.arange(half, rotary.dims)
    first = torch.arange(0, rotary.dims, 2)
    return first, first + 1


def unrotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Undo the rotation of RoPE on queries or keys (B, H, T, d) of positions 0, 1, ...

    A factor of the rotated dimensions stays. If the frequencies are unknown, heads stay as they
    are.
    """
    if not rotary.frequencies:
        return heads
    first, second = pairs(rotary)
    frequencies = torch.tensor(rotary.frequencies, device=heads.device)
    angles = torch.arange(heads.shape[2], device=heads.device)[:, None] * frequencies  # (T, n / 2)
    cos = angles.cos()
    sin = angles.sin()

    plain = heads.to(torch.float32, copy=True)
    real = plain[..., first]
    imaginary = plain[..., second]
    plain[..., first] = real * cos + imaginary * sin
    plain[..., second] = imaginary * cos - real * sin
    return plain


def complex_moments(blocks: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """Moments E[k_a conj(k_b)] (F, m, m) of each frequency, from real moments (m, d, m, d)."""
    frequency = torch.arange(len(real))

    def moments_of(rows: Tensor, columns: Tensor) -> Tensor:
        picked = blocks[:, rows][:, :, :, columns]  # (m, F, m, F)
        return picked[:, frequency, :, frequency]

    return torch.complex(
        moments_of(real, real) + moments_of(imaginary, imaginary),
        moments_of(imaginary, real) - moments_of(real, imaginary),
    )


def put_complex(targets: Tensor, factors: Tensor, real: Tensor, imaginary: Tensor) -> None:
    """Write complex factors (F, m), one per frequency and head, into real matrices (m, d, d)."""
    for target, factor in zip(targets, factors.T, strict=True):
        target[real, real] = factor.real
        target[imaginary, imaginary] = factor.real
        target[real, imaginary] = -factor.imag
        target[imaginary, real] = factor.imag


def complex_basis(rotary: Rotary, dim: int) -> tuple[Tensor, Tensor]:
    """The unitary basis (d, d) in which RoPE is diagonal, and the frequencies v (d,) there.

    A pair (x, y) becomes (x + i y, x - i y) / sqrt(2), which RoPE at distance t multiplies by
    exp(-i v t) and exp(i v t). v is 0 for dimensions that are not rotated.
    """
    first, second = pairs(rotary)
    half = 0.5**0.5
    basis = torch.eye(dim, dtype=torch.complex128)
    basis[first, first] = half
    basis[second, first] = half
    basis[first, second] = 1j * half
    basis[second, second] = -1j * half

    frequencies = torch.zeros(dim, dtype=torch.float64)
    frequencies[first] = torch.tensor(rotary.frequencies, dtype=torch.float64)
    frequencies[second] = -frequencies[first]
    return basis, frequencies
