"""What a layer computes on a text, block by block: the one way in which calibration looks at layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gqa.checkpoint.errors import RefusedError
from gqa.convert.align.attention import watched
from gqa.convert.align.layerwise import Given, run_layer
from gqa.convert.heads.modules import AttentionModule

Until = Literal["call", "heads", "joined", "end"]


class _Stop(Exception):  # noqa: N818 - it is no error
    """Raised inside of a layer whose result nobody needs."""


@dataclass(frozen=True)
class Layer:
    """A layer with its weights; the attention whose heads are merged, as it is stored and as it is run, and the module
    in it that multiplies by W_O, where that is known.
    """

    whole: nn.Module
    module: AttentionModule
    attention: nn.Module
    output: nn.Module | None


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

    @torch.no_grad()
    def run(self, index: int, whole: nn.Module, hidden: Tensor) -> Tensor:
        """What the layer of that number makes of some blocks (B, T, D)."""
        return run_layer(whole, hidden.to(self.device), self.given[len(hidden)][index])

    def observe(self, layer: Layer, stream: Tensor, until: Until = "end") -> Iterator[Seen]:
        """One batch of `stream` (N, T, D) after the other goes through the layer, no further than to where its
        attention is called, has its `heads`, or has them `joined` for W_O. Raises RefusedError where it has no such
        place.
        """
        for start in range(0, len(stream), self.batch):
            seen = Seen(slice(start, min(start + self.batch, len(stream))))
            with _noted(layer, seen, until), suppress(_Stop):
                seen.hidden = self.run(layer.module.layer, layer.whole, stream[seen.rows])
                if until != "end":
                    raise RefusedError(f"{type(layer.whole).__name__} does not call transformers' attention functions")
            yield seen

    def pass_through(
        self, index: int, whole: nn.Module, stream: Tensor, progress: Callable[[int], None] = lambda tokens: None
    ) -> None:
        """The stream (N, T, D) becomes what the layer of that number makes of it."""
        for blocks in stream.split(self.batch):
            blocks.copy_(self.run(index, whole, blocks))
            progress(blocks.shape[0] * blocks.shape[1])


def _noted(layer: Layer, seen: Seen, until: Until) -> ExitStack:
    """A context in which a layer that is run writes down what it computes."""

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
    stack.callback(layer.attention.register_forward_pre_hook(called, with_kwargs=True).remove)
    stack.callback(layer.attention.register_forward_hook(attended).remove)
    if until == "heads":
        stack.enter_context(watched(layer.attention, attend))
    if layer.output is not None:
        stack.callback(layer.output.register_forward_pre_hook(joined).remove)
    return stack
