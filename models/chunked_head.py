"""Next-token logits in slices, without those of a whole batch in memory.

Uptraining, calibration and evaluation need float32 logits of every position, V numbers each, but
not all at once. So the backbone runs once, and the model's own head (projection, soft-capping,
scaling) runs on slices of hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Float32 logits per slice on a CPU: they fit into the cache, and are enough for a fast matrix
# product.
CHUNK_NUMBERS = 1 << 22

# The same on a GPU, which needs more rows for full utilization: half a GiB (a comparison of two
# models holds eight slices).
DEVICE_CHUNK_NUMBERS = 1 << 27

# Every slice reads the whole head (and, in training, writes its gradient), which takes as long as
# multiplying about a hundred rows.
LEAST_ROWS = 256


class ChunkedHead:
    """A model split into backbone and head: call `hidden(...)` once, then `logits(rows)` for any
    positions.

    The head is the model's own `forward` with its backbone replaced by a function that returns
    existing hidden states, so whatever the class does after the backbone is exact. The first call
    checks that this reproduces the model's logits; if not (an unusual class), `split` becomes False
    and the full forward is used, in the model's dtype.
    """

    def __init__(self, model: PreTrainedModel, compile_model: bool = False) -> None:
        self.model = model
        self._compiled: Callable[[Any], Any] = cache(torch.compile) if compile_model else _eager
        # T5 has no module for encoder plus decoder without head: the encoder runs first, the
        # decoder is the backbone.
        runs_encoder_first = model.base_model is model and model.config.is_encoder_decoder
        self._decoder = model.get_decoder() if runs_encoder_first else None
        self.backbone = self._decoder or model.base_model
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self.split = self.backbone is not model
        self._checked = False
        self._output: Any = None

    def hidden(self, **inputs: Tensor) -> Tensor:
        """Hidden states before the head.

        Args:
            inputs: `input_ids` (B, T) and other inputs of the model.

        Returns:
            (B, T, D), or without a split logits (B, T, V) in the model's dtype. With
            `decoder_input_ids` T is their length.
        """
        if self.split and not self._checked:
            first_tokens = {}
            for name, part in inputs.items():
                first_tokens[name] = part[:1, :8] if part.ndim == 2 else part[:1]
            self._check(first_tokens)
        if not self.split:
            return self._compiled(self.model)(**inputs, use_cache=False).logits  # type: ignore[no-any-return]

        self._output = self._run_backbone(inputs, self._compiled)
        hidden: Tensor = self._output.last_hidden_state
        return hidden

    def logits(self, rows: Tensor) -> Tensor:
        """Rows (n, D) of the result of `hidden` -> logits (n, V), in the model's dtype."""
        return self._head(rows, self._output) if self.split else rows

    def _run_backbone(self, inputs: dict[str, Tensor], compiled: Callable[[Any], Any]) -> Any:
        """The output of the backbone; `compiled` is applied to each module before it is called."""
        if self._decoder is not None:
            mask = inputs.get("attention_mask")
            encoder = compiled(self.model.get_encoder())
            encoded = encoder(input_ids=inputs["input_ids"], attention_mask=mask, return_dict=True)
            inputs = {
                "input_ids": inputs["decoder_input_ids"],
                "encoder_hidden_states": encoded.last_hidden_state,
            }
            if mask is not None:
                inputs["encoder_attention_mask"] = mask
        return compiled(self.backbone)(**inputs, use_cache=False, return_dict=True)

    def _head(self, rows: Tensor, output: Any) -> Tensor:
        """Rows (n, D) -> logits (n, V): the model's `forward`, whose backbone returns the rows."""
        output = copy.copy(output)
        output.last_hidden_state = rows.unsqueeze(0)

        ids = rows.new_zeros((1, len(rows)), dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.model.config.is_encoder_decoder:
            inputs = {"decoder_input_ids": ids, "encoder_outputs": (output.last_hidden_state,)}
        with _replaced_forward(self.backbone, lambda *args, **kwargs: output):
            return self.model(**inputs, use_cache=False).logits[0]  # type: ignore[no-any-return]

    def _check(self, inputs: dict[str, Tensor]) -> None:
        """Set `split` to whether backbone and head reproduce the model's logits up to rounding,
        relative to their norm, in the model's dtype.
        """
        self._checked = True
        try:
            with torch.no_grad(), _evaluation_mode(self.model):
                expected = self.model(**inputs, use_cache=False).logits[0]
                output = self._run_backbone(inputs, _eager)
                logits = self._head(output.last_hidden_state[0], output)
            self.split = _equals_up_to_rounding(logits, expected)
        except (AttributeError, TypeError, ValueError, IndexError):  # an unusual class
            self.split = False
        finally:
            # Older torch would reuse autocast copies of weights made without a gradient
            # (pytorch#112583).
            torch.clear_autocast_cache()


def _equals_up_to_rounding(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits are equal up to rounding, relative to the norm of the expected ones."""
    finite = expected.isfinite()  # some classes set logits to -inf to exclude tokens
    if not torch.equal(logits.isfinite(), finite):
        return False

    error = (logits - expected)[finite].float().norm()
    size = expected[finite].float().norm()
    tolerance = max(2 * torch.finfo(expected.dtype).eps, 1e-5)
    return bool(error <= tolerance * size)


def _eager(module: Any) -> Any:
    """The module itself: in place of `torch.compile`."""
    return module


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the block.

    Then each module gets back the mode that it had.
    """
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in was_training.items():
            module.training = mode


@contextmanager
def _replaced_forward(module: torch.nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Temporarily shadow a module's `forward` with an instance attribute."""
    before = module.__dict__.get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def chunks(count: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Slices of `count` rows, sized for float32 logits over `vocabulary` on the device."""
    numbers = CHUNK_NUMBERS if device.type == "cpu" else DEVICE_CHUNK_NUMBERS
    step = max(LEAST_ROWS, numbers // vocabulary)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
