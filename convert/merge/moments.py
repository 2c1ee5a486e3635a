"""Second moments of what the heads of a layer compute, guessed or measured, and the maps that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gqa.checkpoint.devices import as_float64
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.symmetries import Rotary
from gqa.convert.maps import HeadMaps
from gqa.convert.merge.linear_algebra import GroupMaps, shared_key, shared_value
from gqa.convert.methods import first, mean


@dataclass
class Moments:
    """Second moments, float64, or sums that become them (`averaged`).

    keys, key_means: (G, m d, m d) and (G, m d) of the keys of each group, stacked.
    queries: (Hk, d, d) for each head, of its query heads.
    values: (G, m e, m e) of the values of each group, stacked.
    counted: Positions of keys and values in sums.
    """

    keys: Tensor
    key_means: Tensor
    queries: Tensor
    values: Tensor
    counted: int = 0

    @classmethod
    def zeros(cls, heads: LayerHeads, groups: int, device: str | torch.device = "cpu") -> Moments:
        m, d, e = heads.kv // groups, heads.key_dim, heads.value_dim
        shapes = ((groups, m * d, m * d), (groups, m * d), (heads.kv, d, d), (groups, m * e, m * e))
        keys, means, queries, values = (torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes)
        return cls(keys, means, queries, values)

    def add(self, q: Tensor, k: Tensor, v: Tensor, significance: Tensor, seen: Tensor) -> None:
        """(B, H, T, d) queries, (B, Hk, S, d) keys, (B, Hk, S, e) values, (B, H, T) what errors of scores do, (B or 1,
        S) which keys are `seen` at all: the others count nothing.
        """
        groups = len(self.keys)  # one for the whole layer
        seen = seen.expand(len(k), -1)
        k, v = (heads * seen[:, None, :, None] for heads in (k, v))
        self.counted += int(seen.sum())
        keys, values = stack_groups(k, groups), stack_groups(v, groups)
        rows = as_float64(keys.flatten(1, 2))  # (G, n, m d)
        self.keys += rows.mT @ rows
        self.key_means += rows.sum(1)
        rows = as_float64(values.flatten(1, 2))
        self.values += rows.mT @ rows
        rows = as_float64((q * significance.sqrt().unsqueeze(-1)).transpose(0, 1).flatten(1, 2))  # (H, n, d)
        self.queries += (rows.mT @ rows).unflatten(0, (k.shape[1], -1)).sum(1)

    def cpu(self) -> Moments:
        return Moments(self.keys.cpu(), self.key_means.cpu(), self.queries.cpu(), self.values.cpu(), self.counted)

    def averaged(self, count: int) -> Moments:
        """Of sums over `count` queries, and as many keys as were seen."""
        keys = max(self.counted, 1)
        return Moments(self.keys / keys, self.key_means / keys, self.queries / count, self.values / keys)

    def regrouped(self, order: tuple[int, ...], groups: int) -> Moments:
        """Of one group -> those of `groups` groups of heads in that order."""
        heads = torch.tensor(order).view(groups, -1)

        def rows(dim: int) -> Tensor:  # (G, m d)
            return (heads[:, :, None] * dim + torch.arange(dim)).flatten(1)

        def blocks(matrix: Tensor) -> Tensor:
            index = rows(len(matrix) // len(order))
            return matrix[index[:, :, None], index[:, None, :]]

        means = self.key_means[0][rows(self.key_means.shape[1] // len(order))]
        return Moments(blocks(self.keys[0]), means, self.queries[list(order)], blocks(self.values[0]))

    def shared_keys(self, rotary: Rotary) -> list[GroupMaps]:
        """The closed form of each group's key."""
        queries = self.queries.unflatten(0, (len(self.keys), -1))
        return [shared_key(*of, rotary).cpu() for of in zip(self.keys, queries, self.key_means, strict=True)]

    def shared_values(self, seen: Iterable[Tensor], w_o: Tensor) -> list[GroupMaps]:
        """The closed form of each group's value: `seen` gives (H / G, m e, m e) of one of them after another, the
        moments of the stacked values that each query head sees; w_o (H, e, D).
        """
        groups = len(self.values)
        m = len(self.queries) // groups
        owner = torch.arange(m).repeat_interleave(len(w_o) // len(self.queries))
        parts = zip(seen, self.values, w_o.double().unflatten(0, (groups, -1)), strict=True)
        return [shared_value(each, values, w @ w.mT, owner).cpu() for each, values, w in parts]


def head_maps(
    heads: LayerHeads,
    groups: int,
    keys: Sequence[GroupMaps],
    values: Sequence[GroupMaps],
    order: tuple[int, ...] | None = None,
) -> HeadMaps:
    """The maps of a layer from those of its groups. Without any of keys they are averaged; without any of values those
    of the first head stay.
    """
    key, query = mean(heads.kv, groups).key, None
    if keys:
        key = torch.stack([shared.merge for shared in keys])
        query = torch.cat([shared.back.repeat_interleave(heads.query // heads.kv, 0) for shared in keys])
    value, output = first(heads.kv, groups).value, None
    if values:
        value = torch.stack([shared.merge for shared in values])
        output = torch.block_diag(*(back for shared in values for back in shared.back))
    return HeadMaps(key, value, query, output, order)


def stack_groups(heads: Tensor, groups: int) -> Tensor:
    """(B, Hk, T, d) -> (G, B, T, m * d)."""
    stacked: Tensor = heads.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4)
    return stacked.flatten(3)
