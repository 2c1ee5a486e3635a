"""Run the base model and the converted model side by side, one layer in memory at a time.

Each has its own hidden states. The base model's define the targets of every layer's attention. The
converted model's are the inputs that a layer will really get, so each layer also corrects errors of
the layers before it (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqa.convert.head_maps import HeadMaps, mean_maps
from gqa.convert.heads.config import transformers_config
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.modules import AttentionModule, Change
from gqa.convert.merge.layer import Attention, Layer, Stream
from gqa.convert.merge.layer_runner import LayerRunner
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.streams import STREAM_COPIES, Inputs, first_stream
from gqa.convert.plan import Plan
from gqa.core.errors import layerwise_error
from gqa.models.names import stored_tensors

_LEAST_NORM = 1e-30  # of a hidden state by whose norm is divided


@dataclass(frozen=True)
class StreamPair:
    """Hidden states of the same text in the base model and in the converted model."""

    base: Stream
    converted: Stream

    def drift(self) -> float:
        """How far the converted model's hidden states are from the base model's: the median over
        all tokens of |converted - base| / |base|. Padding does not count.
        """
        rows = []
        blocks = zip(self.base.hidden, self.converted.hidden, strict=True)
        for base, converted in blocks:  # one at a time to save memory
            difference = (converted.float() - base.float()).norm(dim=-1)
            rows.append(difference / base.float().norm(dim=-1).clamp_min(_LEAST_NORM))

        drifts = torch.stack(rows)  # (N, T)
        if self.base.is_text is not None:
            drifts = drifts[self.base.is_text]
        return float(drifts.median())


class ModelPair:
    """The base model and the converted model of a plan, one decoder layer at a time.

    Attributes:
        checkpoint: The base model's, which both models read.
        config: The base model's config.
        options: How maps are computed.
        searches_groups: Whether to search for the groups with the least loss.
        symmetry: How heads can be changed; None if it is not known.
        texts: All texts that advance with every layer.
    """

    def __init__(self, plan: Plan, options: MapsOptions) -> None:
        self.checkpoint = plan.checkpoint
        self.config = plan.config
        self.options = options
        self.searches_groups = plan.searches(options.grouping)
        self.symmetry: Symmetry | None = None
        if isinstance(plan.config.symmetry, Symmetry):
            self.symmetry = plan.config.symmetry
        self.texts: list[StreamPair] = []

        base_config = transformers_config(plan.config.raw)
        self._modules = _decoder_modules(plan, base_config.is_encoder_decoder)
        self._changes = plan.changes
        output_name = self.symmetry.output if self.symmetry else None

        def runner(model_config: Any, stored_names: Iterable[str]) -> LayerRunner:
            """One of the models: both read the base model's checkpoint."""
            return LayerRunner(
                plan.checkpoint,
                model_config,
                self._modules[0].path,
                stored_names,
                output_name=output_name,
                dtype=getattr(torch, options.precision),
                device=options.device,
            )

        converted_names = [tensor.name for tensor in plan.tensors]
        self.base_model = runner(base_config, plan.checkpoint.tensors)
        self.converted_model = runner(transformers_config(plan.new_config), converted_names)

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.base_model.layers)

    # ------------------------------------------------------------------------------- modules

    def modules_of(self, layer: int) -> list[AttentionModule]:
        """The layer's attention modules whose heads are merged, in the order of execution."""
        modules = [
            module
            for module in self._modules
            if module.layer == layer and module.path in self._changes
        ]
        kinds = {module.kind for module in modules}
        if len(kinds) < len(modules):
            raise layerwise_error(
                self.checkpoint.name,
                f"layer {layer} has several attention modules of one kind",
            )
        return modules

    def changes_of(self, module: AttentionModule) -> tuple[Change, ...]:
        """How the stored tensors of a module change whose heads are merged."""
        return self._changes[module.path]

    def change_of(self, module: AttentionModule) -> Change:
        """Any of the module's changes, for its heads and groups, which all of them share."""
        return self.changes_of(module)[0]

    def mean_maps(self, module: AttentionModule) -> HeadMaps:
        """Maps of the method `mean`."""
        change = self.change_of(module)
        return mean_maps(change.heads.kv, change.groups)

    # ------------------------------------------------------------------------------- weights

    def load_converted(self, index: int, modules: list[AttentionModule]) -> Layer:
        """The converted model's layer.

        The first of its `modules` has no weights of heads yet; the others have the mean of their
        heads.
        """
        missing = set[str]()
        for module in modules:
            missing |= self._changed_names(module)
        layer = self.converted_model.load(index, missing=missing)
        for module in modules[1:]:
            layer.set_tensors(self.merged_tensors(module, self.mean_maps(module)))
        return layer

    def merged_tensors(self, module: AttentionModule, maps: HeadMaps) -> dict[str, Tensor]:
        """The converted model's tensors of a module, by stored name."""
        read = self.checkpoint.read
        return {
            change.source.name: change.mapped(read(change.source).float(), maps.merge)
            for change in self.changes_of(module)
        }

    def repeated_tensors(
        self, module: AttentionModule, converted: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Converted tensors of a module in the base model's shapes, with repeated KV heads."""
        return {
            change.source.name: change.repeated(converted[change.source.name])
            for change in self.changes_of(module)
        }

    def trainable(self, attention: Attention, module: AttentionModule) -> dict[str, str]:
        """Parameters of a converted module whose stored tensors change.

        Returns the name in the module -> the full name.
        """
        changed = self._changed_names(module)
        full_names = {id(p): name for name, p in self.converted_model.model.named_parameters()}
        trainable = {}
        for name, parameter in attention.module.named_parameters():
            full_name = full_names[id(parameter)]
            if not changed.isdisjoint(self.converted_model.names.stored_names_of(full_name)):
                trainable[name] = full_name
        return trainable

    def _changed_names(self, module: AttentionModule) -> set[str]:
        """The stored names of a module's tensors that change."""
        return {change.source.name for change in self.changes_of(module)}

    def by_stored_name(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of the converted model, by full name -> stored tensors, by stored name."""
        stored_names = {into: name for name, into in self.converted_model.names.unconverted.items()}
        stored: dict[str, Tensor] = {}
        joined: dict[str, Tensor] = {}  # parameters that are stored in another form
        for name, tensor in parameters.items():
            if name in stored_names:
                stored[stored_names[name]] = tensor
            else:
                joined[name] = tensor
        if joined:
            stored |= stored_tensors(self.converted_model.model, joined)
        return stored

    # ------------------------------------------------------------------------- hidden states

    def add_text(self, inputs: Inputs) -> StreamPair:
        """Hidden states of a text before the first layer, which advance with every layer."""
        base = self.states_before_layers(inputs)
        text = StreamPair(base, base.clone())
        self.texts.append(text)
        self.base_model.streams.append(text.base)
        self.converted_model.streams.append(text.converted)
        return text

    def states_before_layers(self, inputs: Inputs, copies: int = STREAM_COPIES) -> Stream:
        """Hidden states of a text before the first layer, the same in both models.

        copies: How many hidden states of this text there will be at the same time.
        """
        return first_stream(self.base_model, inputs, self.options.blocks_at_once, copies)

    def state(self) -> dict[str, Tensor]:
        """The hidden states of all texts, with which another pair continues (`restore`)."""
        state: dict[str, Tensor] = {}
        for number, text in enumerate(self.texts):
            state[f"{number} base"] = text.base.hidden
            state[f"{number} converted"] = text.converted.hidden
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue after the layer at which another pair with the same texts gave its `state`."""
        for name, hidden in self.state().items():
            hidden.copy_(state[name])


def _decoder_modules(plan: Plan, is_encoder_decoder: bool) -> list[AttentionModule]:
    """Attention modules of decoder layers: self-attention first, then cross-attention."""
    modules = [
        module
        for module in plan.modules
        if module.layer < plan.config.layers  # layers beyond predict further tokens
    ]
    chosen = [module for module in modules if module.kind == "decoder-self"]
    if is_encoder_decoder:
        chosen += [module for module in modules if module.kind == "cross"]
    return chosen
