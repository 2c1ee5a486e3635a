"""Layer by layer: the maps of one layer from what its heads compute on a text, and the next layer's input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.devices import default_device, native_bfloat16
from gqa.checkpoint.errors import RefusedError
from gqa.convert.align.calibration_text import CalibrationText
from gqa.convert.align.closed_form import LayerResult, Task, Wanted, closed_form, position_weights
from gqa.convert.align.observe import Layer
from gqa.convert.align.pair import Pair, Streams, check_finite
from gqa.convert.align.refine import Calls, Refinement, refine
from gqa.convert.heads.modules import attention_modules
from gqa.convert.maps_file import fingerprint
from gqa.convert.methods import GROUPINGS, mean
from gqa.convert.plan import Plan

DTYPES = ("float32", "bfloat16", "float16")  # to run layers in


@dataclass(frozen=True)
class MapsOptions:
    """How maps are found; of the weights-only methods only `grouping` matters.

    ridge: Strength of the refit of W_O, relative to the mean energy of a head's outputs.
    batch: Blocks that go through a layer at a time.
    grouping: `contiguous`, or `search` for the groups that lose least.
    """

    text: CalibrationText = field(default_factory=CalibrationText)
    ridge: float = 0.03
    refinement: Refinement = field(default_factory=Refinement)
    device: str = field(default_factory=default_device)
    dtype: str = "float32"
    batch: int = 8
    grouping: str = "contiguous"

    def __post_init__(self) -> None:
        for name, value, known in (("dtype", self.dtype, DTYPES), ("grouping", self.grouping, GROUPINGS)):
            if value not in known:
                raise RefusedError(f"{name} {value!r} is not known; choose {', '.join(known)}")
        if not 0 <= self.ridge < math.inf or self.batch < 1:
            raise RefusedError(f"ridge {self.ridge} and batch {self.batch}: give one from 0 on, and at least 1 block")

    def describe(self, plan: Plan) -> dict[str, Any]:
        """What decides the maps, as JSON."""
        told: dict[str, Any] = {
            "method": plan.merging.method,
            "groups": plan.groups,
            "grouping": self.grouping,
            "name": plan.checkpoint.hub_id or plan.checkpoint.name,
            "model": fingerprint(plan.checkpoint, attention_modules(plan.checkpoint, plan.config)),
        }
        if plan.merging.how.needs == "text":
            told |= {"text": asdict(self.text) | {"sources": list(self.text.sources)}, "ridge": self.ridge}
            told["content"] = self.text.identify()
            told |= {"dtype": self.dtype, "device": self.device, "batch": self.batch}
        if plan.merging.how.refines:
            told["refinement"] = asdict(self.training)
        return told

    @property
    def training(self) -> Refinement:
        """The refinement, in bfloat16 where nothing is said and the device multiplies it faster."""
        if self.refinement.autocast is not None:
            return self.refinement
        return replace(self.refinement, autocast=native_bfloat16(self.device))


class Calibrator:
    """All layers of one model in turn; what it holds between two layers can be kept and given to another."""

    def __init__(self, plan: Plan, blocks: Tensor, options: MapsOptions, streams: Streams | None = None) -> None:
        """`blocks` are (N, T) token ids of calibration text, `streams` what an earlier one had after some layers."""
        self.pair = Pair(plan, options.device, getattr(torch, options.dtype), options.batch)
        self._options = options
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
        pair, streams, options = self.pair, self.streams, self._options
        module = pair.module_of(layer)
        if module is None:
            whole = pair.source.load(layer)
            for stream in (streams.source, streams.converted):
                pair.feed.pass_through(layer, whole, stream)
            check_finite(layer, streams.source, streams.converted)
            pair.source.release(layer)
            return None
        own = pair.original(module)
        wanted = self._wanted(own)
        if pair.symmetry:
            task = Task(pair, pair.symmetry, own, streams.converted, wanted)
            found = closed_form(task, options.ridge, options.grouping == "search")
        else:  # refinement starts from the mean
            heads, groups = pair.heads(module)
            found = LayerResult(module, mean(heads.kv, groups), float("nan"))
        pair.source.release(layer)
        merged = pair.merged(module, found.maps)
        if pair.plan.merging.how.refines:
            weights, error = self._refine(merged, wanted, progress)
            found = replace(found, weights=weights, error=error)
            merged = pair.merged(module, found.maps, weights)
        pair.feed.pass_through(layer, merged.whole, streams.converted, progress)
        pair.target.release(layer)
        return found

    def _wanted(self, own: Layer) -> Wanted:
        """What attention should give; the source's stream goes through the source's layer."""
        pair, stream = self.pair, self.streams.source
        drift, counts = self._drift(own), position_weights(self.streams.converted)
        inputs, outputs = [], []
        for seen in pair.feed.observe(own, stream):
            stream[seen.rows] = seen.hidden.cpu()
            outputs.append(seen.attended.cpu())
            if own.output is not None:
                inputs.append(seen.joined.cpu())
        check_finite(own.module.layer, stream, *outputs)
        return Wanted(torch.cat(inputs) if inputs else torch.empty(0), torch.cat(outputs), drift, counts)

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
                return pair.feed.run(own.module.layer, own.whole, states)
            finally:
                hook.remove()

        one, other = forced(hidden + more, base), forced(hidden, base + more / scale)
        check_finite(own.module.layer, one, other)
        rounding = max(1e-3, 8 * torch.finfo(one.dtype).eps)
        added = torch.allclose(one, other, rtol=0, atol=rounding * float(one.abs().max()))
        return difference / scale if added else torch.zeros_like(difference)

    def _refine(
        self, merged: Layer, wanted: Wanted, progress: Callable[[int], None]
    ) -> tuple[dict[str, Tensor], float]:
        """The converted module's trained tensors by their stored names, and the error that is left."""
        names = self.pair.trainable(merged.module, merged.attention)
        start = {name: merged.attention.get_parameter(name).detach() for name in names}
        calls = Calls.of(seen.call for seen in self.pair.feed.observe(merged, self.streams.converted, "call"))
        targets, how = wanted.outputs + wanted.drift, self._options.training
        with torch.enable_grad():
            best, _, error = refine(merged.attention, start, calls, targets, wanted.counts, how, progress)
        return self.pair.stored({names[name]: tensor for name, tensor in best.items()}), error
