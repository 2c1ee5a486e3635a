"""Least squares with second moments: inverses, roots, products, ridge regression.

Everything is float64. Smaller accumulators lose the case in which heads are redundant and nothing
need be lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gqa.core.devices import as_float64

# Eigenvalues below this share of the largest are rounding errors, which an inverse would blow up.
CUT = 1e-6
# The same where only float64 rounds.
FLOAT64_CUT = 1e-10
# A vector with less than this share of the common energy does not count as typical (an untrained
# token).
_TINY = 1e-4
_ROWS = 2048  # rows whose products are summed in float32


@dataclass(frozen=True)
class GroupMaps:
    """Maps from the heads of a group to a shared head, and back.

    merge: (d, m * d), from the m stacked heads to the shared one.
    back: For keys (m, d, d), applied to the queries that read each head. For values (R, d, d), from
        the shared value to the one that each of the group's R query heads reads.
    """

    merge: Tensor
    back: Tensor


def energy_factor(before: Tensor, after: Tensor) -> Tensor:
    """sqrt(before / after), which scales heads of energy `after` to energy `before`.

    1 where either is zero.
    """
    factor = (before.clamp_min(0) / after.clamp_min(1e-300)).sqrt()
    return factor.where((factor > 0) & (after > 0), torch.ones_like(factor))


def root_mean_squares(moments: Tensor, dim: int) -> Tensor:
    """Sizes (m,) of heads with the second moments (m * d, m * d); 1 for a head that is zero."""
    energies: Tensor = moments.diagonal().unflatten(0, (-1, dim)).mean(1)
    return energies.sqrt().where(energies > 0, torch.ones_like(energies))


def root_and_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """S^1/2 and its pseudo-inverse, without eigenvalues of S below CUT times the largest."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    large = values > CUT * values[-1].clamp_min(1e-300)
    roots = values[large].sqrt()
    vectors = vectors[:, large]
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


def pseudo_inverse(matrices: Tensor, cut: float = CUT) -> Tensor:
    """Of Hermitian positive semi-definite matrices (..., n, n).

    Eigenvalues below `cut` times the largest are left out.
    """
    values, vectors = torch.linalg.eigh((matrices + matrices.mH) / 2)
    largest = values[..., -1:].clamp_min(1e-300)
    values = values.where(values > cut * largest, torch.inf)
    inverses: Tensor = (vectors / values.unsqueeze(-2)) @ vectors.mH
    return inverses


def typical_energy(energies: Tensor) -> float:
    """The upper quartile of the energies (n,), without tiny ones; 1 if all are zero.

    A quartile, because a few vectors are thousands of times as large as the others and would rule a
    mean. Tokens whose embedding is zero or tiny may take up most of a text: what is below a
    ten-thousandth of the 95th percentile does not say what is typical.
    """
    if not bool((energies > 0).any()):
        return 1.0
    # If more than 95 % are zero, all that are not.
    comparable = energies[energies > _TINY * _quantile(energies, 0.95)]
    return _quantile(comparable, 0.75)


def _quantile(numbers: Tensor, share: float) -> float:
    """The smallest of the numbers (n,) that at least this share of them does not exceed."""
    rank = math.ceil(share * len(numbers))
    return float(numbers.kthvalue(rank).values)


def add_products(sums: Tensor, rows: Tensor, columns: Tensor | None = None) -> None:
    """Add rows^T columns to the float64 `sums`.

    sums is (..., n, p) of rows (..., L, n) and columns (..., L, p), which are the rows by default.
    Products of _ROWS rows are summed in float32, which is twice as fast and exact to well below
    CUT.
    """
    if columns is None:
        columns = rows
    row_parts = rows.float().split(_ROWS, -2)
    column_parts = columns.float().split(_ROWS, -2)
    for left, right in zip(row_parts, column_parts, strict=True):
        sums += as_float64(left.mT @ right)


def ridge(inputs: Tensor, targets: Tensor, start: Tensor, strength: float, block: int) -> Tensor:
    """Ridge regression toward `start`: W (n, p) minimizes
    E|x W - y|^2 + sum_i damping_i |W_i - start_i|^2.

    Args:
        inputs: (n, n) E[x^T x].
        targets: (n, p) E[x^T y].
        start: (n, p).
        strength: Damping of an input, relative to the mean energy of its block: a head is not
            damped more because another one is larger.
        block: Inputs of a block, the dimension of a head.
    """
    energies = inputs.diagonal().unflatten(0, (-1, block)).mean(1)
    energies = energies.clamp_min(1e-200)  # inputs of zero keep the start
    damping = max(strength, 1e-12) * energies.repeat_interleave(block)
    system = inputs + damping.diag()
    solution: Tensor = torch.linalg.solve(system, targets + damping[:, None] * start)
    return solution
