"""How the heads of a group become one: every method is one entry, registered here.

`mean` and `first` are the pooling of arXiv 2305.13245, section 2.1 and figure 4; `random` is that figure's control. The
others look at the model: their maps are found first (`gqa.convert.merge.find_maps`) and then applied, and their
function pools the modules that have none (those of layers that predict further tokens).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from gqa.convert.heads.family import QUERY_ROLES
from gqa.convert.maps import HeadMaps, StoredMaps

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from gqa.convert.heads.family import Role
    from gqa.convert.heads.modules import Change

Pooling = Callable[[int, int], HeadMaps]
Finder = Callable[..., "Iterator[tuple[str, HeadMaps]]"]


@dataclass(frozen=True)
class Method:
    """One way in which the heads of a group become one.

    needs: What it looks at besides the number of heads: nothing, the `weights`, or `text` that runs through the model.
    cost: What it takes, in words. result: What the heads of the result are, in words.
    pool: From (Hk, G) to maps; of a method that looks at the model, for what its maps do not cover.
    redraws: Whether projections are drawn at random instead.
    guesses: Whether it supposes that what layers are given can be guessed (`heads/blocks.py`).
    refines: Whether layers are trained after the closed form, so that whole tensors replace those of the model.
    finder: `module:function` that finds the maps of what looks at `weights`, loaded when it is called for: see `find`.
    """

    name: str
    needs: Literal["nothing", "weights", "text"]
    cost: str
    result: str
    pool: Pooling
    redraws: bool = False
    guesses: bool = False
    refines: bool = False
    finder: str = ""

    @property
    def aligns(self) -> bool:
        """Whether it looks at the model: its maps are found first and then applied."""
        return self.needs != "nothing"

    @property
    def reads_text(self) -> bool:
        """Whether text runs through the model, layer by layer."""
        return self.needs == "text"

    @property
    def draws(self) -> bool:
        """Whether a seed decides the result: that of random heads, or of text."""
        return self.redraws or self.reads_text

    @property
    def find(self) -> Finder:
        """A plan, whether to search for the best groups, a device -> path and maps of each attention module."""
        module, _, function = self.finder.partition(":")
        finder: Finder = getattr(import_module(module), function)
        return finder


METHODS: dict[str, Method] = {}
AUTO = "auto"  # the best of those that need nothing but weights (`gqa.convert.plan._choose`)
GROUPINGS = ("auto", "contiguous", "search")


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


_FROM_WEIGHTS = "gqa.convert.merge.from_weights:from_weights"
register("random", "nothing", "seconds", "drawn at random, a control of no use untrained", redraws=True)(mean)
register("procrustes", "weights", "seconds", "rotated to agree, then the mean", finder=_FROM_WEIGHTS)(mean)
_EXPECTED = "the closed form on inputs guessed from weights"
register("aligned", "weights", "minutes", _EXPECTED, guesses=True, finder=_FROM_WEIGHTS)(mean)
_FITTED = "the closed form on inputs from text"
register("calibrated", "text", "three forward passes", _FITTED)(mean)
_TRAINED = "calibrated, then trained layer by layer"
register("refined", "text", "minutes a layer", _TRAINED, refines=True)(mean)

MEASURING = "calibrated"  # by which layers are measured that shall have different numbers of heads
AUTOMATIC = tuple(method.name for method in METHODS.values() if not method.draws)  # what AUTO may turn out to be
ALIGNING = tuple(method.name for method in METHODS.values() if method.aligns)


def best(fits: Callable[[Method], bool]) -> list[str]:
    """The method to advise of those that look at the model and fit: they are registered from the quickest on to the
    one that loses least. Empty where none fits.
    """
    return [method.name for method in METHODS.values() if method.aligns and fits(method)][-1:]


def instead(fits: Callable[[Method], bool]) -> str:
    """`aligned, mean or first`: what to use where a method cannot be used, without the control."""
    plain = [method.name for method in METHODS.values() if not (method.aligns or method.redraws)]
    *others, last = [*best(fits), *plain]
    return f"{', '.join(others)} or {last}"


@dataclass(frozen=True)
class Merging:
    """A method with its options, and the maps that it found where it looks at the model."""

    method: str = "mean"
    seed: int = 0
    initializer_range: float = 0.02
    maps: StoredMaps | None = None

    @property
    def how(self) -> Method:
        return METHODS[self.method]

    def apply(self, change: Change, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What stored tensors become: split into heads, merged, joined. On meta tensors: the shapes of that."""
        if self.maps and change.outputs[0] in self.maps.names:
            return [self.maps.tensor(name) for name in change.outputs]
        generator = self._generator(change)
        return change.mapped(tensors, lambda role, heads: self.merge(change, role, heads, generator))

    def merge(self, change: Change, role: Role, heads: Tensor, generator: Generator) -> Tensor:
        """Keys or values (Hk, rows, *rest) -> (G, rows, *rest); queries and outputs (H, rows, *rest) -> the same.

        Upwards (G > Hk) heads are repeated whatever the method: no logit changes; with G = Hk they stay. `random`
        redraws projections only; norms and gates, which random numbers would break rather than reset, are averaged.
        """
        kv, groups = change.heads.kv, change.groups
        if groups >= kv:
            return heads if role in QUERY_ROLES else heads.repeat_interleave(groups // kv, dim=0)
        if self.how.redraws and change.rule.projection:
            return heads if role in QUERY_ROLES else self._random(change, heads, generator)
        maps = self.maps.of(change.module) if self.maps else None
        return (maps or self.how.pool(kv, groups)).merge(role, heads)

    def _generator(self, change: Change) -> Generator:
        """Of random numbers that are the same whatever the order of shards and jobs."""
        import torch

        digest = hashlib.sha256(f"{self.seed}:{change.outputs[0]}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def _random(self, change: Change, heads: Tensor, generator: Generator) -> Tensor:
        """Draws from N(0, initializer_range), zero for biases."""
        import torch

        shape = (change.groups, *heads.shape[1:])
        if heads.is_meta or change.outputs[0].endswith(".bias"):
            return heads.new_zeros(shape)
        return torch.normal(0.0, self.initializer_range, shape, generator=generator).to(heads.dtype)
