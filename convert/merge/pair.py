"""The source and the converted model side by side, one layer in memory at a time.

Two streams of hidden states run through them: the source's own, which sets what every layer's attention should give,
and that of the converted model, which is what each layer will really be given, so that every layer also corrects what
those before it did (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.names import stored_parts, stored_tensors
from gqa.convert.heads.config import target_heads, transformers_config
from gqa.convert.heads.family import KINDS
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import AttentionModule, attention_modules
from gqa.convert.heads.symmetries import Symmetry
from gqa.convert.maps import HeadMaps
from gqa.convert.merge.layerwise import Given, Layer, Layerwise, Stream, is_by_block, send
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods import mean
from gqa.convert.plan import Plan

# What a model is given, by the names of its forward's arguments: (N, T) token ids, masks.
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Streams:
    """The source's stream of all blocks, and that of the model whose layers so far are converted.

    encoded: What the decoders of both read of their encoders (N, S, D), if these are they.
    """

    source: Stream
    converted: Stream
    encoded: tuple[Tensor, Tensor] | None = None


class Pair:
    """The source and the converted model, one layer at a time, and how to get from one to the other.

    Layers are counted through both stacks of an encoder-decoder, the encoder's first.
    """

    def __init__(self, plan: Plan, options: MapsOptions) -> None:
        checkpoint, config, dtype = plan.checkpoint, plan.config, getattr(torch, options.dtype)
        own = transformers_config(config.raw)
        kinds = KINDS if own.is_encoder_decoder else KINDS[:1]
        modules = [m for m in attention_modules(checkpoint, config) if m.kind == "encoder" or m.layer < config.layers]
        self._modules = sorted((m for m in modules if m.kind in kinds), key=lambda m: KINDS.index(m.kind))
        path = self._modules[0].path
        self.plan, self.options = plan, options
        self.symmetry = config.symmetry if isinstance(config.symmetry, Symmetry) else None
        how, names = (path, dtype, options.device), [tensor.name for tensor in plan.tensors]
        self.source = Layerwise(checkpoint, own, *how, checkpoint.tensors)
        self.target = Layerwise(checkpoint, transformers_config(plan.new_config), *how, names)

    def heads(self, module: AttentionModule) -> tuple[LayerHeads, int]:
        """Those of the source's module, and how many key/value heads they become."""
        config, layer = self.plan.config, module.layer
        return config.heads(layer), target_heads(config, layer, self.plan.groups).kv

    def modules_of(self, layer: int) -> list[AttentionModule]:
        """The attention modules of a layer whose heads are merged, in the order in which they are run."""
        first = self.source.first
        places = ((m, m.layer if m.kind == "encoder" else first + m.layer) for m in self._modules)
        found = [module for module, place in places if place == layer and self.plan.changes_of(module)]
        if len({module.kind for module in found}) < len(found):
            raise RefusedError(f"layer {layer} has several attention modules, which cannot be calibrated apart")
        return found

    def original(self, layer: int, before: Mapping[str, Tensor] | None = None) -> Layer:
        """The source's layer with its weights; `before`: the converted model's tensors of some modules, whose heads are
        repeated.
        """
        repeated: dict[str, Tensor] = {}
        for module in self.modules_of(layer) if before else ():
            for change in self.plan.changes_of(module):
                if before and change.outputs[0] in before:
                    tensors = change.repeated([before[name] for name in change.outputs])
                    repeated |= dict(zip((spec.name for spec in change.sources), tensors, strict=True))
        return Layer(layer, self.source.load(layer, repeated), self.source.device)

    def mapped(self, module: AttentionModule, maps: HeadMaps) -> dict[str, Tensor]:
        """The converted model's tensors of a module by their stored names."""
        read, found = self.plan.checkpoint.read, dict[str, Tensor]()
        for change in self.plan.changes_of(module):
            tensors = change.mapped([read(spec).float() for spec in change.sources], maps.merge)
            found |= dict(zip(change.outputs, tensors, strict=True))
        return found

    def merged(self, layer: int, module: AttentionModule, changed: Mapping[str, Tensor]) -> Layer:
        """The converted model's layer, of which `changed` tensors are known, by their stored names. Modules of which
        none is have the mean of their heads.
        """
        found: dict[str, Tensor] = {}
        for other in self.modules_of(layer):
            if not any(name in changed for change in self.plan.changes_of(other) for name in change.outputs):
                found |= self.mapped(other, self.mean(other))
        whole = self.target.load(layer, found | dict(changed))
        return self.looking_at(module, Layer(layer, whole, self.target.device), self.target)

    def mean(self, module: AttentionModule) -> HeadMaps:
        """The maps of the plainest method."""
        heads, groups = self.heads(module)
        return mean(heads.kv, groups)

    def trainable(self, module: AttentionModule, attention: nn.Module) -> dict[str, str]:
        """Parameters of a converted attention module that are stored in what changes: name below it -> full name."""
        changed = {name for change in self.plan.changes_of(module) for name in change.outputs}
        full = {id(parameter): name for name, parameter in self.target.model.named_parameters()}
        names = {name: full[id(parameter)] for name, parameter in attention.named_parameters()}
        return {name: own for name, own in names.items() if changed & {*self._stored_names(own)}}

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of the converted model by their full names -> tensors as they are stored."""
        whole = {own: name for name, own in self.target.loading.whole.items()}
        found = {whole[own]: tensor for own, tensor in tensors.items() if own in whole}
        rest = {own: tensor for own, tensor in tensors.items() if own not in whole}
        return found | (stored_tensors(self.target.model, rest) if rest else {})

    def _stored_names(self, parameter: str) -> list[str]:
        """Of the tensors that the converted model's parameter is made of."""
        return self.target.loading.sources.get(parameter) or stored_parts(self.target.model, parameter)

    def arrive(self, inputs: Inputs) -> Streams:
        """What the first layer of all is given, which is the encoder's if there is one."""
        if self.source.first:
            stream = self._stream(_own(inputs), inputs.get("attention_mask"), stack=0)
        else:
            stream = self._stream({**inputs, "use_cache": False})
        return Streams(stream, stream.clone())

    def encode(self, inputs: Inputs, streams: Streams) -> tuple[Tensor, Tensor]:
        """What leaves both encoders (N, S, D), of the streams that leave their last layers."""

        def left(stream: Stream) -> Tensor:
            parts = zip(_batches(_own(inputs), stream.batch), stream.hidden.split(stream.batch), strict=True)
            return torch.cat([self.source.leave(given, hidden) for given, hidden in parts])

        return left(streams.source), left(streams.converted)

    def decode(self, inputs: Inputs, encoded: tuple[Tensor, Tensor]) -> Streams:
        """What the first layer of both decoders is given."""
        own: dict[str, Any] = {
            name.removeprefix("decoder_"): of for name, of in inputs.items() if name.startswith("decoder_")
        }
        own |= {f"encoder_{name}": of for name, of in inputs.items() if name == "attention_mask"} | {"use_cache": False}
        source, converted = (
            self._stream(own | {"encoder_hidden_states": states}, inputs.get("decoder_attention_mask"))
            for states in encoded
        )
        return Streams(source, converted, encoded)

    def _stream(self, inputs: Mapping[str, Any], real: Tensor | None = None, stack: int = -1) -> Stream:
        """What the first layer of a stack is given. What layers are given beside is kept of each batch where it is not
        the same for all.
        """
        batch, hidden, found = self.options.at_once, list[Tensor](), list[dict[int, Given]]()
        known: dict[int, dict[int, Given]] = {}  # by the number of rows
        few, other = self.source.arrive(next(_batches(inputs, 1 if batch > 1 else 2)), stack)
        for part in _batches(inputs, batch):
            first, given = self.source.arrive(part, stack)
            before = known.setdefault(len(first), given)
            alike = _alike(given, before, len(first), other, len(few))
            if not alike and not self.source.first:
                raise RefusedError(
                    f"layers of {type(self.source.model).__name__} are given more than hidden states of the text; "
                    "it cannot be run layer by layer"
                )
            found.append(before if alike else send(given, "cpu"))
            hidden.append(first.cpu())
        return Stream(torch.cat(hidden), batch, found, (other, len(few)), None if real is None else real.bool())

    def looking_at(self, module: AttentionModule, layer: Layer, of: Layerwise | None = None) -> Layer:
        """A layer of the source, or `of` the other, whose attention is that at the end of the module's stored path."""
        attention, output = layer.whole.get_submodule(module.path.split(f".{module.layer}.", 1)[1]), None
        if self.symmetry:
            of = of or self.source
            stored = f"{module.path}.{self.symmetry.output}.weight"
            output = of.model.get_submodule(of.loading.whole[stored].rpartition(".")[0])
        return replace(layer, attention=attention, output=output)


def check_finite(layer: int, *tensors: Tensor) -> None:
    """Raises RefusedError where a layer computes what is no number."""
    if not all(bool(torch.stack(tensor.aminmax()).isfinite().all()) for tensor in tensors):  # extremes keep NaN
        raise RefusedError(f"layer {layer} computes NaN or Inf on the calibration text; the model is broken there")


def _own(inputs: Inputs) -> Inputs:
    """Those of the encoder."""
    return {name: of for name, of in inputs.items() if not name.startswith("decoder_")}


def _batches(inputs: Mapping[str, Any], batch: int) -> Iterator[dict[str, Any]]:
    """So many blocks at a time."""
    for start in range(0, len(next(iter(inputs.values()))), batch):
        rows = slice(start, start + batch)
        yield {name: of[rows] if isinstance(of, Tensor) else of for name, of in inputs.items()}


def _alike(given: Any, before: Any, rows: int, other: Any, others: int) -> bool:
    """Whether what layers are given is what they were given before, and the same in all rows of a batch. `other` is
    what they are given of `others` rows.
    """

    def same(part: Any, old: Any, one: Any) -> bool:
        if not isinstance(part, Tensor):
            return True
        own = part.unflatten(0, (rows, -1)) if is_by_block(part, rows, one, others) else part[None]
        return torch.equal(part, old) and bool((own == own[:1]).all())

    return all(tree_leaves(tree_map(same, given, before, other)))
