"""A stand-in for an accelerator, on the CPU: the device `standin`.

A tensor on it wraps a tensor in the host's memory. As on a real accelerator, one call cannot read
tensors of both devices, and what moves between them is counted. So a CPU shows where code forgets
to move a tensor, and where it moves more than it must.

torch registers a device once for a process: `register` is for scripts (tests/scripts).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.backend_registration as backends
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME = "standin"
_aten = torch.ops.aten

# On real devices too these may have indices in the host's memory.
_INDEXED = {
    _aten.index,
    _aten.index_put,
    _aten.index_put_,
    _aten._index_put_impl_,
}


@dataclass
class Moves:
    """How many tensors were copied to the device, and from it to the host."""

    there: int = 0
    back: int = 0


class DeviceTensor(Tensor):
    """A tensor on the stand-in; `host` has its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool | None = None) -> Any:
        """accelerate makes parameters with the class of the old ones, and `requires_grad`."""
        if isinstance(host, DeviceTensor):
            host = host.host
        if host.device.type == "meta":
            return torch.nn.Parameter(host, bool(requires_grad))

        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=bool(requires_grad),
        )
        made.host = host
        if requires_grad is not None:
            made._is_param = True
        return made

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.host})"

    def tolist(self) -> Any:
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(function, args, kwargs or {}, Moves())


class _Device(TorchDispatchMode):
    """Has every call made on the right device."""

    def __init__(self, moves: Moves) -> None:
        super().__init__()
        self.moves = moves

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(function, args, kwargs or {}, self.moves)


def _call(function: Any, args: Any, kwargs: dict[str, Any], moves: Moves) -> Any:
    """What a function of torch returns, computed on the host."""
    operator = function.overloadpacket
    tensors = list(_tensors_in((*args, *kwargs.values())))
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    wanted = kwargs.get("device")  # of functions that make tensors, and of those that move them
    device = None if wanted is None else torch.device(wanted).type
    if not on_device and device != NAME:
        return function(*args, **kwargs)
    if device is None and operator is not _aten.copy_:
        _refuse_two_devices(function, operator, tensors)

    host_kwargs = {name: _host(value) for name, value in kwargs.items()}
    if device == NAME:
        host_kwargs["device"] = torch.device("cpu")
    result = function(*_host(args), **host_kwargs)

    stays = bool(on_device) if device is None else device == NAME
    if operator is _aten.copy_:
        stays = isinstance(args[0], DeviceTensor)
    if operator is _aten._to_copy:
        was_there = isinstance(args[0], DeviceTensor)
        moves.there += stays and not was_there
        moves.back += was_there and device == "cpu"
    if not stays:
        return result

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "meta":
            return value
        for tensor in on_device:
            if tensor.host is value:  # a function that works in place returns its argument
                return tensor
        # A wrapper does not know that its numbers are conjugated or negated.
        return DeviceTensor(value.resolve_conj().resolve_neg())

    return tree_map(wrap, result)


def _refuse_two_devices(function: Any, operator: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError, as torch does, for tensors of two devices; a number may be anywhere."""
    if not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
        return
    for tensor in tensors:
        is_index = operator in _INDEXED and not tensor.is_floating_point()
        if not isinstance(tensor, DeviceTensor) and tensor.ndim and not is_index:
            places = [(tuple(one.shape), str(one.device)) for one in tensors]
            raise RuntimeError(f"{function} reads tensors of two devices: {places}")


def _tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of a function, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _host(value: Any) -> Any:
    """An argument with the numbers on the host, also in lists."""
    if isinstance(value, DeviceTensor):
        return value.host
    if isinstance(value, list | tuple):
        return type(value)(_host(part) for part in value)
    return value


class _Backend(backends._DummyBackendModule):
    """What torch asks of the module of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """It draws no random numbers of its own."""


_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Make the device known to torch in this process."""
    backends._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    # torch.tensor(list, device=...) calls these past every mode.
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    tensor: Tensor = DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))
    return tensor


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _host(target).copy_(_host(source))
    return target


@contextmanager
def stand_in() -> Iterator[Moves]:
    """The device exists in this block; yields what moved so far."""
    moves = Moves()
    with _Device(moves):
        yield moves
