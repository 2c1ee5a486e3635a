"""One decoder layer with its weights: run it, and look into its attention.

`Stream` holds the hidden states of a text between two layers. `Layer.advance` takes them through a
layer; `Attention.capture` records what an attention module computes on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from gqa.core.devices import out_of_memory
from gqa.core.errors import RefusedError, explain, layerwise_error
from gqa.models.attention_functions import OBSERVER

# Arguments of a call, positional and by keyword: of a layer (`Stream.arguments`) those besides the
# hidden states, of an attention module (`Capture.arguments`) all.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# What can be captured inside a layer, in the order in which it is computed.
Captured = Literal["arguments", "heads", "head_outputs", "attention_output"]


@dataclass(eq=False)
class Stream:
    """Hidden states (N, T, D) of N blocks of text between two layers.

    blocks_at_once: Blocks that go through a layer at a time.
    arguments: Function from indices of blocks to the other arguments of each layer, by its index:
        masks, position embeddings, the encoder's output (made in streams.py).
    is_text: (N, T) bool; None if no position is padding.
    """

    hidden: Tensor
    blocks_at_once: int
    arguments: Callable[[Tensor], Mapping[int, Arguments]]
    is_text: Tensor | None = None

    def batches(self) -> tuple[Tensor, ...]:
        """The indices of the blocks of each batch."""
        batches: tuple[Tensor, ...] = torch.arange(len(self.hidden)).split(self.blocks_at_once)
        return batches

    def clone(self) -> Stream:
        return replace(self, hidden=self.hidden.clone())


@dataclass
class Capture:
    """What an attention module computes for the blocks `rows`; only the requested parts are set.

    arguments: Arguments of the call of the attention module.
    heads: Queries (B, H, T, d), keys (B, Hk, S, d) and values (B, Hk, S, e), with the `mask` and
        the `call_options` (scaling, position bias, ...) with which attention is computed.
    head_outputs: (B, T, H e), the input of W_O.
    attention_output: (B, T, D).
    """

    rows: Tensor
    arguments: Arguments = field(init=False)
    heads: tuple[Tensor, Tensor, Tensor] = field(init=False)
    mask: Any = field(init=False)
    call_options: dict[str, Any] = field(init=False)
    head_outputs: Tensor = field(init=False)
    attention_output: Tensor = field(init=False)


class _AllCaptured(Exception):  # noqa: N818 - a signal, not an error
    """Raised inside a layer when every requested part is captured: the rest is not computed."""


class Runner(Protocol):
    """What a layer needs of the `LayerRunner` that has loaded it."""

    device: torch.device

    def projection(self, attention_path: str) -> nn.Module | None: ...

    def set_tensors(self, index: int, stored: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Layer:
    """The decoder layer `index` of a model, with its weights."""

    runner: Runner
    index: int
    module: nn.Module

    @property
    def device(self) -> torch.device:
        return self.runner.device

    def attention(self, path: str) -> Attention:
        """The attention module that is stored under `path` ("model.layers.0.self_attn")."""
        inside = path.split(f".{self.index}.", 1)[1]
        return Attention(self, self.module.get_submodule(inside), self.runner.projection(path))

    def set_tensors(self, stored: Mapping[str, Tensor]) -> None:
        """Replace weights of the layer by tensors that have the names of the checkpoint."""
        self.runner.set_tensors(self.index, stored)

    @torch.no_grad()
    def run(self, stream: Stream, rows: Tensor) -> Tensor:
        """The layer's output (B, T, D) for the blocks `rows` of a stream."""
        return self.run_with(stream.hidden[rows], stream.arguments(rows)[self.index])

    @torch.no_grad()
    def run_with(self, hidden: Tensor, arguments: Arguments) -> Tensor:
        """The layer's output for hidden states (B, T, D). Raises LayerwiseError if it fails."""
        args, kwargs = send(arguments, self.device)
        with layerwise_errors(f"a layer {type(self.module).__name__}"):
            return first_tensor(self.module(hidden.to(self.device), *args, **kwargs))

    def advance(self, stream: Stream) -> None:
        """Replace the hidden states of a stream by the layer's output."""
        for rows in stream.batches():
            stream.hidden[rows] = self.run(stream, rows).to(stream.hidden)

    def advance_and_observe(
        self, stream: Stream, attentions: Sequence[Attention]
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Advance a stream.

        Yield each batch's indices and the output (B, T, D) of each attention.
        """
        for rows in stream.batches():
            outputs: dict[nn.Module, Tensor] = {}

            def record(module: nn.Module, _: Any, output: Any, to: Any = outputs) -> None:
                to[module] = first_tensor(output)

            with hooks(one.module.register_forward_hook(record) for one in attentions):
                hidden = self.run(stream, rows)

            observed = [outputs[one.module] for one in attentions]
            check_finite(self.index, *observed, hidden)
            stream.hidden[rows] = hidden.to(stream.hidden)
            yield rows, observed


@dataclass(frozen=True)
class Attention:
    """An attention module of a loaded layer.

    projection: The module of W_O; None if it is not known which it is.
    """

    layer: Layer
    module: nn.Module
    projection: nn.Module | None

    def capture(self, stream: Stream, *parts: Captured) -> Iterator[Capture]:
        """Capture parts for one batch of a stream after another."""
        for rows in stream.batches():
            yield self.capture_blocks(stream, rows, *parts)

    def capture_blocks(self, stream: Stream, rows: Tensor, *parts: Captured) -> Capture:
        """Run the layer on the blocks `rows`, no further than to the last of the parts.

        Raises LayerwiseError if the layer does not compute one of them.
        """
        capture = Capture(rows)
        missing = set(parts)

        def store(part: Captured, value: Any) -> None:
            if part not in parts:
                return
            setattr(capture, part, value)
            missing.discard(part)
            if not missing:
                raise _AllCaptured

        def observe_heads(q: Tensor, k: Tensor, v: Tensor, mask: Any, options: Any) -> None:
            capture.mask = mask
            capture.call_options = options
            store("heads", (q, k, v))

        registered = [
            self.module.register_forward_pre_hook(
                lambda _, args, kwargs: store("arguments", (args, kwargs)), with_kwargs=True
            ),
            self.module.register_forward_hook(
                lambda _, args, output: store("attention_output", first_tensor(output))
            ),
        ]
        if self.projection is not None:
            registered.append(
                self.projection.register_forward_pre_hook(
                    lambda _, args: store("head_outputs", args[0])
                )
            )

        vars(self.module)[OBSERVER] = observe_heads
        try:
            with hooks(registered), suppress(_AllCaptured):
                self.layer.run(stream, rows)
        finally:
            del vars(self.module)[OBSERVER]

        if missing:
            raise layerwise_error(
                type(self.layer.module).__name__,
                "it does not call transformers' attention functions",
            )
        return capture


def adds_attention(
    layer: Layer, attentions: Sequence[Attention], stream: Stream, scale: float
) -> bool:
    """Whether a layer simply adds attention to its input, with this scale s: h + s * attention(h).

    If it does, a change x of h and a change x / s of attention's output have the same effect. They
    have not if the output is transformed before it is added, as by a norm after it, or if an MLP
    beside attention reads h. The targets of such layers are without the drift.
    """
    rows = stream.batches()[0][:1]
    arguments = stream.arguments(rows)[layer.index]
    hidden = stream.hidden[rows].to(layer.device)

    generator = torch.Generator().manual_seed(0)
    attended = torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std()
    change = torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std()

    def run(states: Tensor, attention_output: Tensor) -> Tensor:
        """The layer's output if each of its attention modules returns `attention_output`."""

        def replace_output(_: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return attention_output
            return (attention_output, *output[1:])

        with hooks(one.module.register_forward_hook(replace_output) for one in attentions):
            return layer.run_with(states, arguments)

    # All modules are made to return this one tensor, so the change is divided among them.
    carrying = attended + change / (scale * len(attentions))
    expected = run(hidden + change, attended)
    output = run(hidden, carrying)
    check_finite(layer.index, expected, output)

    relative = max(1e-3, 8 * torch.finfo(expected.dtype).eps)
    tolerance = relative * float(expected.abs().max())
    return torch.allclose(expected, output, rtol=0, atol=tolerance)


@contextmanager
def hooks(registered: Any) -> Iterator[None]:
    """Remove hooks when the block ends."""
    handles = list(registered)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def layerwise_errors(name: str) -> Iterator[None]:
    """Turn errors of transformers' code in the block into LayerwiseError: `name` cannot be run.

    That code computes by the checkpoint's config, and may raise anything.
    """
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, RefusedError) or out_of_memory(error):
            raise
        raise layerwise_error(name, explain(error)) from error


def check_finite(layer: int, *tensors: Tensor) -> None:
    """Raise RefusedError if a layer computes NaN or Inf."""
    for tensor in tensors:
        extremes = torch.stack(tensor.aminmax())  # which propagates NaN
        if not bool(extremes.isfinite().all()):
            advice = "download the checkpoint again"
            if tensor.dtype in (torch.bfloat16, torch.float16):
                advice = f"pass --precision float32, or {advice}"
            raise RefusedError(
                f"layer {layer} computes NaN or Inf on the calibration text; {advice}"
            )


def send(value: Any, device: str | torch.device) -> Any:
    """A tree with its tensors on a device; a tensor that occurs several times is copied once."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(device)
        return copies[id(tensor)]

    return recursively_apply(copy, value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a tree of arguments, in order."""
    tensors: list[Tensor] = []
    recursively_apply(tensors.append, value)
    return tensors


def first_tensor(output: Any) -> Tensor:
    """The hidden states that a module returns, alone or as the first of a tuple."""
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor
