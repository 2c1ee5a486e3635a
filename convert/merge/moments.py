"""Second moments of an attention module's queries, keys and values, and the maps that follow.

They are measured on text (`gqa.convert.merge.fit`) or estimated from the weights
(`gqa.convert.merge.maps_from_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gqa.checkpoint.read import Checkpoint
from gqa.convert.head_maps import HeadMaps, first_maps, mean_maps
from gqa.convert.heads.layouts import LayerHeads
from gqa.convert.heads.modules import Change
from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge.linear_algebra import GroupMaps, add_products
from gqa.convert.merge.shared_keys import shared_key
from gqa.convert.merge.shared_values import shared_value
from gqa.core.devices import as_float64


def heads_of(checkpoint: Checkpoint, changes: Iterable[Change]) -> dict[str, Tensor]:
    """Stored heads of a module by role, (n, rows, D) float32;
    biases (n, rows) under `role.bias`.
    """
    by_role: dict[str, Tensor] = {}
    for change in changes:
        if not change.rule.projection:
            continue
        suffix = ".bias" if change.source.name.endswith(".bias") else ""
        for part, heads in change.split(checkpoint.read(change.source)).items():
            if part != "whole":
                by_role[part + suffix] = heads.float()
    return by_role


class MomentSums:
    """Sums over batches of text, from which `averaged` makes `Moments`.

    `_sums` has the form of `Moments`, but its tensors are sums.
    """

    def __init__(
        self, heads: LayerHeads, groups: int, length: int, device: str | torch.device = "cpu"
    ) -> None:
        """Sums over nothing, for `groups` groups and distances below `length`."""
        key_width = heads.kv // groups * heads.key_dim
        value_width = heads.kv // groups * heads.value_dim

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self._sums = Moments(
            keys=zeros(groups, key_width, key_width),
            key_means=zeros(groups, key_width),
            queries=zeros(heads.kv, heads.key_dim, heads.key_dim),
            values=zeros(groups, value_width, value_width),
            distances=zeros(heads.kv, length),
        )
        self._positions = 0  # of queries that are in the sums
        self._visible_keys = 0  # that are in the sums, and as many values

    def add(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sensitivity: Tensor,
        visible: Tensor,
        distances: Tensor,
    ) -> None:
        """Add a batch to the sums.

        Args:
            q: Queries (B, H, T, d).
            k, v: Keys (B, Hk, S, d) and values (B, Hk, S, e).
            sensitivity: (B, H, T), what a query's squared scores count (`query_sensitivity`).
            visible: (B or 1, S), the keys and values that count.
            distances: (H, n), from `query_sensitivity`.
        """
        sums = self._sums
        groups = len(sums.keys)  # 1 if the whole layer is one group
        kv_heads = k.shape[1]
        visible = visible.expand(len(k), -1)
        k = k * visible[:, None, :, None]
        v = v * visible[:, None, :, None]
        self._positions += sensitivity[:, 0].numel()
        self._visible_keys += int(visible.sum())

        keys = as_float64(stack_groups(k, groups).flatten(1, 2))  # (G, n, m d)
        sums.keys.add_(keys.mT @ keys)
        sums.key_means.add_(keys.sum(1))

        add_products(sums.values, stack_groups(v, groups).flatten(1, 2))

        weighted = (q * sensitivity.sqrt().unsqueeze(-1)).transpose(0, 1)  # (H, B, T, d)
        add_products(sums.queries, weighted.unflatten(0, (kv_heads, -1)).flatten(1, 3))

        sums.distances.add_(as_float64(distances.unflatten(0, (kv_heads, -1)).sum(1)))

    def averaged(self) -> Moments:
        """Divide the sums by the number of positions and of visible keys."""
        sums = self._sums
        keys = max(self._visible_keys, 1)
        return Moments(
            sums.keys / keys,
            sums.key_means / keys,
            sums.queries / self._positions,
            sums.values / keys,
            sums.distances,
        )


@dataclass(frozen=True)
class Moments:
    """Second moments of the heads of a module, in float64.

    Attributes:
        keys: (G, m d, m d), of the stacked keys of each group.
        key_means: (G, m d), their means.
        queries: (Hk, d, d), of the query heads of each KV head.
        values: (G, m e, m e), of the stacked values of each group.
        distances: (Hk, n), the weight of the scores at distance 0, 1, ... (positions between query
            and key), for the queries of each KV head; n is 0 if that was not measured.
    """

    keys: Tensor
    key_means: Tensor
    queries: Tensor
    values: Tensor
    distances: Tensor

    def cpu(self) -> Moments:
        return Moments(
            self.keys.cpu(),
            self.key_means.cpu(),
            self.queries.cpu(),
            self.values.cpu(),
            self.distances.cpu(),
        )

    def regrouped(self, order: tuple[int, ...] | None, groups: int) -> Moments:
        """From the moments of one group, those of `groups` groups of heads in this order; None:
        neighbors.
        """
        order = order or tuple(range(len(self.queries)))
        heads = torch.tensor(order).view(groups, -1)

        def blocks(matrix: Tensor) -> Tensor:
            rows = rows_of(heads, len(matrix) // len(order))
            return matrix[rows[:, :, None], rows[:, None, :]]

        return Moments(
            keys=blocks(self.keys[0]),
            key_means=self.key_means[0][rows_of(heads, self.queries.shape[1])],
            queries=self.queries[list(order)],
            values=blocks(self.values[0]),
            distances=self.distances[list(order)],
        )

    def shared_keys(self, rotary: Rotary) -> list[GroupMaps]:
        """The closed-form maps of each group's key."""
        groups = len(self.keys)
        queries = self.queries.unflatten(0, (groups, -1))
        distances = self.distances.unflatten(0, (groups, -1))
        return [
            shared_key(self.keys[j], queries[j], self.key_means[j], distances[j], rotary)
            for j in range(groups)
        ]

    def shared_values(self, attended: Iterable[Tensor], w_o: Tensor) -> list[GroupMaps]:
        """The closed-form maps of each group's value.

        Args:
            attended: For each group (H / G, m e, m e), moments of the attention-weighted stacked
                values per query head.
            w_o: (H, e, D).
        """
        groups = len(self.values)
        heads_of_group = len(self.queries) // groups
        queries_per_kv = len(w_o) // len(self.queries)
        owner = torch.arange(heads_of_group).repeat_interleave(queries_per_kv)
        outputs = w_o.double().unflatten(0, (groups, -1))
        return [
            shared_value(group_attended, values, w @ w.mT, owner)
            for group_attended, values, w in zip(attended, self.values, outputs, strict=True)
        ]


def head_maps(
    heads: LayerHeads,
    groups: int,
    keys: Sequence[GroupMaps] | None,
    values: Sequence[GroupMaps] | None,
    order: tuple[int, ...] | None = None,
) -> HeadMaps:
    """The maps of a module from those of its groups.

    Args:
        heads: Of the base model's module.
        groups: G.
        keys: Of each group; None: keys are averaged.
        values: Of each group; None: the values of its first head, a placeholder for a module of
            which only the attention is wanted.
        order: The order of heads in which consecutive ones are a group; None: as they are.
    """
    key = mean_maps(heads.kv, groups).key
    query = None
    if keys is not None:
        key = torch.stack([shared.merge for shared in keys]).cpu()
        backs = [shared.back.repeat_interleave(heads.queries_per_kv, 0) for shared in keys]
        query = torch.cat(backs).cpu()

    value = first_maps(heads.kv, groups).value
    output = None
    if values is not None:
        value = torch.stack([shared.merge for shared in values]).cpu()
        maps_back = torch.cat([shared.back for shared in values])  # one for each head
        output = torch.block_diag(*maps_back).cpu()
    return HeadMaps(key, value, query, output, order)


def stack_groups(heads: Tensor, groups: int) -> Tensor:
    """(B, Hk, T, d) -> (G, B, T, m d)."""
    stacked: Tensor = heads.unflatten(1, (groups, -1)).permute(1, 0, 3, 2, 4)
    return stacked.flatten(3)


def rows_of(heads: Tensor, dim: int) -> Tensor:
    """(..., m) numbers of heads -> (..., m dim), their rows where heads are stacked."""
    return (heads[..., None] * dim + torch.arange(dim)).flatten(-2)
