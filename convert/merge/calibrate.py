"""Calibrate one layer after another: observe it, fit maps of its heads, refine them, advance to the next layer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.write import write_tensor
from gqa.convert.heads.modules import AttentionModule
from gqa.convert.merge.closed_form import LayerResult, Task, closed_form, position_weights
from gqa.convert.merge.layerwise import Layer, Part
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.pair import Inputs, Pair, check_finite
from gqa.convert.merge.refine import refine, without_heldout
from gqa.convert.plan import Plan


class Calibrator:
    """Runs the layers of one model in order. `state` after a layer lets another calibrator continue from there."""

    def __init__(
        self, plan: Plan, blocks: Tensor | Inputs, options: MapsOptions, state: Mapping[str, Tensor] | None = None,
        directory: Path | None = None,
    ) -> None:  # fmt: skip
        """`blocks` are (N, T) token ids of calibration text, or all inputs of the model by name. `state`: of an earlier
        calibrator, after some layers. `directory`: for a temporary file with the source's stream, while a layer is
        refined.
        """
        self.pair, self._directory = Pair(plan, options), directory
        self.streams = self.pair.start({"input_ids": blocks} if isinstance(blocks, Tensor) else blocks)
        if state:
            self.streams.source.hidden.copy_(state["source"])
            self.streams.converted.hidden.copy_(state["converted"])

    @property
    def layers(self) -> int:
        return len(self.pair.source.layers)

    def state(self) -> dict[str, Tensor]:
        """Tensors with which another calibrator continues after the last layer that ran."""
        return {"source": self.streams.source.hidden, "converted": self.streams.converted.hidden}

    @torch.no_grad()
    def run(self, layer: int) -> list[LayerResult]:
        """Results of the attention modules of the next layer; none where it has no heads to merge. Both streams go
        through the layer.
        """
        pair = self.pair
        streams, modules, source = self.streams, pair.modules_of(layer), pair.original(layer)
        if not modules:
            for stream in (streams.source, streams.converted):
                source.pass_through(stream)
                check_finite(layer, stream.hidden)
            pair.source.release(layer)
            return []
        scale, weights = self._observe(source, modules)
        refines, missing = pair.plan.merging.how.refines, None
        fitted = without_heldout(weights, pair.options.refinement) if refines else weights
        results, converted = list[LayerResult](), dict[str, Tensor]()
        for module in modules:
            source = pair.with_attention(module, pair.original(layer, converted) if converted else source)
            task, last = Task(pair, module, source, streams, scale, fitted, converted, missing), module == modules[-1]
            result = closed_form(task) if pair.symmetry else LayerResult(module, pair.mean(module), float("nan"))
            if refines:
                result = self._refine(result, replace(task, position_weights=weights), last)
            elif last:
                task.source_layer().pass_through(streams.source)
                check_finite(layer, streams.source.hidden)
            converted = converted | pair.mapped(module, result.maps) | result.weights
            results.append(result)
            if scale is not None and not last:
                missing = self._missing_output(task, converted)
        pair.merged(layer, modules[-1], converted).pass_through(streams.converted)
        pair.source.release(layer)
        pair.target.release(layer)
        return results

    def _observe(self, layer: Layer, modules: list[AttentionModule]) -> tuple[float | None, Tensor]:
        """The residual scale of a layer, and the weight of an error at each position, (N, T)."""
        converted = self.streams.converted
        scale = self._residual_scale([self.pair.with_attention(module, layer) for module in modules])
        return scale, position_weights(converted.hidden, converted.is_text)

    def _residual_scale(self, layers: list[Layer]) -> float | None:
        """Scale s in h + s * attention(h) of a layer, given once for each of its attention modules. None if the output
        of attention is transformed further, as by a norm: then h + x and attention + x / s do not have the same effect.
        """
        source, same = self.streams.source, True
        scale = float(getattr(self.pair.plan.config.text, "residual_multiplier", None) or 1.0)
        rows, arguments = next(source.batches(layers[0].index))
        hidden = source.hidden[rows].to(self.pair.source.device)
        generator = torch.Generator().manual_seed(0)
        base, extra = (torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std() for _ in range(2))

        def run(states: Tensor, changed: Layer | None = None) -> Tensor:
            """The layer's output where all its attention modules return `base`, the `changed` one `extra` on top."""
            with ExitStack() as hooks:
                for layer in layers:
                    assert layer.attention
                    output = base + extra / scale if layer is changed else base
                    hooks.callback(layer.attention.register_forward_hook(partial(_replace_output, output)).remove)
                return layers[0].run(states, arguments)

        expected = run(hidden + extra)
        for layer in layers:
            output = run(hidden, layer)
            check_finite(layer.index, expected, output)
            tolerance = max(1e-3, 8 * torch.finfo(expected.dtype).eps) * float(expected.abs().max())
            same = same and torch.allclose(expected, output, rtol=0, atol=tolerance)
        return scale if same else None

    def _missing_output(self, task: Task, converted: Mapping[str, Tensor]) -> Tensor:
        """(N, T, D) attention output of the source that the converted module lacks, for the next one to correct."""
        streams = task.streams
        missing = torch.empty_like(streams.source.hidden)
        merged = self.pair.merged(task.layer.index, task.module, converted)
        for capture in task.source_layer().capture(streams.source, "attention_output"):
            missing[capture.rows] = capture.attention_output
        for capture in merged.capture(streams.converted, "attention_output"):
            missing[capture.rows] -= capture.attention_output.cpu()
        return missing

    def _refine(self, result: LayerResult, task: Task, last: bool) -> LayerResult:
        """Train the converted module. With the `last` module of a layer the source's stream goes through the layer."""
        source = task.streams.source
        # In the memory of the stream, which is in a file meanwhile.
        targets = source.hidden if last else torch.empty_like(source.hidden)
        parts: tuple[Part, ...] = ("attention_output", "layer_output") if last else ("attention_output",)
        with TemporaryFile(dir=self._directory) as file:
            for capture in task.source_layer().capture(source, *parts):
                output, drift = capture.attention_output, task.drift(capture.rows)
                targets[capture.rows] = output.cpu() if drift is None else output.cpu() + drift
                check_finite(task.layer.index, output)
                if last:
                    check_finite(task.layer.index, capture.layer_output)
                    write_tensor(file, capture.layer_output.cpu())
            merged = task.converted_layer(result.maps)
            attention = merged.attention
            assert attention
            names = self.pair.trainable(result.module, attention)
            start = {name: attention.get_parameter(name).detach() for name in names}
            arguments = partial(merged.attention_arguments, task.streams.converted)
            with torch.enable_grad():
                best, _, error = refine(
                    attention, start, arguments, targets, task.position_weights, self.pair.options.refinement
                )
            if last:
                file.seek(0)
                file.readinto(memoryview(source.hidden.view(torch.uint8).numpy()).cast("B"))  # type: ignore[arg-type]
        return replace(result, weights=self.pair.stored({names[name]: best[name] for name in best}), error=error)


def _replace_output(tensor: Tensor, _: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that puts `tensor` in the place of the hidden states."""
    return tensor if isinstance(output, Tensor) else (tensor, *output[1:])
