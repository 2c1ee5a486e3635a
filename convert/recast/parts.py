"""A checkpoint seen as one of another class: its tensors are renamed, re-laid-out and folded as they are read. Nothing
is stored on the way: whatever plans, merges, calibrates, writes or verifies a checkpoint does the same with a view.

A model of one class is described as one of another by what its modules become: `{}` stands for the layer, `a|b` for a
module that is stored under either name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import CorruptError, RefusedError, listing
from gqa.checkpoint.files import TensorSpec, byte_size
from gqa.checkpoint.read import TORCH_DTYPES, Checkpoint
from gqa.convert.heads.family import LayerHeads

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
            raise CorruptError(f"{shapes} cannot become {name}{why}; is it of another model?") from error
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


@dataclass(frozen=True)
class Place:
    """Where a module stands: what its new layout may depend on, and the tensors that it is made of.

    config: transformers' config object of the source.
    heads: Its attention heads, `kv` = `query`.
    layer: Counted from 0; 0 also outside the layers.
    stored: The source's tensors by their names without the prefix of the base model; `used`, those that were looked up.
    """

    config: Any
    heads: LayerHeads
    layer: int
    stored: Mapping[str, TensorSpec]
    used: set[str]

    def find(self, module: str, tail: str) -> TensorSpec | None:
        """`module.tail`, where it is stored."""
        names = [f"{name.format(self.layer)}.{tail}" for name in module.split("|")]
        for name in names:
            if name in self.stored:
                self.used.add(name)
                return self.stored[name]
        return None

    def need(self, module: str, tail: str) -> TensorSpec:
        """The same. Raises CorruptError where it is not stored."""
        if spec := self.find(module, tail):
            return spec
        names = f"{module}.{tail}".replace("|", f".{tail} or ").format(self.layer)
        raise CorruptError(f"the checkpoint has no {names}; give a checkpoint of the whole model")


# (weight (out, in) or bias (out,), place) -> its rows picked and ordered as the target has them
Rows = Callable[["Tensor", Place], "Tensor"]


@dataclass(frozen=True)
class Module:
    """A module whose `weight` and `bias` stay as they are; or, as said, a linear layer W x + b laid out anew.

    rows: What of W and b is taken, in which order; all of it as it is by default.
    norm: A LayerNorm n * w + c before it, folded into it: W diag(w) n + (b + W c).
    always_bias: Whether the target has a bias where the source has none: zeros.
    transposed: Whether the source stores W as (in, out).
    tied: An embedding that is the weight where there is none of its own and the config says so.
    neutral: Whether it is a LayerNorm that was folded: its weight is 1 and its bias 0.
    """

    target: str
    source: str
    rows: Rows | None = None
    norm: str | None = None
    always_bias: bool = False
    transposed: bool = False
    tied: str | None = None
    neutral: bool = False

    def recipes(self, place: Place) -> Iterator[tuple[str, Recipe]]:
        """Names of the module's tensors below it, and how they are made."""
        if self.neutral:
            like = place.need(self.source, "weight")
            for tail, value in (("weight", 1.0), ("bias", 0.0)):
                yield tail, Recipe((like,), lambda t: t[0], fill=value)
            return

        def laid_out(tensor: Tensor) -> Tensor:
            tensor = tensor.T if self.transposed and tensor.ndim == 2 else tensor
            return self.rows(tensor, place) if self.rows else tensor

        weight, bias = place.find(self.source, "weight"), place.find(self.source, "bias")
        moves = self.rows or self.transposed
        if weight is None and self.tied and place.config.tie_word_embeddings:
            weight = place.need(self.tied, "weight")
        elif self.norm:
            weight = place.need(self.source, "weight")
            yield "weight", Recipe((weight, place.need(self.norm, "weight")), lambda t: laid_out(t[0]) * t[1])
        else:
            weight = place.need(self.source, "weight")
            yield "weight", Recipe((weight,), (lambda t: laid_out(t[0])) if moves else None)
        if self.norm and (shift := place.find(self.norm, "bias")):  # b + W c, of (W, c) or (W, c, b)
            sources = (weight, shift, bias) if bias else (weight, shift)
            yield "bias", Recipe(sources, lambda t: sum(map(laid_out, t[2:]), laid_out(t[0]) @ t[1]))
        elif bias:
            yield "bias", Recipe((bias,), (lambda t: laid_out(t[0])) if self.rows else None)
        elif self.always_bias:
            yield "bias", Recipe((weight,), lambda t: laid_out(t[0])[:, 0], fill=0.0)


@dataclass(frozen=True)
class Recasting:
    """From the model type `source` to the model type `target`.

    source, target: Model types; `which` of the source's are meant, in words, and `when`, of their config.
    architecture: The target's class; None for custom modelling code, where the class is the one that stands in for the
        source's, config.json stays the source's with what is new, and all tensors stay as they are.
    config: transformers' config of the source -> config.json of the target with `kv = query` heads, without
        `architectures`, `model_type`, token ids, `tie_word_embeddings` and the dtype, which all have. Raises
        RefusedError, which says why, for a config that cannot be expressed.
    prefix: Of the base model's tensors in the source, left out in `parts`; a checkpoint may lack it.
    parts: What the target's modules are made of.
    groups: Which G the target holds, in words (its family's `allows` decides), of the H heads of the source.
    dropped: Patterns of stored tensors that are no parameters (masks).
    """

    source: str
    target: str
    architecture: str | None = None
    config: Callable[[Any], dict[str, Any]] = lambda config: {}
    prefix: str = ""
    parts: tuple[Module, ...] = ()
    which: str = ""
    when: Callable[[Any], bool] = lambda config: True
    groups: str = "any divisor of H"
    note: str = ""
    dropped: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """How a model becomes one of the other type: with a class of transformers, or with one beside its weights."""
        return NATIVE if self.architecture else CUSTOM_CODE

    def drops(self, name: str) -> bool:
        """Whether a stored tensor is no parameter."""
        return any(fnmatchcase(name, like) for like in self.dropped)

    def recipes(self, checkpoint: Checkpoint, config: Any) -> dict[str, Recipe]:
        """Every tensor of the target. Raises RefusedError and CorruptError."""
        if self.architecture is None:
            return {name: Recipe((spec,)) for name, spec in checkpoint.tensors.items() if not self.drops(name)}
        stored = {name.removeprefix(self.prefix): spec for name, spec in checkpoint.tensors.items()}
        if len(stored) < len(checkpoint.tensors):
            raise CorruptError(f"{checkpoint.name} has tensors with and without {self.prefix!r} before their names")
        query, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        recipes: dict[str, Recipe] = {}
        used: set[str] = set()
        for part in self.parts:
            for layer in range(config.num_hidden_layers if "{}" in part.target else 1):
                place = Place(config, LayerHeads(query, query, dim, dim), layer, stored, used)
                for tail, recipe in part.recipes(place):
                    recipes[f"{part.target.format(layer)}.{tail}"] = recipe
        if unknown := [name for name in stored if name not in used and not self.drops(name)]:
            which = f"{listing(unknown)} {'is' if len(unknown) == 1 else 'are'}"
            raise RefusedError(
                f"{which} not known of a language model of type {self.source}, which is all that becomes {self.target}"
            )
        return recipes
