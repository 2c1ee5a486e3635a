"""Layer by layer: the maps of one layer from what its heads compute on a text, and the next layer's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gqa.convert.align.closed_form import ClosedForm, Task, Wanted, closed_form, position_weights
from gqa.convert.align.layerwise import run_layer
from gqa.convert.align.observe import Layer
from gqa.convert.align.pair import Pair, Streams, check_finite
from gqa.convert.align.refine import Calls, Refinement, refine
from gqa.convert.heads.modules import AttentionModule
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
        """The maps of one layer, the next in order; None where it has no heads to merge. Both streams go through it,
        and `progress` is called with the number of tokens that did.
        """
        pair, streams, own = self._pair, self.streams, self._pair.original(layer)
        if own.module is None:
            for stream in (streams.source, streams.converted):
                pair.feed.pass_through(own, stream)
            check_finite(layer, streams.source, streams.converted)
            pair.source.release(layer)
            return None
        module, wanted = own.module, self._wanted(own)
        if pair.symmetry:
            task = Task(pair, own, streams.converted, wanted)
            found = closed_form(task, self._how.ridge, self._how.search)
        else:  # refinement starts from the mean
            heads, groups = pair.heads(module)
            found = ClosedForm(mean(heads.kv, groups), float("nan"))
        pair.source.release(layer)
        merged, trained, error = pair.merged(module, found.maps), dict[str, Tensor](), found.error
        if self._how.refine:
            trained, error = self._refine(merged, wanted, self._how.refine, progress)
            merged = pair.merged(module, found.maps, trained)
        pair.feed.pass_through(merged, streams.converted, progress)
        pair.target.release(layer)
        return LayerResult(module, found.maps, error, trained, found.warning)

    def _wanted(self, own: Layer) -> Wanted:
        """What attention should give; the source's stream goes through the source's layer."""
        pair, stream = self._pair, self.streams.source
        drift, counts = self._drift(own), position_weights(self.streams.converted)
        inputs, outputs = [], []
        for seen in pair.feed.observe(own, stream):
            assert seen.hidden is not None
            assert seen.attended is not None
            stream[seen.rows] = seen.hidden.cpu()
            outputs.append(seen.attended.cpu())
            if seen.joined is not None:
                inputs.append(seen.joined.cpu())
        check_finite(own.index, stream, *outputs)
        return Wanted(torch.cat(inputs) if inputs else torch.empty(0), torch.cat(outputs), drift, counts)

    def _drift(self, own: Layer) -> Tensor:
        """What attention would have to give beside its own output, (N, T, D), to put the converted stream right again.

        Zero where attention's output is not simply added to its stream (a norm comes after it, for one), which is
        tried: what the stream has more must do the same as the same more from attention.
        """
        pair, streams = self._pair, self.streams
        difference = streams.source - streams.converted
        scale = float(getattr(pair.plan.config.text, "residual_multiplier", None) or 1.0)
        hidden, given = streams.source[:1].to(pair.source.device), pair.feed.given[1][own.index]
        generator = torch.Generator().manual_seed(0)
        base, more = (torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std() for _ in range(2))

        def forced(states: Tensor, output: Tensor) -> Tensor:
            def replace(_: nn.Module, args: Any, found: Any) -> Any:
                return output if isinstance(found, Tensor) else (output, *found[1:])

            assert own.attention is not None
            hook = own.attention.register_forward_hook(replace)
            try:
                return run_layer(own.whole, states, given)
            finally:
                hook.remove()

        one, other = forced(hidden + more, base), forced(hidden, base + more / scale)
        check_finite(own.index, one, other)
        rounding = max(1e-3, 8 * torch.finfo(one.dtype).eps)
        added = torch.allclose(one, other, rtol=0, atol=rounding * float(one.abs().max()))
        return difference / scale if added else torch.zeros_like(difference)

    def _refine(
        self, merged: Layer, wanted: Wanted, how: Refinement, progress: Progress
    ) -> tuple[dict[str, Tensor], float]:
        """The converted module's trained tensors by their stored names, and the error that is left."""
        assert merged.module is not None
        assert merged.attention is not None
        names = self._pair.trainable(merged.module, merged.attention)
        start = {name: merged.attention.get_parameter(name).detach() for name in names}
        calls = Calls.of(seen.call for seen in self._pair.feed.observe(merged, self.streams.converted, "call"))
        targets = wanted.outputs + wanted.drift
        with torch.enable_grad():
            best, _, error = refine(merged.attention, start, calls, targets, wanted.counts, how, progress)
        return self._pair.stored({names[name]: tensor for name, tensor in best.items()}), error
