"""A checkpoint seen as one of another class: its tensors are renamed, re-laid-out and folded as they are read.

Nothing is stored on the way: a view has the target's config and the target's tensors, and whatever plans, merges,
calibrates, writes or verifies a checkpoint does the same with a view of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gqa.checkpoint.errors import CorruptError, RefusedError
from gqa.checkpoint.headers import TensorSpec, byte_size
from gqa.checkpoint.read import TORCH_DTYPES, Checkpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


NATIVE, CUSTOM_CODE = "native", "custom modelling code"


@dataclass(frozen=True)
class Recipe:
    """How one tensor of a view is made of stored ones.

    sources: What is read, possibly from several files; the first says the dtype and where the tensor stands.
    compute: From them, in float32 (float64 for F64), to the tensor, which stays so until it is written, so that merging
        afterwards rounds it no second time; None for the first as it is.
    fill: The value of a tensor that is constant; `compute` then only says its shape.
    """

    sources: tuple[TensorSpec, ...]
    compute: Callable[[Sequence[Tensor]], Tensor] | None = None
    fill: float | None = None

    def spec(self, name: str) -> TensorSpec:
        """What the view says of the tensor. Raises CorruptError where the sources do not fit together."""
        import torch

        first = self.sources[0]
        if self.compute is None:
            return replace(first, name=name)
        if first.dtype not in TORCH_DTYPES:
            raise RefusedError(
                f"{first.name} is stored as {first.dtype}: quantised or packed weights cannot be laid out anew; "
                "convert the original and quantise the result"
            )
        try:
            shape = tuple(self.compute([torch.empty(s.shape, device="meta") for s in self.sources]).shape)
        except (CorruptError, RuntimeError, IndexError, ValueError) as error:
            shapes = " and ".join(f"{s.name} {list(s.shape)}" for s in self.sources)
            why = f": {error}" if isinstance(error, CorruptError) else ""
            raise CorruptError(f"{shapes} cannot become {name}{why}; is it of another model?") from None
        return TensorSpec(name, first.dtype, shape, first.file, 0, byte_size(first.dtype, shape))


@dataclass(frozen=True)
class View(Checkpoint):
    """`source` as a checkpoint of another class."""

    source: Checkpoint = field(kw_only=True)
    recipes: Mapping[str, Recipe] = field(kw_only=True)

    def read(self, spec: TensorSpec, buffer: NDArray[np.uint8] | None = None) -> Tensor:
        """One tensor; what is computed comes in float32 (float64 for F64) and is rounded when it is written."""
        import torch

        recipe = self.recipes[spec.name]
        if recipe.compute is None:
            return self.source.read(replace(spec, name=recipe.sources[0].name), buffer)
        if recipe.fill is not None:
            return torch.full(spec.shape, recipe.fill, dtype=getattr(torch, TORCH_DTYPES[spec.dtype]))
        precise = torch.float64 if spec.dtype == "F64" else torch.float32
        return recipe.compute([self.source.read(part).to(precise) for part in recipe.sources])

    def has_range(self, spec: TensorSpec) -> bool:
        recipe = self.recipes[spec.name]
        return recipe.compute is None and self.source.has_range(recipe.sources[0])

    @property
    def parameters(self) -> int:
        """Of the source, as far as it is used: masks that it stores are none, nor are zeros that the target adds."""
        return sum({spec.name: spec.numel for r in self.recipes.values() for spec in r.sources}.values())
