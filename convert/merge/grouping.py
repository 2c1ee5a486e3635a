"""Which heads share a key and a value: the partition into groups with the least loss.

Heads can be reordered if their query heads move with them, so a checkpoint can hold any partition
into groups of equal size. `HeadMaps.order` makes the heads of a group neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations

import torch
from torch import Tensor

from gqa.convert.heads.family import Rotary
from gqa.convert.merge.moments import Moments, rows_of
from gqa.convert.merge.rope import complex_moments, pairs
from gqa.convert.merge.shared_keys import key_weights, without_means

Group = tuple[int, ...]


def find_order(
    moments: Moments, w_o: Tensor, groups: int, rotary: Rotary, free_keys: bool
) -> Group | None:
    """The order of heads in which consecutive ones form the groups with the least loss.

    The loss of a group is its lost score energy plus its lost output energy, each divided by its
    mean over groups of neighbors.

    Args:
        moments: Of the whole layer as one group.
        w_o: (H, e, D).
        free_keys: Whether keys may be aligned; otherwise they are averaged.

    Returns:
        None if neighbors already are the best groups.
    """
    heads = len(moments.queries)
    size = heads // groups
    gains = (w_o @ w_o.mT).unflatten(0, (heads, -1)).sum(1)  # (Hk, e, e)
    neighbors = tuple(tuple(range(j * size, (j + 1) * size)) for j in range(groups))

    @cache
    def lost_keys(group: Group) -> float:
        return _lost_keys(moments, group, rotary, free_keys)

    @cache
    def lost_values(group: Group) -> float:
        rows = rows_of(torch.tensor(group), gains.shape[1])
        return _energy_outside(moments.values[0][rows][:, rows], gains[list(group)])

    key_unit = sum(lost_keys(group) for group in neighbors) / groups
    value_unit = sum(lost_values(group) for group in neighbors) / groups

    @cache
    def cost(group: Group) -> float:
        total = 0.0
        if key_unit > 0:
            total += lost_keys(group) / key_unit
        if value_unit > 0:
            total += lost_values(group) / value_unit
        return total

    def total_cost(partition: tuple[Group, ...]) -> float:
        return sum(cost(group) for group in partition)

    best = min(partitions(tuple(range(heads)), size), key=total_cost)
    if total_cost(best) > (1 - 1e-6) * total_cost(neighbors):
        return None
    return tuple(chain.from_iterable(best))


def partitions(heads: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """Each partition of sorted heads once: the next group contains the smallest remaining head."""
    if not heads:
        yield ()
        return
    for partners in combinations(heads[1:], size - 1):
        group = (heads[0], *partners)
        remaining = tuple(head for head in heads if head not in group)
        for rest in partitions(remaining, size):
            yield (group, *rest)


def _lost_keys(moments: Moments, group: Group, rotary: Rotary, free_keys: bool) -> float:
    """Energy of scores outside the directions that one shared key keeps.

    It is as if each frequency were merged alone.
    """
    dim = moments.queries.shape[1]
    rows = rows_of(torch.tensor(group), dim)
    keys = moments.keys[0][rows][:, rows]
    queries = moments.queries[list(group)]

    if not free_keys:  # keys are averaged
        blocks = keys.view(len(group), dim, len(group), dim)
        return float(keys.trace() - torch.einsum("aibi->", blocks) / len(group))

    lost = 0.0
    if rotary.dims:
        real, imaginary = pairs(rotary)
        weight = key_weights(queries, real, imaginary)
        blocks = keys.view(len(group), dim, -1, dim)
        spread = weight[:, :, None] * complex_moments(blocks, real, imaginary)
        eigenvalues = torch.linalg.eigvalsh(spread * weight[:, None, :])
        lost += float(eigenvalues[:, :-1].clamp_min(0).sum())

    if rotary.dims < dim:
        varying = without_means(keys, moments.key_means[0][rows])
        dims = torch.arange(rotary.dims, dim)
        plain = (torch.arange(len(group))[:, None] * dim + dims).flatten()
        lost += _energy_outside(varying[plain][:, plain], queries[:, dims][:, :, dims])
    return lost


def _energy_outside(covariance: Tensor, energy: Tensor) -> float:
    """Sum of all but the n largest eigenvalues of E^1/2 S E^1/2.

    covariance: S (m n, m n). energy: the blocks (m, n, n) of the block-diagonal E.
    """
    values, vectors = torch.linalg.eigh(energy)
    roots = vectors * values.clamp_min(0).sqrt()[:, None] @ vectors.mT
    root = torch.block_diag(*roots)
    eigenvalues = torch.linalg.eigvalsh(root @ covariance @ root)
    return float(eigenvalues[: -energy.shape[1]].clamp_min(0).sum())
