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

CUT = 1e-6  # of the largest eigenvalue: what is below is rounding, and its inverse would be too
_ROWS = 2048  # whose products are summed in float32
_TURNS = 50  # of heads onto each other
_SWEEPS = 8  # of alternating least squares for keys; twice as many change the third digit of the error
_DISTANCES = 4096  # at which scores are compared
_SMALLEST = 1e-10  # of the largest eigenvalue, where rounding is that of float64
_ROUNDS = 10  # of alternating least squares for values: further ones change the fourth digit of the error
_LEAST_GAIN = 1e-6  # of the energy: a round that gains less is the last


def pairs(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """The two dimensions of every frequency, (n / 2,) each."""
    if rotary.pairing == "half":
        return torch.arange(rotary.dims // 2), torch.arange(rotary.dims // 2, rotary.dims)
    first = torch.arange(0, rotary.dims, 2)
    return first, first + 1


def unturned(heads: Tensor, rotary: Rotary) -> Tensor:
    """(B, H, T, d) rotated queries or keys of positions 0, 1, ... as they were before, where the speeds are known."""
    if not rotary.speeds:
        return heads
    first, second = pairs(rotary)
    speeds = torch.tensor(rotary.speeds, device=heads.device)
    angles = torch.arange(heads.shape[2], device=heads.device)[:, None] * speeds
    before, cos, sin = heads.to(torch.float32, copy=True), angles.cos(), angles.sin()  # (T, n / 2)
    real, imaginary = before[..., first], before[..., second]
    before[..., first], before[..., second] = real * cos + imaginary * sin, imaginary * cos - real * sin
    return before


@dataclass(frozen=True)
class GroupMaps:
    """`merge` (d, m * d): the shared head out of the m of a group. `back`: of keys (m, d, d), for the queries of each
    head; of values (R, d, d), what restores each query head's own.
    """

    merge: Tensor
    back: Tensor

    def cpu(self) -> GroupMaps:
        return GroupMaps(self.merge.cpu(), self.back.cpu())


def shared_key(keys: Tensor, queries: Tensor, means: Tensor, rotary: Rotary) -> GroupMaps:
    """The key that stands for the m keys of one group.

    Args:
        keys: (m * d, m * d) second moments E[k k^T] of the group's keys, one after another, as `unturned` gives them.
        queries: (m, d, d) for each head, the sum over its query heads of E[q q^T].
        means: (m * d,) E[k]: a constant key adds the same to all scores of a query, so it need not be kept.
        rotary: What is turned; the rest of the dimensions is not.
    """
    heads, dim = queries.shape[:2]
    key, query = keys.new_zeros(dim, heads * dim), keys.new_zeros(heads, dim, dim)
    if rotary.dims:
        _rotated_key(keys, queries, rotary, key, query)
    if rotary.dims < dim:
        _plain_key(without_means(keys, means), queries, torch.arange(rotary.dims, dim), key, query)
    return _across_speeds(keys, queries, means, rotary, key) if rotary.speeds else GroupMaps(key, query)


def _across_speeds(keys: Tensor, queries: Tensor, means: Tensor, rotary: Rotary, key: Tensor) -> GroupMaps:
    """The shared key whose pairs also hold what turns at other speeds, as far as scores at all distances allow; from
    the shared key `key` (d, m d) on, which keeps each speed for itself.

    A pair is two complex numbers, which distance t turns by exp(-i v t) and exp(i v t) (v = 0: not rotated); D_t is the
    diagonal of these factors. The shared key B k and queries X_a^H q give scores q^H X_a D_t B k where head a has
    q^H D_t k_a. The mean square of the difference is least over t = 1 ... L, nearer distances counting more (log t is
    uniform). With C_ij = E[D_i conj(D_j)] as elementwise factor, X_a and B have closed forms given the other one:
    X_a = (K_a B^H * C) (B K B^H * C)^-1 and B_a = (sum_b X_b^H Q_b X_b * C^T)^-1 (X_a^H Q_a * C^T).
    """
    heads, dim = queries.shape[:2]
    basis, turns = _complex_basis(rotary, dim)
    basis, turns = basis.to(keys.device), turns.to(keys.device)
    agreement = turns @ turns.mH / turns.shape[1]  # C
    stacked = torch.block_diag(*[basis] * heads)
    mean = stacked @ means.to(basis)
    # What a constant key adds to scores does not matter as far as it is the same at all distances.
    varying = mean * (1 - turns.mean(1).abs().square()).clamp_min(0).sqrt().repeat(heads)
    moments = stacked @ keys.to(basis) @ stacked.mH - torch.outer(mean, mean.conj())
    moments += torch.outer(varying, varying.conj())
    energy = basis @ queries.to(basis) @ basis.mH  # (m, d, d)
    shared = basis @ key.to(basis) @ stacked.mH
    before = moments.diagonal().real.view(heads, dim).mean(0)
    held = ((shared @ moments) * shared.conj()).sum(1).real
    if len(empty := (held <= _SMALLEST * held.max()).nonzero()):  # they would stay so: let them begin with anything
        anything = torch.randn(key.shape, generator=torch.Generator().manual_seed(0), dtype=key.dtype).to(key)
        shared[empty] = (basis @ anything.to(basis) @ stacked.mH)[empty]
    for sweep in range(_SWEEPS + 1):
        crossed = moments @ shared.mH  # (m d, d)
        own = crossed.view(heads, dim, dim) * agreement
        restore = own @ pseudo_inverse(shared @ crossed * agreement, _SMALLEST)  # (m, d, d)
        if sweep == _SWEEPS:
            break
        wanted = (restore.mH @ energy) * agreement.mT
        gain = (restore.mH @ energy @ restore).sum(0) * agreement.mT
        shared = pseudo_inverse(gain, _SMALLEST) @ wanted.transpose(0, 1).flatten(1)
        shared *= _energy_back(before, ((shared @ moments) * shared.conj()).sum(1).real)[:, None]
    return GroupMaps((basis.mH @ shared @ stacked).real, (basis.mH @ restore.mH @ basis).real)


def _complex_basis(rotary: Rotary, dim: int) -> tuple[Tensor, Tensor]:
    """The unitary (d, d) map to complex numbers that are turned, and by what they are at distances (d, n): numbers at
    the place of a pair's first dimension one way, of its second the other way.
    """
    first, second = pairs(rotary)
    basis, speeds = torch.eye(dim, dtype=torch.complex128), torch.zeros(dim, dtype=torch.float64)
    basis[first, first] = basis[second, first] = 0.5**0.5
    basis[first, second], basis[second, second] = 1j * 0.5**0.5, -1j * 0.5**0.5
    speeds[first] = torch.tensor(rotary.speeds, dtype=torch.float64)
    speeds[second] = -speeds[first]
    distances = torch.logspace(0, math.log10(rotary.longest), _DISTANCES, dtype=torch.float64)
    return basis, torch.exp(-1j * speeds[:, None] * distances)


def without_means(keys: Tensor, means: Tensor) -> Tensor:
    """Moments of keys without what is constant: it shifts all scores of a query (nearly) alike."""
    centred = keys - means[:, None] * means
    varies = centred.diagonal() > 1e-12 * keys.diagonal()  # more than by rounding
    return centred * varies[:, None] * varies


def _rotated_key(keys: Tensor, queries: Tensor, rotary: Rotary, key: Tensor, query: Tensor) -> None:
    """Fills the maps `key` and `query` from the moments `keys` and `queries`. Per frequency, the complex combination
    that keeps most of the scores' energy: the top eigenvector of w S w, with S[a, b] = E[k_a conj(k_b)] and w_a^2 the
    energy of head a's queries. A complex factor commutes with the rotation.
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
    scale = _energy_back(before, after)[:, None]
    _put_complex(key.view(dim, heads, dim).transpose(0, 1), combine * scale, real, imaginary)
    _put_complex(query, (restore / scale).conj(), real, imaginary)


def key_weights(queries: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """(F, m) the root of each head's query energy at each frequency, floored so that no key is given up."""
    energy = queries.diagonal(dim1=1, dim2=2)
    weight = (energy[:, real] + energy[:, imaginary]).T.clamp_min(0).sqrt()
    return weight.clamp_min(1e-3 * weight.amax(1, keepdim=True).clamp_min(1e-30))


def complex_moments(blocks: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """(F, m, m) moments E[k_a conj(k_b)] of every frequency, from the real ones (m, d, m, d)."""
    pick = torch.arange(len(real))

    def of(rows: Tensor, columns: Tensor) -> Tensor:  # (m, F, m, F) -> (F, m, m)
        return blocks[:, rows][:, :, :, columns][:, pick, :, pick]

    return torch.complex(of(real, real) + of(imaginary, imaginary), of(imaginary, real) - of(real, imaginary))


def _put_complex(targets: Tensor, factors: Tensor, real: Tensor, imaginary: Tensor) -> None:
    """Multiplication of every frequency by complex factors (F, m), as real matrices (m, d, d)."""
    for target, factor in zip(targets, factors.T, strict=True):
        target[real, real] = target[imaginary, imaginary] = factor.real
        target[real, imaginary], target[imaginary, real] = -factor.imag, factor.imag


def _energy_back(before: Tensor, after: Tensor) -> Tensor:
    """The factor that gives heads of the energy `after` that of `before`; 1 where either is nothing."""
    factor = (before.clamp_min(0) / after.clamp_min(1e-300)).sqrt()
    return factor.where((factor > 0) & (after > 0), torch.ones_like(factor))


def _plain_key(keys: Tensor, queries: Tensor, dims: Tensor, key: Tensor, query: Tensor) -> None:
    """Dimensions without rotation: the subspace of the stacked keys that keeps most of the scores' energy, the top
    eigenvectors U of S^1/2 B S^1/2 with B = blockdiag(E[q q^T]).
    """
    heads, dim = queries.shape[:2]
    n = len(dims)
    stacked = (torch.arange(heads)[:, None] * dim + dims).flatten()
    covariance = keys[stacked][:, stacked]
    root, inverse = root_and_inverse(covariance)
    energy = torch.block_diag(*(queries[head][dims][:, dims] for head in range(heads)))
    vectors = torch.linalg.eigh(root @ energy @ root)[1][:, -n:]
    combine, restore = vectors.T @ inverse, root @ vectors  # (n, m n), (m n, n)
    scale = _energy_back(covariance.trace() / heads, (combine @ covariance @ combine.T).trace())
    key[dims[:, None], stacked] = combine * scale
    for head in range(heads):
        query[head][dims[:, None], dims] = restore[head * n : (head + 1) * n].T / scale


def root_and_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """S^1/2 and its pseudo-inverse, without the directions below CUT of the largest."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    large = values > CUT * values[-1].clamp_min(1e-300)
    values, vectors = values[large].sqrt(), vectors[:, large]
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def shared_value(attended: Tensor, values: Tensor, outputs: Tensor, owner: Tensor) -> GroupMaps:
    """The value that stands for the m values of one group.

    By alternating least squares, from what is best where all query heads see the same: the shared value is moved down
    the preconditioned gradient as far as that helps, then each head's way back to its own is solved for.

    Args:
        attended: (R, m * d, m * d) for each of the group's R = m r query heads, E[z z^T] of the attention-averaged
            stacked values that it sees; (1, m * d, m * d) where all see the same, whose best is known at once.
        values: (m * d, m * d) second moments of the stacked values, which the shared value keeps the energy of.
        outputs: (R, d, d) W_O,i^T W_O,i of each query head.
        owner: (R,) which of the m heads a query head reads.
    """
    dim = outputs.shape[1]
    heads = attended.shape[1] // dim
    root, inverse = root_and_inverse(attended.mean(0))
    gain = torch.block_diag(*(outputs[owner == head].sum(0) for head in range(heads)))
    vectors = torch.linalg.eigh(root @ gain @ root)[1][:, -dim:]
    project = vectors.T @ inverse  # (d, m d), the best where all heads see the same
    own_dims = (owner[:, None] * dim + torch.arange(dim)).to(attended.device)
    query_head = torch.arange(len(owner), device=own_dims.device)[:, None]
    crossed = attended.expand(len(owner), -1, -1)[query_head, own_dims]  # (R, d, m d) E[z_own z^T]
    energy = (outputs * crossed.take_along_dim(own_dims[:, None], 2)).sum()
    restore = _restoring_maps(project, attended, crossed)
    for _ in range(_ROUNDS if len(attended) > 1 else 0):
        gains = restore.mT @ outputs @ restore
        missing = (restore.mT @ outputs @ (crossed - restore @ project @ attended)).sum(0)
        move = pseudo_inverse(gains.sum(0)) @ missing @ inverse @ inverse
        slope, bend = (missing * move).sum(), (move * (gains @ move @ attended).sum(0)).sum()
        if slope.square() <= _LEAST_GAIN * energy * bend:  # what the step would gain
            break
        project = project + slope / bend * move
        restore = _restoring_maps(project, attended, crossed)
    scale = _energy_back(values.trace() / heads, (project @ values @ project.T).trace())
    return GroupMaps(project * scale, restore / scale)


def _restoring_maps(project: Tensor, attended: Tensor, crossed: Tensor) -> Tensor:
    """(R, d, d): the least-squares map of each query head from the shared value (d, m d) to its own; `crossed`
    (R, d, m d) is E[z_own z^T].
    """
    return crossed @ project.T @ pseudo_inverse(project @ attended @ project.T)


def pseudo_inverse(matrices: Tensor, cut: float = CUT) -> Tensor:
    """Of Hermitian positive semi-definite matrices (..., n, n), without the directions below `cut` of the largest."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mH) / 2)
    values = values.where(values > cut * values[..., -1:].clamp_min(1e-300), torch.inf)
    inverses: Tensor = (vectors / values.unsqueeze(-2)) @ vectors.mH
    return inverses


def add_products(sums: Tensor, rows: Tensor, columns: Tensor | None = None) -> None:
    """Add rows^T columns to the float64 `sums`: (..., n, p) of (..., L, n) and (..., L, p), or of the rows alone. The
    products of _ROWS rows are summed in float32, which is twice as fast and exact to well below CUT.
    """
    columns = rows if columns is None else columns
    for some, others in zip(rows.float().split(_ROWS, -2), columns.float().split(_ROWS, -2), strict=True):
        sums += as_float64(some.mT @ others)


def ridge(inputs: Tensor, targets: Tensor, start: Tensor, strength: float) -> Tensor:
    """The map W (n, p) with a' W ~ y in least squares, drawn towards `start`.

    Args:
        inputs: (n, n) E[a'^T a']; targets: (n, p) E[a'^T y]; start: (n, p).
        strength: Of the ridge, relative to the mean of the diagonal of `inputs`.
    """
    damping = max(strength, 1e-12) * inputs.diagonal().mean().clamp_min(1e-200)  # where no input is, the start stays
    system = inputs + damping * torch.eye(len(inputs)).to(inputs)
    solution: Tensor = torch.linalg.solve(system, targets + damping * start)
    return solution


# ------------------------------------------------------------------------------------------------- Procrustes
#
# Heads are turned onto each other, averaged, and given their norm back: the best published way of merging heads without
# data (arXiv 2412.20677, section 3), and the special case of rotations only. Here from the same second moments.


def rotations(moments: Tensor) -> Tensor:
    """(m, d, d) rotations A that bring heads together, from their (m, d, m, d) moments.

    Maximises sum_ab tr(A_a S_ab A_b^T): one head after another is turned onto the sum of the others.
    """
    heads, dim = moments.shape[:2]
    turned = torch.eye(dim, dtype=moments.dtype).repeat(heads, 1, 1)
    for _ in range(_TURNS if heads > 1 else 0):
        before = turned.clone()
        for head in range(heads):
            rest = torch.einsum("bij,bjk->ik", turned, moments[:, :, head]) - turned[head] @ moments[head, :, head]
            left, _, right = torch.linalg.svd(rest)
            turned[head] = left @ right
        if torch.allclose(turned, before, rtol=0, atol=1e-9):
            break
    return turned


def phases(moments: Tensor) -> Tensor:
    """The same for complex numbers: (F, m) of modulus 1 from (F, m, m) moments E[k_a conj(k_b)], F at a time."""
    factors = torch.ones_like(moments[:, 0])
    for _ in range(_TURNS if moments.shape[1] > 1 else 0):
        for head in range(moments.shape[1]):
            rest = (factors * moments[:, :, head]).sum(1) - factors[:, head] * moments[:, head, head]
            size = rest.abs()
            factors[:, head] = torch.where(size > 0, rest / size.clamp_min(1e-300), factors[:, head])
    return factors


def procrustes_key(keys: Tensor, rotary: Rotary, heads: int) -> GroupMaps:
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
        scale = _energy_back(energy.mean(1), after)[:, None]
        _put_complex(key.view(dim, heads, dim).transpose(0, 1), scale / heads * phase, real, imaginary)
        _put_complex(query, phase, real, imaginary)
    rest = torch.arange(rotary.dims, dim)
    if len(rest):
        merges, turned = _turned(blocks[:, rest][:, :, :, rest])
        for head in range(heads):
            key[rest[:, None], head * dim + rest] = merges[head]
            query[head][rest[:, None], rest] = turned[head]
    return GroupMaps(key, query)


def procrustes_value(values: Tensor, heads: int, repeat: int) -> GroupMaps:
    """(m * e, m * e) moments of the values of a group -> their aligned mean, and what turns it back for each of the
    `repeat` query heads of a head.
    """
    dim = len(values) // heads
    merges, turned = _turned(values.view(heads, dim, heads, dim))
    return GroupMaps(torch.cat(list(merges), 1), turned.mT.repeat_interleave(repeat, 0))


def _turned(moments: Tensor) -> tuple[Tensor, Tensor]:
    """(m, d, d) what heads of these moments (m, d, m, d) are averaged by, to the mean energy that they have, and the
    rotations in that.
    """
    heads, turned = len(moments), rotations(moments)
    halfway = torch.einsum("aij,ajbk->aibk", turned, moments)
    mean = torch.einsum("aibk,bik->", halfway, turned) / heads**2
    energy = torch.einsum("aiaj,aij->", halfway, turned) / heads
    return _energy_back(energy, mean) / heads * turned, turned
