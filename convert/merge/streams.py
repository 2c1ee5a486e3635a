"""Hidden states of a text before the first decoder layer, and what each layer also gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gqa.convert.merge.layer import Arguments, Stream, tensors_in
from gqa.convert.merge.layer_runner import LayerRunner
from gqa.core.devices import free_memory
from gqa.core.errors import layerwise_error

# Hidden states of a text in memory: of both models, their differences, and the targets.
STREAM_COPIES = 4
# The share of a device's free memory that hidden states of a text may take.
_DEVICE_SHARE = 1 / 4

# (N, T) token ids and masks, by argument name of the model's forward.
Inputs = Mapping[str, Tensor]


def first_stream(runner: LayerRunner, inputs: Inputs, blocks_at_once: int, copies: int) -> Stream:
    """The hidden states that the first decoder layer of a model reads.

    Args:
        runner: The model.
        inputs: The arguments of its forward.
        blocks_at_once: Blocks that go through a layer at a time.
        copies: How many hidden states of this text there will be at the same time.

    Raises LayerwiseError if layers read more of the text than hidden states.
    """
    blocks = len(next(iter(inputs.values())))
    batches = torch.arange(blocks).split(blocks_at_once)

    has_encoder = runner.model.config.is_encoder_decoder
    if has_encoder:
        decoder_inputs = _with_encoder_outputs(runner, inputs, batches)
    else:
        decoder_inputs = {**inputs, "use_cache": False}
        _check_arguments_ignore_text(runner, decoder_inputs)

    first, _ = runner.layer_inputs(_select(decoder_inputs, batches[0]))
    shape = (blocks, *first.shape[1:])
    place = _place_for(copies * first.dtype.itemsize * math.prod(shape), runner.device)
    hidden = torch.empty(shape, dtype=first.dtype, device=place)
    for rows in batches:
        states, _ = runner.layer_inputs(_select(decoder_inputs, rows))
        hidden[rows] = states.to(place)

    mask = inputs.get("decoder_attention_mask")
    is_text = None if mask is None else mask.bool().to(place)
    arguments = _LayerArguments(runner, decoder_inputs, has_encoder)
    return Stream(hidden, blocks_at_once, arguments, is_text)


def _place_for(n_bytes: int, device: torch.device) -> torch.device:
    """Where hidden states stay between two layers: on the device of the layers, if they take little
    of its memory; else in the host's.

    In the host's memory they are copied to the device and back in every pass over the text, which
    takes longer than to compute a layer.
    """
    free = free_memory(device)
    if free is not None and n_bytes <= _DEVICE_SHARE * free:
        return device
    return torch.device("cpu")


def _check_arguments_ignore_text(runner: LayerRunner, inputs: Mapping[str, Any]) -> None:
    """Raise LayerwiseError if layers are called with more that depends on the text."""
    ids = inputs["input_ids"][:1]
    _, one = runner.layer_inputs({**inputs, "input_ids": ids})
    _, other = runner.layer_inputs({**inputs, "input_ids": ids.flip(1)})

    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        raise layerwise_error(
            type(runner.model).__name__, "its layers read more of the text than hidden states"
        )


class _LayerArguments:
    """The arguments of each layer for blocks of a text.

    With an encoder they depend on the blocks. Otherwise they depend on the number of blocks alone,
    and are computed once for each number.
    """

    def __init__(
        self, runner: LayerRunner, decoder_inputs: Mapping[str, Any], has_encoder: bool
    ) -> None:
        self._runner = runner
        self._inputs = decoder_inputs
        self._has_encoder = has_encoder
        self._by_count: dict[int, dict[int, Arguments]] = {}

    def __call__(self, rows: Tensor) -> dict[int, Arguments]:
        if self._has_encoder:
            return self._compute(rows)

        count = len(rows)
        if count not in self._by_count:
            self._by_count[count] = self._compute(rows)
        return self._by_count[count]

    def _compute(self, rows: Tensor) -> dict[int, Arguments]:
        _, arguments = self._runner.layer_inputs(_select(self._inputs, rows))
        return arguments


def _with_encoder_outputs(
    runner: LayerRunner, inputs: Inputs, batches: tuple[Tensor, ...]
) -> dict[str, Any]:
    """Arguments of the decoder's forward: the encoder is run on the others."""
    encoder_inputs = {}
    decoder_inputs: dict[str, Any] = {"use_cache": False}
    for name, value in inputs.items():
        if name.startswith("decoder_"):
            decoder_inputs[name.removeprefix("decoder_")] = value
        else:
            encoder_inputs[name] = value

    encoder_batches = [_select(encoder_inputs, rows) for rows in batches]
    decoder_inputs["encoder_hidden_states"] = runner.encode(encoder_batches)
    if "attention_mask" in inputs:
        decoder_inputs["encoder_attention_mask"] = inputs["attention_mask"]
    return decoder_inputs


def _select(inputs: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """The inputs of the blocks `rows`."""
    selected = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            selected[name] = value[rows]
    return selected
