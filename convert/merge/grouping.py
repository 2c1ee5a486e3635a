"""Which heads share a key and a value: the partition into groups with the least loss.

Heads can be reordered if their query heads move with them, so a checkpoint can hold any partition
into groups of equal size. `HeadMaps.order` makes the heads of a group neighbors.

Of few heads all partitions are tried. Of many, heads are swapped between groups as long as that
lowers the loss of all pairs of heads that share a group, which stands for the loss of the groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, combinations

import torch
from torch import Tensor

from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge.moments import Moments, rows_of
from gqa.convert.merge.rope import complex_moments, pairs
from gqa.convert.merge.shared_keys import key_weights, without_means

Group = tuple[int, ...]
Partition = tuple[Group, ...]
Order = tuple[int, ...]  # of all heads

# All partitions are tried if there are at most this many groups of the size: of 12 heads in pairs
# (66 groups, 10,395 partitions), but not of 14 (91 groups, 135,135 partitions).
_MOST_GROUPS = 90
_STARTS = 16  # of the local search; all but the first are random


def find_order(
    moments: Moments, w_o: Tensor, groups: int, rotary: Rotary, aligns_keys: bool
) -> Order | None:
    """The order of heads in which consecutive ones form the groups with the least loss.

    The loss of a group is its lost score energy plus its lost output energy, each divided by its
    mean over groups of neighbors.

    Args:
        moments: Of the whole layer as one group.
        w_o: (H, e, D).
        aligns_keys: Whether keys may be aligned; otherwise they are averaged.

    Returns:
        None if neighbors already are the best groups.
    """
    heads = len(moments.queries)
    size = heads // groups
    gains = (w_o @ w_o.mT).unflatten(0, (heads, -1)).sum(1)  # (Hk, e, e)
    neighbors = tuple(tuple(range(j * size, (j + 1) * size)) for j in range(groups))

    @cache
    def lost_keys(group: Group) -> float:
        return _lost_keys(moments, group, rotary, aligns_keys)

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

    def total_cost(partition: Partition) -> float:
        return sum(cost(group) for group in partition)

    if math.comb(heads, size) <= _MOST_GROUPS:
        best = min(partitions(tuple(range(heads)), size), key=total_cost)
    else:
        best = swap_heads(neighbors, pair_costs(heads, cost))
    if total_cost(best) > (1 - 1e-6) * total_cost(neighbors):
        return None
    return tuple(chain.from_iterable(best))


def partitions(heads: Order, size: int) -> Iterator[Partition]:
    """Each partition of sorted heads once: the next group contains the smallest remaining head."""
    if not heads:
        yield ()
        return
    for partners in combinations(heads[1:], size - 1):
        group = (heads[0], *partners)
        remaining = tuple(head for head in heads if head not in group)
        for rest in partitions(remaining, size):
            yield (group, *rest)


def pair_costs(heads: int, cost: Callable[[Group], float]) -> Tensor:
    """(Hk, Hk): the cost of each pair of heads as a group of its own; 0 for a head with itself."""
    costs = torch.zeros(heads, heads, dtype=torch.float64)
    for pair in combinations(range(heads), 2):
        costs[pair] = cost(pair)
    return costs + costs.mT


def swap_heads(start: Partition, costs: Tensor) -> Partition:
    """The partition with the least cost of pairs that swaps of two heads lead to.

    They begin at `start` and at random partitions into groups of the same size.

    Args:
        start: Groups of equal size.
        costs: (Hk, Hk), of each pair of heads in one group.
    """
    heads = len(costs)
    size = len(start[0])
    generator = torch.Generator().manual_seed(0)
    orders = [torch.tensor(start).flatten()]
    orders += [torch.randperm(heads, generator=generator) for _ in range(_STARTS - 1)]

    best = None
    least = math.inf
    for order in orders:
        group_of = torch.empty(heads, dtype=torch.long)
        group_of[order] = torch.arange(heads) // size
        _swap(group_of, costs)

        shared = group_of[:, None] == group_of
        total = float(costs[shared].sum())
        if best is None or total < least:
            best = group_of
            least = total

    assert best is not None
    return tuple(
        tuple(torch.nonzero(best == group).flatten().tolist()) for group in range(heads // size)
    )


def _swap(group_of: Tensor, costs: Tensor) -> None:
    """Swap, in `group_of` (Hk,), the two heads whose swap saves most, until no swap saves anything.

    Each swap lowers the cost, and there are at most Hk^2 of them.
    """
    heads = len(costs)
    tolerance = 1e-9 * float(costs.sum())
    for _ in range(heads**2):
        # (Hk, G): the cost of each head with the heads of each group.
        to_group = costs @ torch.nn.functional.one_hot(group_of).to(costs)
        at_home = to_group.gather(1, group_of[:, None])
        there = to_group[:, group_of]  # (Hk, Hk): of head a with the group of head b
        # If a and b change places, the cost of a with b was counted, and is none of the new groups.
        change = there + there.mT - at_home - at_home.mT - 2 * costs
        change[group_of[:, None] == group_of] = 0.0

        place = int(change.argmin())
        a, b = divmod(place, heads)
        if not float(change[a, b]) < -tolerance:
            return
        group_of[[a, b]] = group_of[[b, a]]


def _lost_keys(moments: Moments, group: Group, rotary: Rotary, aligns_keys: bool) -> float:
    """Energy of scores outside the directions that one shared key keeps.

    It is as if each frequency were merged alone.
    """
    dim = moments.queries.shape[1]
    rows = rows_of(torch.tensor(group), dim)
    keys = moments.keys[0][rows][:, rows]
    queries = moments.queries[list(group)]

    if not aligns_keys:  # keys are averaged
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
