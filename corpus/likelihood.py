"""Next-token likelihoods without the logits of a whole batch in memory.

Uptraining, calibration and evaluation need logits in float32 of every position, but one position at a time: V numbers
each, more than all hidden states of a small model together. So the backbone runs once, and the model's own head
(projection, soft-capping, scaling, whatever its class does) runs on slices of its hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Float32 logits held at a time: small enough for a processor's cache, large enough for a matrix product. A GPU is not
# busy with so few rows of a large vocabulary; half a GiB is what it has to spare, and where it is known what is free, a
# slice of logits may take this share of it (a comparison of two models holds eight of that size).
CHUNK_NUMBERS = 1 << 22
DEVICE_CHUNK_NUMBERS = 1 << 27
FREE_SHARE = 16
# Every slice reads the whole head (and, in training, makes a gradient of it), which takes as long as the products of
# about a hundred rows.
LEAST_ROWS = 256


class ChunkedHead:
    """The model's backbone and head apart: `hidden(...)` once, then `logits(rows)` for any of its positions.

    The head is the model's own `forward` with its backbone replaced by hidden states that are already there, so that
    whatever the class does after the backbone is done exactly. Whether that reproduces the model's logits is checked
    on the first input; where it does not (a backbone of an unusual shape), `split` is False and the model's full
    forward is used instead, in its own dtype.
    """

    def __init__(self, model: PreTrainedModel, compile_backbone: bool = False) -> None:
        self.model = model
        self.backbone = model.base_model
        # T5 has no module that holds encoder and decoder alone; then the encoder runs by itself, before its decoder.
        self._decoder = model.get_decoder() if self.backbone is model and model.config.is_encoder_decoder else None
        self.backbone = self._decoder or self.backbone
        self.vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
        self.split = self.backbone is not model
        self._checked = False
        self._output: Any = None
        self._run = torch.compile(self.backbone) if compile_backbone and self.split else self.backbone

    def hidden(self, **inputs: Tensor) -> Tensor:
        """`input_ids` (B, T) and whatever the model takes beside -> (B, T, D) hidden states of what it predicts from;
        where it does not split, (B, T, V) logits in the model's dtype. With `decoder_input_ids` T is theirs.
        """
        if self.split and not self._checked:
            self._check({name: part[:1, :8] if part.ndim == 2 else part[:1] for name, part in inputs.items()})
        if not self.split:
            return self.model(**inputs, use_cache=False).logits  # type: ignore[no-any-return]
        self._output = self._run(**self._given(inputs), use_cache=False, return_dict=True)
        hidden: Tensor = self._output.last_hidden_state
        return hidden

    def logits(self, rows: Tensor) -> Tensor:
        """(n, D) rows of what `hidden` gave -> (n, V) logits, in the model's dtype."""
        return self._head(rows, self._output) if self.split else rows

    def _given(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the backbone is given."""
        if self._decoder is None:
            return inputs
        mask = inputs.get("attention_mask")
        encoded = self.model.get_encoder()(input_ids=inputs["input_ids"], attention_mask=mask, return_dict=True)
        found = {"input_ids": inputs["decoder_input_ids"], "encoder_hidden_states": encoded.last_hidden_state}
        return found if mask is None else found | {"encoder_attention_mask": mask}

    def _head(self, rows: Tensor, output: Any) -> Tensor:
        given = copy.copy(output)
        given.last_hidden_state = rows.unsqueeze(0)
        ids = rows.new_zeros((1, len(rows)), dtype=torch.long)
        read: dict[str, Any] = {"input_ids": ids}
        if self.model.config.is_encoder_decoder:
            read = {"decoder_input_ids": ids, "encoder_outputs": (given.last_hidden_state,)}
        with _replaced_forward(self.backbone, lambda *args, **kwargs: given):
            return self.model(**read, use_cache=False).logits[0]  # type: ignore[no-any-return]

    def _check(self, inputs: dict[str, Tensor]) -> None:
        self._checked = True
        training = self.model.training
        self.model.eval()  # no dropout
        try:
            with torch.no_grad():
                self.split = self._reproduces(inputs)
        finally:
            self.model.train(training)
            # Of older torch: autocast keeps weights that it cast without a gradient for all that follows in its region
            # (pytorch#112583).
            torch.clear_autocast_cache()

    def _reproduces(self, inputs: dict[str, Tensor]) -> bool:
        """Whether the backbone alone gives the hidden states inside the model, and the head its logits of these."""
        outputs: list[Any] = []
        hook = self.backbone.register_forward_hook(lambda module, given, output: outputs.append(output))
        try:
            expected = self.model(**inputs, use_cache=False).logits[0]
        finally:
            hook.remove()
        try:
            inside = outputs[-1].last_hidden_state[0]
            alone = self.backbone(**self._given(inputs), use_cache=False, return_dict=True).last_hidden_state[0]
            got = self._head(inside, outputs[-1])
        except (
            AttributeError,
            TypeError,
            ValueError,
            IndexError,
        ):  # its class differs from most
            return False
        return _is_close(alone, inside) and _is_close(got, expected)


def _is_close(got: Tensor, expected: Tensor) -> bool:
    """Whether two (n, D) tensors differ by rounding: by the root mean square, relative to that of the second.

    Rounding is independent from number to number, so its mean square is small in any dtype; a largest difference would
    have to allow for the rounding of the largest number, many per cent of others in bfloat16.
    """
    if got.shape != expected.shape:
        return False
    finite = expected.isfinite()  # some classes rule tokens out by -inf
    error, size = (each[finite].float().square().mean().sqrt() for each in (got - expected, expected))
    tolerance = max(2 * torch.finfo(expected.dtype).eps, 1e-5)
    same = torch.equal(got.float().nan_to_num()[~finite], expected.float().nan_to_num()[~finite])
    return same and bool(error <= tolerance * size.clamp_min(1e-6))


@contextmanager
def _replaced_forward(module: torch.nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """An instance attribute that hides the class' method meanwhile."""
    before = module.__dict__.get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def chunks(count: int, vocabulary: int, device: torch.device | None = None, free: int | None = None) -> Iterator[slice]:
    """Slices of `count` rows whose float32 logits over `vocabulary` stay within what suits the device.

    Args:
        free: Bytes that are free on it; None for the same slices whatever else it holds, as sums over slices need that
            are to be the same each time.
    """
    numbers = CHUNK_NUMBERS if device is None or device.type == "cpu" else DEVICE_CHUNK_NUMBERS
    if free is not None:  # a power of two: a little more or less that is free makes no other slices
        numbers = max(CHUNK_NUMBERS, 1 << (free // FREE_SHARE // 4).bit_length() >> 1)
    step = max(LEAST_ROWS, numbers // vocabulary)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln p(target): (n, V) float32 logits, (n,) ids -> (n,) float32."""
    # A processor takes fresh pages for every large result; of small ones it has them already (7 times as fast).
    pieces = logits.device.type == "cpu" and not logits.requires_grad
    rows = max(1, CHUNK_NUMBERS // 2 // logits.shape[-1] if pieces else len(logits))
    found = [
        torch.nn.functional.cross_entropy(some, wanted, reduction="none")
        for some, wanted in zip(logits.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(found)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(P || Q) = sum_v P(v) (ln P(v) - ln Q(v)) in nats: two (n, V) tensors of log-probabilities -> (n,)."""
    divergence = (p.exp() * (p - q)).sum(-1)
    if bool(divergence.isnan().any()):  # 0 x (-inf - -inf) where a model rules a token out
        divergence = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0).sum(-1)
    return divergence.clamp_min(0.0)  # rounding, where the two are equal
