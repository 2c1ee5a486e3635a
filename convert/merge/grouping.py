"""Which heads share: the partition into groups of equal size that loses least, from second moments of a whole layer.

Heads may stand in any order as long as their query heads go with them, so any partition is as loadable as neighbours
are; `HeadMaps.order` puts the heads of a group side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from gqa.convert.heads.symmetries import Rotary
from gqa.convert.merge.linear_algebra import complex_moments, key_weights, pairs, plain_dims, without_means
from gqa.convert.merge.moments import Moments

Group = tuple[int, ...]
Cost = Callable[[Group], float]


def find_order(moments: Moments, w_o: Tensor, groups: int, rotary: Rotary, free_keys: bool) -> Group | None:
    """The order of heads that puts those which share best side by side; None where neighbours do.

    What a group loses of scores and of outputs is counted in units of what neighbours lose on average. `moments` are
    those of the whole layer as one group; w_o (H, e, D).
    """
    heads = len(moments.queries)
    gains = (w_o @ w_o.mT).unflatten(0, (heads, -1)).sum(1)  # (Hk, e, e)
    contiguous = tuple(tuple(range(j * heads // groups, (j + 1) * heads // groups)) for j in range(groups))
    lost_keys = cache(lambda group: _lost_keys(moments, group, rotary, free_keys))
    lost_values = cache(lambda group: _lost_values(moments.values[0], gains, group))
    units = [sum(map(lost, contiguous)) / groups for lost in (lost_keys, lost_values)]

    @cache
    def cost(group: Group) -> float:
        parts = zip((lost_keys(group), lost_values(group)), units, strict=True)
        return sum(lost / unit for lost, unit in parts if unit > 0)

    best = best_partition(heads, groups, cost)
    if sum(map(cost, best)) > (1 - 1e-6) * sum(map(cost, contiguous)):
        return None
    return tuple(head for group in best for head in group)


def best_partition(heads: int, groups: int, cost: Cost) -> tuple[Group, ...]:
    """The partition of `heads` into `groups` of equal size with the least summed cost, of all there are."""
    return min(_partitions(tuple(range(heads)), heads // groups), key=lambda partition: sum(map(cost, partition)))


def _partitions(heads: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """Each once: a group is that of the smallest head that is left."""
    if not heads:
        yield ()
        return
    for others in combinations(heads[1:], size - 1):
        group = (heads[0], *others)
        for rest in _partitions(tuple(head for head in heads if head not in group), size):
            yield (group, *rest)


def _lost_keys(moments: Moments, group: Group, rotary: Rotary, free_keys: bool) -> float:
    """Energy of scores that one shared key cannot carry (`shared_key` says which it does)."""
    rows, dim = _rows(group, moments.queries.shape[1]), moments.queries.shape[1]
    keys, queries = moments.keys[0][rows][:, rows], moments.queries[list(group)]
    if not free_keys:  # they are averaged
        blocks = keys.view(len(group), dim, len(group), dim)
        return float(keys.trace() - torch.einsum("aibi->", blocks) / len(group))
    lost = 0.0
    if rotary.dims:
        real, imaginary = pairs(rotary)
        weight = key_weights(queries, real, imaginary)
        spread = weight[:, :, None] * complex_moments(keys.view(len(group), dim, -1, dim), real, imaginary)
        fast = slice(len(real) - len(rotary.slow))
        lost += float(torch.linalg.eigvalsh(spread * weight[:, None, :])[fast, :-1].clamp_min(0).sum())
    varying = without_means(keys, moments.key_means[0][rows])
    for dims in plain_dims(rotary, dim):
        plain = (torch.arange(len(group))[:, None] * dim + dims).flatten()
        lost += _beyond(varying[plain][:, plain], queries[:, dims][:, :, dims])
    return lost


def _lost_values(values: Tensor, gains: Tensor, group: Group) -> float:
    """Energy of outputs outside of the directions that one shared value keeps."""
    rows = _rows(group, gains.shape[1])
    return _beyond(values[rows][:, rows], gains[list(group)])


def _beyond(covariance: Tensor, energy: Tensor) -> float:
    """Sum of the eigenvalues of E^1/2 S E^1/2 but the n largest, (m n, m n) S and blocks (m, n, n) of E."""
    values, vectors = torch.linalg.eigh(energy)
    root = torch.block_diag(*(vectors * values.clamp_min(0).sqrt()[:, None] @ vectors.mT))
    eigenvalues = torch.linalg.eigvalsh(root @ covariance @ root)
    return float(eigenvalues[: -energy.shape[1]].clamp_min(0).sum())


def _rows(group: Group, dim: int) -> Tensor:
    return (torch.tensor(group)[:, None] * dim + torch.arange(dim)).flatten()
