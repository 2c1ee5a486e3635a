"""A model one layer at a time: hidden states of all text go through a layer before the next one's weights are read.

What a layer is given besides hidden states (masks, positions' embeddings) is recorded from the model's own forward, in
which every layer is replaced by one that only notes it; so nothing here knows how an architecture makes them. What a
layer computes is seen in one way, `Layer.observe`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError, explain, listing
from gqa.checkpoint.loading import model_class
from gqa.checkpoint.names import assembled, parameter_names, shared_names, stored_parts
from gqa.checkpoint.read import TORCH_DTYPES, Checkpoint
from gqa.convert.align.attention import WATCHED, attend_eager, attend_sdpa, watchable

# What a layer is called with beside hidden states.
Given = tuple[tuple[Any, ...], dict[str, Any]]
Until = Literal["call", "heads", "joined", "end"]
_EAGER = "eager_attention_forward"  # what a module of transformers calls its plain attention function

# What layers return, by architecture.
_RETURNED: tuple[Callable[[Tensor], Any], ...] = (lambda h: h, lambda h: (h,), lambda h: (h, None))


class _Stop(Exception):  # noqa: N818 - it is no error
    """Raised inside of a layer whose result nobody needs."""


@dataclass
class Seen:
    """What a layer computed for the blocks `rows` of a stream; what comes after the place where it stops is not set.

    call: what its attention is called with. heads: (B, H, T, d) queries, (B, Hk, T, d) keys and (B, Hk, T, e) values;
    `mask` and `options` go with them. joined: (B, T, H e), what W_O is given. attended: (B, T, D), what attention
    gives. hidden: (B, T, D), what the layer gives.
    """

    rows: slice
    call: Given = field(init=False)
    heads: tuple[Tensor, Tensor, Tensor] = field(init=False)
    mask: Any = field(init=False)
    options: dict[str, Any] = field(init=False)
    joined: Tensor = field(init=False)
    attended: Tensor = field(init=False)
    hidden: Tensor = field(init=False)


@dataclass
class Feed:
    """How blocks go through layers: `batch` of them at a time, on a device, with what layers are `given` beside hidden
    states: by the number of rows, for each layer.
    """

    batch: int
    device: torch.device
    given: dict[int, list[Given]] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """The layer of number `index` with its weights, `whole`; its `attention`, where that is looked at, and what in it
    multiplies by W_O, `output`, where that is known.
    """

    index: int
    whole: nn.Module
    feed: Feed
    attention: nn.Module
    output: nn.Module | None

    @torch.no_grad()
    def run(self, hidden: Tensor) -> Tensor:
        """What it makes of some blocks (B, T, D)."""
        args, kwargs = self.feed.given[len(hidden)][self.index]
        with watchable():
            output = self.whole(hidden.to(self.feed.device), *args, **kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def pass_through(self, stream: Tensor, progress: Callable[[int], None] = lambda tokens: None) -> None:
        """The stream (N, T, D) becomes what the layer makes of it; `progress` is told of tokens."""
        for blocks in stream.split(self.feed.batch):
            blocks.copy_(self.run(blocks))
            progress(blocks.shape[0] * blocks.shape[1])

    def observe(self, stream: Tensor, until: Until = "end") -> Iterator[Seen]:
        """One batch of `stream` (N, T, D) after the other goes through the layer, no further than to where its
        attention is called, has its `heads`, or has them `joined` for W_O. Raises RefusedError where it has no such
        place.
        """
        for start in range(0, len(stream), self.feed.batch):
            seen = Seen(slice(start, min(start + self.feed.batch, len(stream))))
            with self._noted(seen, until), suppress(_Stop):
                seen.hidden = self.run(stream[seen.rows])
                if until != "end":
                    raise RefusedError(f"{type(self.whole).__name__} does not call transformers' attention functions")
            yield seen

    def _noted(self, seen: Seen, until: Until) -> ExitStack:
        """A context in which the layer, when it is run, writes down what it computes."""

        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.call = args, kwargs
            if until == "call":
                raise _Stop

        def attend(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Tensor:
            seen.heads, seen.mask, seen.options = (q, k, v), mask, options
            raise _Stop

        def joined(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.joined = args[0]
            if until == "joined":
                raise _Stop

        def attended(_: nn.Module, args: Any, output: Any) -> None:
            seen.attended = output if isinstance(output, Tensor) else output[0]

        stack = ExitStack()
        stack.callback(self.attention.register_forward_pre_hook(called, with_kwargs=True).remove)
        stack.callback(self.attention.register_forward_hook(attended).remove)
        if until == "heads":
            WATCHED[self.attention] = attend
            stack.callback(WATCHED.pop, self.attention)
        if self.output is not None:
            stack.callback(self.output.register_forward_pre_hook(joined).remove)
        return stack


class Layerwise:
    """A model without weights, of whose layers one at a time has them. `names` are those of its parameters, by those
    under which they are stored; `prefix` is what the names of all layers' begin with.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, path: str, dtype: torch.dtype, device: str) -> None:
        """A model of transformers' `config`, one of whose attention modules is stored at `path`."""
        cap, made = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None), model_class(config)
        if not hasattr(made, "_from_config"):  # an Auto class, which may know one that transformers does not export
            made = made._model_mapping.get(type(config), None)
        if made is None:
            raise RefusedError(
                f"transformers has no model of {config.model_type} alone; it cannot be run layer by layer"
            )
        eager = cap is not None or not made._supports_sdpa
        named, called = "gqa_eager" if eager else "gqa_sdpa", hasattr(sys.modules[made.__module__], _EAGER)
        alone = f"{made.__name__} does not call transformers' attention functions; it cannot be run layer by layer"
        if eager and not called:
            raise RefusedError(alone)
        with watchable(), init_empty_weights(include_buffers=False):
            try:
                model = made._from_config(config, attn_implementation=named, dtype=dtype)
            except (KeyError, ValueError):  # a class with a table of its own
                if not called:
                    raise RefusedError(alone) from None
                model = made._from_config(config, attn_implementation="eager", dtype=dtype)
                model.set_attn_implementation(named)
        model.tie_weights()  # which the empty weights have undone
        self.names = parameter_names(model)
        attention = next((own for name, own in self.names.items() if name.startswith(f"{path}.")), None)
        match = re.match(r"(.+?)\.\d+\.", attention) if attention else None
        if match is None:
            raise RefusedError(f"{type(model).__name__} has no layer with {path}; it cannot be run layer by layer")
        self.model: PreTrainedModel = model.eval()
        self.prefix, self.device, self.attend = match[1], torch.device(device), attend_eager if eager else attend_sdpa
        self.layers: list[nn.Module] = list(model.get_submodule(self.prefix))
        self._checkpoint, self._shared, self._returned = checkpoint, shared_names(model), _RETURNED[0]
        self._stored = {own: name for name, own in self.names.items()}
        outside = (name for name in model.state_dict() if not name.startswith(f"{self.prefix}."))
        self._fill((name for name in outside if "lm_head" not in name), {})
        for buffer_name, buffer in model.named_buffers():
            set_module_tensor_to_device(model, buffer_name, self.device, buffer)

    def _fill(self, names: Iterable[str], changed: Mapping[str, Tensor]) -> None:
        for name in names:
            tensor = self._read(name, changed)
            set_module_tensor_to_device(self.model, name, self.device, tensor, dtype=self.model.dtype)

    def _read(self, name: str, changed: Mapping[str, Tensor]) -> Tensor:
        """A parameter, as it is stored or put together from its parts."""
        checkpoint = self._checkpoint

        def tensor(part: str) -> Tensor:
            if part in changed:
                return changed[part]
            if (spec := checkpoint.tensors[part]).dtype not in TORCH_DTYPES:  # counters of batch norms
                raise RefusedError(f"{part} is stored as {spec.dtype}; it cannot be run layer by layer")
            return checkpoint.read(spec)

        for whole in (self._stored.get(other, other) for other in (name, *self._shared.get(name, ()))):
            if whole in changed or whole in checkpoint.tensors:
                return tensor(whole)
        parts = [] if name in self._stored else stored_parts(self.model, name)
        if not parts or set(parts) - checkpoint.tensors.keys():
            raise RefusedError(
                f"{checkpoint.name} does not store {listing(parts) or self._stored[name]}, which "
                f"{type(self.model).__name__} has; it cannot be run layer by layer"
            )
        return assembled(self.model, name, {part: tensor(part) for part in parts})

    def load(self, index: int, changed: Mapping[str, Tensor]) -> nn.Module:
        """Layer `index` with its weights, of which the stored tensors `changed` replace the checkpoint's."""
        layer = self.layers[index]
        self._fill([f"{self.prefix}.{index}.{name}" for name in layer.state_dict()], changed)
        return layer

    def release(self, index: int) -> None:
        for name in self.layers[index].state_dict():
            set_module_tensor_to_device(self.model, f"{self.prefix}.{index}.{name}", "meta")

    @torch.no_grad()
    def depart(self, hidden: Tensor) -> Tensor:
        """(B, T, D) hidden states that the last layer gives -> (B, T, V) float32 logits; after `arrive`.

        Raises RefusedError where the model has no head of a vocabulary.
        """
        head = self.model.get_output_embeddings()
        if head is None:
            raise RefusedError(f"{type(self.model).__name__} gives no logits; give a checkpoint with its head")
        named = next(name for name, module in self.model.named_modules() if module is head)
        self._fill((f"{named}.{name}" for name, part in head.named_parameters() if part.is_meta), {})
        hidden = hidden.to(self.device)
        for layer in self.layers:
            layer.forward = lambda *args, **kwargs: self._returned(hidden)
        try:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
            found: Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            for layer in self.layers:
                del layer.forward
        return found.float()

    @torch.no_grad()
    def arrive(self, ids: Tensor) -> tuple[Tensor, list[Given]]:
        """(B, T) ids -> the (B, T, D) hidden states that the first layer is given, and what every layer is besides."""
        told: dict[int, tuple[Tensor, Given]] = {}

        def note(index: int, returned: Callable[[Tensor], Any]) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                told[index] = hidden, (args, kwargs)
                return returned(hidden)

            return forward

        owner = self.model.get_submodule(self.prefix.rpartition(".")[0])
        callers = (self.model.base_model,) if self.model.config.is_encoder_decoder else (self.model.base_model, owner)
        failed: list[Exception] = []
        for caller, returned in itertools.product(callers, _RETURNED):
            told.clear()
            for index, layer in enumerate(self.layers):
                layer.forward = note(index, returned)
            try:
                with watchable():
                    out = caller(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
            except RefusedError:
                raise
            except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
                if out_of_memory(error):
                    raise
                failed.append(error)
                continue
            finally:
                for layer in self.layers:
                    del layer.forward
            if len(told) == len(self.layers) and out.shape == (first := next(iter(told.values()))[0]).shape:
                self._returned = returned
                return first, [told[index][1] for index in range(len(self.layers))]
        # What torch itself says tells more than that a layer's result was not of the form that was tried.
        failed.sort(key=lambda error: not isinstance(error, RuntimeError))
        why = f": {explain(failed[0])}" if failed else ""
        raise RefusedError(f"{type(self.model).__name__} cannot be run layer by layer{why}")
