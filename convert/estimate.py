"""Time and memory of each method, within a factor of 2 on an idle machine: operations and numbers
held, counted from config and headers, and how fast this device multiplies.
"""

from __future__ import annotations

import math
import time
from functools import cache
from typing import TYPE_CHECKING

from gqa.checkpoint.write import DEFAULT_JOBS
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods.base import Method
from gqa.convert.methods.maps_method import MapsMethod
from gqa.convert.plan import Plan
from gqa.core.devices import peak_memory

if TYPE_CHECKING:
    from gqa.convert.merge.workload import Workload

_BENCHMARK_SECONDS = 0.2
_WIDEST = 8192  # wider products are no faster
_BYTES_A_SECOND = 1e9  # that are read, copied and read again
# The least seconds that a layer takes for one decoding step of a batch, however little it computes.
# On a GPU Python is the limit: 7.1 s for 255 tokens in 24 layers on an H200 (docs/results.md).
_STEP_SECONDS = 5e-4
_GPU_STEP_SECONDS = 1.2e-3
# Of KV caches that a device reads while it generates text.
_CACHE_BYTES_A_SECOND = 1e10
_GPU_CACHE_BYTES_A_SECOND = 1e12

_OVERHEAD_BYTES = 8 << 20
_COPIES = 4  # of a tensor, while its heads are merged
_FLOAT32_BYTES = 4


def estimate(plan: Plan, method: Method, options: MapsOptions) -> tuple[float, int]:
    """Seconds that a method takes, and the most bytes of memory that it needs on its device.

    On a CPU these include what writing takes and the process itself (`runtime_memory`). The first
    call times the device for a fifth of a second.
    """
    seconds = plan.total_bytes / _BYTES_A_SECOND
    memory = 0
    if options.device.startswith("cpu"):
        memory = _writing_memory(plan) + runtime_memory()
    if isinstance(method, MapsMethod):
        workload = method.workload(plan, options)
        width = int(plan.config.text_config.hidden_size)
        seconds += workload_seconds(workload, options.device, width)
        memory += workload.memory
    return seconds, memory


def workload_seconds(workload: Workload, device: str, width: int) -> float:
    """Seconds that a workload takes on a device, with matrices of this width."""
    step = _STEP_SECONDS
    bandwidth = _CACHE_BYTES_A_SECOND
    if not device.startswith("cpu"):
        step = _GPU_STEP_SECONDS
        bandwidth = _GPU_CACHE_BYTES_A_SECOND

    computing = workload.operations / measure_flops(device, width)
    return computing + workload.token_steps * step + workload.cache_bytes / bandwidth


def duration(seconds: float) -> str:
    """`40 s`, `3 minutes`, `5 hours`, `14 days`; two of a unit at least, except of seconds."""
    for unit, length in (("days", 24 * 3600), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(math.ceil(seconds / 5) * 5, 5)} s"


@cache
def runtime_memory() -> int:
    """Bytes of CPU memory that this process has before it converts: Python, torch, transformers and
    what is loaded so far. Measured when it is first called; more is loaded later, if text runs
    through the model.
    """
    import transformers.modeling_utils  # noqa: F401  # every method loads it sooner or later

    return peak_memory()


@cache
def measure_flops(device: str, width: int, dtype: str = "float32") -> float:
    """Operations per second of a matrix product of this width, at most `_WIDEST`."""
    import torch

    width = min(width, _WIDEST)  # a config may state any

    rows = torch.randn(2048, width, dtype=getattr(torch, dtype), device=device)
    square = torch.randn(width, width, dtype=rows.dtype, device=device)
    fastest = math.inf
    end = time.perf_counter() + _BENCHMARK_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        float((rows @ square)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * 2048 * width**2 / fastest


def _writing_memory(plan: Plan) -> int:
    """Bytes held while tensors are merged and written."""
    largest = max((tensor.source.numel for tensor in plan.changed_tensors), default=0)
    return _OVERHEAD_BYTES + _COPIES * DEFAULT_JOBS * _FLOAT32_BYTES * largest
