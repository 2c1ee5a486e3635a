"""Maps on disk: a file for each finished layer, written once and read a module at a time.

Of every attention module `MODULE/key`, `/value`, `/query`, `/output`, `/order` (see HeadMaps); whole tensors that
replace those of the result, in its layout, have its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.files import BITS, format_header
from gqa.checkpoint.read import TORCH_DTYPES
from gqa.checkpoint.write import DEFAULT_JOBS, replacing, write_bytes, write_tensor
from gqa.convert.maps import HeadMaps

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = ("key", "value", "query", "output")
_STORED = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {"int64": "I64"}


@dataclass(frozen=True)
class StoredMaps:
    """The maps of a model in `files`.

    description: how they were made, as JSON: the method, its options, the text.
    """

    files: tuple[Path, ...]
    description: Mapping[str, Any]

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """The open file of each tensor, by the tensor's name."""
        from safetensors import safe_open

        opened: list[Any] = [safe_open(file, framework="pt") for file in self.files]
        return {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no dict

    @cached_property
    def of(self) -> Callable[[str], HeadMaps | None]:
        """From the path of an attention module to its maps; None where there are none.

        The last ones are kept, since the four projections of a module are merged one after another.
        """
        return lru_cache(maxsize=2 * DEFAULT_JOBS)(self._read)

    def _read(self, module: str) -> HeadMaps | None:
        parts = {part: self.tensor(f"{module}/{part}") for part in _PARTS if f"{module}/{part}" in self.names}
        if not parts:
            return None
        order = f"{module}/order"
        return HeadMaps(**parts, order=tuple(self.tensor(order).tolist()) if order in self.names else None)

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.names[name].get_tensor(name)
        return tensor


def maps_tensors(maps: Iterable[tuple[str, HeadMaps]]) -> dict[str, Tensor]:
    """The maps of attention modules by their paths -> tensors by the names that they are stored under."""
    import torch

    tensors: dict[str, Tensor] = {}
    for module, of in maps:
        parts = {part: getattr(of, part) for part in _PARTS}
        tensors |= {f"{module}/{part}": tensor.float() for part, tensor in parts.items() if tensor is not None}
        if of.order is not None:
            tensors[f"{module}/order"] = torch.tensor(of.order)
    return tensors


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a safetensors file whole and durable or not at all; tensors are not copied, as they are by the library."""
    # The largest numbers first, so that all are aligned.
    stored = {name: _STORED[str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (-BITS[stored[name]], name))
    header = format_header({name: (stored[name], tuple(tensors[name].shape)) for name in names}, metadata)
    with replacing(path) as temporary, temporary.open("wb", buffering=0) as target:
        write_bytes(target, header)
        for name in names:
            write_tensor(target, tensors[name].detach().cpu())
