"""Devices: where a model runs, and the memory and precision that they have."""

import torch

from gqa.checkpoint.errors import RefusedError, explain

# Messages of torch's CPU allocators (Linux and macOS, Windows), memory-mapped files, MPS and cuBLAS.
_NO_MEMORY = (
    "can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip


def default_device() -> str:
    """A GPU where there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def find_device(name: str | None) -> str:
    """The device of that name, or the default. Raises RefusedError if it does not exist or cannot hold tensors."""
    if name is None:
        return default_device()
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each backend has its own
        raise RefusedError(f"--device {name} cannot be used: {explain(error)}; {default_device()} can") from error
    return name


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the machine, has no memory left: torch has a class for the first only."""
    message = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in message for words in _NO_MEMORY)


def free_memory(device: torch.device) -> int | None:
    """Bytes that tensors can still take on an accelerator; None for a processor, and where torch does not tell.

    What torch's allocator holds and does not use is free to tensors, though the driver counts it as taken.
    """
    if device.type != "cuda":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in float64: on the CPU where the device has none (MPS)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def float64_device(device: torch.device) -> torch.device:
    """Where `as_float64` puts what is on that device."""
    return torch.device("cpu") if device.type == "mps" else device


def native_bfloat16(device: str) -> bool:
    """Whether the device multiplies bfloat16 by itself, not by way of float32."""
    if device.startswith("cpu"):  # one of several processes has `cpu:0`
        able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        return bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))
    return device.startswith("cuda") and torch.cuda.is_bf16_supported()
