"""A model one layer at a time: hidden states of all text go through a layer before the next one's weights are read.

What a layer is called with beside hidden states (masks, position embeddings, the encoder's output) is recorded from the
model's own forward, in which every layer only records its arguments, so nothing here depends on the architecture.
`Layer.capture` is the one way to look into a layer. Models are built with attention functions of our own, which
transformers knows by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqa.checkpoint.compat import build_model, initialize, supports_sdpa, tree_map_only, unsaved_names
from gqa.checkpoint.errors import LayerwiseError, RefusedError, explain
from gqa.checkpoint.loading import model_class, out_of_memory
from gqa.checkpoint.names import Loading
from gqa.checkpoint.read import TORCH_DTYPES, Checkpoint

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional and by keyword, beside hidden states
Part = Literal["arguments", "heads", "head_outputs", "attention_output", "layer_output"]
# (module, query, key, value, mask, options of transformers) -> (B, T, H, e)
Attend = Callable[..., Tensor]


def attend_sdpa(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
    """(B, H, T, d) queries, (B, G, T, d) keys and (B, G, T, e) values -> (B, T, H, e)."""
    output: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)[0]
    return output


def attend_eager(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
    """The same by the module's own eager function, which also applies its caps and sinks."""
    output: Tensor = sys.modules[type(module).__module__].eager_attention_forward(module, q, k, v, mask, **options)[0]
    return output


# By name in transformers: the function, and the function that makes its masks.
PLAIN: dict[str, tuple[Attend, Any]] = {"sdpa": (attend_sdpa, sdpa_mask), "eager": (attend_eager, eager_mask)}


def register(name: str, attend: Attend, mask: Callable[..., Any]) -> None:
    """Let models be built and run whose attention implementation has that name.

    A module's `gqa_record`, if any, is called with queries, keys, values, mask and options first.
    """
    AttentionInterface.register(name, partial(_attention, attend))
    AttentionMaskInterface.register(name, mask)


def _attention(
    attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if record := getattr(module, "gqa_record", None):
        record(query, key, value, attention_mask, options)
    return attend(module, query, key, value, attention_mask, **options), None


for _name, (_attend, _mask) in PLAIN.items():
    register(f"gqa_{_name}", _attend, _mask)


class _Captured(Exception):  # noqa: N818 - it is no error
    """Raised inside of a layer once all parts are captured: the rest need not be computed."""


@dataclass
class Capture:
    """What a layer computes for the blocks `rows` of a stream; only the parts that are asked for are set.

    arguments: Of the call of its attention module.
    heads: (B, H, T, d) queries, (B, Hk, T, d) keys and (B, Hk, T, e) values, with the `mask` and `options` of the call.
    head_outputs: (B, T, H e), what W_O is multiplied with.
    attention_output, layer_output: (B, T, D).
    """

    rows: Tensor
    arguments: Arguments = field(init=False)
    heads: tuple[Tensor, Tensor, Tensor] = field(init=False)
    mask: Any = field(init=False)
    options: dict[str, Any] = field(init=False)
    head_outputs: Tensor = field(init=False)
    attention_output: Tensor = field(init=False)
    layer_output: Tensor = field(init=False)


@dataclass
class Stream:
    """Hidden states (N, T, D) between two layers, which go through them `batch` at a time.

    arguments: From indices of blocks to the other arguments of every layer, by its index.
    is_text: (N, T) bool; None where nothing is padding.
    """

    hidden: Tensor
    batch: int
    arguments: Callable[[Tensor], dict[int, Arguments]]
    is_text: Tensor | None = None

    def batches(self) -> tuple[Tensor, ...]:
        """The indices of the blocks of each batch."""
        batches: tuple[Tensor, ...] = torch.arange(len(self.hidden)).split(self.batch)
        return batches

    def clone(self) -> Stream:
        return replace(self, hidden=self.hidden.clone())


@dataclass(frozen=True)
class Layer:
    """Layer `index` with its weights; `attention` and `projection` (W_O) are the modules in it that are captured."""

    index: int
    module: nn.Module
    device: torch.device
    attention: Any = None
    projection: Any = None

    @torch.no_grad()
    def run(self, hidden: Tensor, arguments: Arguments) -> Tensor:
        """(B, T, D) -> (B, T, D). Raises LayerwiseError where the layer fails."""
        args, kwargs = send(arguments, self.device)
        with _failing(f"a layer {type(self.module).__name__}"):
            return first_tensor(self.module(hidden.to(self.device), *args, **kwargs))

    def pass_through(self, stream: Stream, head_outputs: Tensor | None = None) -> None:
        """Replace the hidden states by the layer's output. `head_outputs` (N, T, H e) are what W_O is multiplied with,
        if that is known: attention then runs for the first batch only, to see that it returns W_O's output.
        """
        attention, alone = self.attention, None
        if head_outputs is not None:
            forward = attention.forward

            def project(*args: Any, **kwargs: Any) -> Any:
                nonlocal alone
                output = self.projection(head_outputs[rows].to(self.device)), None
                if alone is None:
                    first = forward(*args, **kwargs)
                    alone = isinstance(first, tuple) and first[1:] == (None,) and torch.equal(first[0], output[0])
                return output if alone else forward(*args, **kwargs)

            attention.forward = project
        for rows in stream.batches():
            stream.hidden[rows] = self.run(stream.hidden[rows], stream.arguments(rows)[self.index]).to(stream.hidden)
        if head_outputs is not None:
            del attention.forward

    def capture(self, stream: Stream, *parts: Part) -> Iterator[Capture]:
        """Capture parts of one batch after another. Raises LayerwiseError where the layer does not compute them."""
        return (self.capture_blocks(stream, rows, *parts) for rows in stream.batches())

    def capture_blocks(self, stream: Stream, rows: Tensor, *parts: Part) -> Capture:
        """The same for the blocks `rows` (B,). The layer runs no further than to the last of the parts."""
        capture, missing, attention = Capture(rows), set(parts), self.attention

        def store(part: Part, value: Any) -> None:
            if part in parts:
                setattr(capture, part, value)
                missing.discard(part)
                if not missing:
                    raise _Captured

        def record(q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> None:
            capture.mask, capture.options = mask, options
            store("heads", (q, k, v))

        attention.gqa_record = record
        hooks = [
            attention.register_forward_pre_hook(lambda _, *call: store("arguments", call), with_kwargs=True),
            attention.register_forward_hook(lambda _, args, out: store("attention_output", first_tensor(out))),
        ]
        if self.projection is not None:
            hooks.append(self.projection.register_forward_pre_hook(lambda _, args: store("head_outputs", args[0])))
        try:
            with suppress(_Captured):
                store("layer_output", self.run(stream.hidden[rows], stream.arguments(rows)[self.index]))
        finally:
            del attention.gqa_record
            for hook in hooks:
                hook.remove()
        if missing:
            raise LayerwiseError(f"{type(self.module).__name__} does not call transformers' attention functions")
        return capture


class Layerwise:
    """A model without weights, which the layers of its decoder get one at a time. `loading` maps stored tensors to
    parameters.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Any, path: str, dtype: torch.dtype, device: str, names: Iterable[str]
    ) -> None:
        """Build the model of transformers' `config`; `path`: an attention module of its decoder; `names`: all stored
        tensors. Raises LayerwiseError where transformers cannot run it layer by layer.
        """
        cls = model_class(config)
        if not issubclass(cls, PreTrainedModel):
            raise LayerwiseError(
                f"transformers has no model of {config.model_type} alone; it cannot be run layer by layer"
            )
        capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
        eager = capped or not supports_sdpa(cls)
        try:
            with init_empty_weights(include_buffers=False), no_init_weights():
                model = build_model(cls, config, attn_implementation=f"gqa_{'eager' if eager else 'sdpa'}", dtype=dtype)
        except (KeyError, ValueError) as error:  # a class with its own table of attention classes
            raise LayerwiseError(
                f"{cls.__name__} does not call transformers' attention functions; it cannot be run layer by layer"
            ) from error
        model.tie_weights()  # empty weights are not tied
        self.loading = Loading(model, names)
        parameter = next((into for name, into in self.loading.whole.items() if name.startswith(f"{path}.")), "")
        match = re.match(r"(.+?)\.\d+\.", parameter)
        if match is None:
            raise LayerwiseError(f"{type(model).__name__} has no layer with {path}; it cannot be run layer by layer")
        self.model: PreTrainedModel = model.eval()
        self.device, self.attend = torch.device(device), attend_eager if eager else attend_sdpa
        self.prefix = match[1]  # of the names of all layers of the decoder
        self._checkpoint = checkpoint
        self.layers: list[nn.Module] = list(model.get_submodule(self.prefix))
        self._ran = False  # whether it is known what layers return beside hidden states
        self._extras: tuple[Any, ...] | None = None
        self._encoder = ""  # its path
        if config.is_encoder_decoder:
            encoder = model.get_encoder()
            self._encoder = next(name for name, module in model.named_modules() if module is encoder)
        parameters = model.state_dict()
        self._computed = unsaved_names(model).difference(self.loading.sources)
        inside = (f"{self.prefix}.", f"{self._encoder}." if self._encoder else f"{self.prefix}.")
        self._fill([name for name in parameters if not name.startswith(inside) and "lm_head" not in name], {})
        for name in self._computed & parameters.keys():  # sinusoids, which the class makes
            module = model.get_submodule(name.rpartition(".")[0])
            module.to_empty(device=self.device)
            initialize(model, module)
        for name, buffer in model.named_buffers():
            set_module_tensor_to_device(model, name, self.device, buffer)

    def _fill(self, parameters: Iterable[str], changed: Mapping[str, Tensor]) -> None:
        """Load parameters; the stored tensors `changed` replace the checkpoint's."""
        checkpoint = self._checkpoint
        for name in (name for name in parameters if name not in self._computed):
            tensors = {}
            for part in self.loading.parts(name):
                spec = checkpoint.tensors.get(part)
                if part not in changed and (spec is None or spec.dtype not in TORCH_DTYPES):
                    stored = f"stores {part} as {spec.dtype}" if spec else f"does not store {part}"
                    raise LayerwiseError(f"{checkpoint.name} {stored}; it cannot be run layer by layer")
                tensors[part] = changed[part] if part in changed else checkpoint.read(checkpoint.tensors[part])
            tensor = self.loading.assemble(name, tensors)
            set_module_tensor_to_device(self.model, name, self.device, tensor, dtype=self.model.dtype)

    def load(self, index: int, changed: Mapping[str, Tensor]) -> Layer:
        """Layer `index` with its weights; the stored tensors `changed` replace the checkpoint's."""
        self._fill([f"{self.prefix}.{index}.{name}" for name in self.layers[index].state_dict()], changed)
        return Layer(index, self.layers[index], self.device)

    def release(self, index: int) -> None:
        for name in self.layers[index].state_dict():
            set_module_tensor_to_device(self.model, f"{self.prefix}.{index}.{name}", "meta")

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, D) output of the last layer -> (B, T, V) float32 logits; after `layer_inputs`.

        Raises RefusedError where the model has no language-model head.
        """
        head = self.model.get_output_embeddings()
        if head is None:
            raise RefusedError(f"{type(self.model).__name__} gives no logits; give a checkpoint with its head")
        path = next(path for path, module in self.model.named_modules() if module is head)
        self._fill([f"{path}.{name}" for name, weight in head.named_parameters() if weight.is_meta], {})
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
        with self._bypassed(hidden.to(self.device)), _failing(type(self.model).__name__):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits.float()

    @torch.no_grad()
    def encode(self, batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """Arguments of the encoder's forward -> its outputs (N, S, D); all of its layers have weights meanwhile."""
        encoder = self.model.get_submodule(self._encoder)
        names = [f"{self._encoder}.{name}" for name in encoder.state_dict()]
        self._fill(names, {})
        output = torch.cat([self._run(encoder, batch).last_hidden_state.cpu() for batch in batches])
        for name in names:
            set_module_tensor_to_device(self.model, name, "meta")
        return output

    def _run(self, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """The output of the encoder or decoder. Raises LayerwiseError where it fails."""
        with _failing(type(self.model).__name__):
            return module(**send(dict(inputs), self.device))

    @torch.no_grad()
    def layer_inputs(self, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[int, Arguments]]:
        """Arguments of the decoder's forward -> the (B, T, D) hidden states that its first layer reads, and the other
        arguments of every layer.
        """
        decoder = self.model.get_submodule(self.prefix.rpartition(".")[0])
        with self._bypassed() as calls:
            output = self._run(decoder, inputs).last_hidden_state
        if len(calls) < len(self.layers) or output.shape != calls[0][0].shape:
            raise LayerwiseError(f"{type(self.model).__name__} cannot be run layer by layer")
        return calls[0][0], {index: arguments for index, (_, arguments) in calls.items()}

    @contextmanager
    def _bypassed(self, output: Tensor | None = None) -> Iterator[dict[int, tuple[Tensor, Arguments]]]:
        """Replace the layers by ones that record their calls, by index, and return their hidden states, or `output`,
        unchanged. The first layer runs once to see what it returns beside hidden states.
        """
        calls: dict[int, tuple[Tensor, Arguments]] = {}

        def forward(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[index] = hidden, (args, kwargs)
            if not self._ran:
                layer = self.load(index, {}).module
                result = type(layer).forward(layer, hidden, *args, **kwargs)
                self._ran, self._extras = True, None if isinstance(result, Tensor) else tuple(result[1:])
                self.release(index)
            states = hidden if output is None else output
            return states if self._extras is None else (states, *self._extras)

        for index, layer in enumerate(self.layers):
            layer.forward = partial(forward, index)
        try:
            yield calls
        finally:
            for layer in self.layers:
                del layer.forward


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Within the block code of transformers computes by the checkpoint's config, and may raise anything; turn that into
    LayerwiseError.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, RefusedError) or out_of_memory(error):
            raise
        raise LayerwiseError(f"{name} cannot be run layer by layer: {explain(error)}") from error


def send(value: Any, device: str | torch.device) -> Any:
    """A tree with its tensors on a device; a tensor that occurs several times is copied once."""
    copies: dict[int, Tensor] = {}
    return tree_map_only(Tensor, lambda tensor: copies.setdefault(id(tensor), tensor.to(device)), value)


def first_tensor(output: Any) -> Tensor:
    """The hidden states that a module returns, alone or first of a tuple."""
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor
