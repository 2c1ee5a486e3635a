"""How the heads of one attention layer lie in its stored tensors.

      MHA  G = H            GQA  1 < G < H          MQA  G = 1
    q q q q q q q q       q q q q q q q q       q q q q q q q q      query head i reads KV head
    | | | | | | | |        \\| |/   \\| |/         \\ \\ \\| |/ / /       i // (H // G): contiguous
    k k k k k k k k         k       k                 k              groups, in every runtime

A layout takes a stored tensor apart into its heads, lets a merge change the number of key/value heads, and puts the
tensor together again. Run on a meta tensor the same code yields the new shape, so the plan cannot differ from the
rewrite. Shape letters: H query heads, Hk key/value heads before, G after, d head dimension, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from gqa.checkpoint.errors import CorruptError

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["query", "key", "value", "output"]
QUERY_ROLES = ("query", "output")
# (role, heads (Hk, rows, *rest)) -> (G, rows, *rest); queries and outputs (H, rows, *rest) stay as many
Merge = Callable[[Role, "Tensor"], "Tensor"]


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one attention layer: `query` H, `kv` Hk, and the rows of one key and one value head."""

    query: int
    kv: int
    key_dim: int
    value_dim: int

    def count(self, role: Role) -> int:
        return self.query if role in QUERY_ROLES else self.kv

    def dim(self, role: Role) -> int:
        return self.value_dim if role in ("value", "output") else self.key_dim

    def with_kv(self, kv: int) -> LayerHeads:
        return replace(self, kv=kv)


class Layout(Protocol):
    """Where the heads lie in one stored tensor."""

    def regroup(self, tensor: Tensor, heads: LayerHeads, merge: Merge) -> Tensor:
        """The tensor with its key/value heads merged. Raises CorruptError when the shape contradicts `heads`."""
        ...


def _require(actual: int, expected: int, meaning: str) -> None:
    if actual != expected:
        raise CorruptError(f"has {actual} rows where the config asks for {expected} ({meaning})")


@dataclass(frozen=True)
class Separate:
    """All heads of one role, one after another on `axis`: (Hk * d, *rest), a bias (Hk * d,) (none on axis 1).

    `width` is what one head takes: its `dim`, `one` row (a norm (Hk, d), a scalar), or `any` equal share.
    """

    role: Role
    width: Literal["dim", "one", "any"] = "dim"
    axis: Literal[0, 1] = 0

    def regroup(self, tensor: Tensor, heads: LayerHeads, merge: Merge) -> Tensor:
        if tensor.ndim <= self.axis:
            return tensor
        tensor = tensor.transpose(0, self.axis)
        count = heads.count(self.role)
        rows = {"dim": heads.dim(self.role), "one": 1, "any": tensor.shape[0] // count}[self.width]
        _require(tensor.shape[0], count * rows, f"{count} {self.role} heads x {rows}")
        merged = merge(self.role, tensor.reshape(count, rows, *tensor.shape[1:])).flatten(0, 1)
        return merged.transpose(0, self.axis)


@dataclass(frozen=True)
class Fused:
    """Queries, keys and values in one tensor, in one of two orders of rows.

    `stacked`: all of Q, then all of K, then all of V (Phi-3, DBRX, multi-query Falcon and GPTBigCode).
    `grouped`: for each KV head its queries, its key, its value (Falcon's new architecture; with Hk = H this is the
    per-head [q, k, v] of Falcon-RW and GPTBigCode).
    The target is laid out by `target`, given the number of KV heads, where it differs.
    """

    order: Literal["stacked", "grouped"]
    target: Callable[[int], Literal["stacked", "grouped"]] | None = None

    def regroup(self, tensor: Tensor, heads: LayerHeads, merge: Merge) -> Tensor:
        q, k, v = self.unpack(tensor, heads)
        q, k, v = merge("query", q), merge("key", k), merge("value", v)
        order = self.target(k.shape[0]) if self.target else self.order
        return self.pack(q, k, v, order)

    def unpack(self, tensor: Tensor, heads: LayerHeads) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (H, d, *rest), keys (Hk, d, *rest) and values (Hk, d, *rest)."""
        dim, rest = heads.key_dim, tensor.shape[1:]
        rows = (heads.query + 2 * heads.kv) * dim
        _require(tensor.shape[0], rows, f"({heads.query} query + 2 x {heads.kv} key/value heads) x {dim}")
        if self.order == "stacked":
            per_head = tensor.reshape(heads.query + 2 * heads.kv, dim, *rest)
            q, k, v = per_head.split([heads.query, heads.kv, heads.kv])
            return q, k, v
        repeat = heads.query // heads.kv
        per_group = tensor.reshape(heads.kv, repeat + 2, dim, *rest)  # (Hk, r + 2, d, *rest)
        return per_group[:, :repeat].flatten(0, 1), per_group[:, repeat], per_group[:, repeat + 1]

    @staticmethod
    def pack(q: Tensor, k: Tensor, v: Tensor, order: Literal["stacked", "grouped"]) -> Tensor:
        """The inverse of `unpack` for that order."""
        import torch

        if order == "stacked":
            return torch.cat([q, k, v]).flatten(0, 1)
        per_group = q.unflatten(0, (k.shape[0], -1))  # (G, r, d, *rest)
        return torch.cat([per_group, k[:, None], v[:, None]], dim=1).flatten(0, 2)


@dataclass(frozen=True)
class ReadsValues:
    """Doge's `dt_proj` (Hk, Hk * d): row per KV head, columns read the concatenated values.

    Rows merge as keys do; every column block that read a value head now reads the group's one, so the blocks of a
    group are summed (families.md, measured). Upwards each copy carries its share.
    """

    def regroup(self, tensor: Tensor, heads: LayerHeads, merge: Merge) -> Tensor:
        _require(tensor.shape[0], heads.kv, f"{heads.kv} key/value heads")
        if tensor.ndim == 1:  # the bias: rows only
            return merge("key", tensor.unsqueeze(1)).squeeze(1)
        _require(tensor.shape[1], heads.kv * heads.value_dim, f"{heads.kv} value heads x {heads.value_dim}")
        rows = merge("key", tensor.unsqueeze(1)).squeeze(1)  # (G, Hk * d)
        groups = rows.shape[0]
        columns: Tensor = rows.unflatten(1, (heads.kv, heads.value_dim))  # (G, Hk, d)
        if groups <= heads.kv:
            columns = columns.unflatten(1, (groups, -1)).sum(2)  # (G, G, d)
        else:
            repeat = groups // heads.kv
            columns = (columns / repeat).repeat_interleave(repeat, dim=1)
        return columns.flatten(1)


@dataclass(frozen=True)
class Untouched:
    """A tensor whose heads are not known: it stays, or is replaced as a whole."""

    def regroup(self, tensor: Tensor, heads: LayerHeads, merge: Merge) -> Tensor:
        return tensor


@dataclass(frozen=True)
class Numbered:
    """One stored tensor per head, numbered by head (StableLM's `k_layernorm.norms.7.weight`): the stack (Hk, d)."""

    role: Role

    def regroup(self, tensor: Tensor, heads: LayerHeads, merge: Merge) -> Tensor:
        _require(tensor.shape[0], heads.count(self.role), f"{heads.count(self.role)} {self.role} heads")
        return merge(self.role, tensor.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Conv1D:
    """The weight of transformers' Conv1D, stored (in, out): `layout` with its axes swapped. A bias is as it is."""

    layout: Layout

    def regroup(self, tensor: Tensor, heads: LayerHeads, merge: Merge) -> Tensor:
        if tensor.ndim < 2:
            return self.layout.regroup(tensor, heads, merge)
        return self.layout.regroup(tensor.T, heads, merge).T
