"""A model one layer at a time: hidden states of all text go through a layer before the next one's weights are read.

What a layer is given besides hidden states (masks, positions' embeddings, what an encoder made of another sequence) is
recorded from the model's own forward, in which every layer is replaced by one that only notes it; so nothing here knows
how an architecture makes them. What a layer computes is seen in one way, `Layer.observe`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import RefusedError, explain, listing
from gqa.checkpoint.loading import model_class
from gqa.checkpoint.names import Loading, shared_names, stored_parts
from gqa.checkpoint.read import TORCH_DTYPES, Checkpoint
from gqa.convert.merge.attention import WATCHED, attend_eager, attend_sdpa, watchable

# What a layer is called with beside hidden states.
Given = tuple[tuple[Any, ...], dict[str, Any]]
Until = Literal["call", "heads", "joined", "attended", "end"]
_EAGER = "eager_attention_forward"  # what a module of transformers calls its plain attention function


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
class Stream:
    """Hidden states (N, T, D) between two layers, which go through them `batch` at a time.

    given: What layers are given beside, by their index, of each batch.
    other: The same of another number of blocks than the first batch's, where there are more than one; and that number.
    real: (N, T) which positions are text, where some are padding.
    """

    hidden: Tensor
    batch: int
    given: list[dict[int, Given]]
    other: tuple[dict[int, Given], int]
    real: Tensor | None = None

    def batches(self, layer: int) -> Iterator[tuple[slice, Given]]:
        """The blocks of each batch, and what the layer is given beside."""
        for number, given in enumerate(self.given):
            start = number * self.batch
            yield slice(start, min(start + self.batch, len(self.hidden))), given[layer]

    def clone(self) -> Stream:
        """Other hidden states, as large as these."""
        return replace(self, hidden=self.hidden.clone())


@dataclass(frozen=True)
class Layer:
    """The layer of number `index` with its weights, `whole`; its `attention`, where that is looked at, and what in it
    multiplies by W_O, `output`, where that is known.
    """

    index: int
    whole: nn.Module
    device: torch.device
    attention: nn.Module | None = None
    output: nn.Module | None = None

    @torch.no_grad()
    def run(self, hidden: Tensor, given: Given) -> Tensor:
        """What it makes of some blocks (B, T, D)."""
        args, kwargs = send(given, self.device)
        with watchable():
            output = self.whole(hidden.to(self.device), *args, **kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def pass_through(self, stream: Stream, progress: Callable[[int], None] = lambda tokens: None) -> None:
        """The stream becomes what the layer makes of it; `progress` is told of tokens."""
        for rows, given in stream.batches(self.index):
            blocks = stream.hidden[rows]
            blocks.copy_(self.run(blocks, given))
            progress(blocks.shape[0] * blocks.shape[1])

    def observe(self, stream: Stream, until: Until = "end") -> Iterator[Seen]:
        """One batch of `stream` after the other goes through the layer, no further than to where its attention is
        called, has its `heads`, has them `joined` for W_O or has `attended`. Raises RefusedError where it has no such
        place.
        """
        for rows, given in stream.batches(self.index):
            seen = Seen(rows)
            with self._noted(seen, until), suppress(_Stop):
                seen.hidden = self.run(stream.hidden[rows], given)
                if until != "end":
                    raise RefusedError(f"{type(self.whole).__name__} does not call transformers' attention functions")
            yield seen

    def called(self, hidden: Tensor, given: Given) -> Given:
        """What its attention is called with for some blocks (B, T, D)."""
        seen = Seen(slice(len(hidden)))
        with self._noted(seen, "call"), suppress(_Stop):
            self.run(hidden, given)
        return seen.call

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
            if until == "attended":
                raise _Stop

        assert self.attention
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
    """A model without weights, of whose layers one at a time has them: those of its encoder, if it has one, then the
    `first` of its decoder and all others. `loading` says of which stored tensors its parameters are made.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Any, path: str, dtype: torch.dtype, device: str, names: Iterable[str]
    ) -> None:
        """A model of transformers' `config`, one of the attention modules of whose decoder is stored at `path`; `names`
        are those of all its stored tensors.
        """
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
        with watchable(), init_empty_weights(include_buffers=False), no_init_weights():
            try:
                model = made._from_config(config, attn_implementation=named, dtype=dtype)
            except (KeyError, ValueError) as error:  # a class with a table of its own
                if not called:
                    raise RefusedError(alone) from error
                model = made._from_config(config, attn_implementation="eager", dtype=dtype)
                model.set_attn_implementation(named)
        model.tie_weights()  # which the empty weights have undone
        self.loading = Loading(model, names)
        attention = next((own for name, own in self.loading.whole.items() if name.startswith(f"{path}.")), None)
        match = re.match(r"(.+?)\.\d+\.", attention) if attention else None
        if match is None:
            raise RefusedError(f"{type(model).__name__} has no layer with {path}; it cannot be run layer by layer")
        self.model: PreTrainedModel = model.eval()
        self.device, self.attend = torch.device(device), attend_eager if eager else attend_sdpa
        self.prefix = match[1]  # of the names of all layers of the decoder
        self._stacks = [*self._encoders(), self.prefix]
        stacks = [list(model.get_submodule(stack)) for stack in self._stacks]
        self.first = sum(map(len, stacks[:-1]))
        self.layers: list[nn.Module] = [layer for stack in stacks for layer in stack]
        self._paths = [f"{name}.{i}" for name, of in zip(self._stacks, stacks, strict=True) for i in range(len(of))]
        self._extras: dict[str, tuple[Any, ...] | None] = {}  # what layers return beside hidden states, if a tuple
        self._checkpoint, self._shared = checkpoint, shared_names(model)
        outside = (name for name in model.state_dict() if not name.startswith(tuple(f"{s}." for s in self._stacks)))
        fixed = {name for name in model._keys_to_ignore_on_save or () if name not in self.loading.sources}
        self._fill((name for name in outside if "lm_head" not in name and name not in fixed), {})
        for name in fixed & model.state_dict().keys():  # sinusoids, which classes make themselves
            whole = model.get_submodule(name.rpartition(".")[0])
            whole.to_empty(device=self.device)
            model._init_weights(whole)
        for buffer_name, buffer in model.named_buffers():
            set_module_tensor_to_device(model, buffer_name, self.device, buffer)

    def _encoders(self) -> list[str]:
        """The stack of an encoder, where there is one."""
        if not self.model.config.is_encoder_decoder:
            return []
        encoder = self.model.get_encoder()
        name = next(name for name, module in self.model.named_modules() if module is encoder)
        lists = [f"{name}.{part}" for part, of in encoder.named_children() if isinstance(of, nn.ModuleList)]
        if len(lists) != 1:
            raise RefusedError(f"{type(encoder).__name__} is no stack of layers; it cannot be run layer by layer")
        return lists

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

        names = next(filter(None, map(self.loading.sources.get, (name, *self._shared.get(name, ())))), None)
        if names and names[0] in self.loading.whole:
            return tensor(names[0])
        parts = names or stored_parts(self.model, name)
        if set(parts) - checkpoint.tensors.keys():
            raise RefusedError(
                f"{checkpoint.name} does not store {listing(parts)}, which {type(self.model).__name__} has; it cannot "
                "be run layer by layer"
            )
        return self.loading.assemble(name, {part: tensor(part) for part in parts})

    def load(self, index: int, changed: Mapping[str, Tensor]) -> nn.Module:
        """Layer `index` with its weights, of which the stored tensors `changed` replace the checkpoint's."""
        layer = self.layers[index]
        self._fill([f"{self._paths[index]}.{name}" for name in layer.state_dict()], changed)
        return layer

    def release(self, index: int) -> None:
        for name in self.layers[index].state_dict():
            set_module_tensor_to_device(self.model, f"{self._paths[index]}.{name}", "meta")

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
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=self.device)
        with self._replaced(0, hidden.to(self.device)):
            found: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return found.float()

    @torch.no_grad()
    def leave(self, given: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """(B, S, D) hidden states that the encoder's last layer gives -> what the decoder reads; after `arrive`."""
        with self._replaced(0, hidden.to(self.device)):
            found: Tensor = self.model.get_encoder()(**send(dict(given), self.device)).last_hidden_state
        return found.to(hidden.device)

    @torch.no_grad()
    def arrive(self, given: Mapping[str, Tensor], stack: int = -1) -> tuple[Tensor, dict[int, Given]]:
        """What the model, its encoder (`stack` 0) or its decoder is given, by the names of its forward -> the (B, T, D)
        hidden states that the first of its layers is given, and what every layer is besides.
        """
        whole, owner = self.model, self.model.get_submodule(self._stacks[stack].rpartition(".")[0])
        failed: list[Exception] = []
        for caller in (owner,) if whole.config.is_encoder_decoder else (whole.base_model, owner):
            with self._replaced(stack) as told:
                try:
                    out = caller(**send(dict(given), self.device)).last_hidden_state
                except RefusedError:
                    raise
                except (AttributeError, IndexError, TypeError, ValueError, RuntimeError) as error:
                    if out_of_memory(error):
                        raise
                    failed.append(error)
                    continue
            if len(told) == len(self._of(stack)) and out.shape == (first := next(iter(told.values()))[0]).shape:
                return first, {index: given for index, (_, given) in told.items()}
        # What torch itself says tells more than that a layer's result was not of the form that was tried.
        failed.sort(key=lambda error: not isinstance(error, RuntimeError))
        why = f": {explain(failed[0])}" if failed else ""
        raise RefusedError(f"{type(whole).__name__} cannot be run layer by layer{why}")

    def _of(self, stack: int) -> dict[int, nn.Module]:
        """The layers of a stack by their index."""
        return {
            i: self.layers[i] for i, path in enumerate(self._paths) if path.rpartition(".")[0] == self._stacks[stack]
        }

    @contextmanager
    def _replaced(self, stack: int, leaving: Tensor | None = None) -> Iterator[dict[int, tuple[Tensor, Given]]]:
        """Meanwhile the layers of a stack only note what they are given, by their index, and give it on, or `leaving`.

        The first is run once, for what it returns beside hidden states; others may be given that.
        """
        told: dict[int, tuple[Tensor, Given]] = {}
        layers, name = self._of(stack), self._stacks[stack]

        def note(index: int, layer: nn.Module) -> Callable[..., Any]:
            def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
                told[index] = hidden, (args, kwargs)
                if name not in self._extras:
                    self.load(index, {})
                    found = type(layer).forward(layer, hidden, *args, **kwargs)
                    self._extras[name] = None if isinstance(found, Tensor) else tuple(found[1:])
                    self.release(index)
                extras, given = self._extras[name], hidden if leaving is None else leaving
                return given if extras is None else (given, *extras)

            return forward

        for index, layer in layers.items():
            layer.forward = note(index, layer)
        try:
            # Of padded texts some batches need no mask, and all are to be given the same.
            with watchable(always_masked=self.model.config.is_encoder_decoder):
                yield told
        finally:
            for layer in layers.values():
                del layer.forward


def is_by_block(value: Tensor, blocks: int, other: Tensor, others: int) -> bool:
    """Whether an argument of so many blocks has rows for each, one or several: it is as much longer than that of
    `others`. What is of all blocks has its own length, which may be any number.
    """
    return value.ndim > 0 and blocks != others and len(value) * others == len(other) * blocks


def send(value: Any, device: str | torch.device) -> Any:
    """What a layer is given with its tensors on a device; one that stands there several times once."""
    known: dict[int, Tensor] = {}
    return tree_map_only(Tensor, lambda tensor: known.setdefault(id(tensor), tensor.to(device)), value)
