"""The source and the converted model side by side, one layer in memory at a time.

Two streams of hidden states run through them: the source's own, which sets what every layer's attention should give,
and that of the converted model, which is what each layer will really be given, so that every layer also corrects what
those before it did (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.errors import RefusedError, listing
from gqa.checkpoint.names import assembled, parameter_names, shared_names, stored_parts, stored_tensors
from gqa.checkpoint.read import TORCH_DTYPES, Checkpoint
from gqa.convert.align.layerwise import Layerwise, Read
from gqa.convert.align.observe import Feed, Layer
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import AttentionModule, Change, attention_modules, module_changes
from gqa.convert.heads.symmetries import Symmetry
from gqa.convert.maps import HeadMaps
from gqa.convert.plan import Plan, rules_beside


@dataclass(frozen=True)
class Streams:
    """Hidden states (N, T, D) of all blocks: the source's, and those of the model whose layers so far are converted."""

    source: Tensor
    converted: Tensor


@dataclass(frozen=True)
class Pair:
    """The source and the converted model, one layer at a time, and how to get from one to the other."""

    plan: Plan
    source: Layerwise
    target: Layerwise
    modules: list[AttentionModule]
    feed: Feed

    @classmethod
    def open(cls, plan: Plan, device: str, dtype: torch.dtype, batch: int) -> Pair:
        checkpoint, config = plan.checkpoint, plan.config
        modules = attention_modules(checkpoint, config)
        modules = [module for module in modules if module.layer < config.layers and module.kind == "decoder-self"]
        path = modules[0].path
        source = Layerwise.make(transformers_config(config.raw), path, _reader(checkpoint), dtype, device)
        target = Layerwise.make(transformers_config(plan.new_config), path, _reader(checkpoint), dtype, device)
        return cls(plan, source, target, modules, Feed(batch, source.device))

    @cached_property
    def symmetry(self) -> Symmetry | None:
        found = self.plan.config.symmetry
        return found if isinstance(found, Symmetry) else None

    @cached_property
    def _names(self) -> dict[str, str]:
        """Stored name -> of the parameter, which is called the same in both models."""
        return parameter_names(self.target.model)

    def heads(self, module: AttentionModule) -> tuple[LayerHeads, int]:
        """Those of the source's module, and how many key/value heads they become."""
        heads, config = self.plan.config.heads(module.layer), self.plan.config
        return heads, heads.kv * self.plan.groups // config.main.kv

    def module_of(self, layer: int) -> AttentionModule | None:
        """The attention module of a layer whose heads are merged."""
        found = [m for m in self.modules if m.layer == layer and self._changes(m)]
        if len(found) > 1:
            raise RefusedError(f"layer {layer} has several attention modules, which cannot be calibrated apart")
        return found[0] if found else None

    def original(self, index: int) -> Layer:
        """The source's layer with its weights."""
        whole, module = self.source.load(index), self.module_of(index)
        return self._found(self.source, whole, module) if module else Layer(index, whole)

    def merged(self, module: AttentionModule, maps: HeadMaps, trained: Mapping[str, Tensor] | None = None) -> Layer:
        """The converted model's layer, by maps; of `trained` tensors, by their stored names, as they are."""
        read, found = self.plan.checkpoint.read, dict[str, Tensor]()
        for change in self._changes(module):
            parts = change.split([read(spec).float() for spec in change.sources])
            tensors = change.join({p: heads if p == "whole" else maps.merge(p, heads) for p, heads in parts.items()})
            found |= dict(zip(change.outputs, tensors, strict=True))
        return self._found(self.target, self.target.load(module.layer, found | dict(trained or {})), module)

    def trainable(self, module: AttentionModule, attention: nn.Module) -> dict[str, str]:
        """Parameters of a converted attention module that are stored in what changes: name below it -> full name."""
        changed = {name for change in self._changes(module) for name in change.outputs}
        full = {id(parameter): name for name, parameter in self.target.model.named_parameters()}
        names = {name: full[id(parameter)] for name, parameter in attention.named_parameters()}
        return {name: own for name, own in names.items() if changed & set(stored_parts(self.target.model, own))}

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of the converted model by their full names -> tensors as they are stored."""
        return stored_tensors(self.target.model, dict(tensors))

    def arrive(self, blocks: Tensor) -> Streams:
        """(N, T) ids -> what the first layer is given."""
        hidden, known = [], self.feed.given
        for ids in blocks.split(self.feed.batch):
            first, given = self.source.arrive(ids)
            if not _alike(given, known.setdefault(len(ids), given), len(ids)):
                raise RefusedError(
                    f"layers of {type(self.source.model).__name__} are given more than hidden states of the text; "
                    "it cannot be run layer by layer"
                )
            hidden.append(first.cpu())
        if 1 not in known:  # for what is tried on one block
            known[1] = self.source.arrive(blocks[:1])[1]
        states = torch.cat(hidden)
        return Streams(states, states.clone())

    def _changes(self, module: AttentionModule) -> list[Change]:
        beside = rules_beside(self.plan.config, self.plan.merging.method, self.plan.checkpoint.name)
        return module_changes(module, self.plan.config, self.plan.groups, beside)

    def _found(self, own: Layerwise, whole: nn.Module, module: AttentionModule) -> Layer:
        """A layer whose attention is at the end of the module's stored path."""
        attention, output = whole.get_submodule(module.path.split(f".{module.layer}.", 1)[1]), None
        if self.symmetry:
            stored = f"{module.path}.{self.symmetry.output.tensor}.weight"
            output = own.model.get_submodule(self._names[stored].rpartition(".")[0])
        return Layer(module.layer, whole, module, attention, output)


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
                if part in changed:
                    return changed[part]
                if (spec := checkpoint.tensors[part]).dtype not in TORCH_DTYPES:  # counters of batch norms
                    raise RefusedError(f"{part} is stored as {spec.dtype}; it cannot be run layer by layer")
                return checkpoint.read(spec)

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
