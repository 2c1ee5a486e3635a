"""How the heads of a group become one: name -> function from (Hk, G) to HeadMaps.

`mean` and `first` are the pooling of arXiv 2305.13245, section 2.1 and figure 4; `random` is that figure's control.
The other methods look at the model: their maps are computed first (`gqa.convert.align.calibration`) and then applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gqa.convert.heads.layout import QUERY_ROLES
from gqa.convert.maps import HeadMaps

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.heads.layout import Merge, Role
    from gqa.convert.heads.modules import Change


def mean(kv: int, groups: int) -> HeadMaps:
    """Every head of a group counts alike: weights 1 / m, m = Hk / G."""
    import torch

    weights = torch.full((groups, kv // groups), groups / kv, dtype=torch.float64)
    return HeadMaps(key=weights, value=weights)


def first(kv: int, groups: int) -> HeadMaps:
    """The first head of each group stands for it."""
    import torch

    weights = torch.zeros(groups, kv // groups, dtype=torch.float64)
    weights[:, 0] = 1.0
    return HeadMaps(key=weights, value=weights)


POOLING: dict[str, Callable[[int, int], HeadMaps]] = {"mean": mean, "first": first}
ALIGNING = ("procrustes", "aligned", "calibrated", "refined")
GROUPINGS = ("contiguous", "search")
METHODS = (*POOLING, "random", *ALIGNING)


class Maps(Protocol):
    """Maps by attention module, and whole tensors by name."""

    @property
    def names(self) -> frozenset[str]: ...
    @property
    def description(self) -> Mapping[str, Any]: ...
    def of(self, module: str) -> HeadMaps | None: ...
    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Merging:
    """The chosen method with its options: yields the merge of one tensor."""

    method: str = "mean"
    seed: int = 0
    initializer_range: float = 0.02
    maps: Maps | None = None

    def apply(self, change: Change, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What stored tensors become: split into heads, merged, joined. On meta tensors: the shapes of that."""
        if self.maps and change.outputs[0] in self.maps.names:
            return [self.maps.tensor(name) for name in change.outputs]
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
        if self.method == "random" and projection:
            return self._random(tensor, groups)
        maps = self.maps.of(module) if self.maps else None
        return (maps or POOLING.get(self.method, mean)(kv, groups)).merge

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
