"""What methods that read the model compute and hold, counted from config and headers.

`estimate` (convert/estimate.py) makes seconds and bytes of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gqa.checkpoint.files import TensorSpec
from gqa.convert.generate.sampling import (
    BYTES_PER_LOGIT,
    MAX_BATCH,
    MAX_CACHE_BYTES,
    host_room,
    sequences_of_size,
)
from gqa.convert.heads.config import transformers_config
from gqa.convert.merge.options import MapsOptions
from gqa.convert.plan import Plan
from gqa.core.devices import native_bfloat16, total_memory
from gqa.corpus.specs import is_self

# Passes of the whole model over the text: one of each model, about one of attention, which both
# compute once more for the fits, and about one of the products for W_O
_CALIBRATION_PASSES = 4.0
# Forward passes in float32 that take as long as sampling, one token at a time; fewer where bfloat16
# is native.
_SAMPLING_PASSES = 2.0
_SAMPLING_PASSES_BFLOAT16 = 1.0
_PASSES_PER_STEP = 3.0  # forward passes that a training step takes as long as
# Hidden states of the text in both models, targets, and half as much while they are computed: an
# average. What a GPU must have room for is STREAM_COPIES of streams.py.
_AVERAGE_STREAM_COPIES = 3.5
_REFINE_COPIES = 5  # of attention's parameters: weights, start, best, gradients and moments
_ESTIMATE_COPIES = 4  # of a layer's parameters
_MODULE_COPIES = 4  # of attention's parameters, in float64
_MUON_ITERATIONS = 5  # for each matrix and step: _ITERATIONS of muon.py, which imports torch


@dataclass(frozen=True)
class Workload:
    """What a method takes until its maps are found, or a model until it has generated text.

    operations: Multiplications and additions, of float32.
    memory: Bytes held at the most.
    token_steps: How often a layer computes one position of all texts of a batch (layers x positions
        x batches). Each time costs at least a fixed time.
    cache_bytes: Bytes of KV caches that are read while text is generated.
    """

    operations: float
    memory: int
    token_steps: int = 0
    cache_bytes: float = 0


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model.

    width: D.
    module_parameters: Parameters of each attention module whose heads change.
    layer_parameters: Of the layer of the first of them.
    embeddings: Of the table of tokens.
    mlps: Of all else, most of which are MLPs.
    query_width: H (d + e), the width of all queries and of all head outputs.
    moments: Numbers of the second moments of all keys and of all values of a layer, counted in
        float32, which a search for groups needs.
    """

    width: int
    module_parameters: list[int]
    layer_parameters: int
    embeddings: int
    mlps: int
    query_width: int
    moments: int


def _sizes(plan: Plan) -> _Sizes:
    checkpoint = plan.checkpoint
    width = int(plan.config.text_config.hidden_size)
    # None of BLT, whose tokens other stacks embed.
    embeddings = width * int(getattr(plan.config.text_config, "vocab_size", 0))

    changed = [module for module in plan.modules if module.path in plan.changes]
    modules = [_numel(module.tensors.values()) for module in changed]

    in_layer = f"{changed[0].layer_path}."
    layer = _numel(spec for name, spec in checkpoint.tensors.items() if name.startswith(in_layer))
    mlps = max(checkpoint.parameters - sum(modules) - embeddings, 0)
    heads = plan.config.main_heads
    query_width = heads.query * (heads.key_dim + heads.value_dim)
    # In float64, and once more without the means of keys.
    moments = 2 * 2 * ((heads.kv * heads.key_dim) ** 2 + (heads.kv * heads.value_dim) ** 2)
    return _Sizes(
        width=width,
        module_parameters=modules,
        layer_parameters=layer,
        embeddings=embeddings,
        mlps=mlps,
        query_width=query_width,
        moments=moments,
    )


def _numel(specs: Iterable[TensorSpec]) -> int:
    """Numbers in some tensors."""
    return sum(spec.numel for spec in specs)


def weights_workload(plan: Plan) -> Workload:
    """Of second moments of the heads of each module, in float64."""
    sizes = _sizes(plan)
    return Workload(_projections(sizes), memory=8 * _MODULE_COPIES * sizes.module_parameters[0])


def aligned_workload(plan: Plan) -> Workload:
    """Of the closed form on inputs that are estimated through every MLP."""
    sizes = _sizes(plan)
    operations = _projections(sizes) + 4 * sizes.width * sizes.mlps
    numbers = sizes.embeddings + _ESTIMATE_COPIES * sizes.layer_parameters
    return Workload(operations, memory=4 * numbers)


def _projections(sizes: _Sizes) -> float:
    """Operations on the second moments of the inputs of every module."""
    modules = sizes.module_parameters
    return 2.0 * sizes.width * (sum(modules) + 2 * sizes.width**2 * len(modules))


def calibration_workload(plan: Plan, options: MapsOptions) -> Workload:
    """Of the closed form on text, and of generating the text if the model does."""
    sizes = _sizes(plan)
    return _on_text(
        plan,
        options,
        operations=_calibration_operations(sizes, options),
        numbers=_calibration_numbers(plan, sizes, options),
    )


def refinement_workload(plan: Plan, options: MapsOptions) -> Workload:
    """Of the closed form on text and the training of every module."""
    sizes = _sizes(plan)
    training = options.refinement
    length = options.text.length
    tokens = _PASSES_PER_STEP * training.blocks_of_step(length) * length
    projections = (2 * tokens + 6 * _MUON_ITERATIONS * sizes.width) * sum(sizes.module_parameters)
    step = projections + _attention_operations(sizes, tokens, length)
    trained_copies = _REFINE_COPIES * sizes.module_parameters[0]
    return _on_text(
        plan,
        options,
        operations=_calibration_operations(sizes, options) + training.steps * step,
        numbers=_calibration_numbers(plan, sizes, options) + trained_copies,
    )


def _calibration_operations(sizes: _Sizes, options: MapsOptions) -> float:
    tokens = _CALIBRATION_PASSES * options.text.total_tokens
    weights = 2 * tokens * (sum(sizes.module_parameters) + sizes.mlps)
    return weights + _attention_operations(sizes, tokens, options.text.length)


def _attention_operations(sizes: _Sizes, tokens: float, length: int) -> float:
    """Of the scores and the weighted values of so many tokens, in texts of this length, in every
    module.
    """
    return 2 * tokens * length * sizes.query_width * len(sizes.module_parameters)


def _calibration_numbers(plan: Plan, sizes: _Sizes, options: MapsOptions) -> int:
    """Numbers in memory: hidden states of the text, a layer of both models, and second moments."""
    hidden = int(_AVERAGE_STREAM_COPIES * options.text.total_tokens * sizes.width)
    layers = 2 * (sizes.layer_parameters + sizes.embeddings)
    moments = sizes.moments if plan.searches(options.grouping) else 0
    return hidden + layers + moments


def _on_text(plan: Plan, options: MapsOptions, operations: float, numbers: int) -> Workload:
    """A workload on calibration text: with what it takes to generate the text."""
    memory = 4 * numbers
    writes_pairs = transformers_config(plan.checkpoint.config).is_encoder_decoder
    text = options.text.readable(accepts_plain_text=not writes_pairs)
    shares = text.tokens_by_source()
    sequences = sum(tokens // text.length for source, tokens in shares if is_self(source))
    if writes_pairs:
        sequences *= 2  # a source and a target
    if not sequences:
        return Workload(operations, memory)

    generation = generation_workload(
        parameters=plan.checkpoint.parameters,
        layers=plan.config.layers,
        vocabulary=int(getattr(plan.config.text_config, "vocab_size", 0)),
        cache_bytes_per_token=plan.cache_before.bytes_per_token,
        sequences=sequences,
        length=text.length,
        device=options.device,
    )
    return replace(
        generation,
        operations=operations + generation.operations,
        # Text is generated before anything is calibrated: the larger of both counts.
        memory=max(memory, generation.memory),
    )


def generation_workload(
    *,
    parameters: int,
    layers: int,
    vocabulary: int,
    cache_bytes_per_token: int,
    sequences: int,
    length: int,
    device: str,
) -> Workload:
    """Of generating text, one token after the other in as many sequences as fit into memory.

    Args:
        parameters: Number of parameters of the model.
        layers: Number of its layers.
        vocabulary: Number of its tokens.
        cache_bytes_per_token: Bytes of its KV cache.
        sequences: Number of sequences.
        length: Tokens of a sequence.
        device: Where it writes.
    """
    weights = 2 * parameters  # bytes, in 16 bits
    sequence = length * cache_bytes_per_token + BYTES_PER_LOGIT * vocabulary

    if device.startswith("cpu"):
        sequences_at_once = min(sequences, max(1, sequences_of_size(host_room(), sequence)))
        held = sequences_at_once
    else:
        total = total_memory(device)
        free = MAX_CACHE_BYTES if total is None else max(0, total - weights)
        sequences_at_once = min(sequences, max(1, sequences_of_size(free, sequence)))
        # A GPU takes as many as fit, but one batch is all that it needs memory for.
        held = min(sequences_at_once, MAX_BATCH, max(1, MAX_CACHE_BYTES // sequence))

    rounds = math.ceil(sequences / sequences_at_once)
    passes = _SAMPLING_PASSES_BFLOAT16 if native_bfloat16(device) else _SAMPLING_PASSES
    return Workload(
        operations=passes * 2 * sequences * length * parameters,
        memory=weights + held * sequence,
        token_steps=rounds * length * layers,
        # Each token reads those before it, half of the sequence on average.
        cache_bytes=sequences * length * cache_bytes_per_token * length / 2,
    )
