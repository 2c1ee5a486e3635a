"""Calibrate one layer after another: observe it, fit maps of its heads, refine them, advance to the next layer.

`refine` trains a converted attention module towards the output of the source's module. Only the module's projections
are trained, inputs and targets are fixed, and no other layer is in memory. It runs transformers' modules, so it works
for every architecture and from any start (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gqa.checkpoint.loading import native_bfloat16
from gqa.convert.merge.closed_form import LayerResult, Task, closed_form, mean_squares, position_weights
from gqa.convert.merge.layerwise import Arguments, Layer, Part, Stream, first_tensor
from gqa.convert.merge.options import AT_ONCE, MapsOptions, Refinement
from gqa.convert.merge.pair import Inputs, Pair, check_finite
from gqa.convert.plan import Plan

_CHECKS = 8  # of the held-out error in a run


class Calibrator:
    """Runs the layers of one model in order. `state` after a layer lets another calibrator continue from there."""

    def __init__(
        self, plan: Plan, blocks: Tensor | Inputs, options: MapsOptions, state: Mapping[str, Tensor] | None = None
    ) -> None:
        """`blocks` are (N, T) token ids of calibration text, or all inputs of the model by name. `state`: of an earlier
        calibrator, after some layers.
        """
        self.pair = Pair(plan, options)
        self.layers = len(self.pair.source.layers)
        self.streams = self.pair.start({"input_ids": blocks} if isinstance(blocks, Tensor) else blocks)
        if state:
            self.streams.source.hidden.copy_(state["source"])
            self.streams.converted.hidden.copy_(state["converted"])

    def state(self) -> dict[str, Tensor]:
        """Tensors with which another calibrator continues after the last layer that ran."""
        return {"source": self.streams.source.hidden, "converted": self.streams.converted.hidden}

    @torch.no_grad()
    def run(
        self, layer: int, source_streams: Sequence[Stream] = (), converted_streams: Sequence[Stream] = ()
    ) -> list[LayerResult]:
        """Results of the attention modules of the next layer; none where it has no heads to merge. Both streams go
        through the layer, and streams of other text, which nothing is fitted to, through the source's or the converted.
        """
        pair = self.pair
        streams, modules, source = self.streams, pair.modules_of(layer), pair.original(layer)
        for stream in source_streams:
            source.pass_through(stream)
        if not modules:
            for stream in (streams.source, streams.converted, *converted_streams):
                source.pass_through(stream)
                check_finite(layer, stream.hidden)
            pair.source.release(layer)
            return []
        scale = self._residual_scale([pair.with_attention(module, source) for module in modules])
        weights = position_weights(streams.converted.hidden, streams.converted.is_text)
        refines = pair.plan.merging.traits.refines
        fitted = without_heldout(weights, pair.options.refinement) if refines else weights
        drift = streams.source.hidden - streams.converted.hidden
        targets = torch.zeros_like(drift) if scale is None else drift.div_(scale)
        results, converted, head_outputs = list[LayerResult](), dict[str, Tensor](), None
        for module in modules:
            source = pair.with_attention(module, pair.original(layer) if converted else source)
            last = module == modules[-1]
            self._add_output(source, targets, last)
            if converted:
                source = pair.with_attention(module, pair.original(layer, converted))
            heads, _ = pair.heads(module)
            if last and pair.symmetry and not refines and heads.query * heads.value_dim == targets.shape[2]:
                head_outputs = targets  # nothing else needs their memory
            task = Task(pair, module, source, streams.converted, targets, fitted, converted, head_outputs)
            result = closed_form(task) if pair.symmetry else LayerResult(module, pair.mean(module), float("nan"))
            if refines:
                result = self._refine(result, replace(task, position_weights=weights))
            converted = converted | pair.mapped(module, result.maps) | result.weights
            results.append(result)
            if not last:
                for capture in pair.merged(layer, module, converted).capture(streams.converted, "attention_output"):
                    targets[capture.rows] -= capture.attention_output.cpu()
                if scale is None:
                    targets.zero_()
        merged = pair.merged(layer, modules[-1], converted)
        merged.pass_through(streams.converted, head_outputs)
        for stream in converted_streams:
            merged.pass_through(stream)
        pair.source.release(layer)
        pair.target.release(layer)
        return results

    def _residual_scale(self, layers: list[Layer]) -> float | None:
        """Scale s in h + s * attention(h) of a layer, given once for each of its attention modules. None if the output
        of attention is transformed further, as by a norm: then h + x and attention + x / s do not have the same effect.
        """
        source, index = self.streams.source, layers[0].index
        scale = float(getattr(self.pair.plan.config.text, "residual_multiplier", None) or 1.0)
        rows = source.batches()[0][:1]
        hidden, arguments = source.hidden[rows].to(self.pair.source.device), source.arguments(rows)[index]
        generator = torch.Generator().manual_seed(0)
        base, extra = (torch.randn(hidden.shape, generator=generator).to(hidden) * hidden.std() for _ in range(2))

        def run(states: Tensor, attention_output: Tensor) -> Tensor:
            """The layer's output if all its attention modules return `attention_output`."""

            def replace_output(_: nn.Module, args: Any, output: Any) -> Any:
                return attention_output if isinstance(output, Tensor) else (attention_output, *output[1:])

            hooks = [layer.attention.register_forward_hook(replace_output) for layer in layers]
            try:
                return layers[0].run(states, arguments)
            finally:
                for hook in hooks:
                    hook.remove()

        expected, output = run(hidden + extra, base), run(hidden, base + extra / (scale * len(layers)))
        check_finite(index, expected, output)
        tolerance = max(1e-3, 8 * torch.finfo(expected.dtype).eps) * float(expected.abs().max())
        return scale if torch.allclose(expected, output, rtol=0, atol=tolerance) else None

    def _add_output(self, layer: Layer, targets: Tensor, last: bool) -> None:
        """Add the attention output of the source's layer to the targets. With the `last` module of a layer the source's
        hidden states go through the layer.
        """
        source = self.streams.source
        parts: tuple[Part, ...] = ("attention_output", "layer_output") if last else ("attention_output",)
        for capture in layer.capture(source, *parts):
            check_finite(layer.index, *(getattr(capture, part) for part in parts))
            targets[capture.rows] += capture.attention_output.cpu()
            if last:
                source.hidden[capture.rows] = capture.layer_output.cpu()

    def _refine(self, result: LayerResult, task: Task) -> LayerResult:
        """Train the converted module."""
        merged = task.converted_layer(result.maps)
        names = self.pair.trainable(result.module, merged.attention)
        start = {name: merged.attention.get_parameter(name).detach() for name in names}

        def arguments(rows: Tensor) -> Arguments:
            return merged.capture_blocks(task.stream, rows, "arguments").arguments

        with torch.enable_grad():
            best, _, error = refine(
                merged.attention, start, arguments, task.targets, task.position_weights, self.pair.options.refinement
            )
        return replace(result, weights=self.pair.stored({names[name]: best[name] for name in best}), error=error)


def refine(
    module: nn.Module, start: Mapping[str, Tensor], arguments: Callable[[Tensor], Arguments], targets: Tensor,
    counts: Tensor, settings: Refinement,
) -> tuple[dict[str, Tensor], float, float]:  # fmt: skip
    """Train the parameters `start` (names below `module`) towards `targets` (N, T, D); an error at a position counts
    `counts` (N, T). `arguments` gives those that `module` is called with, from indices of blocks.

    Returns the parameters with the least held-out error, which may be the start, and that error at the start and at
    the best: squared, relative to the targets' energy.
    """
    device, length = next(iter(start.values())).device, targets.shape[1]
    autocast = native_bfloat16(str(device)) if settings.autocast is None else settings.autocast
    generator = torch.Generator().manual_seed(settings.seed)
    heldout, train = _split(len(targets), settings, generator)
    weights = {name: tensor.float().clone().requires_grad_() for name, tensor in start.items()}
    optimizers = _optimizers(list(weights.values()), settings.learning_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - step / settings.steps) for each in optimizers]
    scale = (mean_squares(targets) * counts).mean().clamp_min(1e-30).to(device)

    def losses(rows: Tensor) -> Iterator[Tensor]:
        """The mean over blocks in parts, of as many blocks as fit into a layer at a time."""
        for part in rows.split(max(1, AT_ONCE // length)):
            args, kwargs = arguments(part)
            dtype = (args[0] if args else kwargs["hidden_states"]).dtype
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
                output = first_tensor(torch.func.functional_call(module, cast, args, kwargs))
            errors = (output.float() - targets[part].to(device).float()).square().mean(-1)
            yield (errors * counts[part].to(device)).mean() / scale * (len(part) / len(rows))

    def error() -> float:
        with torch.no_grad():
            parts = [loss * len(rows) for rows in heldout.split(settings.batch) for loss in losses(rows)]
        return float(torch.stack(parts).sum()) / len(heldout)

    def copy() -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in weights.items()}

    best, first = copy(), error()
    least, interval = first, max(1, settings.steps // _CHECKS)
    for step in range(settings.steps):
        rows = train[torch.randperm(len(train), generator=generator)[: settings.batch]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses(rows):
            loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if ((step + 1) % interval == 0 or step + 1 == settings.steps) and (current := error()) < least:
            best, least = copy(), current
    return best, first, least


def without_heldout(counts: Tensor, settings: Refinement) -> Tensor:
    """(N, T) weights of positions with 0 in the blocks that `refine` holds out. A start fitted to these would be better
    there than on new text, so that hardly any step would improve on it.
    """
    heldout, train = _split(len(counts), settings, torch.Generator().manual_seed(settings.seed))
    used = counts.new_empty(len(counts))
    used[heldout], used[train] = 0, 1  # in this order: a single block is both
    return counts * used.unsqueeze(1)


def _split(blocks: int, settings: Refinement, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of the held-out blocks and of the training blocks; a single block is both."""
    order = torch.randperm(blocks, generator=generator)
    count = max(1, round(blocks * settings.heldout)) if blocks > 1 else 0
    return (order[:count], order[count:]) if count else (order, order)


def _optimizers(parameters: list[Tensor], rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for matrices, Adam for the rest. Learning rates are `rate` times the size of a tensor:
    the root mean square of its singular values or of its numbers, which differs tenfold between layers and models. A
    tensor of zeros gets the size of the smallest other one.
    """
    sizes = [float(p.detach().norm()) / (min(p.shape) if p.ndim == 2 else p.numel()) ** 0.5 for p in parameters]
    least = min((size for size in sizes if size), default=1.0)
    sized = [(p, rate * (size or least)) for p, size in zip(parameters, sizes, strict=True)]
    # torch's Muon takes steps that are larger by a root where a matrix has more rows than columns
    matrices = [{"params": [p], "lr": lr / max(1, len(p) / p.shape[1]) ** 0.5} for p, lr in sized if p.ndim == 2]
    vectors = [{"params": [p], "lr": lr} for p, lr in sized if p.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0.0, momentum=0.9))
    if vectors:
        optimizers.append(torch.optim.Adam(vectors, betas=(0.9, 0.99)))
    return optimizers
