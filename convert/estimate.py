"""Time and memory of each method, within a factor of 2 on an idle machine: operations and numbers
held, counted from config and headers, and how fast this device multiplies.
"""

import math
import time
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
# Of the whole model over the text: both streams, attention once more, products for W_O
_PASSES = 4.0
_SAMPLING = 2.0  # passes that sampling takes, one token at a time
_STEP_SECONDS = 5e-4  # of a layer that computes one token
_TRAINING = 3.0  # forward passes that a step of training takes
_OVERHEAD_BYTES = 8 << 20
# Hidden states of the text: both streams, targets, and part of one while they are computed
_STREAM_COPIES = 3.5
_REFINE_COPIES = 5  # of attention's parameters: weights, start, best, gradients and moments
_ESTIMATE_COPIES = 4  # of a layer's parameters
_PROCRUSTES_COPIES = 4  # of attention's parameters, in float64
_MUON = 5  # iterations for each matrix and step


def estimate(plan: Plan, method: Method, options: MapsOptions) -> tuple[float, int]:
    """Seconds that a method takes, and the bytes of memory of its device at the most; on a CPU with
    those of the process itself (`runtime_memory`). The first call times the device for a fifth of a
    second.
    """
    speed = measure_flops(options.device, int(plan.config.text.hidden_size))
    operations, memory = _cost(plan, method, options)
    memory += runtime_memory(options.device)
    seconds = operations / speed + plan.total_bytes / _BYTES_A_SECOND
    if method.reads_text:
        written = sum(tokens for source, tokens in options.text.shares() if is_self(source))
        cached = written * plan.cache_before.bytes_per_token
        batches = math.ceil(cached / SAMPLED_BYTES) if options.device == "cpu" else bool(written)
        seconds += batches * options.text.length * plan.config.layers * _STEP_SECONDS
        seconds += _SAMPLING * 2 * written * plan.checkpoint.parameters / speed
    return seconds, memory


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

    rows = torch.randn(2048, width, device=device)
    one = torch.randn(width, width, device=device)
    fastest = math.inf
    end = time.perf_counter() + _BENCHMARK_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        float((rows @ one)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * 2048 * width**2 / fastest


def _cost(plan: Plan, method: Method, options: MapsOptions) -> tuple[float, int]:
    """Multiplications and additions, and the bytes held at the most, of float32 unless said."""
    largest = max((tensor.source.numel for tensor in plan.changed), default=0)
    writing = _OVERHEAD_BYTES + 4 * DEFAULT_JOBS * 4 * largest
    if not method.aligns:
        return 0.0, writing
    checkpoint = plan.checkpoint
    text = options.text
    training = options.refinement
    width = int(plan.config.text.hidden_size)
    # None of BLT, whose tokens other stacks embed
    embeddings = width * int(getattr(plan.config.text, "vocab_size", 0))
    modules = [
        module for module in attention_modules(checkpoint, plan.config) if plan.changes_of(module)
    ]
    sizes = [sum(spec.numel for spec in module.tensors.values()) for module in modules]
    inside = f"{modules[0].layer_path}."
    layer = sum(spec.numel for name, spec in checkpoint.tensors.items() if name.startswith(inside))
    mlps = max(checkpoint.parameters - sum(sizes) - embeddings, 0)  # and what little there is else
    if not method.reads_text:
        operations = 2.0 * width * (sum(sizes) + 2 * width**2 * len(modules))
        if method.guesses:
            return operations + 4 * width * mlps, writing + 4 * (
                embeddings + _ESTIMATE_COPIES * layer
            )
        return operations, writing + 8 * _PROCRUSTES_COPIES * sizes[0]
    operations = _PASSES * 2 * text.taken * (sum(sizes) + mlps)
    numbers = int(_STREAM_COPIES * text.taken * width) + 2 * (layer + embeddings)
    if method.refines:
        steps = training.steps * (2 * _TRAINING * training.batch * text.length + 6 * _MUON * width)
        operations += steps * sum(sizes)
        numbers += _REFINE_COPIES * sizes[0]
    memory = 4 * numbers
    if any(map(is_self, text.sources)):  # the whole model in 16 bits
        kv_cache = min(SAMPLED_BYTES, text.taken * plan.cache_before.bytes_per_token)
        memory = max(
            memory, 2 * checkpoint.parameters + kv_cache + SAMPLED * embeddings // width * DRAWN
        )
    return operations, writing + memory
