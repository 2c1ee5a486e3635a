"""Run the source and the converted model side by side, one layer in memory at a time.

Each has its own hidden states: the source's define the targets of every layer's attention; the converted model's are
the inputs that a layer will really get, so each layer also corrects errors of the layers before (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.compat import tree_leaves, tree_map
from gqa.checkpoint.errors import LayerwiseError, RefusedError
from gqa.checkpoint.names import stored_tensors
from gqa.convert.heads.config import target_heads, transformers_config
from gqa.convert.heads.family import LayerHeads, Symmetry
from gqa.convert.heads.modules import AttentionModule, attention_modules
from gqa.convert.merge.layerwise import Arguments, Layer, Layerwise, Stream
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods import HeadMaps, mean
from gqa.convert.plan import Plan

# (N, T) token ids and masks by argument name of the model's forward.
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Streams:
    """Hidden states of all blocks in the source, and in the model whose layers up to here are converted."""

    source: Stream
    converted: Stream


class Pair:
    """The source and the converted model, one decoder layer at a time."""

    def __init__(self, plan: Plan, options: MapsOptions) -> None:
        checkpoint, config, dtype = plan.checkpoint, plan.config, getattr(torch, options.dtype)
        source = transformers_config(config.raw)
        modules = [m for m in attention_modules(checkpoint, config) if m.layer < config.layers]
        self._modules = [m for m in modules if m.kind == "decoder-self"]
        self._modules += [m for m in modules if m.kind == "cross" and source.is_encoder_decoder]
        path = self._modules[0].path
        self.plan, self.options = plan, options
        self.symmetry = config.symmetry if isinstance(config.symmetry, Symmetry) else None
        self.source = Layerwise(checkpoint, source, path, dtype, options.device, checkpoint.tensors)
        names, target = [tensor.name for tensor in plan.tensors], transformers_config(plan.new_config)
        self.target = Layerwise(checkpoint, target, path, dtype, options.device, names)

    def heads(self, module: AttentionModule) -> tuple[LayerHeads, int]:
        """Heads of the source's module, and the converted module's number of KV heads."""
        config, layer = self.plan.config, module.layer
        return config.heads(layer), target_heads(config, layer, self.plan.groups).kv

    def modules_of(self, layer: int) -> list[AttentionModule]:
        """The layer's attention modules whose heads are merged, in execution order."""
        modules = [module for module in self._modules if module.layer == layer and self.plan.changes_of(module)]
        if len({module.kind for module in modules}) < len(modules):
            raise LayerwiseError(f"layer {layer} has several attention modules of one kind, which is not supported")
        return modules

    def original(self, layer: int, before: Mapping[str, Tensor] | None = None) -> Layer:
        """The source's layer with its weights, except in modules with converted tensors in `before`: these get the
        converted heads, repeated.
        """
        repeated: dict[str, Tensor] = {}
        for module in self.modules_of(layer) if before else ():
            for change in self.plan.changes_of(module):
                if before and (name := change.source.name) in before:
                    repeated[name] = change.repeated(before[name])
        return self.source.load(layer, repeated)

    def mapped(self, module: AttentionModule, maps: HeadMaps) -> dict[str, Tensor]:
        """The converted model's tensors of a module, by stored name."""
        changes, read = self.plan.changes_of(module), self.plan.checkpoint.read
        return {change.source.name: change.mapped(read(change.source).float(), maps.merge) for change in changes}

    def merged(self, layer: int, module: AttentionModule, changed: Mapping[str, Tensor]) -> Layer:
        """The converted model's layer with the tensors `changed` (by stored name). Modules without any of them get the
        mean of their heads.
        """
        tensors: dict[str, Tensor] = {}
        for other in self.modules_of(layer):
            if not any(change.source.name in changed for change in self.plan.changes_of(other)):
                tensors |= self.mapped(other, self.mean(other))
        return self.with_attention(module, self.target.load(layer, tensors | dict(changed)), self.target)

    def mean(self, module: AttentionModule) -> HeadMaps:
        """Maps of the method `mean`."""
        heads, groups = self.heads(module)
        return mean(heads.kv, groups)

    def trainable(self, module: AttentionModule, attention: nn.Module) -> dict[str, str]:
        """Parameters of a converted attention module whose stored tensors change: name in the module -> full name."""
        changed = {change.source.name for change in self.plan.changes_of(module)}
        full = {id(parameter): name for name, parameter in self.target.model.named_parameters()}
        names = {name: full[id(parameter)] for name, parameter in attention.named_parameters()}
        return {name: path for name, path in names.items() if changed & {*self.target.loading.parts(path)}}

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert parameters of the converted model, by full name, to stored tensors, by stored name."""
        whole = {parameter: name for name, parameter in self.target.loading.whole.items()}
        stored = {whole[name]: tensor for name, tensor in tensors.items() if name in whole}
        rest = {name: tensor for name, tensor in tensors.items() if name not in whole}
        return stored | (stored_tensors(self.target.model, rest) if rest else {})

    def start(self, inputs: Inputs) -> Streams:
        """Hidden states that the first decoder layer reads. The layers' other arguments are computed once per batch
        size, or with an encoder once per batch.
        """
        source, batch, known = self.source, self.options.at_once, dict[int, dict[int, Arguments]]()
        blocks = torch.arange(len(next(iter(inputs.values())))).split(batch)
        decoder, is_text = {**inputs, "use_cache": False}, inputs.get("decoder_attention_mask")
        has_encoder = source.model.config.is_encoder_decoder
        if has_encoder:
            encoder = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
            decoder = {name.removeprefix("decoder_"): decoder[name] for name in decoder.keys() - encoder.keys()}
            decoder["encoder_hidden_states"] = source.encode([_select(encoder, rows) for rows in blocks])
            if "attention_mask" in inputs:
                decoder["encoder_attention_mask"] = inputs["attention_mask"]
        else:
            ids = inputs["input_ids"][:1]
            one, other = (source.layer_inputs({**decoder, "input_ids": ids})[1] for ids in (ids, ids.flip(1)))
            if not all(tree_leaves(tree_map(lambda a, b: not isinstance(a, Tensor) or torch.equal(a, b), one, other))):
                raise LayerwiseError(
                    f"layers of {type(source.model).__name__} read more of the text than hidden states; "
                    "it cannot be run layer by layer"
                )

        def arguments_of(rows: Tensor) -> dict[int, Arguments]:
            if has_encoder:
                return source.layer_inputs(_select(decoder, rows))[1]
            if len(rows) not in known:
                known[len(rows)] = source.layer_inputs(_select(decoder, rows))[1]
            return known[len(rows)]

        hidden = torch.cat([source.layer_inputs(_select(decoder, rows))[0].cpu() for rows in blocks])
        stream = Stream(hidden, batch, arguments_of, None if is_text is None else is_text.bool())
        return Streams(stream, stream.clone())

    def with_attention(self, module: AttentionModule, layer: Layer, model: Layerwise | None = None) -> Layer:
        """The layer (of the source, or of `model`) with the attention module and output projection to capture."""
        attention, projection = layer.module.get_submodule(module.path.split(f".{module.layer}.", 1)[1]), None
        if self.symmetry:
            model = model or self.source
            weight = model.loading.whole[f"{module.path}.{self.symmetry.output}.weight"]
            projection = model.model.get_submodule(weight.rpartition(".")[0])
        return replace(layer, attention=attention, projection=projection)


def check_finite(layer: int, *tensors: Tensor) -> None:
    """Raise RefusedError if a layer computes NaN or Inf."""
    if not all(bool(torch.stack(tensor.aminmax()).isfinite().all()) for tensor in tensors):  # aminmax propagates NaN
        raise RefusedError(f"layer {layer} computes NaN or Inf on the calibration text; the model is broken there")


def _select(inputs: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """The inputs of the blocks `rows`."""
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}
