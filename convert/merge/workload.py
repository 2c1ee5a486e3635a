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
from gqa.convert.merge.options import MapsOptions
from gqa.convert.plan import Plan
from gqa.core.devices import native_bfloat16, total_memory
from gqa.corpus.specs import is_self

# Passes of the whole model over the text: both streams, attention once more, products for W_O
_PASSES = 4.0
# Forward passes in float32 that take as long as sampling, one token at a time; fewer where bfloat16
# is native.
_SAMPLING = 2.0
_SAMPLING_BFLOAT16 = 1.0
_TRAINING = 3.0  # forward passes that a step of training takes
# Hidden states of the text: both streams, targets, and part of one while they are computed
_STREAM_COPIES = 3.5
_REFINE_COPIES = 5  # of attention's parameters: weights, start, best, gradients and moments
_ESTIMATE_COPIES = 4  # of a layer's parameters
_MODULE_COPIES = 4  # of attention's parameters, in float64
_MUON = 5  # iterations for each matrix and step


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
    """Numbers in the parts of a model.

    modules: Of each attention module whose heads change. layer: Of the layer of the first of them.
    embeddings: Of the table of tokens. mlps: Of all else, most of which are MLPs.
    moments: Of the second moments of all keys and of all values of a layer, counted in float32,
        which a search for groups needs.
    """

    width: int
    modules: list[int]
    layer: int
    embeddings: int
    mlps: int
    moments: int


def _sizes(plan: Plan) -> _Sizes:
    checkpoint = plan.checkpoint
    width = int(plan.config.text.hidden_size)
    # None of BLT, whose tokens other stacks embed.
    embeddings = width * int(getattr(plan.config.text, "vocab_size", 0))

    changed = [module for module in plan.modules if module.path in plan.changes]
    modules = [_numel(module.tensors.values()) for module in changed]

    in_layer = f"{changed[0].layer_path}."
    layer = _numel(spec for name, spec in checkpoint.tensors.items() if name.startswith(in_layer))
    mlps = max(checkpoint.parameters - sum(modules) - embeddings, 0)
    heads = plan.config.main_heads
    # In float64, and once more without the means of keys.
    moments = 2 * 2 * ((heads.kv * heads.key_dim) ** 2 + (heads.kv * heads.value_dim) ** 2)
    return _Sizes(width, modules, layer, embeddings, mlps, moments)


def _numel(specs: Iterable[TensorSpec]) -> int:
    """Numbers in some tensors."""
    return sum(spec.numel for spec in specs)


def weights_workload(plan: Plan) -> Workload:
    """Of second moments of the heads of each module, in float64."""
    sizes = _sizes(plan)
    return Workload(_projections(sizes), memory=8 * _MODULE_COPIES * sizes.modules[0])


def aligned_workload(plan: Plan) -> Workload:
    """Of the closed form on inputs that are estimated through every MLP."""
    sizes = _sizes(plan)
    operations = _projections(sizes) + 4 * sizes.width * sizes.mlps
    return Workload(operations, memory=4 * (sizes.embeddings + _ESTIMATE_COPIES * sizes.layer))


def _projections(sizes: _Sizes) -> float:
    """Operations on the second moments of the inputs of every module."""
    return 2.0 * sizes.width * (sum(sizes.modules) + 2 * sizes.width**2 * len(sizes.modules))


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
    forward_and_backward = 2 * _TRAINING * training.batch * options.text.length
    steps = training.steps * (forward_and_backward + 6 * _MUON * sizes.width)
    return _on_text(
        plan,
        options,
        operations=_calibration_operations(sizes, options) + steps * sum(sizes.modules),
        numbers=_calibration_numbers(plan, sizes, options) + _REFINE_COPIES * sizes.modules[0],
    )


def _calibration_operations(sizes: _Sizes, options: MapsOptions) -> float:
    return _PASSES * 2 * options.text.total_tokens * (sum(sizes.modules) + sizes.mlps)


def _calibration_numbers(plan: Plan, sizes: _Sizes, options: MapsOptions) -> int:
    """Numbers in memory: hidden states of the text, a layer of both models, and second moments."""
    hidden = int(_STREAM_COPIES * options.text.total_tokens * sizes.width)
    layers = 2 * (sizes.layer + sizes.embeddings)
    moments = sizes.moments if plan.searches(options.grouping) else 0
    return hidden + layers + moments


def _on_text(plan: Plan, options: MapsOptions, operations: float, numbers: int) -> Workload:
    """A workload on calibration text: with what it takes to generate the text."""
    memory = 4 * numbers
    text = options.text
    shares = text.tokens_by_source()
    sequences = sum(tokens // text.length for source, tokens in shares if is_self(source))
    if not sequences:
        return Workload(operations, memory)

    generation = generation_workload(
        parameters=plan.checkpoint.parameters,
        layers=plan.config.layers,
        vocabulary=int(getattr(plan.config.text, "vocab_size", 0)),
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
        at_once = min(sequences, max(1, sequences_of_size(host_room(), sequence)))
        held = at_once
    else:
        total = total_memory(device)
        free = MAX_CACHE_BYTES if total is None else max(0, total - weights)
        at_once = min(sequences, max(1, sequences_of_size(free, sequence)))
        # A GPU takes as many as fit, but one batch is all that it needs memory for.
        held = min(at_once, MAX_BATCH, max(1, MAX_CACHE_BYTES // sequence))

    rounds = math.ceil(sequences / at_once)
    passes = _SAMPLING_BFLOAT16 if native_bfloat16(device) else _SAMPLING
    return Workload(
        operations=passes * 2 * sequences * length * parameters,
        memory=weights + held * sequence,
        token_steps=rounds * length * layers,
        # Each token reads those before it, half of the sequence on average.
        cache_bytes=sequences * length * cache_bytes_per_token * length / 2,
    )
