"""Layer by layer: the maps of one layer from what its heads compute on a text, and the next layer's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.names import stored_tensors
from gqa.convert.align.closed_form import ClosedForm, Wanted, closed_form, position_weights
from gqa.convert.align.layerwise import Stop, run_layer
from gqa.convert.align.pair import Pair, Streams, attention_of, check_finite, inputs_of, until_stop
from gqa.convert.align.refine import Calls, Refinement, refine
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.heads.symmetries import Symmetry, find_symmetry
from gqa.convert.maps import HeadMaps
from gqa.convert.methods import mean
from gqa.convert.plan import Plan

Progress = Callable[[int], None]


@dataclass(frozen=True)
class LayerResult:
    """What came out of one layer.

    error: Of its attention output, squares relative to the squares of the source's, after the refit of W_O (on the
        calibration text) or the refinement (on held-out blocks); NaN where nothing was measured.
    weights: What refinement trained, by stored names.
    warning: What the text could not determine, in words.
    """

    module: AttentionModule
    maps: HeadMaps
    error: float
    weights: dict[str, Tensor] = field(default_factory=dict)
    warning: str = ""


def calibrate_layer(
    pair: Pair, streams: Streams, layer: int, how: Calibration, progress: Progress
) -> LayerResult | None:
    """The maps of one layer; both streams go through it. None where the layer has no heads to merge."""
    module = pair.module_of(layer)
    own = pair.source.load(layer)
    if module is None:
        for stream in (streams.source, streams.converted):
            for piece, hidden, given in pair.batches(stream, layer):
                stream[piece] = run_layer(own, hidden, given).cpu()
        check_finite(layer, streams.source, streams.converted)
        pair.source.release(layer)
        return None
    attention = attention_of(own, module)
    symmetry = find_symmetry(pair.plan.config.text)
    drift, counts = _drift(pair, streams, layer, own, attention), position_weights(streams.converted)
    seen = _run_source(pair, streams, module, own, attention, symmetry)
    if symmetry:
        wanted = Wanted(seen.inputs, drift, counts)
        start = closed_form(pair, streams, module, own, attention, symmetry, wanted, how.ridge, how.search)
    else:
        heads = pair.plan.config.heads(layer)
        start = ClosedForm(mean(heads.kv, heads.kv * pair.plan.groups // pair.plan.config.main.kv), float("nan"))
    error = start.error
    pair.source.release(layer)
    weights = pair.weights(module, start.maps)
    trained: dict[str, Tensor] = {}
    changed = pair.load_target(module, weights)
    if how.refine:
        calls = _calls(pair, streams.converted, module, changed)
        trained, error = _refine(pair, module, changed, calls, seen.outputs + drift, counts, how.refine, progress)
        changed = pair.load_target(module, weights | trained)
    for piece, hidden, given in pair.batches(streams.converted, layer):
        streams.converted[piece] = run_layer(changed, hidden, given).cpu()
        progress(hidden.shape[0] * hidden.shape[1])
    pair.target.release(layer)
    return LayerResult(module, start.maps, error, trained, start.warning)


@torch.no_grad()
def _drift(pair: Pair, streams: Streams, layer: int, own: nn.Module, attention: nn.Module) -> Tensor:
    """What attention would have to give beside its own output, (N, T, D), to put the converted stream right again.

    Zero where attention's output is not simply added to its stream (a norm comes after it, for one), which is tried:
    what the stream has more must do the same as the same more from attention.
    """
    difference = streams.source - streams.converted
    scale = float(getattr(pair.plan.config.text, "residual_multiplier", None) or 1.0)
    hidden, given = streams.source[:1].to(pair.source.device), pair.given[1][layer]
    generator = torch.Generator().manual_seed(0)
    base, more = (torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std() for _ in range(2))

    def forced(states: Tensor, output: Tensor) -> Tensor:
        def replace(_: nn.Module, args: Any, found: Any) -> Any:
            return output if isinstance(found, Tensor) else (output, *found[1:])

        hook = attention.register_forward_hook(replace)
        try:
            return run_layer(own, states, given)
        finally:
            hook.remove()

    one, other = forced(hidden + more, base), forced(hidden, base + more / scale)
    check_finite(layer, one, other)
    rounding = max(1e-3, 8 * torch.finfo(one.dtype).eps)
    added = torch.allclose(one, other, rtol=0, atol=rounding * float(one.abs().max()))
    return difference / scale if added else torch.zeros_like(difference)


@dataclass(frozen=True)
class Seen:
    """Of the source's attention on its own stream: what W_O is given, (N, T, H e), and what it gives, (N, T, D)."""

    inputs: Tensor
    outputs: Tensor


def _run_source(
    pair: Pair,
    streams: Streams,
    module: AttentionModule,
    own: nn.Module,
    attention: nn.Module,
    symmetry: Symmetry | None,
) -> Seen:
    """The source's stream goes through the layer."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    watch = pair.projection(pair.source, module, symmetry.output.tensor) if symmetry else nn.Identity()
    hook = attention.register_forward_hook(lambda _, args, output: outputs.append(_first(output).cpu()))
    with inputs_of(watch, lambda given: inputs.append(given.cpu())):
        for piece, hidden, given in pair.batches(streams.source, module.layer):
            streams.source[piece] = run_layer(own, hidden, given).cpu()
    hook.remove()
    check_finite(module.layer, streams.source, *outputs)
    return Seen(torch.cat(inputs) if inputs else torch.empty(0), torch.cat(outputs))


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _calls(pair: Pair, stream: Tensor, module: AttentionModule, changed: nn.Module) -> Calls:
    """What the converted attention module is called with on its stream."""
    attention, calls = attention_of(changed, module), Calls()

    def stop(*given: Any) -> None:
        raise Stop

    hook = attention.register_forward_hook(stop)
    with calls.of(attention), torch.no_grad():
        for _, hidden, given in pair.batches(stream, module.layer):
            until_stop(changed, hidden, given)
    hook.remove()
    return calls


def _refine(
    pair: Pair,
    module: AttentionModule,
    changed: nn.Module,
    calls: Calls,
    targets: Tensor,
    counts: Tensor,
    how: Refinement,
    progress: Progress,
) -> tuple[dict[str, Tensor], float]:
    """The converted module's trained tensors by their stored names, and the error that is left."""
    attention = attention_of(changed, module)
    names = pair.trainable(module, attention)
    start = {name: attention.get_parameter(name).detach() for name in names}
    with torch.enable_grad():
        best, _, error = refine(attention, start, calls, targets, counts, how, progress)
    return stored_tensors(pair.target.model, {names[name]: tensor for name, tensor in best.items()}), error


@dataclass(frozen=True)
class Calibration:
    """How maps are found.

    ridge: Strength of the refit of W_O, relative to the mean energy of a head's outputs.
    refine: How layers are trained after their closed form; None where they are not.
    search: Whether heads are grouped so that least is lost.
    batch: Blocks that go through a layer at a time.
    """

    ridge: float = 0.03
    refine: Refinement | None = None
    search: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    batch: int = 8


class Calibrator:
    """All layers of one model in turn; what it holds between two layers can be kept and given to another."""

    def __init__(self, plan: Plan, blocks: Tensor, how: Calibration, streams: Streams | None = None) -> None:
        """`blocks` are (N, T) token ids of calibration text, `streams` what an earlier one had after some layers."""
        self._pair, self._how = Pair.open(plan, how.device, how.dtype, how.batch), how
        with torch.no_grad():
            fresh = self._pair.arrive(blocks)
        self.streams = streams or fresh

    @property
    def layers(self) -> int:
        return len(self._pair.source.layers)

    @property
    def path(self) -> str:
        """Of the list of layers in transformers' class."""
        return self._pair.source.prefix

    @torch.no_grad()
    def run(self, layer: int, progress: Progress = lambda tokens: None) -> LayerResult | None:
        """The maps of one layer, the next in order; None where it has no heads to merge. `progress` is called with the
        number of tokens that went through it.
        """
        return calibrate_layer(self._pair, self.streams, layer, self._how, progress)
