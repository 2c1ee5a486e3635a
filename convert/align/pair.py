"""The source and the converted model side by side, one layer in memory at a time.

Two streams of hidden states run through them: the source's own, which sets what every layer's attention should give,
and that of the converted model, which is what each layer will really be given, so that every layer also corrects what
those before it did (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.errors import RefusedError, listing
from gqa.checkpoint.names import assembled, parameter_names, shared_names, stored_parts
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.layerwise import Layerwise, Read, Stop, run_layer
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.modules import AttentionModule, Change, attention_modules, module_changes
from gqa.convert.maps import HeadMaps
from gqa.convert.methods import Merging
from gqa.convert.plan import Plan, rules_beside


@dataclass(frozen=True)
class InMemory:
    """Maps that are not on disk, for one layer."""

    module: str
    maps: HeadMaps
    names: frozenset[str] = frozenset()
    description: Mapping[str, Any] = field(default_factory=dict)

    def of(self, module: str, meta: bool = False) -> HeadMaps | None:
        return self.maps if module == self.module else None

    def tensor(self, name: str, meta: bool = False) -> Tensor:
        raise KeyError(name)


@dataclass(frozen=True)
class Streams:
    """Hidden states (N, T, D) of all blocks: the source's, and those of the model whose layers so far are converted."""

    source: Tensor
    converted: Tensor


@dataclass
class Pair:
    """The source and the converted model, one layer at a time, and how to get from one to the other."""

    plan: Plan
    source: Layerwise
    target: Layerwise
    modules: list[AttentionModule]
    batch: int
    names: Mapping[str, str]  # stored -> of the converted model's parameter
    given: dict[int, list[tuple[Any, dict[str, Any]]]] = field(default_factory=dict)  # by the number of rows

    @classmethod
    def open(cls, plan: Plan, device: str, dtype: torch.dtype, batch: int) -> Pair:
        checkpoint, config = plan.checkpoint, plan.config
        modules = attention_modules(checkpoint, config)
        modules = [module for module in modules if module.layer < config.layers and module.kind == "decoder-self"]
        path = modules[0].path
        source = Layerwise.make(transformers_config(config.raw), path, _reader(checkpoint), dtype, device)
        target = Layerwise.make(transformers_config(plan.new_config), path, _reader(checkpoint), dtype, device)
        return cls(plan, source, target, modules, batch, parameter_names(target.model))

    def module_of(self, layer: int) -> AttentionModule | None:
        """The attention module of a layer whose heads are merged."""
        found = [m for m in self.modules if m.layer == layer and self.changes(m)]
        if len(found) > 1:
            raise RefusedError(f"layer {layer} has several attention modules, which cannot be calibrated apart")
        return found[0] if found else None

    def changes(self, module: AttentionModule) -> list[Change]:
        beside = rules_beside(self.plan.config, self.plan.merging.method, self.plan.checkpoint.name)
        return module_changes(module, self.plan.config, self.plan.groups, beside)

    def weights(self, module: AttentionModule, maps: HeadMaps) -> dict[str, Tensor]:
        """The converted module's tensors by their stored names."""
        merging, read = Merging(self.plan.merging.method, maps=InMemory(module.path, maps)), self.plan.checkpoint.read
        found: dict[str, Tensor] = {}
        for change in self.changes(module):
            tensors = merging.apply(change, [read(spec).float() for spec in change.sources])
            found |= dict(zip(change.outputs, tensors, strict=True))
        return found

    def load_target(self, module: AttentionModule, weights: Mapping[str, Tensor]) -> nn.Module:
        """The converted model's layer with these stored tensors."""
        return self.target.load(module.layer, weights)

    def projection(self, own: Layerwise, module: AttentionModule, name: str) -> nn.Module:
        """The submodule whose weight is stored as `name` below an attention module."""
        found: nn.Module = own.model.get_submodule(self.names[f"{module.path}.{name}.weight"].rpartition(".")[0])
        return found

    def trainable(self, module: AttentionModule, attention: nn.Module) -> dict[str, str]:
        """Parameters of a converted attention module that are stored in what changes: name below it -> full name."""
        changed = {name for change in self.changes(module) for name in change.outputs}
        full = {id(parameter): name for name, parameter in self.target.model.named_parameters()}
        names = {name: full[id(parameter)] for name, parameter in attention.named_parameters()}
        return {name: own for name, own in names.items() if changed & set(stored_parts(self.target.model, own))}

    def arrive(self, blocks: Tensor) -> Streams:
        """(N, T) ids -> what the first layer is given."""
        hidden = []
        for ids in blocks.split(self.batch):
            first, given = self.source.arrive(ids)
            if not _alike(given, self.given.setdefault(len(ids), given), len(ids)):
                raise RefusedError(
                    f"layers of {type(self.source.model).__name__} are given more than hidden states of the text; "
                    "it cannot be run layer by layer"
                )
            hidden.append(first.cpu())
        if 1 not in self.given:  # for what is tried on one block
            self.given[1] = self.source.arrive(blocks[:1])[1]
        states = torch.cat(hidden)
        return Streams(states, states.clone())

    def batches(self, stream: Tensor, layer: int) -> Iterator[tuple[slice, Tensor, Any]]:
        for start in range(0, len(stream), self.batch):
            piece = slice(start, min(start + self.batch, len(stream)))
            hidden = stream[piece].to(self.source.device)
            yield piece, hidden, self.given[len(hidden)][layer]


def check_finite(layer: int, *tensors: Tensor) -> None:
    """Raises RefusedError where a layer computes what is no number."""
    if not all(bool(torch.stack(tensor.aminmax()).isfinite().all()) for tensor in tensors):  # extremes keep NaN
        raise RefusedError(f"layer {layer} computes NaN or Inf on the calibration text; the model is broken there")


def _alike(given: Any, before: Any, rows: int) -> bool:
    """Whether what layers are given is what they were given before, and the same in all rows of a batch."""
    if isinstance(given, Tensor):
        by_row = given.ndim > 1 and len(given) == rows
        return torch.equal(given, before) and not (by_row and bool((given != given[:1]).any()))
    if isinstance(given, dict):
        return all(_alike(value, before[key], rows) for key, value in given.items())
    if isinstance(given, tuple | list):
        return all(_alike(value, other, rows) for value, other in zip(given, before, strict=True))
    return True


def _reader(checkpoint: Checkpoint) -> Callable[[Any], Read]:
    def reader(model: Any) -> Read:
        stored, shared = {own: name for name, own in parameter_names(model).items()}, shared_names(model)

        def read(name: str, changed: Mapping[str, Tensor]) -> Tensor:
            def tensor(part: str) -> Tensor:
                return changed[part] if part in changed else checkpoint.read(checkpoint.tensors[part])

            for whole in (stored.get(other, other) for other in (name, *shared.get(name, ()))):
                if whole in changed or whole in checkpoint.tensors:
                    return tensor(whole)
            parts = [] if name in stored else stored_parts(model, name)
            if not parts or set(parts) - checkpoint.tensors.keys():
                raise RefusedError(
                    f"{checkpoint.name} does not store {listing(parts) or stored[name]}, which {type(model).__name__} "
                    "has; it cannot be run layer by layer"
                )
            return assembled(model, name, {part: tensor(part) for part in parts})

        return read

    return reader


def attention_of(layer: nn.Module, module: AttentionModule) -> nn.Module:
    """The attention submodule of a layer: the end of its stored path."""
    return layer.get_submodule(module.path.split(f".{module.layer}.", 1)[1])


@contextmanager
def inputs_of(module: nn.Module, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Meanwhile `note` is told what `module` is given."""
    handle = module.register_forward_pre_hook(lambda _, args: note(args[0]))
    try:
        yield
    finally:
        handle.remove()


def until_stop(layer: nn.Module, hidden: Tensor, given: Any) -> None:
    try:
        run_layer(layer, hidden, given)
    except Stop:
        return
    raise RefusedError(f"{type(layer).__name__} does not call transformers' attention functions")
