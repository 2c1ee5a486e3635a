"""The source and the converted model side by side, one layer in memory at a time.

Two streams of hidden states run through them: the source's own, which sets what every layer's attention should give,
and that of the converted model, which is what each layer will really be given, so that every layer also corrects what
those before it did (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.names import stored_parts, stored_tensors
from gqa.convert.align.layerwise import Feed, Layer, Layerwise
from gqa.convert.align.options import MapsOptions
from gqa.convert.heads.config import target_heads, transformers_config
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import AttentionModule, attention_modules
from gqa.convert.heads.symmetries import Symmetry
from gqa.convert.maps import HeadMaps
from gqa.convert.plan import Plan


@dataclass(frozen=True)
class Streams:
    """Hidden states (N, T, D) of all blocks: the source's, and those of the model whose layers so far are converted."""

    source: Tensor
    converted: Tensor


class Pair:
    """The source and the converted model, one layer at a time, and how to get from one to the other."""

    def __init__(self, plan: Plan, options: MapsOptions) -> None:
        checkpoint, config, dtype = plan.checkpoint, plan.config, getattr(torch, options.dtype)
        modules = attention_modules(checkpoint, config)
        self._modules = [module for module in modules if module.layer < config.layers and module.kind == "decoder-self"]
        path = self._modules[0].path
        self.plan, self.options = plan, options
        self.symmetry = config.symmetry if isinstance(config.symmetry, Symmetry) else None
        self.source = Layerwise(checkpoint, transformers_config(config.raw), path, dtype, options.device)
        self.target = Layerwise(checkpoint, transformers_config(plan.new_config), path, dtype, options.device)
        self.feed = Feed(options.batch, self.source.device)

    def heads(self, module: AttentionModule) -> tuple[LayerHeads, int]:
        """Those of the source's module, and how many key/value heads they become."""
        config, layer = self.plan.config, module.layer
        return config.heads(layer), target_heads(config, layer, self.plan.groups).kv

    def module_of(self, layer: int) -> AttentionModule | None:
        """The attention module of a layer whose heads are merged."""
        found = [module for module in self._modules if module.layer == layer and self.plan.changes_of(module)]
        if len(found) > 1:
            raise RefusedError(f"layer {layer} has several attention modules, which cannot be calibrated apart")
        return found[0] if found else None

    def original(self, layer: int, module: AttentionModule | None) -> Layer:
        """The source's layer with its weights, in which `module` is looked at."""
        return self._found(self.source, layer, module, {})

    def merged(self, module: AttentionModule, maps: HeadMaps, trained: Mapping[str, Tensor] | None = None) -> Layer:
        """The converted model's layer, by maps; of `trained` tensors, by their stored names, as they are."""
        read, found = self.plan.checkpoint.read, dict[str, Tensor]()
        for change in self.plan.changes_of(module):
            tensors = change.mapped([read(spec).float() for spec in change.sources], maps.merge)
            found |= dict(zip(change.outputs, tensors, strict=True))
        return self._found(self.target, module.layer, module, found | dict(trained or {}))

    def trainable(self, module: AttentionModule, attention: nn.Module) -> dict[str, str]:
        """Parameters of a converted attention module that are stored in what changes: name below it -> full name."""
        changed = {name for change in self.plan.changes_of(module) for name in change.outputs}
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

    def _found(
        self, own: Layerwise, layer: int, module: AttentionModule | None, changed: Mapping[str, Tensor]
    ) -> Layer:
        """A layer with its weights; its attention is at the end of the module's stored path."""
        attention, output = (whole := own.load(layer, changed)), None
        if module:
            attention = whole.get_submodule(module.path.split(f".{layer}.", 1)[1])
        if module and self.symmetry:
            stored = f"{module.path}.{self.symmetry.output}.weight"
            output = own.model.get_submodule(own.names[stored].rpartition(".")[0])
        return Layer(layer, whole, self.feed, attention, output)


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
