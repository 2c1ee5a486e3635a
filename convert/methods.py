"""How the heads of a group become one: every method is one entry, registered here.

`mean` and `first` are the pooling of arXiv 2305.13245, section 2.1 and figure 4; `random` is that figure's control. The
others look at the model: their maps are found first (`gqa.convert.align.find_maps`) and then applied, and their
function pools what maps do not cover (norms, gates, the keys and values of layers that predict further tokens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gqa.convert.heads.layout import QUERY_ROLES
from gqa.convert.maps import HeadMaps

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.heads.layout import Merge, Role
    from gqa.convert.heads.modules import Change

Pooling = Callable[[int, int], HeadMaps]


@dataclass(frozen=True)
class Method:
    """One way in which the heads of a group become one.

    needs: What it looks at besides the number of heads: nothing, the `weights`, or `text` that runs through the model.
    cost: What it takes, in words. result: What the heads of the result are, in words.
    pool: From (Hk, G) to maps; of a method that looks at the model, for what its maps do not cover.
    redraws: Whether projections are drawn at random instead.
    refines: Whether layers are trained after the closed form, so that whole tensors replace those of the model.
    finder: `module:function` that finds the maps of what looks at `weights`, loaded when it is called for: see `find`.
    """

    name: str
    needs: Literal["nothing", "weights", "text"]
    cost: str
    result: str
    pool: Pooling
    redraws: bool = False
    refines: bool = False
    finder: str = ""

    @property
    def aligns(self) -> bool:
        """Whether it looks at the model: its maps are found first and then applied."""
        return self.needs != "nothing"

    @property
    def find(self) -> Callable[..., Iterator[tuple[str, HeadMaps]]]:
        """A plan, and whether to search for the best groups -> the maps of attention modules, each by its path."""
        module, _, function = self.finder.partition(":")
        found: Callable[..., Iterator[tuple[str, HeadMaps]]] = getattr(import_module(module), function)
        return found


METHODS: dict[str, Method] = {}
GROUPINGS = ("contiguous", "search")


def register(
    name: str, needs: Literal["nothing", "weights", "text"], cost: str, result: str, **told: Any
) -> Callable[[Pooling], Pooling]:
    """A decorator that makes a function from (Hk, G) to HeadMaps a method of that name."""

    def add(pool: Pooling) -> Pooling:
        METHODS[name] = Method(name, needs, cost, result, pool, **told)
        return pool

    return add


@register("mean", "nothing", "seconds", "the mean of each group")
def mean(kv: int, groups: int) -> HeadMaps:
    """Every head of a group counts alike: weights 1 / m, m = Hk / G."""
    import torch

    weights = torch.full((groups, kv // groups), groups / kv, dtype=torch.float64)
    return HeadMaps(key=weights, value=weights)


@register("first", "nothing", "seconds", "the first of each group")
def first(kv: int, groups: int) -> HeadMaps:
    """The first head of each group stands for it."""
    import torch

    weights = torch.zeros(groups, kv // groups, dtype=torch.float64)
    weights[:, 0] = 1.0
    return HeadMaps(key=weights, value=weights)


register("random", "nothing", "seconds", "drawn at random: a control, of no use untrained", redraws=True)(mean)
register(
    "procrustes",
    "weights",
    "seconds",
    "rotated to agree, then the mean",
    finder="gqa.convert.align.aligned:procrustes",
)(mean)
register(
    "aligned",
    "weights",
    "minutes",
    "the closed form on what the weights make layers expect",
    finder="gqa.convert.align.aligned:aligned",
)(mean)
register("calibrated", "text", "three forward passes", "the closed form on what layers are given by text")(mean)
register("refined", "text", "calibrated, and minutes a layer", "calibrated, then trained layer by layer", refines=True)(
    mean
)

ALIGNING = tuple(method.name for method in METHODS.values() if method.aligns)


class Maps(Protocol):
    """Maps by attention module, and whole tensors by name; `meta` for shapes alone."""

    @property
    def names(self) -> frozenset[str]: ...
    @property
    def description(self) -> Mapping[str, Any]: ...
    def of(self, module: str, meta: bool = False) -> HeadMaps | None: ...
    def tensor(self, name: str, meta: bool = False) -> Tensor: ...


@dataclass(frozen=True)
class Merging:
    """A method with its options: yields the merge of one tensor."""

    method: str = "mean"
    seed: int = 0
    initializer_range: float = 0.02
    maps: Maps | None = None

    @property
    def how(self) -> Method:
        return METHODS[self.method]

    def apply(self, change: Change, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What stored tensors become: split into heads, merged, joined. On meta tensors: the shapes of that."""
        if self.maps and change.outputs[0] in self.maps.names:
            return [self.maps.tensor(name, tensors[0].is_meta) for name in change.outputs]
        of = (change.outputs[0], change.heads.kv, change.groups, change.rule.projection, change.module)
        merge, parts = self.merge_for(*of), change.split(tensors)
        return change.join({part: heads if part == "whole" else merge(part, heads) for part, heads in parts.items()})

    def merge_for(self, tensor: str, kv: int, groups: int, projection: bool, module: str = "") -> Merge:
        """The merge of one stored tensor of an attention module, Hk -> G heads.

        Upwards (G > Hk) heads are repeated whatever the method: no logit changes. `random` redraws projections
        only; norms and gates, which random numbers would break rather than reset, are averaged.
        """
        if groups > kv:
            return lambda role, heads: heads if role in QUERY_ROLES else heads.repeat_interleave(groups // kv, dim=0)
        if groups == kv:
            return lambda role, heads: heads
        if self.how.redraws and projection:
            return self._random(tensor, groups)

        def merge(role: Role, heads: Tensor) -> Tensor:
            maps = self.maps.of(module, heads.is_meta) if self.maps else None
            return (maps or self.how.pool(kv, groups)).merge(role, heads)

        return merge

    def _random(self, tensor: str, groups: int) -> Merge:
        """Draws from N(0, initializer_range), zero for biases; the same whatever the order of shards and jobs."""
        import torch

        digest = hashlib.sha256(f"{self.seed}:{tensor}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

        def draw(role: Role, heads: Tensor) -> Tensor:
            if role in QUERY_ROLES:
                return heads
            shape = (groups, *heads.shape[1:])
            if heads.is_meta or tensor.endswith(".bias"):
                return heads.new_zeros(shape)
            return torch.normal(0.0, self.initializer_range, shape, generator=generator).to(heads.dtype)

        return draw
