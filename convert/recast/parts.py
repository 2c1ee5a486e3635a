"""The vocabulary in which a model of one class is described as one of another: what its modules become.

`{}` stands for the layer, `a|b` for a module that is stored under either name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import CorruptError, RefusedError, listing
from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.recast.view import Recipe, way_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a module stands: what its new layout may depend on.

    config: transformers' config object of the source.
    heads: Its attention heads, `kv` = `query`.
    layer: Counted from 0; 0 also outside the layers.
    """

    config: Any
    heads: LayerHeads
    layer: int


# (weight (out, in) or bias (out,), place) -> its rows picked and ordered as the target has them
Rows = Callable[["Tensor", Place], "Tensor"]


class Stored:
    """The source's tensors by their names without the prefix of the base model, and which of them are used."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._specs = {name.removeprefix(prefix): spec for name, spec in checkpoint.tensors.items()}
        if len(self._specs) < len(checkpoint.tensors):
            raise CorruptError(f"{checkpoint.name} has tensors with and without {prefix!r} before their names")
        self._used: set[str] = set()

    def find(self, module: str, tail: str) -> TensorSpec | None:
        """`module.tail`, where it is stored."""
        for name in (f"{name}.{tail}" for name in module.split("|")):
            if name in self._specs:
                self._used.add(name)
                return self._specs[name]
        return None

    def need(self, module: str, tail: str) -> TensorSpec:
        """The same. Raises CorruptError where it is not stored."""
        found = self.find(module, tail)
        if found is None:
            names = " or ".join(f"{name}.{tail}" for name in module.split("|"))
            raise CorruptError(f"{self._checkpoint.name} has no {names}; give a checkpoint of the whole model")
        return found

    def check_all_used(self, model_type: str, dropped: tuple[str, ...]) -> None:
        """Raise RefusedError for a tensor that nothing has become of, unless its name is like one of `dropped`."""
        unknown = [
            name for name in self._specs.keys() - self._used if not any(fnmatchcase(name, like) for like in dropped)
        ]
        if unknown:
            which = f"{listing(unknown)} {'is' if len(unknown) == 1 else 'are'}"
            raise RefusedError(f"{which} not known of a language model of type {model_type}; nothing was written")


@dataclass(frozen=True)
class Module:
    """A module whose `weight` and `bias` stay as they are; or, as said, a linear layer W x + b laid out anew.

    rows: What of W and b is taken, in which order; all of it as it is by default.
    norm: A LayerNorm n * w + c before it, folded into it: W diag(w) n + (b + W c).
    always_bias: Whether the target has a bias where the source has none: zeros.
    transposed: Whether the source stores W as (in, out).
    moves: Whether `rows` only moves numbers.
    tied: An embedding that is the weight where there is none of its own and the config says so.
    """

    target: str
    source: str
    rows: Rows | None = None
    norm: str | None = None
    always_bias: bool = False
    transposed: bool = False
    moves: bool = True
    tied: str | None = None

    def recipes(self, stored: Stored, place: Place) -> Iterator[tuple[str, Recipe]]:
        """Names of the module's tensors below it, and how they are made."""
        source = self.source.format(place.layer)
        weight = stored.find(source, "weight")
        if weight is None and self.tied and place.config.tie_word_embeddings:
            weight = stored.need(self.tied, "weight")
        else:
            weight = stored.need(source, "weight")
            yield "weight", self._weight(weight, stored, place)
        bias = stored.find(source, "bias")
        shift = stored.find(self.norm.format(place.layer), "bias") if self.norm else None
        if bias and not shift:
            yield "bias", Recipe((bias,), (lambda t: self._laid_out(t[0], place)) if self.rows else None, self.moves)
        elif shift:
            added = (bias,) if bias else ()
            yield "bias", Recipe((weight, shift, *added), lambda t: self._shifted(t, place), moves=False)
        elif self.always_bias:
            yield "bias", Recipe((weight,), lambda t: self._laid_out(t[0], place)[:, 0], fill=0.0)

    def _weight(self, weight: TensorSpec, stored: Stored, place: Place) -> Recipe:
        if self.norm:
            gain = stored.need(self.norm.format(place.layer), "weight")
            return Recipe((weight, gain), lambda t: self._laid_out(t[0], place) * t[1], moves=False)
        changed = self.rows is not None or self.transposed
        return Recipe((weight,), (lambda t: self._laid_out(t[0], place)) if changed else None, self.moves)

    def _laid_out(self, tensor: Tensor, place: Place) -> Tensor:
        tensor = tensor.T if self.transposed and tensor.ndim == 2 else tensor
        return self.rows(tensor, place) if self.rows else tensor

    def _shifted(self, tensors: Sequence[Tensor], place: Place) -> Tensor:
        """b + W c of (W, c) or (W, c, b)."""
        weight, shift, *bias = tensors
        moved = self._laid_out(weight, place) @ shift
        return moved + self._laid_out(bias[0], place) if bias else moved


@dataclass(frozen=True)
class Norm(Module):
    """A LayerNorm whose class adds `-shift` to the weight that it stores."""

    shift: float = field(kw_only=True)

    def recipes(self, stored: Stored, place: Place) -> Iterator[tuple[str, Recipe]]:
        source = self.source.format(place.layer)
        yield "weight", Recipe((stored.need(source, "weight"),), lambda t: t[0] + self.shift, moves=False)
        yield "bias", Recipe((stored.need(source, "bias"),))


@dataclass(frozen=True)
class NeutralNorm(Module):
    """A LayerNorm with weight 1 and bias 0, of the width of the source's."""

    def recipes(self, stored: Stored, place: Place) -> Iterator[tuple[str, Recipe]]:
        like = stored.need(self.source.format(place.layer), "weight")
        for tail, value in (("weight", 1.0), ("bias", 0.0)):
            yield tail, Recipe((like,), lambda t: t[0], fill=value)


def all_recipes(
    parts: tuple[Module, ...], stored: Stored, config: Any, heads: LayerHeads, layers: int
) -> Mapping[str, Recipe]:
    """Every tensor of the target. Raises RefusedError and CorruptError."""
    found: dict[str, Recipe] = {}
    for part in parts:
        for layer in range(layers if "{}" in part.target else 1):
            for tail, recipe in part.recipes(stored, Place(config, heads, layer)):
                found[f"{part.target.format(layer)}.{tail}"] = recipe
    return found


@dataclass(frozen=True)
class Recasting:
    """From the model type `source` to the model type `target`.

    source, target: Model types; `which` of the source's are meant, in words, and `when`, of their config.
    architecture: The target's class; None for custom modelling code, where the class is the one that stands in for the
        source's, config.json stays the source's with what is new, and all tensors stay as they are.
    config: transformers' config of the source -> config.json of the target with `kv = query` heads, without
        `architectures`, `model_type`, token ids, `tie_word_embeddings` and the dtype, which all have.
    prefix: Of the base model's tensors in the source, left out in `parts`; a checkpoint may lack it.
    parts: What the target's modules are made of.
    groups: Which G the target holds, in words (its family's `allows` decides), of the H heads of the source.
    refusal: Why a config cannot be expressed, or None.
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
    refusal: Callable[[Any], str | None] = lambda config: None
    dropped: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        return way_to(self.target)
