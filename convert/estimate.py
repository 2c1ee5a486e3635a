"""Time and memory of each method, within a factor of 2 on an idle machine: operations and numbers
held, counted from config and headers, and how fast this device multiplies.
"""

import math
import time
from dataclasses import dataclass
from functools import cache

from gqa.checkpoint.write import DEFAULT_JOBS
from gqa.convert.heads.modules import attention_modules
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.self_samples import DRAWN, SAMPLED, SAMPLED_BYTES
from gqa.convert.methods import Method
from gqa.convert.plan import Plan
from gqa.core.devices import peak_memory
from gqa.corpus.sources import is_self

_BENCHMARK_SECONDS = 0.2
_BYTES_A_SECOND = 1e9  # that are read, copied and read again
# Passes of the whole model over the text: both streams, attention once more, products for W_O.
_PASSES = 4.0
_SAMPLING = 2.0  # passes that sampling takes, one token at a time
_STEP_SECONDS = 5e-4  # of a layer that computes one token
_TRAINING = 3.0  # forward passes that a step of training takes
_OVERHEAD_BYTES = 8 << 20
# Hidden states of the text: both streams, targets, and part of one while they are computed.
_STREAM_COPIES = 3.5
_REFINE_COPIES = 5  # of attention's parameters: weights, start, best, gradients and moments
_ESTIMATE_COPIES = 4  # of a layer's parameters
_PROCRUSTES_COPIES = 4  # of attention's parameters, in float64
_MUON = 5  # iterations for each matrix and step


def estimate(plan: Plan, method: Method, options: MapsOptions) -> tuple[float, int]:
    """What a method takes. The first call times the device for a fifth of a second.

    Returns:
        Seconds, and the bytes of memory of its device at the most; on a CPU with those of the
        process itself (`runtime_memory`).
    """
    speed = measure_flops(options.device, int(plan.config.text.hidden_size))
    operations, memory = _cost(plan, method, options)
    seconds = operations / speed + plan.total_bytes / _BYTES_A_SECOND
    if method.reads_text:
        seconds += _sampling_seconds(plan, options, speed)
    return seconds, memory + runtime_memory(options.device)


def _sampling_seconds(plan: Plan, options: MapsOptions, speed: float) -> float:
    """Seconds in which the model writes its calibration text; 0 for other text."""
    text = options.text
    tokens = sum(count for source, count in text.shares() if is_self(source))

    batches: int = bool(tokens)
    if options.device == "cpu":
        cache = tokens * plan.cache_before.bytes_per_token
        batches = math.ceil(cache / SAMPLED_BYTES)
    steps = batches * text.length * plan.config.layers * _STEP_SECONDS
    return steps + _SAMPLING * 2 * tokens * plan.checkpoint.parameters / speed


def duration(seconds: float) -> str:
    """`40 s`, `3 minutes`, `5 hours`."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(math.ceil(seconds / 5) * 5, 5)} s"


@cache
def runtime_memory(device: str) -> int:
    """Bytes that this process has on a device before it converts: on a CPU Python, torch,
    transformers and what is loaded so far. Measured when it is first called; more is loaded later,
    if text runs through the model.
    """
    if not device.startswith("cpu"):
        return 0
    import transformers.modeling_utils  # noqa: F401  # every method loads it sooner or later

    return peak_memory()


@cache
def measure_flops(device: str, width: int) -> float:
    """float32 matmul FLOP/s at this width."""
    import torch

    count = 2048
    rows = torch.randn(count, width, device=device)
    weight = torch.randn(width, width, device=device)

    fastest = math.inf
    end = time.perf_counter() + _BENCHMARK_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        float((rows @ weight)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * count * width**2 / fastest


@dataclass(frozen=True)
class _Sizes:
    """Numbers of parameters that a conversion changes or runs.

    Attributes:
        attention: Of each attention module that changes.
        layer: Of the first layer that changes.
        embeddings: Of the embedding.
        mlps: Of all else: MLPs, and what little there is beside them.
    """

    attention: list[int]
    layer: int
    embeddings: int
    mlps: int


def _sizes(plan: Plan) -> _Sizes:
    """The sizes of a conversion that aligns heads."""
    checkpoint = plan.checkpoint
    modules = [
        module for module in attention_modules(checkpoint, plan.config) if plan.changes_of(module)
    ]
    attention = []
    for module in modules:
        attention.append(sum(spec.numel for spec in module.tensors.values()))

    inside = f"{modules[0].layer_path}."
    layer = sum(spec.numel for name, spec in checkpoint.tensors.items() if name.startswith(inside))
    # BLT has no vocabulary: other stacks embed its tokens.
    vocabulary = int(getattr(plan.config.text, "vocab_size", 0))
    embeddings = int(plan.config.text.hidden_size) * vocabulary
    mlps = max(checkpoint.parameters - sum(attention) - embeddings, 0)
    return _Sizes(attention, layer, embeddings, mlps)


def _cost(plan: Plan, method: Method, options: MapsOptions) -> tuple[float, int]:
    """Multiplications and additions, and the bytes held at the most, of float32 unless said."""
    largest = max((tensor.source.numel for tensor in plan.changed), default=0)
    writing = _OVERHEAD_BYTES + 4 * DEFAULT_JOBS * 4 * largest
    if not method.aligns:
        return 0.0, writing

    sizes = _sizes(plan)
    cost = _cost_on_text if method.reads_text else _cost_on_weights
    operations, memory = cost(plan, method, options, sizes)
    return operations, writing + memory


def _cost_on_weights(
    plan: Plan, method: Method, options: MapsOptions, sizes: _Sizes
) -> tuple[float, int]:
    """The same of the maps of a method that reads weights only."""
    width = int(plan.config.text.hidden_size)
    operations = 2.0 * width * (sum(sizes.attention) + 2 * width**2 * len(sizes.attention))
    if method.guesses:
        operations += 4 * width * sizes.mlps
        return operations, 4 * (sizes.embeddings + _ESTIMATE_COPIES * sizes.layer)
    return operations, 8 * _PROCRUSTES_COPIES * sizes.attention[0]


def _cost_on_text(
    plan: Plan, method: Method, options: MapsOptions, sizes: _Sizes
) -> tuple[float, int]:
    """The same of the maps of a method that runs the model on text."""
    text = options.text
    width = int(plan.config.text.hidden_size)
    attention = sum(sizes.attention)

    operations = _PASSES * 2 * text.taken * (attention + sizes.mlps)
    numbers = int(_STREAM_COPIES * text.taken * width) + 2 * (sizes.layer + sizes.embeddings)
    if method.refines:
        training = options.refinement
        forward = 2 * _TRAINING * training.batch * text.length
        operations += training.steps * (forward + 6 * _MUON * width) * attention
        numbers += _REFINE_COPIES * sizes.attention[0]

    memory = 4 * numbers
    if any(map(is_self, text.sources)):
        model = 2 * plan.checkpoint.parameters  # all of it, in 16 bits
        kv_cache = min(SAMPLED_BYTES, text.taken * plan.cache_before.bytes_per_token)
        logits = SAMPLED * sizes.embeddings // width * DRAWN
        memory = max(memory, model + kv_cache + logits)
    return operations, memory
