"""A model whose decoder layers get their weights one at a time.

All text goes through a layer before the next one's weights are read, so a model needs the memory of
one layer. What a layer is called with besides hidden states (masks, position embeddings, the
encoder's output) is recorded from the model's own forward with layers that only record, so nothing
here depends on the architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from gqa.checkpoint.read import TORCH_OF_SAFETENSORS, Checkpoint
from gqa.convert.merge.layer import Arguments, Layer, Stream, layerwise_errors, send
from gqa.core.compat import build_model, initialize, supports_sdpa, unsaved_names
from gqa.core.errors import RefusedError, layerwise_error
from gqa.models.attention_functions import Attend, attend_eager, attend_sdpa
from gqa.models.classes import model_class
from gqa.models.names import StoredNames


class _FirstCall(Exception):  # noqa: N818 - a signal, not an error
    """Raised by the first recorder that is called, if nothing more has to be known."""


class _Recorder(nn.Module):
    """Stands in for a layer: records what it is called with. Attributes are those of the layer."""

    def __init__(
        self, layer: nn.Module, index: int, record: Callable[[int, Tensor, Any, Any], Any]
    ) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, so that it is no submodule
        self._index = index
        self._record = record

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._record(self._index, hidden_states, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # the decoder asks its layers for their types
            return getattr(self.__dict__["_layer"][0], name)


def _empty_model(config: Any, dtype: torch.dtype) -> tuple[PreTrainedModel, Attend]:
    """The model of a config on the meta device, with buffers, and its attention function.

    Raises LayerwiseError if its class does not call transformers' attention functions.
    """
    cls = model_class(config)
    if not issubclass(cls, PreTrainedModel):
        raise layerwise_error(config.model_type, "transformers has no model of it alone")

    text = config.get_text_config(decoder=True)
    caps_scores = getattr(text, "attn_logit_softcapping", None) is not None
    eager = caps_scores or not supports_sdpa(cls)
    name = "gqa_eager" if eager else "gqa_sdpa"
    try:
        with init_empty_weights(include_buffers=False), no_init_weights():
            model = build_model(cls, config, attn_implementation=name, dtype=dtype)
    except (KeyError, ValueError) as error:  # a class with its own table of attention classes
        raise layerwise_error(
            cls.__name__, "it does not call transformers' attention functions"
        ) from error

    model.tie_weights()  # empty weights are not tied
    attend = attend_eager if eager else attend_sdpa
    return model.eval(), attend


class LayerRunner:
    """One model, layer by layer: the only place that loads and releases weights of layers.

    streams: Hidden states that go through every layer of this model (`advance`).
    names: How transformers maps stored tensors to the model's parameters.
    attend: The attention function of the model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Any,
        attention_path: str,
        stored_names: Iterable[str],
        *,
        output_name: str | None,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """Build the model of transformers' `config` without the weights of its layers.

        Args:
            checkpoint: Where weights are read.
            attention_path: An attention module of the decoder ("model.layers.0.self_attn").
            stored_names: The names of all tensors of the model's checkpoint.
            output_name: Name of W_O below an attention module; None if it is not known.

        Raises:
            LayerwiseError: transformers cannot run the model layer by layer.
        """
        self.device = torch.device(device)
        self.streams: list[Stream] = []
        self._checkpoint = checkpoint
        self._output_name = output_name

        self.model, self.attend = _empty_model(config, dtype)
        self.names = StoredNames(self.model, stored_names)
        self.prefix = self._find_layers(attention_path)
        self.layers: list[nn.Module] = list(self.model.get_submodule(self.prefix))

        self._encoder = ""  # path of the encoder, if there is one
        if config.is_encoder_decoder:
            encoder = self.model.get_encoder()
            self._encoder = next(
                path for path, module in self.model.named_modules() if module is encoder
            )

        self._computed = unsaved_names(self.model).difference(self.names.by_parameter)
        self._load_outside_layers()
        # Whether layers return a tuple (None until one has run), and what follows the hidden states
        # in it.
        self._returns_tuple: bool | None = None
        self._extras: tuple[Any, ...] = ()

    def _find_layers(self, attention_path: str) -> str:
        """The path of the list of decoder layers."""
        inside = (
            parameter
            for stored, parameter in self.names.unconverted.items()
            if stored.startswith(f"{attention_path}.")
        )
        match = re.match(r"(.+?)\.\d+\.", next(inside, ""))
        if match is None:
            reason = f"it has no layer with {attention_path}"
            raise layerwise_error(type(self.model).__name__, reason)
        return match[1]

    def _load_outside_layers(self) -> None:
        """Load embeddings and norms; not the layers, the encoder and the language-model head."""
        parameters = self.model.state_dict()
        inside = [f"{self.prefix}."]
        if self._encoder:
            inside.append(f"{self._encoder}.")

        outside = [
            name
            for name in parameters
            if not name.startswith(tuple(inside)) and "lm_head" not in name
        ]
        self._load_parameters(outside)

        for name in self._computed & parameters.keys():  # sinusoids, which the class computes
            module = self.model.get_submodule(name.rpartition(".")[0])
            module.to_empty(device=self.device)
            initialize(self.model, module)

        for name, buffer in self.model.named_buffers():
            set_module_tensor_to_device(self.model, name, self.device, buffer)

    # ------------------------------------------------------------------------------- weights

    def load(self, index: int, missing: Iterable[str] = ()) -> Layer:
        """Layer `index` with its weights, except parameters of the stored tensors `missing`."""
        left_out = set(missing)
        names = [
            name
            for name in self._parameters_of(index)
            if not left_out or left_out.isdisjoint(self.names.stored_names_of(name))
        ]
        self._load_parameters(names)
        return Layer(self, index, self.layers[index])

    def set_tensors(self, index: int, stored: Mapping[str, Tensor]) -> None:
        """Replace weights of layer `index` by tensors that have the names of the checkpoint."""
        names = [
            name
            for name in self._parameters_of(index)
            if not stored.keys().isdisjoint(self.names.stored_names_of(name))
        ]
        self._load_parameters(names, stored)

    def release(self, index: int) -> None:
        """Free the weights of layer `index`."""
        for name in self._parameters_of(index):
            set_module_tensor_to_device(self.model, name, "meta")

    def projection(self, attention_path: str) -> nn.Module | None:
        """The module of W_O in the attention module stored under a path; None if not known."""
        if self._output_name is None:
            return None
        weight = self.names.unconverted[f"{attention_path}.{self._output_name}.weight"]
        module: nn.Module = self.model.get_submodule(weight.rpartition(".")[0])
        return module

    def _parameters_of(self, index: int) -> list[str]:
        return [f"{self.prefix}.{index}.{name}" for name in self.layers[index].state_dict()]

    def _load_parameters(
        self, names: Iterable[str], replaced: Mapping[str, Tensor] | None = None
    ) -> None:
        """Load parameters from the checkpoint, or from `replaced`, by stored name."""
        for name in names:
            if name in self._computed:
                continue
            tensors = {
                stored: self._stored_tensor(stored, replaced or {})
                for stored in self.names.stored_names_of(name)
            }
            tensor = self.names.assemble(name, tensors)
            set_module_tensor_to_device(
                self.model, name, self.device, tensor, dtype=self.model.dtype
            )

    def _stored_tensor(self, name: str, replaced: Mapping[str, Tensor]) -> Tensor:
        if name in replaced:
            return replaced[name]
        spec = self._checkpoint.tensors.get(name)
        if spec is None or spec.dtype not in TORCH_OF_SAFETENSORS:
            problem = f"it stores {name} as {spec.dtype}" if spec else f"it does not store {name}"
            raise layerwise_error(self._checkpoint.name, problem)
        return self._checkpoint.read(spec)

    # ------------------------------------------------------------------------- hidden states

    def advance(self, layer: Layer) -> None:
        """Take all streams of this model through a loaded layer."""
        for stream in self.streams:
            layer.advance(stream)

    @torch.no_grad()
    def layer_inputs(self, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[int, Arguments]]:
        """What the decoder calls its layers with, from the arguments of its forward.

        Returns the hidden states (B, T, D) that the first layer reads, and the other arguments of
        every layer, by its index.
        """
        if self._returns_tuple is None:
            self._see_what_layers_return(inputs)

        with self._recording_layers() as calls:
            output = self._run(self._decoder, inputs).last_hidden_state

        if len(calls) != len(self.layers) or output.shape != calls[0][0].shape:
            reason = "its decoder does other things than to call each layer"
            raise layerwise_error(type(self.model).__name__, reason)
        hidden = calls[0][0]
        return hidden, {index: arguments for index, (_, arguments) in calls.items()}

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The output (B, T, D) of the last layer -> logits (B, T, V), float32.

        Raises RefusedError if the model has no language-model head.
        """
        head = self.model.get_output_embeddings()
        if head is None:
            raise RefusedError(
                f"{type(self.model).__name__} returns no logits; pass a checkpoint that has "
                "its language-model head"
            )
        path = next(path for path, module in self.model.named_modules() if module is head)
        empty = [f"{path}.{name}" for name, weight in head.named_parameters() if weight.is_meta]
        self._load_parameters(empty)

        # The model's own forward, whose layers return the given hidden states.
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
        recording = self._recording_layers(hidden.to(self.device))
        with recording, layerwise_errors(type(self.model).__name__):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits.float()

    @torch.no_grad()
    def encode(self, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """Outputs (N, S, D) of the encoder, from batches of arguments of its forward.

        All layers of the encoder have weights meanwhile.
        """
        encoder = self.model.get_submodule(self._encoder)
        names = [f"{self._encoder}.{name}" for name in encoder.state_dict()]
        self._load_parameters(names)
        outputs = [self._run(encoder, batch).last_hidden_state.cpu() for batch in batches]
        for name in names:
            set_module_tensor_to_device(self.model, name, "meta")
        return torch.cat(outputs)

    @property
    def _decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.get_submodule(self.prefix.rpartition(".")[0])
        return decoder

    def _run(self, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """The output of the encoder or decoder. Raises LayerwiseError if it fails."""
        with layerwise_errors(type(self.model).__name__):
            return module(**send(dict(inputs), self.device))

    def _see_what_layers_return(self, inputs: Mapping[str, Any]) -> None:
        """Run the first layer once to see what layers return after the hidden states."""
        with self._recording_layers(stop=True) as calls, suppress(_FirstCall):
            self._run(self._decoder, inputs)
        if not calls:  # `layer_inputs` says so
            return

        index, (hidden, (args, kwargs)) = calls.popitem()
        layer = self.load(index).module
        with layerwise_errors(f"a layer {type(layer).__name__}"):
            output = layer(hidden, *args, **kwargs)
        self._returns_tuple = not isinstance(output, Tensor)
        if self._returns_tuple:
            self._extras = tuple(output[1:])
        self.release(index)

    @contextmanager
    def _recording_layers(
        self, output: Tensor | None = None, stop: bool = False
    ) -> Iterator[dict[int, tuple[Tensor, Arguments]]]:
        """Put recorders in the place of the layers, and yield what they are called with, by index.

        A recorder returns the hidden states that it gets, or `output`; with `stop` the first one
        ends the forward.
        """
        calls: dict[int, tuple[Tensor, Arguments]] = {}

        def record(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any) -> Any:
            if index in calls:
                reason = "its decoder calls a layer more than once"
                raise layerwise_error(type(self.model).__name__, reason)
            calls[index] = hidden, (args, kwargs)
            if stop:
                raise _FirstCall
            states = hidden if output is None else output
            if not self._returns_tuple:
                return states
            return (states, *self._extras)

        recorders = [_Recorder(layer, index, record) for index, layer in enumerate(self.layers)]
        layer_list = self.model.get_submodule(self.prefix)
        self._put(layer_list, recorders)
        try:
            yield calls
        finally:
            self._put(layer_list, self.layers)

    @staticmethod
    def _put(layer_list: Any, modules: Iterable[nn.Module]) -> None:
        for index, module in enumerate(modules):
            layer_list[index] = module
