"""Layer by layer: the maps of one layer from what its heads compute on a text, and the next layer's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.write import write_tensor
from gqa.convert.merge.closed_form import LayerResult, Task, closed_form, position_weights
from gqa.convert.merge.layerwise import Layer
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.pair import Inputs, Pair, check_finite
from gqa.convert.merge.refine import Calls, refine, seen_of
from gqa.convert.plan import Plan


class Calibrator:
    """All layers of one model in turn; what it holds between two layers can be kept and given to another."""

    def __init__(
        self, plan: Plan, blocks: Tensor | Inputs, options: MapsOptions, state: Mapping[str, Tensor] | None = None,
        place: Path | None = None,
    ) -> None:  # fmt: skip
        """`blocks` are (N, T) token ids of calibration text, or what else the model is given; `state` is that of an
        earlier calibrator after some layers. Where a layer is refined, the source's stream lies in a file in `place`.
        """
        self.pair, self._place = Pair(plan, options), place
        self._inputs: Inputs = {"input_ids": blocks} if isinstance(blocks, Tensor) else blocks
        with torch.no_grad():
            if state and "encoded" in state:
                self.streams = self.pair.decode(self._inputs, (state["encoded"], state["encoded converted"]))
            else:
                self.streams = self.pair.arrive(self._inputs)
        if state:
            self.streams.source.hidden.copy_(state["source"])
            self.streams.converted.hidden.copy_(state["converted"])

    @property
    def layers(self) -> int:
        return len(self.pair.source.layers)

    def tokens(self, layer: int, trained: int) -> int:
        """How many a layer yet to come goes through, if each of its attention modules is trained on so many."""
        blocks = self.streams.source.hidden[:, :, 0]
        if self.pair.source.first <= layer and "decoder_input_ids" in self._inputs:
            blocks = self._inputs["decoder_input_ids"]
        return blocks.numel() + trained * max(1, len(self.pair.modules_of(layer)))

    def state(self) -> dict[str, Tensor]:
        """What is needed to go on after the last layer that was run."""
        streams = self.streams
        state = {"source": streams.source.hidden, "converted": streams.converted.hidden}
        if streams.encoded:
            state |= {"encoded": streams.encoded[0], "encoded converted": streams.encoded[1]}
        return state

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
            same = torch.equal(streams.source.hidden, streams.converted.hidden)
            own.pass_through(streams.source)
            if same:  # nothing was merged so far
                streams.converted.hidden.copy_(streams.source.hidden)
            else:
                own.pass_through(streams.converted)
            check_finite(layer, streams.source.hidden, streams.converted.hidden)
            pair.source.release(layer)
            return []
        scale = self._scale([pair.looking_at(module, own) for module in modules])
        counts = position_weights(streams.converted.hidden, streams.converted.real)
        refines, missed = pair.plan.merging.how.refines, None
        fitted = seen_of(counts, pair.options.training) if refines else counts
        found, done = list[LayerResult](), dict[str, Tensor]()
        for module in modules:
            own, last = pair.looking_at(module, pair.original(layer, done) if done else own), module == modules[-1]
            task = Task(pair, module, own, streams, scale, fitted, done, missed)
            result = closed_form(task) if pair.symmetry else LayerResult(module, pair.mean(module), float("nan"))
            if refines:
                result = self._refined(result, replace(task, counts=counts), last, progress)
            elif last:
                task.true().pass_through(streams.source)
                check_finite(layer, streams.source.hidden)
            done = done | pair.mapped(module, result.maps) | result.weights
            found.append(result)
            merged = pair.merged(layer, module, done)
            if scale is not None and not last:  # what the next one is to correct
                missed = torch.empty_like(streams.source.hidden)
                for true in task.true().observe(streams.source, "attended"):
                    missed[true.rows] = true.attended
                for seen in merged.observe(streams.converted, "attended"):
                    missed[seen.rows] -= seen.attended.cpu()
        merged.pass_through(streams.converted, progress)
        pair.source.release(layer)
        pair.target.release(layer)
        return found

    def _scale(self, looked_at: list[Layer]) -> float | None:
        """By what outputs of a layer's attention modules are multiplied before they are added to the stream.

        None where that is not all that becomes of them (a norm comes after them, for one), which is tried: what the
        stream has more must do the same as the same more from attention.
        """
        pair, source, alike = self.pair, self.streams.source, True
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
            alike = alike and torch.allclose(one, other, rtol=0, atol=rounding * float(one.abs().max()))
        return scale if alike else None

    def _refined(self, found: LayerResult, task: Task, last: bool, progress: Callable[[int], None]) -> LayerResult:
        """With the converted module's trained tensors and the error that is left. With the `last` module of a layer the
        source's stream goes through it.
        """
        source = task.streams.source
        # In the place of the stream, which lies on the disk meanwhile.
        targets = source.hidden if last else torch.empty_like(source.hidden)
        with TemporaryFile(dir=self._place) as left:
            for seen in task.true().observe(source, "end" if last else "attended"):
                drift = task.drift(seen.rows)
                targets[seen.rows] = seen.attended.cpu() if drift is None else seen.attended.cpu() + drift
                check_finite(task.own.index, seen.attended)
                if last:
                    check_finite(task.own.index, seen.hidden)
                    write_tensor(left, seen.hidden.cpu())
            result = self._trained(found, task, targets, progress)
            if last:
                left.seek(0)
                left.readinto(memoryview(source.hidden.view(torch.uint8).numpy()).cast("B"))  # type: ignore[arg-type]
        return result

    def _trained(self, found: LayerResult, task: Task, targets: Tensor, progress: Callable[[int], None]) -> LayerResult:
        """The module trained towards `targets` (N, T, D)."""
        merged = task.merged(found.maps)
        attention = merged.attention
        assert attention
        names = self.pair.trainable(found.module, attention)
        start = {name: attention.get_parameter(name).detach() for name in names}
        calls, how = Calls.of(merged, task.streams.converted), self.pair.options.training
        with torch.enable_grad():
            best, _, error = refine(attention, start, calls, targets, task.counts, how, progress)
        weights = self.pair.stored({names[name]: tensor for name, tensor in best.items()})
        return replace(found, weights=weights, error=error)
