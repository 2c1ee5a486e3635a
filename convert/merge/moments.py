"""Second moments of a layer's queries, keys and values, measured or estimated; the merge maps and the grouping of heads
that they determine.

Heads can be reordered if their query heads move with them, so the checkpoint can hold any partition into groups of
equal size; `HeadMaps.order` makes the heads of a group neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

import torch
from torch import Tensor

from gqa.checkpoint.loading import as_float64
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.family import LayerHeads, Rotary
from gqa.convert.heads.modules import Change
from gqa.convert.merge.linear_algebra import (
    GroupMaps,
    add_products,
    complex_moments,
    key_weights,
    pairs,
    shared_key,
    shared_value,
    without_means,
)  # fmt: skip
from gqa.convert.methods import HeadMaps, first, mean

Group = tuple[int, ...]


def heads_of(checkpoint: Checkpoint, changes: list[Change]) -> dict[str, Tensor]:
    """Stored heads of a module by role, (n, rows, D) float32, and biases (n, rows) under `role.bias`."""
    by_role: dict[str, Tensor] = {}
    for change in changes:
        if change.rule.projection:
            suffix = ".bias" if change.source.name.endswith(".bias") else ""
            parts = change.split(checkpoint.read(change.source))
            by_role |= {part + suffix: heads.float() for part, heads in parts.items() if part != "whole"}
    return by_role


@dataclass
class Moments:
    """Second moments in float64, or the sums from which `averaged` makes them.

    keys, key_means: (G, m d, m d) and (G, m d), of the stacked keys of each group.
    queries: (Hk, d, d), of the query heads of each KV head.
    values: (G, m e, m e), of the stacked values of each group.
    distances: (Hk, n), weights of scores of the queries of each KV head with the key 0, 1, ... tokens before; n is 0
        if they were not measured.
    positions, visible_keys: Number of positions of queries, and of keys (and values), in the sums.
    """

    keys: Tensor
    key_means: Tensor
    queries: Tensor
    values: Tensor
    distances: Tensor
    positions: int = field(default=0, kw_only=True)
    visible_keys: int = field(default=0, kw_only=True)

    @classmethod
    def zeros(cls, heads: LayerHeads, groups: int, length: int, device: str | torch.device = "cpu") -> Moments:
        m, d, e = heads.kv // groups, heads.key_dim, heads.value_dim
        shapes = (groups, m * d, m * d), (groups, m * d), (heads.kv, d, d), (groups, m * e, m * e), (heads.kv, length)
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, q: Tensor, k: Tensor, v: Tensor, significance: Tensor, visible: Tensor, distances: Tensor) -> None:
        """Add queries (B, H, T, d) weighted by their sensitivity `significance` (B, H, T), and those keys (B, Hk, S, d)
        and values (B, Hk, S, e) that are `visible` (B or 1, S). `distances` (H, n): see `significance_of`.
        """
        groups = len(self.keys)  # 1 if the whole layer is one group
        visible = visible.expand(len(k), -1)
        k, v = (heads * visible[:, None, :, None] for heads in (k, v))
        self.positions += significance[:, 0].numel()
        self.visible_keys += int(visible.sum())
        keys, values = stack_groups(k, groups), stack_groups(v, groups)
        rows = as_float64(keys.flatten(1, 2))  # (G, n, m d)
        self.keys += rows.mT @ rows
        self.key_means += rows.sum(1)
        add_products(self.values, values.flatten(1, 2))
        self.distances += as_float64(distances.unflatten(0, (k.shape[1], -1)).sum(1))
        queries = (q * significance.sqrt().unsqueeze(-1)).transpose(0, 1)  # (H, B, T, d)
        add_products(self.queries, queries.unflatten(0, (k.shape[1], -1)).flatten(1, 3))

    def cpu(self) -> Moments:
        return Moments(*(part.cpu() for part in (self.keys, self.key_means, self.queries, self.values, self.distances)))

    def averaged(self) -> Moments:
        """Divide the sums by the number of positions and of visible keys."""
        keys, queries = max(self.visible_keys, 1), self.queries / self.positions
        return Moments(self.keys / keys, self.key_means / keys, queries, self.values / keys, self.distances)

    def regrouped(self, order: tuple[int, ...], groups: int) -> Moments:
        """From the moments of one group, those of `groups` groups of heads in this order."""
        heads = torch.tensor(order).view(groups, -1)

        def blocks(matrix: Tensor) -> Tensor:
            index = _rows(heads, len(matrix) // len(order))
            return matrix[index[:, :, None], index[:, None, :]]

        means = self.key_means[0][_rows(heads, self.queries.shape[1])]
        queries, distances = (part[list(order)] for part in (self.queries, self.distances))
        return Moments(blocks(self.keys[0]), means, queries, blocks(self.values[0]), distances)

    def shared_keys(self, rotary: Rotary) -> list[GroupMaps]:
        """The closed-form maps of each group's key."""
        queries, distances = (part.unflatten(0, (len(self.keys), -1)) for part in (self.queries, self.distances))
        groups = zip(self.keys, queries, self.key_means, distances, strict=True)
        return [shared_key(*group, rotary) for group in groups]

    def shared_values(self, attended: Iterable[Tensor], w_o: Tensor) -> list[GroupMaps]:
        """The closed-form maps of each group's value. `attended` yields for each group (H / G, m e, m e) moments of the
        attention-weighted stacked values per query head; w_o (H, e, D).
        """
        groups = len(self.values)
        m = len(self.queries) // groups
        owner = torch.arange(m).repeat_interleave(len(w_o) // len(self.queries))
        parts = zip(attended, self.values, w_o.double().unflatten(0, (groups, -1)), strict=True)
        return [shared_value(outputs, values, w @ w.mT, owner) for outputs, values, w in parts]


def head_maps(
    heads: LayerHeads,
    groups: int,
    keys: Sequence[GroupMaps],
    values: Sequence[GroupMaps],
    order: tuple[int, ...] | None = None,
) -> HeadMaps:
    """The maps of a layer from those of its groups. Empty `keys`: keys are averaged. Empty `values`: each group keeps
    the values of its first head.
    """
    key, query = mean(heads.kv, groups).key, None
    if keys:
        key = torch.stack([shared.merge for shared in keys]).cpu()
        query = torch.cat([shared.back.repeat_interleave(heads.query // heads.kv, 0) for shared in keys]).cpu()
    value, output = first(heads.kv, groups).value, None
    if values:
        value = torch.stack([shared.merge for shared in values]).cpu()
        output = torch.block_diag(*(back for shared in values for back in shared.back)).cpu()
    return HeadMaps(key, value, query, output, order)


def stack_groups(heads: Tensor, groups: int) -> Tensor:
    """(B, Hk, T, d) -> (G, B, T, m d)."""
    stacked: Tensor = heads.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4)
    return stacked.flatten(3)


def find_order(moments: Moments, w_o: Tensor, groups: int, rotary: Rotary, free_keys: bool) -> Group | None:
    """The order of heads in which consecutive ones form the groups with the least loss; None if neighbours already do.

    The loss of a group is its lost score energy plus its lost output energy, each divided by the mean over groups of
    neighbours. `moments`: of the whole layer as one group; w_o (H, e, D).
    """
    heads = len(moments.queries)
    gains = (w_o @ w_o.mT).unflatten(0, (heads, -1)).sum(1)  # (Hk, e, e)
    contiguous = tuple(tuple(range(j * heads // groups, (j + 1) * heads // groups)) for j in range(groups))
    lost_keys = cache(lambda group: _lost_keys(moments, group, rotary, free_keys))

    @cache
    def lost_values(group: Group) -> float:
        rows = _rows(torch.tensor(group), gains.shape[1])
        return _energy_outside(moments.values[0][rows][:, rows], gains[list(group)])

    units = [sum(map(lost, contiguous)) / groups for lost in (lost_keys, lost_values)]

    @cache
    def cost(group: Group) -> float:
        parts = zip((lost_keys(group), lost_values(group)), units, strict=True)
        return sum(lost / unit for lost, unit in parts if unit > 0)

    best = min(partitions(tuple(range(heads)), heads // groups), key=lambda partition: sum(map(cost, partition)))
    if sum(map(cost, best)) > (1 - 1e-6) * sum(map(cost, contiguous)):
        return None
    return tuple(head for group in best for head in group)


def partitions(heads: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """Each partition of sorted heads once: the next group always contains the smallest remaining head."""
    if not heads:
        yield ()
        return
    for partners in combinations(heads[1:], size - 1):
        group = (heads[0], *partners)
        for rest in partitions(tuple(head for head in heads if head not in group), size):
            yield (group, *rest)


def _lost_keys(moments: Moments, group: Group, rotary: Rotary, free_keys: bool) -> float:
    """Energy of scores outside of the directions that one shared key keeps if each frequency is merged alone."""
    dim = moments.queries.shape[1]
    rows = _rows(torch.tensor(group), dim)
    keys, queries = moments.keys[0][rows][:, rows], moments.queries[list(group)]
    if not free_keys:  # keys are averaged
        blocks = keys.view(len(group), dim, len(group), dim)
        return float(keys.trace() - torch.einsum("aibi->", blocks) / len(group))
    lost = 0.0
    if rotary.dims:
        real, imaginary = pairs(rotary)
        weight = key_weights(queries, real, imaginary)
        spread = weight[:, :, None] * complex_moments(keys.view(len(group), dim, -1, dim), real, imaginary)
        lost += float(torch.linalg.eigvalsh(spread * weight[:, None, :])[:, :-1].clamp_min(0).sum())
    if rotary.dims < dim:
        varying, dims = without_means(keys, moments.key_means[0][rows]), torch.arange(rotary.dims, dim)
        plain = (torch.arange(len(group))[:, None] * dim + dims).flatten()
        lost += _energy_outside(varying[plain][:, plain], queries[:, dims][:, :, dims])
    return lost


def _energy_outside(covariance: Tensor, energy: Tensor) -> float:
    """Sum of all but the n largest eigenvalues of E^1/2 S E^1/2: S (m n, m n), E block-diagonal of (m, n, n)."""
    values, vectors = torch.linalg.eigh(energy)
    root = torch.block_diag(*(vectors * values.clamp_min(0).sqrt()[:, None] @ vectors.mT))
    eigenvalues = torch.linalg.eigvalsh(root @ covariance @ root)
    return float(eigenvalues[: -energy.shape[1]].clamp_min(0).sum())


def _rows(heads: Tensor, dim: int) -> Tensor:
    """(..., m) numbers of heads -> (..., m dim) their rows where heads are stacked."""
    return (heads[..., None] * dim + torch.arange(dim)).flatten(-2)
