"""Calibrate one layer after another: observe it, fit maps of its heads, advance.

All methods that read text do this; they differ in the function that fits one module. Both models
keep hidden states of the calibration text between two layers; `Calibrator.run` handles the layer
that comes next.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gqa.convert.merge.fit import FitTask, FittedModule, fit_module
from gqa.convert.merge.layer import Attention, Layer, adds_attention, check_finite
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.pair import ModelPair
from gqa.convert.merge.sensitivity import position_weights
from gqa.convert.merge.streams import Inputs
from gqa.convert.plan import Plan


class Calibrator:
    """Fits the attention modules of a model, layer by layer.

    Layers come in order: `run(index)` takes the hidden states from layer `index` to the next.

    Attributes:
        pair: The base model and the converted model.
        fit: How one attention module is fitted.
        n_layers: Number of layers.
        calibration_states: Hidden states of the calibration text. Further texts of the pair
            (`ModelPair.add_text`) advance with it, and nothing is fitted to them.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Tensor | Inputs,
        options: MapsOptions,
        fit: Callable[[FitTask], FittedModule] = fit_module,
    ) -> None:
        """
        Args:
            plan: The plan of the conversion.
            inputs: (N, T) token ids of the text, or all inputs of the model's forward by name.
            options: How maps are computed.
            fit: How one attention module is fitted: `TextMethod.fit` of a method; by default that
                of `calibrated`, in closed form.
        """
        self.fit = fit
        self.pair = ModelPair(plan, options)
        self.n_layers = self.pair.n_layers
        if isinstance(inputs, Tensor):
            inputs = {"input_ids": inputs}
        self.calibration_states = self.pair.add_text(inputs)

    @torch.no_grad()
    def run(self, index: int) -> list[FittedModule]:
        """Fit the attention modules of layer `index`, and take all hidden states through it.

        Returns an empty list for a layer whose heads stay as they are. Raises LayerwiseError, and
        RefusedError for NaN or Inf.
        """
        pair = self.pair
        base_layer = pair.base_model.load(index)
        modules = pair.modules_of(index)
        if not modules:
            self._advance_unchanged_layer(base_layer)
            return []

        converted_layer = pair.load_converted(index, modules)
        attentions = [base_layer.attention(module.path) for module in modules]
        base_states = self.calibration_states.base
        converted_states = self.calibration_states.converted
        weights = position_weights(converted_states.hidden, converted_states.is_text)

        # 1. Observe. The first module's target starts as the drift, which is computed while the
        # hidden states of both models are before this layer. Then those of the base model advance,
        # and the output of each base attention is added to the target of its module.
        scale = self._scale_of(base_layer, attentions)
        targets = self._initial_targets(len(modules), scale)
        for rows, outputs in base_layer.advance_and_observe(base_states, attentions):
            for target, output in zip(targets, outputs, strict=True):
                target[rows] += output.to(target.device)
        self._advance_other_texts(base_layer)

        # 2. Fit: module after module, in the order of execution.
        results = []
        for number, module in enumerate(modules):
            task = FitTask(
                pair,
                module,
                base_attention=attentions[number],
                converted_attention=converted_layer.attention(module.path),
                inputs=converted_states,
                targets=targets[number],
                position_weights=weights,
            )
            result = self.fit(task)
            results.append(result)

            # Later modules of the layer read what this one makes of the hidden states, and correct
            # what it misses of its targets. The base model's layer gets the converted heads too
            # (repeated), because the later modules observe it.
            tensors = self._converted_tensors(result)
            converted_layer.set_tensors(tensors)
            if number + 1 < len(modules):
                base_layer.set_tensors(pair.repeated_tensors(module, tensors))
                # Without a scale, a change of one output does not make up for one of another.
                if scale is not None:
                    self._hand_on_errors(task, targets[number + 1])

        # 3. Advance: the converted model's hidden states go through the layer that it now has.
        pair.converted_model.advance(converted_layer)
        pair.base_model.release(index)
        pair.converted_model.release(index)
        return results

    def _converted_tensors(self, result: FittedModule) -> dict[str, Tensor]:
        """All tensors of a fitted module, by stored name: those that were trained, and merged
        ones where none were (biases that `refined` leaves, or all).
        """
        merged = self.pair.merged_tensors(result.module, result.maps)
        return {**merged, **result.trained_tensors}

    # ------------------------------------------------------------------------------- targets

    def _initial_targets(self, n_modules: int, scale: float | None) -> list[Tensor]:
        """Targets (N, T, D) of a layer's modules before the base model's outputs are added.

        The first module also corrects the drift: what earlier layers lost of the hidden states. It
        cannot if the layer does not simply add attention's output (`scale` is None). Those of the
        other modules are zero.
        """
        hidden = self.calibration_states.converted.hidden
        if scale is None:
            first = torch.zeros_like(hidden)
        else:
            first = (self.calibration_states.base.hidden - hidden).div_(scale)

        others = [torch.zeros_like(hidden) for _ in range(n_modules - 1)]
        return [first, *others]

    def _hand_on_errors(self, task: FitTask, next_target: Tensor) -> None:
        """Add what the converted module misses of its targets to the next module's targets."""
        for capture in task.converted_attention.capture(task.inputs, "attention_output"):
            attended = capture.attention_output.to(next_target.device)
            next_target[capture.rows] += task.targets[capture.rows] - attended

    def _scale_of(self, base_layer: Layer, attentions: list[Attention]) -> float | None:
        """The factor with which the layer adds attention to the residual stream; None if it does
        not simply add it (`adds_attention`).
        """
        config = self.pair.config.text_config
        scale = float(getattr(config, "residual_multiplier", None) or 1.0)
        is_added = adds_attention(base_layer, attentions, self.calibration_states.base, scale)
        return scale if is_added else None

    # --------------------------------------------------------------------------------- other

    def _advance_other_texts(self, base_layer: Layer) -> None:
        """Take the base model's hidden states of all but the calibration text through a layer."""
        for stream in self.pair.base_model.streams:
            if stream is not self.calibration_states.base:
                base_layer.advance(stream)

    def _advance_unchanged_layer(self, base_layer: Layer) -> None:
        """Take the hidden states of both models through a layer that is the same in both."""
        for runner in (self.pair.base_model, self.pair.converted_model):
            for stream in runner.streams:
                base_layer.advance(stream)
                check_finite(base_layer.index, stream.hidden)
        self.pair.base_model.release(base_layer.index)
