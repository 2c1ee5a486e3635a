"""Closed forms: from second moments of what a layer's heads compute to the maps that merge them with the least loss.

Letters: H query heads, Hk key/value heads, G groups of m = Hk / G, r = H / Hk query heads per source head, d head
dimension. Everything is float64: smaller accumulators lose the case in which heads are redundant and nothing need be
lost. Sources: docs/methods.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gqa.checkpoint.loading import as_float64
from gqa.convert.heads.family import Rotary

CUT = 1e-6  # eigenvalues below this share of the largest are rounding errors, which an inverse would blow up
_FLOAT64_CUT = 1e-10  # the same where only float64 rounds
_ROWS = 2048  # rows whose products are summed in float32
_TURNS = 50  # sweeps that rotate heads onto each other, at most
_KEY_SWEEPS = 8  # of alternating least squares for keys; twice as many change the third digit of the error
_MEASURED = 0.5  # share of the distances between query and key that is measured; the rest reaches the longest context
_DISTANCES = 4096  # samples of the rest
_VALUE_SWEEPS = 10  # of alternating least squares for values; more change the fourth digit of the error
_LEAST_GAIN = 1e-6  # share of the energy: a sweep that gains less is the last


def pairs(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """The two dimensions of every frequency, (n / 2,) each."""
    if rotary.pairing == "half":
        return torch.arange(rotary.dims // 2), torch.arange(rotary.dims // 2, rotary.dims)
    first = torch.arange(0, rotary.dims, 2)
    return first, first + 1


def unrotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Undo RoPE on (B, H, T, d) queries or keys of positions 0, 1, ...; without frequencies they stay as they are."""
    if not rotary.frequencies:
        return heads
    first, second = pairs(rotary)
    frequencies = torch.tensor(rotary.frequencies, device=heads.device)
    angles = torch.arange(heads.shape[2], device=heads.device)[:, None] * frequencies
    plain, cos, sin = heads.to(torch.float32, copy=True), angles.cos(), angles.sin()  # (T, n / 2)
    real, imaginary = plain[..., first], plain[..., second]
    plain[..., first], plain[..., second] = real * cos + imaginary * sin, imaginary * cos - real * sin
    return plain


@dataclass(frozen=True)
class GroupMaps:
    """`merge` (d, m * d): from the m stacked heads of a group to the shared one. `back`: of keys (m, d, d), applied to
    the queries that read each head; of values (R, d, d), from the shared value to the one that each query head reads.
    """

    merge: Tensor
    back: Tensor


def shared_key(keys: Tensor, queries: Tensor, means: Tensor, distances: Tensor, rotary: Rotary) -> GroupMaps:
    """Merge the m keys of a group. Without frequencies in `rotary` each pair of dimensions is merged alone.

    Args:
        keys: (m * d, m * d) second moments E[k k^T] of the group's stacked keys, as `unrotate` returns them.
        queries: (m, d, d) for each head, the sum over its query heads of E[q q^T], as `unrotate` returns them.
        means: (m * d,) E[k]: unless rotated, a constant key adds the same to all scores of a query: it is dropped.
        distances: (m, n) weights of scores of each head's queries with the key 0, 1, ... tokens before.
        rotary: The dimensions that are rotated, and their frequencies.
    """
    heads, dim = queries.shape[:2]
    key, query = keys.new_zeros(dim, heads * dim), keys.new_zeros(heads, dim, dim)
    if rotary.dims:
        _rotated_key(keys, queries, rotary, key, query)
    if rotary.dims < dim:
        _plain_key(without_means(keys, means), queries, torch.arange(rotary.dims, dim), key, query)
    if not rotary.frequencies:
        return GroupMaps(key, query)
    return _across_frequencies(keys, queries, means, distances, rotary, key)


def _across_frequencies(
    keys: Tensor, queries: Tensor, means: Tensor, distances: Tensor, rotary: Rotary, key: Tensor
) -> GroupMaps:
    """The shared key whose scores have the least error at all distances. A pair of its dimensions may hold what pairs
    of other frequencies held; `key` (d, m d), where it does not, is the start.

    In the basis of `_complex_basis` RoPE is diagonal: a query q and a key k at distance t have the score q^H D_t k,
    D_t = diag(exp(-i v t)), v the frequency of a pair and its negative (0: not rotated). With the stacked keys k, the
    shared key B k and queries X_a^H q, head a has q^H X_a D_t B k in place of q^H D_t k_a. Minimised is the mean square
    of the difference, summed over a, over the distances t of `_coherence`.

    The mean over t multiplies D_t M D_t^H elementwise (*) by C_ij = E[exp(-i (v_i - v_j) t)], C_a for head a. So with
    K = E[k k^H], K_a = E[k_a k^H] and Q_a = E[q q^H], each of B = [B_1 ... B_m] and X_a is least squares given the
    other:
        X_a = (K_a B^H * C_a) (B K B^H * C_a)^-1
        B_a = (sum_b X_b^H Q_b X_b * C_b^T)^-1 (X_a^H Q_a * C_a^T)
    """
    heads, dim = queries.shape[:2]
    basis, frequencies = (part.to(keys.device) for part in _complex_basis(rotary, dim))
    coherence, centre = _coherence(frequencies, distances, rotary.longest)
    mean = _times_each(means.to(basis)[None], basis.mT)[0]
    # Of a constant key E[D_t] k shifts all scores of a query alike; only the rest counts, 1 - |E[D_t]|^2 of its energy
    # (the mean over heads: equal heads must stay equal).
    varying = mean * (1 - centre.abs().square().mean(0)).clamp_min(0).sqrt().repeat(heads)
    moments = _times_each(_times_each(keys.to(basis), basis.mH).mH, basis.mH) - torch.outer(mean, mean.conj())
    moments += torch.outer(varying, varying.conj())  # K
    query_moments = basis @ queries.to(basis) @ basis.mH  # Q (m, d, d)
    merge = _times_each(basis @ key.to(basis), basis.mH)  # B (d, m d)
    energy = moments.diagonal().real.view(heads, dim).mean(0)
    merged_energy = ((merge @ moments) * merge.conj()).sum(1).real
    if len(empty := (merged_energy <= _FLOAT64_CUT * merged_energy.max()).nonzero()):  # zeros stay zeros: start random
        start = torch.randn(key.shape, generator=torch.Generator().manual_seed(0), dtype=key.dtype).to(key)
        merge[empty] = _times_each(basis @ start.to(basis), basis.mH)[empty]
    for sweep in range(_KEY_SWEEPS + 1):
        cross = moments @ merge.mH  # K B^H (m d, d)
        head_cross = cross.view(heads, dim, dim) * coherence
        restore = head_cross @ pseudo_inverse(merge @ cross * coherence, _FLOAT64_CUT)  # X (m, d, d)
        if sweep == _KEY_SWEEPS:
            break
        targets = (restore.mH @ query_moments) * coherence.mT
        gram = ((restore.mH @ query_moments @ restore) * coherence.mT).sum(0)
        merge = pseudo_inverse(gram, _FLOAT64_CUT) @ targets.transpose(0, 1).flatten(1)
        merge *= _energy_factor(energy, ((merge @ moments) * merge.conj()).sum(1).real)[:, None]
    return GroupMaps(_times_each(basis.mH @ merge, basis).real, (basis.mH @ restore.mH @ basis).real)


def _times_each(rows: Tensor, matrix: Tensor) -> Tensor:
    """(n, m d) times blockdiag(M, ..., M) of (d, d)."""
    product: Tensor = rows.unflatten(1, (-1, len(matrix))) @ matrix
    return product.flatten(1)


def _coherence(frequencies: Tensor, distances: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """E[D_t 1 1^H D_t^H] (m, d, d) and the diagonals of E[D_t] (m, d), for each head. Half of the distances t have the
    weights `distances` (m, n), as measured on text; log t of the others is uniform from 1 to `longest`, so that near
    keys count more, and every distance has some weight.
    """
    near = torch.arange(distances.shape[1], dtype=torch.float64, device=frequencies.device)
    far = torch.logspace(0, math.log10(longest), _DISTANCES, dtype=torch.float64, device=frequencies.device)
    near, far = (torch.exp(-1j * frequencies[:, None] * each) for each in (near, far))  # D_t (d, n)
    weights = _MEASURED * distances / distances.sum(1, keepdim=True).clamp_min(1e-300)
    share = 1 - weights.sum(1, keepdim=True)  # of `far`; 1 for a head that nothing was measured of
    coherence = torch.stack([near * of_head @ near.mH for of_head in weights])
    coherence += share[:, :, None] * (far @ far.mH / _DISTANCES)
    return coherence, weights.to(near) @ near.mT + share * far.mean(1)


def _complex_basis(rotary: Rotary, dim: int) -> tuple[Tensor, Tensor]:
    """The unitary basis (d, d) in which RoPE is diagonal, and the frequencies v (d,) there: a pair (x, y) becomes
    (x + i y, x - i y) / sqrt(2), which RoPE at distance t multiplies by exp(-i v t) and exp(i v t).
    """
    first, second = pairs(rotary)
    basis, frequencies = torch.eye(dim, dtype=torch.complex128), torch.zeros(dim, dtype=torch.float64)
    basis[first, first] = basis[second, first] = 0.5**0.5
    basis[first, second], basis[second, second] = 1j * 0.5**0.5, -1j * 0.5**0.5
    frequencies[first] = torch.tensor(rotary.frequencies, dtype=torch.float64)
    frequencies[second] = -frequencies[first]
    return basis, frequencies


def without_means(keys: Tensor, means: Tensor) -> Tensor:
    """Covariance (n, n) of keys from moments and means (n,): a constant key shifts all scores of a query alike."""
    centred = keys - means[:, None] * means
    varies = centred.diagonal() > 1e-12 * keys.diagonal()  # more than by rounding
    return centred * varies[:, None] * varies


def _rotated_key(keys: Tensor, queries: Tensor, rotary: Rotary, key: Tensor, query: Tensor) -> None:
    """Fill the rotated dimensions of the maps `key` and `query`, each frequency alone: the complex combination of keys
    that keeps most of the scores' energy, the top eigenvector of w S w with S_ab = E[k_a conj(k_b)] and w_a^2 the
    energy of head a's queries. Complex factors commute with the rotation.
    """
    heads, dim = queries.shape[:2]
    real, imaginary = pairs(rotary)
    moments = complex_moments(keys.view(heads, dim, heads, dim), real, imaginary)
    weight = key_weights(queries, real, imaginary)
    vectors = torch.linalg.eigh(weight[:, :, None] * moments * weight[:, None, :])[1][:, :, -1]  # (F, m)
    combine = vectors.conj() * weight  # k* = sum_a combine_a k_a
    restore = vectors / weight  # k_a ~ restore_a k*
    before = moments.diagonal(dim1=1, dim2=2).real.mean(1)
    after = torch.einsum("fa,fab,fb->f", combine, moments, combine.conj()).real
    scale = _energy_factor(before, after)[:, None]
    _put_complex(key.view(dim, heads, dim).transpose(0, 1), combine * scale, real, imaginary)
    _put_complex(query, (restore / scale).conj(), real, imaginary)


def key_weights(queries: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """(F, m) square root of each head's query energy at each frequency, floored so that no head's key is dropped."""
    energy = queries.diagonal(dim1=1, dim2=2)
    weight = (energy[:, real] + energy[:, imaginary]).T.clamp_min(0).sqrt()
    return weight.clamp_min(1e-3 * weight.amax(1, keepdim=True).clamp_min(1e-30))


def complex_moments(blocks: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """(F, m, m) moments E[k_a conj(k_b)] of each frequency, from real moments (m, d, m, d)."""
    pick = torch.arange(len(real))

    def of(rows: Tensor, columns: Tensor) -> Tensor:  # (m, F, m, F) -> (F, m, m)
        return blocks[:, rows][:, :, :, columns][:, pick, :, pick]

    return torch.complex(of(real, real) + of(imaginary, imaginary), of(imaginary, real) - of(real, imaginary))


def _put_complex(targets: Tensor, factors: Tensor, real: Tensor, imaginary: Tensor) -> None:
    """Write complex factors (F, m), one for each frequency and head, into the real matrices `targets` (m, d, d)."""
    for target, factor in zip(targets, factors.T, strict=True):
        target[real, real] = target[imaginary, imaginary] = factor.real
        target[real, imaginary], target[imaginary, real] = -factor.imag, factor.imag


def _energy_factor(before: Tensor, after: Tensor) -> Tensor:
    """sqrt(before / after), which scales heads of energy `after` to energy `before`; 1 where either is zero."""
    factor = (before.clamp_min(0) / after.clamp_min(1e-300)).sqrt()
    return factor.where((factor > 0) & (after > 0), torch.ones_like(factor))


def _plain_key(keys: Tensor, queries: Tensor, dims: Tensor, key: Tensor, query: Tensor) -> None:
    """Fill the dimensions `dims` of the maps `key` and `query`, which are not rotated: the subspace of the stacked keys
    that keeps most of the scores' energy, the top eigenvectors of S^1/2 B S^1/2, S = `keys`, B = blockdiag(E[q q^T]).
    """
    heads, dim = queries.shape[:2]
    n = len(dims)
    stacked = (torch.arange(heads)[:, None] * dim + dims).flatten()
    covariance = keys[stacked][:, stacked]
    root, inverse = root_and_inverse(covariance)
    energy = torch.block_diag(*(queries[head][dims][:, dims] for head in range(heads)))
    vectors = torch.linalg.eigh(root @ energy @ root)[1][:, -n:]
    combine, restore = vectors.T @ inverse, root @ vectors  # (n, m n), (m n, n)
    scale = _energy_factor(covariance.trace() / heads, (combine @ covariance @ combine.T).trace())
    key[dims[:, None], stacked] = combine * scale
    for head in range(heads):
        query[head][dims[:, None], dims] = restore[head * n : (head + 1) * n].T / scale


def root_and_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """S^1/2 and its pseudo-inverse, without eigenvalues of S below CUT times the largest."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    large = values > CUT * values[-1].clamp_min(1e-300)
    values, vectors = values[large].sqrt(), vectors[:, large]
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def shared_value(attended: Tensor, values: Tensor, outputs: Tensor, owner: Tensor) -> GroupMaps:
    """Merge the m values of a group, so that W_O's outputs can be recovered with the least squared error.

    Alternating least squares, from the optimum for equal attention in all query heads: the map to the shared value
    takes a line search along the preconditioned gradient, then each query head's map back is solved for.

    Args:
        attended: (R, m * d, m * d) E[z z^T] for each of the group's R = m r query heads, z the attention-weighted
            average of the stacked values; (1, m * d, m * d) if all attend alike: then the start is the optimum.
        values: (m * d, m * d) second moments of the stacked values; the shared value gets their mean energy.
        outputs: (R, d, d) W_O,i W_O,i^T of each query head, W_O,i (d, D).
        owner: (R,) which of the m heads each query head reads.
    """
    dim = outputs.shape[1]
    heads = attended.shape[1] // dim
    root, inverse = root_and_inverse(attended.mean(0))
    gain = torch.block_diag(*(outputs[owner == head].sum(0) for head in range(heads)))
    vectors = torch.linalg.eigh(root @ gain @ root)[1][:, -dim:]
    project = vectors.T @ inverse  # (d, m d), the optimum if all heads attend alike
    head_dims = (owner[:, None] * dim + torch.arange(dim)).to(attended.device)
    query_head = torch.arange(len(owner), device=head_dims.device)[:, None]
    crossed = attended.expand(len(owner), -1, -1)[query_head, head_dims]  # (R, d, m d) E[z_a z^T]
    energy = (outputs * crossed.take_along_dim(head_dims[:, None], 2)).sum()
    restore = _restoring_maps(project, attended, crossed)
    for _ in range(_VALUE_SWEEPS if len(attended) > 1 else 0):
        gains = restore.mT @ outputs @ restore
        missing = (restore.mT @ outputs @ (crossed - restore @ project @ attended)).sum(0)
        move = pseudo_inverse(gains.sum(0)) @ missing @ inverse @ inverse
        slope, bend = (missing * move).sum(), (move * (gains @ move @ attended).sum(0)).sum()
        if slope.square() <= _LEAST_GAIN * energy * bend:  # the step gains slope^2 / bend
            break
        project = project + slope / bend * move
        restore = _restoring_maps(project, attended, crossed)
    scale = _energy_factor(values.trace() / heads, (project @ values @ project.T).trace())
    return GroupMaps(project * scale, restore / scale)


def _restoring_maps(project: Tensor, attended: Tensor, crossed: Tensor) -> Tensor:
    """(R, d, d) least-squares maps from the shared value, `project` (d, m d) @ z, to the value z_a that each query head
    reads; `crossed` (R, d, m d) is E[z_a z^T].
    """
    return crossed @ project.T @ pseudo_inverse(project @ attended @ project.T)


def pseudo_inverse(matrices: Tensor, cut: float = CUT) -> Tensor:
    """Of Hermitian positive semi-definite matrices (..., n, n), without eigenvalues below `cut` times the largest."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mH) / 2)
    values = values.where(values > cut * values[..., -1:].clamp_min(1e-300), torch.inf)
    inverses: Tensor = (vectors / values.unsqueeze(-2)) @ vectors.mH
    return inverses


def typical_energy(energies: Tensor) -> float:
    """The upper quartile of the energies (n,) that are not zero; 1 if all are zero.

    A quartile, because a few vectors are thousands of times as large as the others and would rule a mean; the upper
    one, because tokens without an embedding may take up most of a short text.
    """
    positive = energies[energies > 0]
    if not len(positive):
        return 1.0
    rank = math.ceil(0.75 * len(positive))
    return float(positive.kthvalue(rank).values)


def add_products(sums: Tensor, rows: Tensor, columns: Tensor | None = None) -> None:
    """Add rows^T columns to the float64 `sums`: (..., n, p) of (..., L, n) and (..., L, p), or of the rows alone. The
    products of _ROWS rows are summed in float32, which is twice as fast and exact to well below CUT.
    """
    columns = rows if columns is None else columns
    for left, right in zip(rows.float().split(_ROWS, -2), columns.float().split(_ROWS, -2), strict=True):
        sums += as_float64(left.mT @ right)


def ridge(inputs: Tensor, targets: Tensor, start: Tensor, strength: float) -> Tensor:
    """Ridge regression towards `start`: W (n, p) minimises E|x W - y|^2 + damping |W - start|^2.

    Args:
        inputs: (n, n) E[x^T x]; targets: (n, p) E[x^T y]; start: (n, p).
        strength: Damping relative to the mean of the diagonal of `inputs`.
    """
    damping = max(strength, 1e-12) * inputs.diagonal().mean().clamp_min(1e-200)  # inputs of zero keep the start
    system = inputs + damping * torch.eye(len(inputs)).to(inputs)
    solution: Tensor = torch.linalg.solve(system, targets + damping * start)
    return solution


# ------------------------------------------------------------------------------------------------- Procrustes
#
# Heads are rotated onto each other, averaged, and scaled to their norm: the best published way of merging heads without
# data (arXiv 2412.20677, section 3). The same second moments, with rotations as the only maps.


def rotations(moments: Tensor) -> Tensor:
    """(m, d, d) rotations A that align heads, from their moments S (m, d, m, d).

    Maximises sum_ab tr(A_a S_ab A_b^T): one head after another is rotated onto the sum of the others.
    """
    heads, dim = moments.shape[:2]
    rotation = torch.eye(dim, dtype=moments.dtype).repeat(heads, 1, 1)
    for _ in range(_TURNS if heads > 1 else 0):
        before = rotation.clone()
        for head in range(heads):
            rest = torch.einsum("bij,bjk->ik", rotation, moments[:, :, head]) - rotation[head] @ moments[head, :, head]
            left, _, right = torch.linalg.svd(rest)
            rotation[head] = left @ right
        if torch.allclose(rotation, before, rtol=0, atol=1e-9):
            break
    return rotation


def phases(moments: Tensor) -> Tensor:
    """The same, each frequency alone: (F, m) factors of modulus 1 from (F, m, m) moments E[k_a conj(k_b)]."""
    factors = torch.ones_like(moments[:, 0])
    for _ in range(_TURNS if moments.shape[1] > 1 else 0):
        for head in range(moments.shape[1]):
            rest = (factors * moments[:, :, head]).sum(1) - factors[:, head] * moments[:, head, head]
            size = rest.abs()
            factors[:, head] = torch.where(size > 0, rest / size.clamp_min(1e-300), factors[:, head])
    return factors


def procrustes_key(keys: Tensor, rotary: Rotary, heads: int) -> GroupMaps:
    """The aligned mean of a group's keys, with moments (m * d, m * d), and the rotations of its queries."""
    dim = len(keys) // heads
    key, query = keys.new_zeros(dim, heads * dim), keys.new_zeros(heads, dim, dim)
    blocks = keys.view(heads, dim, heads, dim)
    if rotary.dims:
        real, imaginary = pairs(rotary)
        moments = complex_moments(blocks, real, imaginary)
        phase = phases(moments)
        energy = moments.diagonal(dim1=1, dim2=2).real.clamp_min(0)  # (F, m)
        after = torch.einsum("fa,fab,fb->f", phase, moments, phase.conj()).real / heads**2
        scale = _energy_factor(energy.mean(1), after)[:, None]
        _put_complex(key.view(dim, heads, dim).transpose(0, 1), scale / heads * phase, real, imaginary)
        _put_complex(query, phase, real, imaginary)
    rest = torch.arange(rotary.dims, dim)
    if len(rest):
        merges, rotation = _scaled_rotations(blocks[:, rest][:, :, :, rest])
        for head in range(heads):
            key[rest[:, None], head * dim + rest] = merges[head]
            query[head][rest[:, None], rest] = rotation[head]
    return GroupMaps(key, query)


def procrustes_value(values: Tensor, heads: int, repeat: int) -> GroupMaps:
    """The aligned mean of a group's values, with moments (m * e, m * e), and the rotations back, for each query head
    (`repeat` read a head).
    """
    dim = len(values) // heads
    merges, rotation = _scaled_rotations(values.view(heads, dim, heads, dim))
    return GroupMaps(torch.cat(list(merges), 1), rotation.mT.repeat_interleave(repeat, 0))


def _scaled_rotations(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (m, d, d) of heads, with moments (m, d, m, d), that sum to their aligned mean at their mean energy; and the
    rotations in these maps.
    """
    heads, rotation = len(moments), rotations(moments)
    half = torch.einsum("aij,ajbk->aibk", rotation, moments)
    mean_energy = torch.einsum("aibk,bik->", half, rotation) / heads**2
    energy = torch.einsum("aiaj,aij->", half, rotation) / heads
    return _energy_factor(energy, mean_energy) / heads * rotation, rotation
