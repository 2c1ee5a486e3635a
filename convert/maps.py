"""HeadMaps: what a merging method decides, as small maps on head space that the rewriter applies to stored weights.

Letters: H query heads, Hk key/value heads, G groups of m = Hk / G, d and e the dimensions of a key and a value head.

On disk a file holds the maps of each finished layer: of every attention module `MODULE/key`, `/value`, `/query`,
`/output`, `/order` (see HeadMaps); whole tensors that replace those of the result, in its layout, have its names.
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
from gqa.convert.heads.family import QUERY_ROLES

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.heads.family import Role

_PARTS = ("key", "value", "query", "output")
_STORED = {dtype: name for name, dtype in TORCH_DTYPES.items()} | {"int64": "I64"}


@dataclass(frozen=True)
class HeadMaps:
    """What becomes of the heads of one attention layer.

    key: (G, d, m * d), `W_K'[j] = key[j] @ stack(W_K of the group)`; or (G, m) weights, short for blocks key[j, a] * I.
    value: (G, e, m * e) or (G, m), the same for values. Both hold for biases too.
    query: (H, d, d), `W_Q'[i] = query[i] @ W_Q[i]`; None for the identity.
    output: (H * e, H * e), `W_O' = W_O @ output` with W_O (D, H * e); None for the identity.
    order: (Hk,) which source head stands where before neighbours are merged; its query heads go with it.
    """

    key: Tensor
    value: Tensor
    query: Tensor | None = None
    output: Tensor | None = None
    order: tuple[int, ...] | None = None

    def merge(self, role: Role, heads: Tensor) -> Tensor:
        """Keys or values (Hk, rows, *rest) -> (G, rows, *rest); queries and outputs (H, rows, *rest) -> the same.

        Summed in float32 (float64 for F64) and rounded once.
        """
        if self.order is not None:
            heads = heads[query_order(self.order, len(heads))]
        if role in QUERY_ROLES:
            return self._reshape(role, heads)
        weights = self.value if role == "value" else self.key
        if weights.ndim == 2:
            return _pooled(heads, weights)
        groups, rows, width = weights.shape
        if heads.shape[1] * (heads.shape[0] // groups) != width:  # a row or so of each head: a norm, a gate
            return _pooled(heads, weights.new_full((groups, heads.shape[0] // groups), groups / heads.shape[0]))
        merged = heads.new_empty(groups, rows, *heads.shape[2:])
        if not heads.is_meta:
            members = heads.unflatten(0, (groups, -1)).flatten(1, 2)  # (G, m * d, *rest)
            for j in range(groups):
                merged[j] = _product(weights[j], members[j])
        return merged

    def _reshape(self, role: Role, heads: Tensor) -> Tensor:
        maps = self.query if role == "query" else self.output
        if maps is None or heads.is_meta:
            return heads
        if role == "output":  # heads are W_O's transposed: (W_O C)^T = C^T W_O^T
            return _product(maps.T, heads.flatten(0, 1)).to(heads.dtype).view_as(heads)
        if heads.shape[1] != maps.shape[1]:  # one number of each head: a sink
            return heads
        changed = heads.clone()
        for head, matrix in enumerate(maps):
            changed[head] = _product(matrix, heads[head])
        return changed


def query_order(order: tuple[int, ...], heads: int) -> list[int]:
    """The same order for `heads` = r Hk query heads, r of which read each key/value head."""
    per_head = heads // len(order)
    return [head * per_head + i for head in order for i in range(per_head)]


def _product(matrix: Tensor, rows: Tensor) -> Tensor:
    """(n, k) @ (k, *rest) in float32, in float64 for rows of float64."""
    import torch

    precise = torch.float64 if rows.dtype == torch.float64 else torch.float32
    product = matrix.to(precise) @ rows.to(precise).reshape(len(rows), -1)
    return product.view(len(matrix), *rows.shape[1:])


def _pooled(heads: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums (G, rows, *rest) of the heads (Hk, rows, *rest) of each group, (G, m) weights."""
    import torch

    groups, per_group = weights.shape
    merged = heads.new_empty(groups, *heads.shape[1:])
    if heads.is_meta:
        return merged
    precise = torch.float64 if heads.dtype == torch.float64 else torch.float32
    members = heads.unflatten(0, (groups, per_group))  # (G, m, rows, *rest)
    for j, row in enumerate(weights.tolist()):
        total: Tensor | None = None
        for head, weight in zip(members[j], row, strict=True):  # one at a time: the wide numbers stay in the cache
            if weight:  # times zero, an Inf of an unused head would become a NaN of the group
                wide = head.to(precise)
                total = wide * weight if total is None else total.add_(wide, alpha=weight)
        merged[j] = 0 if total is None else total
    return merged


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
