"""How the heads of one attention layer lie in its stored tensors.

      MHA  G = H            GQA  1 < G < H          MQA  G = 1
    q q q q q q q q       q q q q q q q q       q q q q q q q q      query head i reads KV head
    | | | | | | | |        \\| |/   \\| |/         \\ \\ \\| |/ / /       i // (H // G): contiguous
    k k k k k k k k         k       k                 k              groups, in every runtime

A layout splits a stored tensor into its heads and joins heads to a tensor: `join` is the inverse of `split`, also for
heads that were merged to fewer, or repeated, in between. Run on a meta tensor the same code yields the new shape, so
the plan cannot differ from the rewrite. Shape letters: H query heads, Hk key/value heads before, G after, d head
dimension, D hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gqa.checkpoint.errors import CorruptError

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["query", "key", "value", "output"]
# What a tensor is split into: heads (n, rows, *rest) by role, or `whole`: a tensor without heads, as it is.
Part = Literal["query", "key", "value", "output", "whole"]
Parts = dict[Part, "Tensor"]
QUERY_ROLES = ("query", "output")
# G of a result: of all layers (where types of layers differ, of the main one; the others in proportion), or of each.
Groups = int | tuple[int, ...]


def groups_text(groups: Groups) -> str:
    """`2`, or `1 to 3 (1.67 on average)`."""
    if isinstance(groups, int):
        return str(groups)
    return f"{min(groups)} to {max(groups)} ({sum(groups) / len(groups):.3g} on average)"


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one attention layer: `query` H, `kv` Hk, and the rows of one key and one value head.

    `keys_only` where its values are its keys and none are stored.
    """

    query: int
    kv: int
    key_dim: int
    value_dim: int
    keys_only: bool = False

    def count(self, role: Role) -> int:
        return self.query if role in QUERY_ROLES else self.kv

    def dim(self, role: Role) -> int:
        return self.value_dim if role in ("value", "output") else self.key_dim


class Layout:
    """Where the heads lie in one stored tensor. This one knows of none: the tensor stays, or is replaced as a whole."""

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        """The heads (n, rows, *rest) of each role. Raises CorruptError when the shape contradicts `heads`."""
        return {"whole": tensor}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        """The tensor of these heads, of which those of keys and values may be fewer or more than the `heads` split."""
        return parts["whole"]


def _require(actual: int, expected: int, meaning: str) -> None:
    if actual != expected:
        raise CorruptError(f"has {actual} rows where the config asks for {expected} ({meaning})")


@dataclass(frozen=True)
class Separate(Layout):
    """All heads of one role, one after another on `axis`: (Hk * d, *rest), a bias (Hk * d,) (none on axis 1).

    `width` is what one head takes: its `dim`, `one` row (a norm (Hk, d), a scalar), or `any` equal share.
    """

    role: Role
    width: Literal["dim", "one", "any"] = "dim"
    axis: Literal[0, 1] = 0

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        if tensor.ndim <= self.axis:
            return {"whole": tensor}
        tensor = tensor.transpose(0, self.axis)
        count = heads.count(self.role)
        rows = {"dim": heads.dim(self.role), "one": 1, "any": tensor.shape[0] // count}[self.width]
        _require(tensor.shape[0], count * rows, f"{count} {self.role} heads x {rows}")
        return {self.role: tensor.reshape(count, rows, *tensor.shape[1:])}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        if "whole" in parts:
            return parts["whole"]
        return parts[self.role].flatten(0, 1).transpose(0, self.axis)


@dataclass(frozen=True)
class Fused(Layout):
    """Queries, keys and values in one tensor, in one of two orders of rows.

    `stacked`: all of Q, then all of K, then all of V (Phi-3, DBRX).
    `grouped`: for each KV head its queries, its key, its value (Falcon, GPTBigCode): with Hk = H one [q, k, v] after
    the other, with Hk = 1 the same as `stacked`.
    """

    order: Literal["stacked", "grouped"]

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        dim, rest = heads.key_dim, tensor.shape[1:]
        rows = (heads.query + 2 * heads.kv) * dim
        _require(tensor.shape[0], rows, f"({heads.query} query + 2 x {heads.kv} key/value heads) x {dim}")
        if self.order == "stacked":
            per_head = tensor.reshape(heads.query + 2 * heads.kv, dim, *rest)
            q, k, v = per_head.split([heads.query, heads.kv, heads.kv])
            return {"query": q, "key": k, "value": v}
        repeat = heads.query // heads.kv
        per_group = tensor.reshape(heads.kv, repeat + 2, dim, *rest)  # (Hk, r + 2, d, *rest)
        q = per_group[:, :repeat].flatten(0, 1)
        return {"query": q, "key": per_group[:, repeat], "value": per_group[:, repeat + 1]}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        import torch

        q, k, v = parts["query"], parts["key"], parts["value"]
        if self.order == "stacked":
            return torch.cat([q, k, v]).flatten(0, 1)
        per_group = q.unflatten(0, (len(k), -1))  # (G, r, d, *rest)
        return torch.cat([per_group, k[:, None], v[:, None]], dim=1).flatten(0, 2)


@dataclass(frozen=True)
class ReadsValues(Layout):
    """Doge's `dt_proj` (Hk, Hk * d): row per KV head, columns read the concatenated values.

    Rows merge as keys do; every column block that read a value head now reads the group's one, so the blocks of a
    group are summed. Upwards each copy carries its share.
    """

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        _require(tensor.shape[0], heads.kv, f"{heads.kv} key/value heads")
        if tensor.ndim > 1:  # the bias has rows only
            _require(tensor.shape[1], heads.kv * heads.value_dim, f"{heads.kv} value heads x {heads.value_dim}")
        return {"key": tensor.unsqueeze(1)}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        rows = parts["key"].squeeze(1)  # (G, Hk * d)
        if rows.ndim == 1:
            return rows
        groups = rows.shape[0]
        columns: Tensor = rows.unflatten(1, (heads.kv, heads.value_dim))  # (G, Hk, d)
        if groups <= heads.kv:
            columns = columns.unflatten(1, (groups, -1)).sum(2)  # (G, G, d)
        else:
            repeat = groups // heads.kv
            columns = (columns / repeat).repeat_interleave(repeat, dim=1)
        return columns.flatten(1)


@dataclass(frozen=True)
class Conv1D(Layout):
    """The weight of transformers' Conv1D, stored (in, out): `layout` with its axes swapped. A bias is as it is."""

    layout: Layout

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        return self.layout.split(tensor.T if tensor.ndim == 2 else tensor, heads)

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        joined = self.layout.join(parts, heads)
        return joined.T if joined.ndim == 2 else joined


@dataclass(frozen=True)
class Rule:
    """One kind of tensor below an attention module: its name (without `.weight`/`.bias`) and its layout.

    With `{head}` in the name there is one tensor per head (StableLM's `k_layernorm.norms.7.weight`): the layout is that
    of their stack (Hk, d).
    `projection` tells keys and values themselves from what belongs to their heads (norms, convolutions, gates).
    `when` is a config field and the value it must have for the rule to hold.
    """

    tensor: str
    layout: Layout
    projection: bool = True
    when: tuple[str, Any] | None = None

    @property
    def numbered(self) -> bool:
        return "{head}" in self.tensor

    def matches(self, tail: str, text: Any) -> bool:
        """Whether it is about a tensor, by its name below the module, of a model with this config."""
        name = re.escape(self.tensor).replace(r"\{head\}", r"\d+")
        holds = self.when is None or getattr(text, self.when[0], None) == self.when[1]
        return holds and re.fullmatch(rf"{name}(?:\.weight|\.bias)?", tail) is not None
