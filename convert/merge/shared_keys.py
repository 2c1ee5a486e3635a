"""The shared key of a group of heads: the least squared error of the scores, in closed form.

Letters: m heads of a group, d the head dimension, F rotary frequencies. Source: docs/methods.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge.linear_algebra import (
    FLOAT64_CUT,
    GroupMaps,
    energy_factor,
    pseudo_inverse,
    root_and_inverse,
    root_mean_squares,
)
from gqa.convert.merge.rope import complex_basis, complex_moments, pairs, put_complex

# Sweeps of alternating least squares; twice as many change the third digit of the error.
_SWEEPS = 8
# Weight of the measured distances between query and key. The other half of the weight is on
# distances up to the longest context, uniform in log t.
_MEASURED = 0.5
_DISTANCES = 4096  # samples of those


def shared_key(
    keys: Tensor, queries: Tensor, means: Tensor, distances: Tensor, rotary: Rotary
) -> GroupMaps:
    """Merge the m keys of a group.

    Without frequencies in `rotary`, each rotated pair of dimensions is merged alone.

    Args:
        keys: (m * d, m * d) second moments E[k k^T] of the group's stacked keys, from `unrotate`.
        queries: (m, d, d), for each head the sum over its query heads of E[q q^T], from `unrotate`.
        means: (m * d,) E[k]. Unless it is rotated, a constant key adds the same to all scores of a
            query, which changes nothing: it is dropped.
        distances: (m, n) weights of scores of each head's queries with the key 0, 1, ... tokens
            before.
        rotary: The dimensions that are rotated, and their frequencies.
    """
    each_alone = _merge_each_frequency(keys, queries, means, rotary)
    if not rotary.frequencies:
        return each_alone
    # Only the shared key is needed to start from: the queries follow from it.
    return _merge_across_frequencies(keys, queries, means, distances, rotary, each_alone.merge)


# -------------------------------------------------------------------------- one frequency at a time


def _merge_each_frequency(
    keys: Tensor, queries: Tensor, means: Tensor, rotary: Rotary
) -> GroupMaps:
    """Merge each rotated pair of dimensions alone, and those that are not rotated together.

    Arguments are those of `shared_key`.
    """
    heads, dim = queries.shape[:2]
    merge = keys.new_zeros(dim, heads * dim)
    back = keys.new_zeros(heads, dim, dim)
    if rotary.dims:
        _merge_rotated(keys, queries, rotary, merge, back)
    if rotary.dims < dim:
        varying = without_means(keys, means)
        _merge_plain(varying, queries, torch.arange(rotary.dims, dim), merge, back)
    return GroupMaps(merge, back)


def _merge_rotated(
    keys: Tensor, queries: Tensor, rotary: Rotary, merge: Tensor, back: Tensor
) -> None:
    """Fill the rotated dimensions of the maps `merge` and `back`, each frequency alone.

    The shared key is the complex combination of keys that keeps most of the scores' energy: the top
    eigenvector of w S w with S_ab = E[k_a conj(k_b)] and w_a^2 the energy of head a's queries.
    Complex factors commute with the rotation.
    """
    heads, dim = queries.shape[:2]
    real, imaginary = pairs(rotary)
    moments = complex_moments(keys.view(heads, dim, heads, dim), real, imaginary)
    weight = key_weights(queries, real, imaginary)
    weighted = weight[:, :, None] * moments * weight[:, None, :]
    top = torch.linalg.eigh(weighted)[1][:, :, -1]  # (F, m)
    combine = top.conj() * weight  # k* = sum_a combine_a k_a
    restore = top / weight  # k_a ~ restore_a k*

    before = moments.diagonal(dim1=1, dim2=2).real.mean(1)
    after = torch.einsum("fa,fab,fb->f", combine, moments, combine.conj()).real
    scale = energy_factor(before, after)[:, None]
    put_complex(merge.view(dim, heads, dim).transpose(0, 1), combine * scale, real, imaginary)
    put_complex(back, (restore / scale).conj(), real, imaginary)


def key_weights(queries: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """Square root (F, m) of each head's query energy at each frequency.

    It has a floor, so that no head's key is dropped.
    """
    energy = queries.diagonal(dim1=1, dim2=2)
    weight = (energy[:, real] + energy[:, imaginary]).T.clamp_min(0).sqrt()
    largest = weight.amax(1, keepdim=True).clamp_min(1e-30)
    return weight.clamp_min(1e-3 * largest)


def _merge_plain(keys: Tensor, queries: Tensor, dims: Tensor, merge: Tensor, back: Tensor) -> None:
    """Fill the dimensions `dims` of the maps `merge` and `back`, which are not rotated.

    The shared key is the subspace of the stacked keys that keeps most of the scores' energy: the
    top eigenvectors of S^1/2 Q S^1/2 with S = `keys` and Q = blockdiag(E[q q^T]).

    Heads are brought to equal energy first, as values are in `shared_value`: the size in which a
    head is stored is no property of the model.
    """
    heads, dim = queries.shape[:2]
    count = len(dims)
    stacked = (torch.arange(heads)[:, None] * dim + dims).flatten()
    covariance = keys[stacked][:, stacked]
    energy = torch.block_diag(*(queries[head][dims][:, dims] for head in range(heads)))

    sizes = root_mean_squares(covariance, count).repeat_interleave(count)  # by row, (m n,)
    root, inverse = root_and_inverse(covariance / sizes[:, None] / sizes)
    scaled_energy = energy * sizes[:, None] * sizes
    top = torch.linalg.eigh(root @ scaled_energy @ root)[1][:, -count:]
    combine = top.T @ inverse / sizes  # (n, m n)
    restore = root @ top * sizes[:, None]  # (m n, n)

    merged_energy = (combine @ covariance @ combine.T).trace()
    scale = energy_factor(covariance.trace() / heads, merged_energy)
    merge[dims[:, None], stacked] = combine * scale
    for head in range(heads):
        rows = restore[head * count : (head + 1) * count]
        back[head][dims[:, None], dims] = rows.T / scale


def without_means(keys: Tensor, means: Tensor) -> Tensor:
    """Covariance (n, n) of keys from moments and means (n,).

    A constant key shifts all scores of a query alike, which changes no attention.
    """
    centered = keys - means[:, None] * means
    varies = centered.diagonal() > 1e-12 * keys.diagonal()  # more than by rounding
    return centered * varies[:, None] * varies


# ------------------------------------------------------------------------------- across frequencies


def _merge_across_frequencies(
    keys: Tensor,
    queries: Tensor,
    means: Tensor,
    distances: Tensor,
    rotary: Rotary,
    start: Tensor,
) -> GroupMaps:
    """The shared key whose scores have the least error at all distances.

    A pair of its dimensions may hold what pairs of other frequencies held; in `start` (d, m d) it
    does not.

    In the basis of `complex_basis` RoPE is diagonal: a query q and a key k at distance t have the
    score q^H D_t k, D_t = diag(exp(-i v t)), v the frequency of a pair and its negative (0: not
    rotated). With the stacked keys k, the shared key B k and queries X_a^H q, head a has q^H X_a
    D_t B k in place of q^H D_t k_a. Minimized is the mean square of the difference, summed over a,
    over the distances t of `_coherence`.

    The mean over t multiplies D_t M D_t^H elementwise (*) by C_ij = E[exp(-i (v_i - v_j) t)], C_a
    for head a. So with K = E[k k^H], K_a = E[k_a k^H] and Q_a = E[q q^H], each of B = [B_1 ... B_m]
    and X_a is least squares given the other (in the code: B `merge`, X `restore`, K `moments`,
    K B^H `cross`, Q `query_moments`, C `coherence`):

        X_a = (K_a B^H * C_a) (B K B^H * C_a)^-1
        B_a = (sum_b X_b^H Q_b X_b * C_b^T)^-1 (X_a^H Q_a * C_a^T)
    """
    heads, dim = queries.shape[:2]
    basis, frequencies = (part.to(keys.device) for part in complex_basis(rotary, dim))
    coherence, center = _coherence(frequencies, distances, rotary.longest)

    # K. A constant key c adds q^H E[D_t] c to all scores of a query, which changes nothing. What
    # counts is the part that varies with t, 1 - |E[D_t]|^2 of its energy (the mean over heads:
    # equal heads must stay equal).
    mean = _times_each(means.to(basis)[None], basis.mT)[0]
    varying_share = (1 - center.abs().square().mean(0)).clamp_min(0)
    varying_mean = mean * varying_share.sqrt().repeat(heads)
    moments = _times_each(_times_each(keys.to(basis), basis.mH).mH, basis.mH)
    moments = moments - torch.outer(mean, mean.conj())
    moments += torch.outer(varying_mean, varying_mean.conj())

    query_moments = basis @ queries.to(basis) @ basis.mH  # Q (m, d, d)
    merge = _times_each(basis @ start.to(basis), basis.mH)  # B (d, m d)
    energy = moments.diagonal().real.view(heads, dim).mean(0)
    _fill_empty_rows(merge, moments, basis)

    def solve_restore() -> Tensor:  # X (m, d, d), given B
        cross = moments @ merge.mH  # K B^H (m d, d)
        head_cross = cross.view(heads, dim, dim) * coherence
        gram = merge @ cross * coherence
        return head_cross @ pseudo_inverse(gram, FLOAT64_CUT)

    def solve_merge() -> Tensor:  # B (d, m d), given X
        targets = (restore.mH @ query_moments) * coherence.mT
        gram = ((restore.mH @ query_moments @ restore) * coherence.mT).sum(0)
        solution = pseudo_inverse(gram, FLOAT64_CUT) @ targets.transpose(0, 1).flatten(1)
        return solution * energy_factor(energy, _row_energy(solution, moments))[:, None]

    restore = solve_restore()
    for _ in range(_SWEEPS):
        merge = solve_merge()
        restore = solve_restore()

    combine = _times_each(basis.mH @ merge, basis).real
    back = (basis.mH @ restore.mH @ basis).real

    # These maps belong to keys and queries as they are measured, whose rotated dimensions have been
    # multiplied by `factor`. Those of the weights come before it: S^-1 M S in place of M.
    scale = combine.new_ones(dim)
    scale[: rotary.dims] = rotary.factor
    return GroupMaps(combine * scale.repeat(heads) / scale[:, None], back * scale / scale[:, None])


def _fill_empty_rows(merge: Tensor, moments: Tensor, basis: Tensor) -> None:
    """Start rows without energy at random: least squares would leave zeros as they are."""
    energy = _row_energy(merge, moments)
    empty = (energy <= FLOAT64_CUT * energy.max()).nonzero()
    if not len(empty):
        return
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(merge.shape, generator=generator, dtype=torch.float64).to(basis)
    merge[empty] = _times_each(basis @ start, basis.mH)[empty]


def _row_energy(merge: Tensor, moments: Tensor) -> Tensor:
    """Diagonal (d,) of B K B^H."""
    return ((merge @ moments) * merge.conj()).sum(1).real


def _times_each(rows: Tensor, matrix: Tensor) -> Tensor:
    """(n, m d) times blockdiag(M, ..., M) of (d, d)."""
    product: Tensor = rows.unflatten(1, (-1, len(matrix))) @ matrix
    return product.flatten(1)


def _coherence(frequencies: Tensor, distances: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """E[D_t 1 1^H D_t^H] (m, d, d) and the diagonals of E[D_t] (m, d), for each head.

    Half of the distances t have the weights `distances` (m, n), as measured on text. log t of the
    others is uniform from 1 to `longest`, so that near keys count more and every distance has some
    weight.
    """
    device = frequencies.device
    near_distances = torch.arange(distances.shape[1], dtype=torch.float64, device=device)
    far_distances = torch.logspace(
        0, math.log10(longest), _DISTANCES, dtype=torch.float64, device=device
    )
    near = torch.exp(-1j * frequencies[:, None] * near_distances)  # D_t (d, n)
    far = torch.exp(-1j * frequencies[:, None] * far_distances)

    weights = _MEASURED * distances / distances.sum(1, keepdim=True).clamp_min(1e-300)
    far_share = 1 - weights.sum(1, keepdim=True)  # 1 for a head of which nothing was measured
    coherence = torch.stack([near * head_weights @ near.mH for head_weights in weights])
    coherence += far_share[:, :, None] * (far @ far.mH / _DISTANCES)
    center = weights.to(near) @ near.mT + far_share * far.mean(1)
    return coherence, center
