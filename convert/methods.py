"""The methods, and how they apply: how the heads of a group are merged into one.

`mean` and `first` are the pooling of arXiv 2305.13245, section 2.1 and figure 4; `random` is that
figure's control. The others read the model: their maps are computed first
(`gqa.convert.merge.find_maps`) and then applied; modules without maps (those of layers that predict
further tokens) are pooled.

Letters: H query heads, Hk key/value heads, G groups of m = Hk / G, d and e the dimensions of a key
and a value head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gqa.convert.heads.family import QUERY_ROLES

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from gqa.convert.heads.family import Role
    from gqa.convert.heads.modules import Change


@dataclass(frozen=True)
class HeadMaps:
    """Linear maps that merge the heads of one attention module.

    key: (G, d, m * d), `W_K'[j] = key[j] @ stack(W_K of the group)`; or (G, m) weights, short for
    blocks key[j, a] * I. value: (G, e, m * e) or (G, m), the same for values. Both hold for biases
    too. query: (H, d, d), `W_Q'[i] = query[i] @ W_Q[i]`; None for the identity. output: (H * e, H *
    e), `W_O' = W_O @ output` with W_O (D, H * e); None for the identity. order: (Hk,) source heads
    in the order in which neighbors are merged; query heads move with them.
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
            return self._reshape(role, heads)
        weights = self.value if role == "value" else self.key
        if weights.ndim == 2:
            return _pooled(heads, weights)
        groups, rows, width = weights.shape
        # A row or so for each head: a norm, a gate
        if heads.shape[1] * (heads.shape[0] // groups) != width:
            return _pooled(
                heads, weights.new_full((groups, heads.shape[0] // groups), groups / heads.shape[0])
            )
        merged = heads.new_empty(groups, rows, *heads.shape[2:])
        if not heads.is_meta:
            members = heads.unflatten(0, (groups, -1)).flatten(1, 2)  # (G, m * d, *rest)
            for j in range(groups):
                merged[j] = _product(weights[j], members[j])
        return merged

    def _reshape(self, role: Role, heads: Tensor) -> Tensor:
        maps = self.query if role == "query" else self.output
        if maps is None or heads.is_meta:
            return heads
        if role == "output":  # heads of W_O^T: (W_O C)^T = C^T W_O^T
            return _product(maps.T, heads.flatten(0, 1)).to(heads.dtype).view_as(heads)
        if heads.shape[1] != maps.shape[1]:  # one number for each head: a sink
            return heads
        changed = heads.clone()
        for head, matrix in enumerate(maps):
            changed[head] = _product(matrix, heads[head])
        return changed


def query_order(order: tuple[int, ...], heads: int) -> list[int]:
    """The same order for `heads` = r Hk query heads, r of which read each key/value head."""
    per_head = heads // len(order)
    return [head * per_head + i for head in order for i in range(per_head)]


def _product(matrix: Tensor, rows: Tensor) -> Tensor:
    """(n, k) @ (k, *rest) in float32, in float64 for rows of float64."""
    import torch

    precise = torch.float64 if rows.dtype == torch.float64 else torch.float32
    product = matrix.to(precise) @ rows.to(precise).reshape(len(rows), -1)
    return product.view(len(matrix), *rows.shape[1:])


def _pooled(heads: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums (G, rows, *rest) of the heads (Hk, rows, *rest) of each group, (G,
    m) weights.
    """
    import torch

    groups, per_group = weights.shape
    merged = heads.new_empty(groups, *heads.shape[1:])
    if heads.is_meta:
        return merged
    precise = torch.float64 if heads.dtype == torch.float64 else torch.float32
    members = heads.unflatten(0, (groups, per_group))  # (G, m, rows, *rest)
    for j, row in enumerate(weights.tolist()):
        total: Tensor | None = None
        # One at a time: the wide numbers stay in the cache
        for head, weight in zip(members[j], row, strict=True):
            if weight:  # times zero, an Inf of an unused head would become a NaN of the group
                wide = head.to(precise)
                total = wide * weight if total is None else total.add_(wide, alpha=weight)
        merged[j] = 0 if total is None else total
    return merged


MAPS = ("key", "value", "query", "output")


@dataclass(frozen=True)
class StoredMaps:
    """The maps of a model in safetensors `files`, one for each finished layer (of methods that read
    weights: module).

    Each attention module has `MODULE/key`, `/value`, `/query`, `/output`, `/order` (see HeadMaps).
    Tensors that replace whole tensors of the result have the names of those. description: What made
    them, as JSON: the method, its options, the text. errors: If the method reads text, for each
    layer the squared error of attention's output relative to the base model's; None if nothing is
    merged. quality: Of both models on held-out text (`Check`); None if not measured.
    """

    files: tuple[Path, ...]
    description: Mapping[str, Any]
    errors: Sequence[float | None] = ()
    quality: Mapping[str, Any] | None = None

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """The open file of each tensor, by the tensor's name."""
        from safetensors import safe_open

        opened: list[Any] = [safe_open(file, framework="pt") for file in self.files]
        return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no dict

    def of(self, module: str) -> HeadMaps | None:
        """The maps of the attention module at this path, or None."""
        parts = {
            part: self.tensor(f"{module}/{part}")
            for part in MAPS
            if f"{module}/{part}" in self.names
        }
        order = f"{module}/order"
        if not parts:
            return None
        return HeadMaps(
            **parts, order=tuple(self.tensor(order).tolist()) if order in self.names else None
        )

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.names[name].get_tensor(name)
        return tensor


def mean(kv: int, groups: int) -> HeadMaps:
    """Average the heads of each group: weights 1 / m, m = Hk / G."""
    import torch

    weights = torch.full((groups, kv // groups), groups / kv, dtype=torch.float64)
    return HeadMaps(key=weights, value=weights)


def first(kv: int, groups: int) -> HeadMaps:
    """Keep the first head of each group."""
    import torch

    weights = torch.zeros(groups, kv // groups, dtype=torch.float64)
    weights[:, 0] = 1.0
    return HeadMaps(key=weights, value=weights)


@dataclass(frozen=True)
class Method:
    """One method of merging heads.

    needs: What it reads besides the numbers of heads: nothing, the `weights`, or `text` that runs
    through the model. cost, result: The time it takes, and what the heads of the result are, in
    words. pool: Function from (Hk, G) to maps; methods that read the model use it for modules
    without maps. redraws: Whether projections are drawn at random instead. guesses: Whether it
    estimates the inputs of layers from the weights (`can_guess_inputs`). refines: Whether it trains
    layers after the closed form; trained tensors then replace whole tensors of the model.
    """

    name: str
    needs: Literal["nothing", "weights", "text"]
    cost: str
    result: str
    pool: Callable[[int, int], HeadMaps] = mean
    redraws: bool = False
    guesses: bool = False
    refines: bool = False

    @property
    def aligns(self) -> bool:
        """Whether it reads the model: its maps are computed first and then applied."""
        return self.needs != "nothing"

    @property
    def reads_text(self) -> bool:
        """Whether text runs through the model, layer by layer."""
        return self.needs == "text"

    @property
    def draws(self) -> bool:
        """Whether the result depends on a seed: of random heads, or of text."""
        return self.redraws or self.reads_text


# From the quickest on to the one that loses least.
_METHODS = (
    Method("mean", "nothing", "seconds", "the mean of each group"),
    Method("first", "nothing", "seconds", "the first of each group", first),
    Method("random", "nothing", "seconds", "random, as a control", redraws=True),
    Method("procrustes", "weights", "seconds", "rotated onto each other, then averaged"),
    Method(
        "aligned", "weights", "minutes", "merged in closed form, from the weights", guesses=True
    ),
    Method("calibrated", "text", "four forward passes", "merged in closed form on text"),
    Method("refined", "text", "3x as long as calibrated", "trained layer by layer", refines=True),
)
METHODS = {method.name: method for method in _METHODS}
DEFAULT = "calibrated"  # with --kv-budget also the method that measures layers
GROUPINGS = ("auto", "contiguous")


@dataclass(frozen=True)
class Merging:
    """A method with its options, and its maps if it reads the model."""

    method: str = "mean"
    seed: int = 0
    initializer_range: float = 0.02
    maps: StoredMaps | None = None

    @property
    def traits(self) -> Method:
        return METHODS[self.method]

    def apply(self, change: Change, tensor: Tensor) -> Tensor:
        """Split a stored tensor into heads, merge these and join them.

        A meta tensor yields the new shape.
        """
        if self.maps and change.source.name in self.maps.names:
            return self.maps.tensor(change.source.name)
        import torch

        # independent of the order of shards and threads
        digest = hashlib.sha256(f"{self.seed}:{change.source.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return change.mapped(tensor, lambda role, heads: self.merge(change, role, heads, generator))

    def merge(self, change: Change, role: Role, heads: Tensor, generator: Generator) -> Tensor:
        """Keys or values (Hk, rows, *rest) -> (G, rows, *rest); queries and outputs (H, rows,
        *rest) -> the same.

        With G > Hk every method repeats heads, which changes no logit; with G = Hk they stay.
        `random` redraws projections only: norms and gates, which random numbers would break, are
        averaged.
        """
        kv, groups = change.heads.kv, change.groups
        if groups >= kv:
            return heads if role in QUERY_ROLES else heads.repeat_interleave(groups // kv, dim=0)
        if self.traits.redraws and change.rule.projection:
            return heads if role in QUERY_ROLES else self._random(change, heads, generator)
        maps = self.maps.of(change.module) if self.maps else None
        return (maps or self.traits.pool(kv, groups)).merge(role, heads)

    def _random(self, change: Change, heads: Tensor, generator: Generator) -> Tensor:
        """Draws from N(0, initializer_range), zero for biases."""
        import torch

        shape = (change.groups, *heads.shape[1:])
        if heads.is_meta or change.source.name.endswith(".bias"):
            return heads.new_zeros(shape)
        return torch.normal(0.0, self.initializer_range, shape, generator=generator).to(heads.dtype)
