r"""Where the heads lie in stored tensors.

      MHA  G = H            GQA  1 < G < H          MQA  G = 1
    q q q q q q q q       q q q q q q q q       q q q q q q q q      query head i reads KV head
    | | | | | | | |        \| |/   \| |/         \ \ \| |/ / /       i // (H // G): contiguous
    k k k k k k k k         k       k                 k              groups, in every runtime

A layout splits a stored tensor into its heads and joins heads to a tensor: `join` is the inverse of
`split`, also for heads that were merged or repeated in between. `shape` is the shape of what it
joins, which the plan states before any tensor is read.

Shape letters: H query heads, Hk key/value heads before, G after, d head dimension, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gqa.core.errors import CorruptError

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["query", "key", "value", "output"]
# What a tensor is split into: heads (n, rows, *rest) by role, or `whole`: a tensor without heads,
# as it is.
Part = Literal["query", "key", "value", "output", "whole"]
Parts = dict[Part, "Tensor"]
Shape = tuple[int, ...]
QUERY_ROLES = ("query", "output")


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one attention layer.

    Attributes:
        query: H, the number of query heads.
        kv: Hk, the number of KV heads.
        key_dim: Rows of one key head.
        value_dim: Rows of one value head.
        keys_only: Whether its values are its keys, so that none are stored.
    """

    query: int
    kv: int
    key_dim: int
    value_dim: int
    keys_only: bool = False

    @property
    def queries_per_kv(self) -> int:
        """How many query heads read a KV head."""
        return self.query // self.kv

    def count(self, role: Role) -> int:
        """Number of heads of a role."""
        return self.query if role in QUERY_ROLES else self.kv

    def dim(self, role: Role) -> int:
        """Rows of one head of a role."""
        return self.value_dim if role in ("value", "output") else self.key_dim


class Layout:
    """Where the heads lie in one stored tensor.

    The base of all layouts, and itself that of a tensor without heads, which is handled whole.
    """

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        """The heads (n, rows, *rest) of each role.

        Raises CorruptError if the shape contradicts `heads`.
        """
        return {"whole": tensor}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        """The tensor with these heads.

        Keys and values may have more or fewer than the `heads` of the source.
        """
        return parts["whole"]

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        """The shape of the tensor with `groups` key and value heads, from that with `heads`."""
        return shape


def _require(actual: int, expected: int, meaning: str) -> None:
    """Raise CorruptError unless a tensor has as many rows as expected."""
    if actual != expected:
        raise CorruptError(f"has {actual} rows where the config asks for {expected} ({meaning})")


@dataclass(frozen=True)
class Separate(Layout):
    """All heads of one role, one after another on one axis: (Hk * d, *rest).

    A bias is (Hk * d,); on axis 1 it has no heads.

    Attributes:
        role: What the heads are.
        width: Rows of one head: its `dim`, or `one` (a norm (Hk, d), a scalar).
        axis: The axis with the heads.
    """

    role: Role
    width: Literal["dim", "one"] = "dim"
    axis: Literal[0, 1] = 0

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        if tensor.ndim <= self.axis:
            return {"whole": tensor}

        tensor = tensor.transpose(0, self.axis)
        count = heads.count(self.role)
        rows = heads.dim(self.role) if self.width == "dim" else 1
        _require(tensor.shape[0], count * rows, f"{count} {self.role} heads x {rows}")
        return {self.role: tensor.reshape(count, rows, *tensor.shape[1:])}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        if "whole" in parts:
            return parts["whole"]
        return parts[self.role].flatten(0, 1).transpose(0, self.axis)

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        if self.role in QUERY_ROLES or len(shape) <= self.axis:
            return shape
        rows = heads.dim(self.role) if self.width == "dim" else 1
        return (*shape[: self.axis], groups * rows, *shape[self.axis + 1 :])


FusedOrder = Literal["stacked", "grouped"]


@dataclass(frozen=True)
class Fused(Layout):
    """Queries, keys and values in one tensor, in one of the orders of rows `FusedOrder`.

    Attributes:
        order: `stacked`: all of Q, then all of K, then all of V (Phi-3, DBRX). `grouped`: for each
            KV head its queries, its key, its value (Falcon, GPTBigCode): with Hk = H one [q, k, v]
            after the other, with Hk = 1 the same as `stacked`.
    """

    order: FusedOrder

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        dim = heads.key_dim
        rest = tensor.shape[1:]
        count = heads.query + 2 * heads.kv
        meaning = f"({heads.query} query + 2 x {heads.kv} KV heads) x {dim}"
        _require(tensor.shape[0], count * dim, meaning)

        if self.order == "stacked":
            per_head = tensor.reshape(count, dim, *rest)
            query, key, value = per_head.split([heads.query, heads.kv, heads.kv])
            return {"query": query, "key": key, "value": value}

        repeat = heads.query // heads.kv
        per_group = tensor.reshape(heads.kv, repeat + 2, dim, *rest)  # (Hk, r + 2, d, *rest)
        return {
            "query": per_group[:, :repeat].flatten(0, 1),
            "key": per_group[:, repeat],
            "value": per_group[:, repeat + 1],
        }

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        import torch

        query = parts["query"]
        key = parts["key"]
        value = parts["value"]
        if self.order == "stacked":
            return torch.cat([query, key, value]).flatten(0, 1)

        assert self.order == "grouped"
        per_group = query.unflatten(0, (len(key), -1))  # (G, r, d, *rest)
        return torch.cat([per_group, key[:, None], value[:, None]], dim=1).flatten(0, 2)

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        return ((heads.query + 2 * groups) * heads.key_dim, *shape[1:])


@dataclass(frozen=True)
class Transposed(Layout):
    """The weight of transformers' Conv1D, stored (in, out). A bias has one axis, so nothing is
    swapped.

    Attributes:
        layout: The layout of the tensor with its axes swapped.
    """

    layout: Layout

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        return self.layout.split(self._swapped(tensor), heads)

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        return self._swapped(self.layout.join(parts, heads))

    @staticmethod
    def _swapped(tensor: Tensor) -> Tensor:
        return tensor.T if tensor.ndim == 2 else tensor

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        if len(shape) != 2:
            return self.layout.shape(shape, heads, groups)
        return self.layout.shape(shape[::-1], heads, groups)[::-1]


@dataclass(frozen=True)
class Rule:
    """One kind of tensor below an attention module.

    Attributes:
        tensor: Its name, without `.weight` or `.bias`.
        layout: Where the heads lie in it.
        projection: Whether it is the weight or bias of a linear layer that makes or reads heads
            (W_Q, W_K, W_V, W_O), and not something that belongs to heads (norms, convolutions,
            gates). Only projections are merged by maps.
        only_if: A config field, and the value for which the rule holds; None if it always does.
    """

    tensor: str
    layout: Layout
    projection: bool = True
    only_if: tuple[str, Any] | None = None

    def matches(self, tail: str, config: Any) -> bool:
        """Whether the rule applies to the tensor `tail`, its name below the module, of a model with
        this config.
        """
        if self.only_if is not None:
            key, value = self.only_if
            if getattr(config, key, None) != value:
                return False
        return tail in (self.tensor, f"{self.tensor}.weight", f"{self.tensor}.bias")
