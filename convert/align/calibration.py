"""Layer by layer: the maps of one layer from what its heads compute on a text, and the next layer's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gqa.convert.align.closed_form import LayerResult, Task, closed_form, position_weights
from gqa.convert.align.layerwise import Layer
from gqa.convert.align.options import MapsOptions
from gqa.convert.align.pair import Inputs, Pair, check_finite
from gqa.convert.align.refine import Calls, refine
from gqa.convert.plan import Plan


class Calibrator:
    """All layers of one model in turn; what it holds between two layers can be kept and given to another."""

    def __init__(
        self, plan: Plan, blocks: Tensor | Inputs, options: MapsOptions, kept: Mapping[str, Tensor] | None = None
    ) -> None:
        """`blocks` are (N, T) token ids of calibration text, or what else the model is given; `kept` is what an earlier
        one was to keep after some layers.
        """
        self.pair, kept = Pair(plan, options), kept or {}
        self._inputs: Inputs = {"input_ids": blocks} if isinstance(blocks, Tensor) else blocks
        with torch.no_grad():
            if "encoded" in kept:
                self.streams = self.pair.decode(self._inputs, (kept["encoded"], kept["encoded converted"]))
            else:
                self.streams = self.pair.arrive(self._inputs)
        if kept:
            self.streams.source.hidden, self.streams.converted.hidden = kept["source"], kept["converted"]

    @property
    def layers(self) -> int:
        return len(self.pair.source.layers)

    def tokens(self, layer: int, trained: int) -> int:
        """How many a layer yet to come goes through, if each of its attention modules is trained on so many."""
        blocks = self.streams.source.hidden[:, :, 0]
        if self.pair.source.first <= layer and "decoder_input_ids" in self._inputs:
            blocks = self._inputs["decoder_input_ids"]
        return blocks.numel() + trained * max(1, len(self.pair.modules_of(layer)))

    def keep(self) -> dict[str, Tensor]:
        """What is needed to go on after the last layer that was run."""
        streams = self.streams
        found = {"source": streams.source.hidden, "converted": streams.converted.hidden}
        if streams.encoded:
            found |= {"encoded": streams.encoded[0], "encoded converted": streams.encoded[1]}
        return found

    @torch.no_grad()
    def run(self, layer: int, progress: Callable[[int], None] = lambda tokens: None) -> list[LayerResult]:
        """The maps of the attention modules of one layer, the next in order; none where it has no heads to merge. Both
        streams go through it, and `progress` is called with the number of tokens that did.
        """
        pair = self.pair
        if layer == pair.source.first > 0:
            self.streams = pair.decode(self._inputs, pair.encode(self._inputs, self.streams))
        streams, modules, own = self.streams, pair.modules_of(layer), pair.original(layer)
        if not modules:
            for stream in (streams.source, streams.converted):
                own.pass_through(stream)
            check_finite(layer, streams.source.hidden, streams.converted.hidden)
            pair.source.release(layer)
            return []
        looked_at = [pair.looking_at(module, own) for module in modules]
        drift, found, done = self._drift(looked_at), list[LayerResult](), dict[str, Tensor]()
        for module, (joined, outputs) in zip(modules, self._wanted(looked_at), strict=True):
            own = pair.looking_at(module, pair.original(layer, done) if done else own)
            counts = position_weights(streams.converted.hidden, streams.converted.real)
            task = Task(pair, module, own, streams.converted, joined, outputs, drift, counts, done)
            result = closed_form(task) if pair.symmetry else LayerResult(module, pair.mean(module), float("nan"))
            pair.source.release(layer)
            if pair.plan.merging.how.refines:
                result = self._refined(result, task, progress)
            done = done | pair.mapped(module, result.maps) | result.weights
            found.append(result)
            merged = pair.merged(layer, module, done)
            if drift is not None and module != modules[-1]:  # what the next one is to correct
                for seen in merged.observe(streams.converted, "attended"):
                    drift[seen.rows] += outputs[seen.rows] - seen.attended.cpu()
        merged.pass_through(streams.converted, progress)
        pair.target.release(layer)
        return found

    def _wanted(self, looked_at: list[Layer]) -> list[tuple[Tensor, Tensor]]:
        """What W_O of each attention module of a layer is given (N, T, H e), where it is known, and what the module
        gives (N, T, D), where that is needed. The source's stream goes through the layer.
        """
        stream, found = self.streams.source, list[tuple[Tensor, Tensor]]()
        for own in looked_at:
            last, none = own is looked_at[-1], stream.hidden.new_empty(0)
            outputs = torch.empty_like(stream.hidden) if self.pair.plan.merging.how.refines or not last else none
            joined = none
            for seen in own.observe(stream):
                if last:
                    stream.hidden[seen.rows] = seen.hidden
                check_finite(own.index, seen.hidden, seen.attended)
                if len(outputs):
                    outputs[seen.rows] = seen.attended
                if own.output is not None:
                    joined = joined if len(joined) else none.new_empty(*stream.hidden.shape[:2], seen.joined.shape[-1])
                    joined[seen.rows] = seen.joined
            found.append((joined, outputs))
        return found

    def _drift(self, looked_at: list[Layer]) -> Tensor | None:
        """What attention would have to give beside its own output, (N, T, D), to put the converted stream right again.

        None where the outputs of a layer's attention modules are not simply added to the stream (a norm comes after
        them, for one), which is tried: what the stream has more must do the same as the same more from attention.
        """
        pair, source = self.pair, self.streams.source
        difference = source.hidden - self.streams.converted.hidden
        scale = float(getattr(pair.plan.config.text, "residual_multiplier", None) or 1.0)
        rows, given = next(source.batches(looked_at[0].index))
        hidden = source.hidden[rows].to(pair.source.device)
        generator = torch.Generator().manual_seed(0)
        base, more = (torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std() for _ in range(2))

        def forced(states: Tensor, changed: Layer | None = None) -> Tensor:
            def give(output: Tensor) -> Callable[[nn.Module, Any, Any], Any]:
                return lambda _, args, found: output if isinstance(found, Tensor) else (output, *found[1:])

            with ExitStack() as hooks:
                for own in looked_at:
                    assert own.attention
                    output = base + more / scale if own is changed else base
                    hooks.callback(own.attention.register_forward_hook(give(output)).remove)
                return looked_at[0].run(states, given)

        one = forced(hidden + more)
        for own in looked_at:
            other = forced(hidden, own)
            check_finite(own.index, one, other)
            rounding = max(1e-3, 8 * torch.finfo(one.dtype).eps)
            if not torch.allclose(one, other, rtol=0, atol=rounding * float(one.abs().max())):
                return None
        return difference / scale

    def _refined(self, found: LayerResult, task: Task, progress: Callable[[int], None]) -> LayerResult:
        """With the converted module's trained tensors and the error that is left."""
        merged = task.merged(found.maps)
        attention = merged.attention
        assert attention
        names = self.pair.trainable(found.module, attention)
        start = {name: attention.get_parameter(name).detach() for name in names}
        calls = Calls.of(seen.call for seen in merged.observe(task.stream, "call"))
        how, targets = self.pair.options.training, task.outputs if task.drift is None else task.outputs + task.drift
        with torch.enable_grad():
            best, _, error = refine(attention, start, calls, targets, task.counts, how, progress)
        weights = self.pair.stored({names[name]: tensor for name, tensor in best.items()})
        return replace(found, weights=weights, error=error)
