"""Heads rotated onto each other, averaged, and scaled to their norm.

The best published way of merging heads without data (arXiv 2412.20677, section 3). It uses the same
second moments as the closed form, with rotations as the only maps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge.linear_algebra import GroupMaps, energy_factor
from gqa.convert.merge.rope import complex_moments, pairs, put_complex

_MOST_SWEEPS = 50  # over the heads


def rotations(moments: Tensor) -> Tensor:
    """Rotations A (m, d, d) that align heads, from their moments S (m, d, m, d).

    Maximizes sum_ab tr(A_a S_ab A_b^T): one head after another is rotated onto the sum of the
    others.
    """
    heads, dim = moments.shape[:2]
    rotation = torch.eye(dim, dtype=moments.dtype).repeat(heads, 1, 1)
    if heads == 1:
        return rotation

    for _ in range(_MOST_SWEEPS):
        before = rotation.clone()
        for head in range(heads):
            all_heads = torch.einsum("bij,bjk->ik", rotation, moments[:, :, head])
            others = all_heads - rotation[head] @ moments[head, :, head]
            left, _, right = torch.linalg.svd(others)
            rotation[head] = left @ right
        if torch.allclose(rotation, before, rtol=0, atol=1e-9):
            break
    return rotation


def phases(moments: Tensor) -> Tensor:
    """Factors (F, m) of modulus 1 that align the heads at each frequency, from their moments
    E[k_a conj(k_b)] (F, m, m): as `rotations`, in one complex dimension.
    """
    heads = moments.shape[1]
    factors = torch.ones_like(moments[:, 0])
    if heads == 1:
        return factors

    for _ in range(_MOST_SWEEPS):
        for head in range(heads):
            all_heads = (factors * moments[:, :, head]).sum(1)
            others = all_heads - factors[:, head] * moments[:, head, head]
            size = others.abs()
            turned = others / size.clamp_min(1e-300)
            factors[:, head] = torch.where(size > 0, turned, factors[:, head])
    return factors


def procrustes_key(keys: Tensor, rotary: Rotary, heads: int) -> GroupMaps:
    """The aligned mean of a group's keys, from moments (m * d, m * d), and rotations of its
    queries.
    """
    dim = len(keys) // heads
    merge = keys.new_zeros(dim, heads * dim)
    back = keys.new_zeros(heads, dim, dim)
    blocks = keys.view(heads, dim, heads, dim)

    if rotary.dims:
        real, imaginary = pairs(rotary)
        moments = complex_moments(blocks, real, imaginary)
        phase = phases(moments)
        energy = moments.diagonal(dim1=1, dim2=2).real.clamp_min(0)  # (F, m)
        after = torch.einsum("fa,fab,fb->f", phase, moments, phase.conj()).real / heads**2
        scale = energy_factor(energy.mean(1), after)[:, None]
        shared = scale / heads * phase
        put_complex(merge.view(dim, heads, dim).transpose(0, 1), shared, real, imaginary)
        put_complex(back, phase, real, imaginary)

    plain = torch.arange(rotary.dims, dim)
    if len(plain):
        merges, rotation = _scaled_rotations(blocks[:, plain][:, :, :, plain])
        for head in range(heads):
            merge[plain[:, None], head * dim + plain] = merges[head]
            back[head][plain[:, None], plain] = rotation[head]
    return GroupMaps(merge, back)


def procrustes_value(values: Tensor, heads: int, repeat: int) -> GroupMaps:
    """The aligned mean of a group's values, from moments (m * e, m * e), and the rotations back.

    repeat: Query heads that read each head.
    """
    dim = len(values) // heads
    merges, rotation = _scaled_rotations(values.view(heads, dim, heads, dim))
    return GroupMaps(torch.cat(list(merges), 1), rotation.mT.repeat_interleave(repeat, 0))


def _scaled_rotations(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (m, d, d) that sum heads to their aligned mean at their mean energy, and their
    rotations.

    moments: (m, d, m, d).
    """
    heads = len(moments)
    rotation = rotations(moments)
    half = torch.einsum("aij,ajbk->aibk", rotation, moments)
    energy_of_mean = torch.einsum("aibk,bik->", half, rotation) / heads**2
    energy = torch.einsum("aiaj,aij->", half, rotation) / heads
    return energy_factor(energy, energy_of_mean) / heads * rotation, rotation
