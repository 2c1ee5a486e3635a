"""Layer by layer: the maps of one layer from what its heads compute on a text, and the next layer's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gqa.convert.align.closed_form import LayerResult, Task, closed_form, position_weights
from gqa.convert.align.layerwise import Layer
from gqa.convert.align.options import MapsOptions
from gqa.convert.align.pair import Pair, Streams, check_finite
from gqa.convert.align.refine import Calls, refine
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.methods import mean
from gqa.convert.plan import Plan


class Calibrator:
    """All layers of one model in turn; what it holds between two layers can be kept and given to another."""

    def __init__(self, plan: Plan, blocks: Tensor, options: MapsOptions, streams: Streams | None = None) -> None:
        """`blocks` are (N, T) token ids of calibration text, `streams` what an earlier one had after some layers."""
        self.pair = Pair(plan, options)
        with torch.no_grad():
            fresh = self.pair.arrive(blocks)
        self.streams = streams or fresh

    @property
    def layers(self) -> int:
        return len(self.pair.source.layers)

    @torch.no_grad()
    def run(self, layer: int, progress: Callable[[int], None] = lambda tokens: None) -> LayerResult | None:
        """The maps of one layer, the next in order; None where it has no heads to merge. Both streams go through it,
        and `progress` is called with the number of tokens that did.
        """
        pair, streams = self.pair, self.streams
        module = pair.module_of(layer)
        own = pair.original(layer, module)
        if module is None:
            for stream in (streams.source, streams.converted):
                own.pass_through(stream)
            check_finite(layer, streams.source, streams.converted)
            pair.source.release(layer)
            return None
        task = self._task(own, module)
        if pair.symmetry:
            found = closed_form(task)
        else:  # refinement starts from the mean
            heads, groups = pair.heads(module)
            found = LayerResult(module, mean(heads.kv, groups), float("nan"))
        pair.source.release(layer)
        merged = pair.merged(module, found.maps)
        if pair.plan.merging.how.refines:
            found = self._refined(found, merged, task, progress)
            merged = pair.merged(module, found.maps, found.weights)
        merged.pass_through(streams.converted, progress)
        pair.target.release(layer)
        return found

    def _task(self, own: Layer, module: AttentionModule) -> Task:
        """What attention should give; the source's stream goes through the source's layer."""
        stream, converted = self.streams.source, self.streams.converted
        drift, counts = self._drift(own), position_weights(converted)
        outputs = torch.empty_like(stream) if self.pair.plan.merging.how.refines else stream.new_empty(0)
        joined = stream.new_empty(0)
        for seen in own.observe(stream):
            stream[seen.rows] = seen.hidden
            check_finite(own.index, seen.hidden, seen.attended)
            if len(outputs):
                outputs[seen.rows] = seen.attended
            if own.output is not None:
                joined = joined if len(joined) else stream.new_empty(*stream.shape[:2], seen.joined.shape[-1])
                joined[seen.rows] = seen.joined
        return Task(self.pair, module, own, converted, joined, outputs, drift, counts)

    def _drift(self, own: Layer) -> Tensor:
        """What attention would have to give beside its own output, (N, T, D), to put the converted stream right again.

        Zero where attention's output is not simply added to its stream (a norm comes after it, for one), which is
        tried: what the stream has more must do the same as the same more from attention.
        """
        pair, streams = self.pair, self.streams
        difference = streams.source - streams.converted
        scale = float(getattr(pair.plan.config.text, "residual_multiplier", None) or 1.0)
        hidden = streams.source[:1].to(pair.source.device)
        generator = torch.Generator().manual_seed(0)
        base, more = (torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std() for _ in range(2))

        def forced(states: Tensor, output: Tensor) -> Tensor:
            def replace(_: nn.Module, args: Any, found: Any) -> Any:
                return output if isinstance(found, Tensor) else (output, *found[1:])

            hook = own.attention.register_forward_hook(replace)
            try:
                return own.run(states)
            finally:
                hook.remove()

        one, other = forced(hidden + more, base), forced(hidden, base + more / scale)
        check_finite(own.index, one, other)
        rounding = max(1e-3, 8 * torch.finfo(one.dtype).eps)
        added = torch.allclose(one, other, rtol=0, atol=rounding * float(one.abs().max()))
        return difference / scale if added else torch.zeros_like(difference)

    def _refined(self, found: LayerResult, merged: Layer, task: Task, progress: Callable[[int], None]) -> LayerResult:
        """With the converted module's trained tensors and the error that is left."""
        attention = merged.attention
        names = self.pair.trainable(found.module, attention)
        start = {name: attention.get_parameter(name).detach() for name in names}
        calls = Calls.of(seen.call for seen in merged.observe(self.streams.converted, "call"))
        how = self.pair.options.training
        with torch.enable_grad():
            best, _, error = refine(attention, start, calls, task.outputs.add_(task.drift), task.counts, how, progress)
        weights = self.pair.stored({names[name]: tensor for name, tensor in best.items()})
        return replace(found, weights=weights, error=error)
