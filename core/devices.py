"""Devices, their memory and precision; ranks, and work of the main process for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from gqa.core.errors import RefusedError, explain

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")

# Messages of torch's CPU allocators (Linux and macOS, Windows), memory-mapped files, MPS and
# cuBLAS.
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

# Sets of instructions of x86 and ARM that multiply bfloat16, as torch names them.
_BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


def ranks() -> PartialState:
    """accelerate's state of the processes that a launcher started, or of this one."""
    from accelerate import PartialState

    # Without cpu=True accelerate treats CPU processes as independent.
    cpu = not torch.accelerator.is_available()
    # One process tokenizes, or writes the result, while the others wait.
    return PartialState(cpu=cpu, timeout=timedelta(hours=6))


def on_main(function: Callable[[], object]) -> None:
    """Call a function in the main process while the others wait; all processes raise its error."""

    def call() -> None:
        function()  # what it returns stays in the main process

    from_main(call)


def from_main(function: Callable[[], T]) -> T:
    """What a function returns in the main process, which the others wait for.

    All processes raise its error.
    """
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None, None]  # the result, and the error
    if ranks().is_main_process:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error

    broadcast_object_list(outcome)
    result, failure = outcome
    if failure is not None:
        raise failure
    return cast("T", result)


@contextmanager
def main_first() -> Iterator[None]:
    """The main process runs the block first. The others wait for it, also if it fails.

    (They would wait for ever with accelerate's `main_process_first` if the main process failed.)
    """
    processes = ranks()
    if not processes.is_main_process:
        processes.wait_for_everyone()
    try:
        yield
    finally:
        if processes.is_main_process:
            processes.wait_for_everyone()


def default_device() -> str:
    """The accelerator, or else the CPU."""
    if not torch.accelerator.is_available():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator else "cpu"


def find_device(name: str | None) -> str:
    """The device of that name, or the default.

    Raises RefusedError if it does not exist or cannot hold tensors.
    """
    if name is None:
        return default_device()

    try:
        torch.device(name)
    except RuntimeError as error:
        # torch would list devices that nobody has
        raise RefusedError(f"there is no device {name}; pass cpu, cuda, cuda:1 or mps") from error

    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each backend has its own
        advice = f"pass --device {default_device()}"
        if "not compiled with" in str(error):
            advice = f"install a build of torch with {name.split(':')[0].upper()}, or {advice}"
        raise RefusedError(f"device {name} cannot be used: {explain(error)}; {advice}") from error
    return name


def out_of_memory(error: BaseException) -> bool:
    """Whether the cause of an error is that a device, or the host, ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True

    # torch has a class of errors for devices only, and for the host only messages.
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    return any(words in message for words in _NO_MEMORY)


def free_memory(device: torch.device) -> int | None:
    """Bytes free for tensors on an accelerator; None for a CPU, and if torch cannot report them.

    Memory that torch's allocator has reserved but does not use is free, though the driver counts it
    as used.
    """
    if device.type != "cuda":
        return None

    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free + unused


def total_memory(device: str) -> int | None:
    """Bytes of memory of an accelerator, or of this host or its container; None if unknown."""
    if device.startswith("cuda"):
        _, total = torch.cuda.mem_get_info(device)
        return total

    try:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        file = Path("/sys/fs/cgroup/memory.max")
        limit = file.read_text().strip() if file.exists() else "max"
    except (AttributeError, ValueError, OSError):  # on other systems
        return None

    if limit.isdecimal():
        return min(host, int(limit))
    return host  # `max`: the container has no limit


def peak_memory() -> int:
    """The most bytes of the host's memory that this process has had so far."""
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64; on the CPU if the device has no float64 (MPS)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def float64_device(device: torch.device) -> torch.device:
    """The device to which `as_float64` moves tensors of `device`."""
    return torch.device("cpu") if device.type == "mps" else device


def fast_dtype(device: str) -> torch.dtype:
    """The dtype that the device multiplies fastest: bfloat16, or float32 where it is emulated."""
    return torch.bfloat16 if native_bfloat16(device) else torch.float32


def emulates(dtype: torch.dtype | None, device: str) -> bool:
    """Whether a device is a CPU that computes in this dtype of 16 bits through float32, which takes
    ten times as long or more.
    """
    has_16_bits = dtype in (torch.bfloat16, torch.float16)
    return has_16_bits and device.startswith("cpu") and not native_bfloat16(device)


def native_bfloat16(device: str) -> bool:
    """Whether the device multiplies bfloat16 natively, not through float32."""
    if device.startswith("cpu"):  # one of several processes has `cpu:0`
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in _BFLOAT16_INSTRUCTIONS)
    if not device.startswith("cuda"):
        return False
    # GPUs before Ampere (V100, T4) have tensors of bfloat16, but compute in float32.
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
