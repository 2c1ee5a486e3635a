"""Maps that merge the heads of one attention module, and the files that store those of a model.

Letters: H query heads, Hk key/value heads, G groups of m = Hk / G, d and e the dimensions of a key
and a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.convert.heads.layouts import QUERY_ROLES

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.heads.layouts import Role

    # Keys or values (Hk, rows, *rest) -> (G, rows, *rest); queries and outputs (H, rows, *rest) ->
    # the same.
    MergeHeads = Callable[[Role, Tensor], Tensor]


@dataclass(frozen=True)
class HeadMaps:
    """Linear maps that merge the heads of one attention module.

    Maps of keys and values apply to biases too.

    Attributes:
        key: (G, d, m * d), `W_K'[j] = key[j] @ stack(W_K of the group)`; or (G, m) weights, short
            for blocks key[j, a] * I.
        value: (G, e, m * e) or (G, m), the same for values.
        query: (H, d, d), `W_Q'[i] = query[i] @ W_Q[i]`; None for the identity.
        output: (H * e, H * e), `W_O' = W_O @ output` with W_O (D, H * e); None for the identity.
        order: (Hk,), source heads in the order in which neighbors are merged; query heads move with
            them. None for their own order.
    """

    key: Tensor
    value: Tensor
    query: Tensor | None = None
    output: Tensor | None = None
    order: tuple[int, ...] | None = None

    def merge(self, role: Role, heads: Tensor) -> Tensor:
        """Keys or values (Hk, rows, *rest) -> (G, rows, *rest); queries and outputs (H, rows,
        *rest) -> the same.

        Summed in float32 (float64 for F64) and rounded once.
        """
        if self.order is not None:
            heads = heads[query_order(self.order, len(heads))]
        if role in QUERY_ROLES:
            return self._changed_basis(role, heads)

        weights = self.value if role == "value" else self.key
        if weights.ndim == 2:
            return _pooled(heads, weights)

        groups, rows, width = weights.shape
        per_group = heads.shape[0] // groups
        if heads.shape[1] * per_group != width:  # not the d dimensions of heads (a norm, a gate)
            return _pooled(heads, weights.new_full((groups, per_group), 1 / per_group))

        merged = heads.new_empty(groups, rows, *heads.shape[2:])
        members = heads.unflatten(0, (groups, -1)).flatten(1, 2)  # (G, m * d, *rest)
        for j in range(groups):
            merged[j] = _product(weights[j], members[j])
        return merged

    def _changed_basis(self, role: Role, heads: Tensor) -> Tensor:
        """Queries or outputs (H, rows, *rest) in the basis of the merged heads."""
        maps = self.query if role == "query" else self.output
        if maps is None:
            return heads

        if role == "output":  # heads of W_O^T: (W_O C)^T = C^T W_O^T
            product = _product(maps.T, heads.flatten(0, 1))
            return product.to(heads.dtype).view_as(heads)

        if heads.shape[1] != maps.shape[1]:  # one number for each head: a sink
            return heads
        changed = heads.clone()
        for head, matrix in enumerate(maps):
            changed[head] = _product(matrix, heads[head])
        return changed


def mean_maps(kv: int, groups: int) -> HeadMaps:
    """Average the heads of each group: weights 1 / m, m = Hk / G."""
    import torch

    weights = torch.full((groups, kv // groups), groups / kv, dtype=torch.float64)
    return HeadMaps(key=weights, value=weights)


def first_maps(kv: int, groups: int) -> HeadMaps:
    """Keep the first head of each group."""
    import torch

    weights = torch.zeros(groups, kv // groups, dtype=torch.float64)
    weights[:, 0] = 1.0
    return HeadMaps(key=weights, value=weights)


def query_order(order: tuple[int, ...], heads: int) -> list[int]:
    """The same order for `heads` = r Hk query heads, r of which read each key/value head."""
    per_head = heads // len(order)
    query_numbers: list[int] = []
    for head in order:
        first = head * per_head
        query_numbers.extend(range(first, first + per_head))
    return query_numbers


def _product(matrix: Tensor, rows: Tensor) -> Tensor:
    """(n, k) @ (k, *rest) in float32, in float64 for rows of float64."""
    import torch

    precise = torch.float64 if rows.dtype == torch.float64 else torch.float32
    product = matrix.to(precise) @ rows.to(precise).reshape(len(rows), -1)
    return product.view(len(matrix), *rows.shape[1:])


def _pooled(heads: Tensor, weights: Tensor) -> Tensor:
    """Sums (G, rows, *rest) of the heads (Hk, rows, *rest) of each group, with (G, m) weights."""
    import torch

    groups, per_group = weights.shape
    merged = heads.new_empty(groups, *heads.shape[1:])
    precise = torch.float64 if heads.dtype == torch.float64 else torch.float32
    members = heads.unflatten(0, (groups, per_group))  # (G, m, rows, *rest)
    for j, row in enumerate(weights.tolist()):
        total: Tensor | None = None
        # One head at a time: the wide numbers stay in the cache.
        for head, weight in zip(members[j], row, strict=True):
            if not weight:  # times zero, an Inf of an unused head would become a NaN of the group
                continue
            wide = head.to(precise)
            total = wide * weight if total is None else total.add_(wide, alpha=weight)
        merged[j] = 0 if total is None else total
    return merged


MAP_ROLES = ("key", "value", "query", "output")  # the maps of `HeadMaps`, by name


@dataclass(frozen=True)
class StoredMaps:
    """What a method found for a model: maps, trained tensors, errors, quality.

    Each attention module has `MODULE/key`, `/value`, `/query`, `/output`, `/order` (see HeadMaps).
    Tensors that replace whole tensors of the result (trained ones) have the names of those.

    Attributes:
        files: Safetensors, one for each finished layer (of methods that read weights: module).
        description: What made them, as JSON: the method, its options, the text.
        errors: If the method reads text, for each layer the largest `FittedModule.error` of its
            modules; None for a layer in which nothing is merged.
        drifts: If the method reads text, how far the hidden states after each layer are from those
            of the base model (`StreamPair.drift`).
        quality: Of both models on held-out text (`QualityCheck`); None if not measured.
    """

    files: tuple[Path, ...]
    description: Mapping[str, Any]
    errors: Sequence[float | None] = ()
    drifts: Sequence[float] = ()
    quality: Mapping[str, Any] | None = None

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """The open file of each tensor, by the tensor's name."""
        from safetensors import safe_open

        files_by_name: dict[str, Any] = {}
        for path in self.files:
            file: Any = safe_open(path, framework="pt")
            files_by_name |= dict.fromkeys(file.keys(), file)
        return files_by_name

    def of_module(self, module: str) -> HeadMaps | None:
        """The maps of the attention module at this path, or None."""
        maps = {
            role: self.tensor(f"{module}/{role}")
            for role in MAP_ROLES
            if f"{module}/{role}" in self.names
        }
        if not maps:
            return None

        order: tuple[int, ...] | None = None
        if f"{module}/order" in self.names:
            order = tuple(self.tensor(f"{module}/order").tolist())
        return HeadMaps(**maps, order=order)

    def tensor(self, name: str) -> Tensor:
        """One stored tensor: a map, or a trained tensor of the result."""
        tensor: Tensor = self.names[name].get_tensor(name)
        return tensor
