"""Time and memory of each method, within a factor of 2 on an idle machine: operations and numbers held, counted from
config and headers, and how fast this device multiplies.
"""

import math
import time
from collections.abc import Iterator
from functools import cache

from gqa.checkpoint.write import DEFAULT_JOBS
from gqa.convert.heads.blocks import can_guess_inputs
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.modules import AttentionModule, attention_modules
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods import METHODS, Method
from gqa.convert.plan import Plan
from gqa.corpus.sources import is_self

_BENCHMARK_SECONDS = 0.5
_BYTES_A_SECOND = 1e9  # that are read, copied and read again
_PASSES = 7.0  # of the whole model over the text: both streams twice, its attention once more, and what samples it
TRAINING = 3.0  # forward passes that a step of training takes
_OVERHEAD_BYTES = 8 << 20
_STREAM_COPIES = 2.5  # hidden states of the text: both streams, and part of one while they are computed (and targets)
_REFINE_COPIES = 5  # of attention's parameters: weights, start, best, gradients and moments
_ESTIMATE_COPIES = 4  # of a layer's parameters
_PROCRUSTES_COPIES = 4  # of attention's parameters, in float64
_MUON = 5  # iterations for each matrix and step


def duration(seconds: float) -> str:
    """`2 s`, `3.5 min`, `2.1 h`."""
    if seconds < 100:
        return f"{max(1, math.ceil(seconds))} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def available_methods(plan: Plan) -> Iterator[Method]:
    """The methods that merge heads of this model, controls left out, from the quickest on."""
    alignable = isinstance(plan.config.symmetry, Symmetry)
    guessing = can_guess_inputs(plan.checkpoint, plan.config, attention_modules(plan.checkpoint, plan.config))
    for method in METHODS.values():
        mergeable = alignable or method.refines or not method.aligns
        possible = (not plan.config.not_layerwise or not method.reads_text) and (guessing or not method.guesses)
        if mergeable and possible and not method.redraws:
            yield method


def estimates(plan: Plan, options: MapsOptions) -> Iterator[tuple[Method, float, int]]:
    """Seconds of every method that the model allows, and the bytes that it holds at the most above what imports take.
    Half a second goes into timing the device.
    """
    speed = measure_flops(options.device, int(plan.config.text.hidden_size))
    writing = plan.total_bytes / _BYTES_A_SECOND
    for method in available_methods(plan):
        yield method, operations(plan, method, options) / speed + writing, memory(plan, method, options)


@cache
def measure_flops(device: str, width: int) -> float:
    """float32 matmul FLOP/s at this width."""
    import torch

    rows, one = torch.randn(2048, width, device=device), torch.randn(width, width, device=device)
    fastest, end = math.inf, time.perf_counter() + _BENCHMARK_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        float((rows @ one)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * 2048 * width**2 / fastest


def operations(plan: Plan, method: Method, options: MapsOptions) -> float:
    """Multiplications and additions."""
    if not method.aligns:
        return 0.0
    width, modules, training = int(plan.config.text.hidden_size), _changed(plan), options.refinement
    attention = sum(spec.numel for module in modules for spec in module.tensors.values())
    mlps = max(plan.checkpoint.parameters - attention - _vocabulary(plan) * width, 0)  # and what little there is else
    if not method.reads_text:
        inputs = 4 * width * mlps if method.guesses else 0
        return 2.0 * width * (attention + 2 * width**2 * len(modules)) + inputs
    steps = training.steps * (2 * TRAINING * training.batch * options.text.length + 6 * _MUON * width)
    return _PASSES * 2 * options.text.taken * (attention + mlps) + (steps * attention if method.refines else 0)


def memory(plan: Plan, method: Method, options: MapsOptions) -> int:
    """Bytes held at the most, on whatever device, above what imports take: numbers are float32 unless said."""
    writing = _OVERHEAD_BYTES + 4 * DEFAULT_JOBS * 4 * max(
        (spec.numel for tensor in plan.changed for spec in tensor.sources), default=0
    )
    if not method.aligns:
        return writing
    width, module = int(plan.config.text.hidden_size), _changed(plan)[0]
    vocabulary, inside = _vocabulary(plan), f"{module.layer_path}."
    layer = sum(spec.numel for name, spec in plan.checkpoint.tensors.items() if name.startswith(inside))
    if not method.reads_text:
        stored = sum(spec.numel for spec in module.tensors.values())
        return writing + (
            4 * (vocabulary * width + _ESTIMATE_COPIES * layer) if method.guesses else 8 * _PROCRUSTES_COPIES * stored
        )
    trained = _REFINE_COPIES * sum(spec.numel for spec in module.tensors.values()) if method.refines else 0
    held = 4 * int(
        (_STREAM_COPIES + method.refines) * options.text.taken * width + 2 * (layer + vocabulary * width) + trained
    )
    if any(map(is_self, options.text.sources)):  # the whole model in 16 bits
        from gqa.convert.merge.self_samples import DRAWN, SAMPLED, SAMPLED_BYTES

        cache = min(SAMPLED_BYTES, SAMPLED * options.text.length * plan.cache_before.bytes_per_token)
        held = max(held, 2 * plan.checkpoint.parameters + cache + SAMPLED * vocabulary * DRAWN)
    return writing + held


def _vocabulary(plan: Plan) -> int:
    """Vocabulary size; 0 for BLT, whose tokens other stacks embed."""
    return int(getattr(plan.config.text, "vocab_size", 0))


def _changed(plan: Plan) -> list[AttentionModule]:
    return [module for module in attention_modules(plan.checkpoint, plan.config) if plan.changes_of(module)]
