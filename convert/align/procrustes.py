"""Generalised Procrustes alignment: heads are turned onto each other, averaged, and given their norm back.

The best published way of merging heads without data (arXiv 2412.20677, section 3); here from second moments, so that it
can be compared with the closed form of `alignment.py`, of which it is the special case of rotations only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gqa.convert.align.alignment import KeyMaps, ValueMaps, complex_moments, pairs, put_complex
from gqa.convert.heads.symmetries import Rotary

_ROUNDS = 50


def rotations(moments: Tensor) -> Tensor:
    """(m, d, d) rotations A that bring heads together, from their (m, d, m, d) moments.

    Maximises sum_ab tr(A_a S_ab A_b^T): one head after another is turned onto the sum of the others.
    """
    heads, dim = moments.shape[:2]
    turned = torch.eye(dim, dtype=moments.dtype).repeat(heads, 1, 1)
    for _ in range(_ROUNDS if heads > 1 else 0):
        for head in range(heads):
            others = torch.einsum("bij,bjk->ik", turned, moments[:, :, head]) - turned[head] @ moments[head, :, head]
            left, _, right = torch.linalg.svd(others)
            turned[head] = left @ right
    return turned


def phases(moments: Tensor) -> Tensor:
    """The same for complex numbers: (F, m) of modulus 1 from (F, m, m) moments E[k_a conj(k_b)], F at a time."""
    found = torch.ones_like(moments[:, 0])
    for _ in range(_ROUNDS if moments.shape[1] > 1 else 0):
        for head in range(moments.shape[1]):
            others = (found * moments[:, :, head]).sum(1) - found[:, head] * moments[:, head, head]
            size = others.abs()
            found[:, head] = torch.where(size > 0, others / size.clamp_min(1e-300), found[:, head])
    return found


def procrustes_key(keys: Tensor, rotary: Rotary, heads: int) -> KeyMaps:
    """(m * d, m * d) moments of the keys of a group -> their aligned mean, and the turned queries."""
    dim = len(keys) // heads
    key, query = keys.new_zeros(dim, heads * dim), keys.new_zeros(heads, dim, dim)
    blocks = keys.view(heads, dim, heads, dim)
    if rotary.dims:
        real, imaginary = pairs(rotary)
        moments = complex_moments(blocks, real, imaginary)
        phase = phases(moments)
        energy = moments.diagonal(dim1=1, dim2=2).real.clamp_min(0)  # (F, m)
        after = torch.einsum("fa,fab,fb->f", phase, moments, phase.conj()).real / heads**2
        scale = (energy.mean(1) / after.clamp_min(1e-300)).sqrt().where(after > 0, torch.ones_like(after))
        for head in range(heads):
            part = key[:, head * dim : (head + 1) * dim]
            put_complex(part, scale / heads * phase[:, head], real, imaginary)
            put_complex(query[head], phase[:, head], real, imaginary)
    rest = torch.arange(rotary.dims, dim)
    if len(rest):
        moments = blocks[:, rest][:, :, :, rest]
        turned = rotations(moments)
        scale = _restored(torch.einsum("aij,ajbk->aibk", turned, moments), turned)
        for head in range(heads):
            key[rest[:, None], head * dim + rest] = scale / heads * turned[head]
            query[head][rest[:, None], rest] = turned[head]
    return KeyMaps(key, query)


def procrustes_value(values: Tensor, heads: int, repeat: int) -> ValueMaps:
    """(m * e, m * e) moments of the values of a group -> their aligned mean, and what turns it back for each of the
    `repeat` query heads of a head.
    """
    dim = len(values) // heads
    moments = values.view(heads, dim, heads, dim)
    turned = rotations(moments)
    scale = _restored(torch.einsum("aij,ajbk->aibk", turned, moments), turned)
    return ValueMaps(torch.cat(list(scale / heads * turned), 1), turned.mT.repeat_interleave(repeat, 0))


def _restored(turned_moments: Tensor, turned: Tensor) -> Tensor:
    """What gives the mean of aligned heads the mean energy that they have: (m, d, m, d) half-turned moments."""
    heads = len(turned)
    mean = torch.einsum("aibk,bik->", turned_moments, turned) / heads**2
    each = torch.einsum("aiaj,aij->", turned_moments, turned) / heads
    return (each / mean.clamp_min(1e-300)).sqrt().where(mean > 0, torch.ones_like(mean))
