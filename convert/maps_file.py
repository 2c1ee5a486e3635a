"""Maps on disk: computed once, applied as often as wanted, looked at with any reader of safetensors.

Of every attention module `MODULE/key`, `/value`, `/query`, `/output`, `/order` (see HeadMaps); whole tensors that
replace those of the result, in its layout, have its names. The metadata says which model they are of.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.errors import CorruptError, RefusedError, explain
from gqa.checkpoint.headers import BITS, format_header, read_header
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import DEFAULT_JOBS, copy_range, replacing, unwatched, write_bytes
from gqa.convert.heads.layout import Groups
from gqa.convert.maps import HeadMaps

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.checkpoint.headers import TensorSpec
    from gqa.convert.heads.modules import AttentionModule, Change

FORMAT = "gqa-maps-1"
_METADATA = "gqa_maps"
_PARTS = ("key", "value", "query", "output")
_SAMPLE = 4096  # bytes of every attention tensor that the fingerprint reads


@dataclass(frozen=True)
class MapsFile:
    """A file of maps, read a module at a time.

    description: how they were made: `method`, `groups`, `model` (fingerprint), `name`, and the method's options.
    """

    path: Path
    description: Mapping[str, Any]
    names: frozenset[str]

    @property
    def method(self) -> str:
        return str(self.description["method"])

    @cached_property
    def _file(self) -> Any:
        from safetensors import safe_open

        return safe_open(self.path, framework="pt")

    @cached_property
    def of(self) -> Callable[..., HeadMaps | None]:
        """`of(module, meta=False)`: the maps of one attention module; None where the file has none.

        The last ones are kept, since the four projections of a module are asked for one after another.
        """
        return lru_cache(maxsize=2 * DEFAULT_JOBS)(self._read)

    def _read(self, module: str, meta: bool = False) -> HeadMaps | None:
        found = {part: self.tensor(f"{module}/{part}", meta) for part in _PARTS if f"{module}/{part}" in self.names}
        if "key" not in found or "value" not in found:
            return None
        order = f"{module}/order"
        return HeadMaps(**found, order=tuple(self.tensor(order).tolist()) if order in self.names else None)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._file.get_slice(name).get_shape()) if name in self.names else None

    def tensor(self, name: str, meta: bool = False) -> Tensor:
        """A tensor of the file; with `meta` one of its shape that is never read."""
        import torch

        return (
            torch.empty(self._file.get_slice(name).get_shape(), device="meta") if meta else self._file.get_tensor(name)
        )


def save_maps(
    path: Path, maps: Mapping[str, HeadMaps], tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> None:
    """Write `path` whole or not at all."""
    import torch
    from safetensors.torch import save_file

    named = dict(tensors)
    for module, found in maps.items():
        parts = {part: getattr(found, part) for part in _PARTS}
        named |= {f"{module}/{part}": tensor.float() for part, tensor in parts.items() if tensor is not None}
        if found.order is not None:
            named[f"{module}/order"] = torch.tensor(found.order)
    with replacing(path) as temporary:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
        save_file(whole, temporary, _metadata(description))


def join_maps(path: Path, parts: Sequence[Path], description: Mapping[str, Any]) -> None:
    """Write what several files hold to `path`, whole or not at all: bytes are copied, no tensor is in memory."""
    specs = [spec for part in parts for spec in read_header(part, str(part))]
    specs.sort(key=lambda spec: (-BITS[spec.dtype], spec.name))  # as the library has them: all are aligned
    with replacing(path) as temporary, temporary.open("wb", buffering=0) as target:
        write_bytes(target, format_header({s.name: (s.dtype, s.shape) for s in specs}, _metadata(description)))
        for spec in specs:
            with Path(spec.file).open("rb") as source:
                copy_range(source, target, spec.begin, spec.nbytes, unwatched, threading.Event())


def _metadata(description: Mapping[str, Any]) -> dict[str, str]:
    """One entry: the library writes several in any order, and the same maps shall be the same bytes."""
    return {_METADATA: json.dumps({"format": FORMAT} | dict(description), sort_keys=True)}


def open_maps(path: Path) -> MapsFile:
    """Raises RefusedError where it is not such a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stream:
            metadata, names = stream.metadata() or {}, frozenset(stream.keys())
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"--maps {path} cannot be read: {explain(error)}") from None
    if _METADATA not in metadata:
        raise RefusedError(f"--maps {path} is not a file of {FORMAT}; make one with gqa-calibrate")
    told = {}
    with suppress(TypeError, ValueError):
        told = dict(json.loads(metadata[_METADATA]))
    if (found := told.pop("format", FORMAT)) != FORMAT:
        raise RefusedError(f"--maps {path} is a file of {found}, not of {FORMAT}; make one with gqa-calibrate")
    if not isinstance(told.get("method"), str):
        raise CorruptError(f"{path} does not say how it was made; make it again with gqa-calibrate")
    return MapsFile(path, told, names)


def check_maps(maps: MapsFile, checkpoint: Checkpoint, modules: list[AttentionModule], groups: Groups) -> None:
    """Raise RefusedError where the maps are of another model or another number of groups."""
    told = maps.description
    if told.get("groups") != (groups if isinstance(groups, int) else list(groups)):
        raise RefusedError(f"--maps {maps.path} is for {told.get('groups')} groups, not for {groups}")
    if told.get("model") != fingerprint(checkpoint, modules):
        raise RefusedError(
            f"--maps {maps.path} was made for {told.get('name')}, which is another model than {checkpoint.name}; "
            "make one for this model with gqa-calibrate"
        )


def check_shapes(maps: MapsFile, changes: Iterable[Change], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CorruptError where maps of a changed module are missing or not of its shape. `shapes` are those of the
    result's tensors, which whole tensors of the file replace.
    """
    for change in changes:
        heads, groups, m = change.heads, change.groups, change.heads.kv // change.groups
        d, e, width = heads.key_dim, heads.value_dim, heads.query * heads.value_dim
        expected = {
            "key": ((groups, m), (groups, d, m * d)),
            "value": ((groups, m), (groups, e, m * e)),
            "query": (None, (heads.query, d, d)),
            "output": (None, (width, width)),
            "order": (None, (heads.kv,)),
        }
        named = {f"{change.module}/{part}": allowed for part, allowed in expected.items()}
        named |= {name: (None, shapes[name]) for name in change.outputs}
        for name, allowed in named.items():
            if (found := maps.shape(name)) not in allowed:
                what = f"has {name} {list(found)}" if found else f"has no {name}"
                raise CorruptError(f"--maps {maps.path} {what}; make it again with gqa-calibrate")
        order = f"{change.module}/order"
        if order in maps.names and sorted(maps.tensor(order).tolist()) != list(range(heads.kv)):
            raise CorruptError(f"--maps {maps.path} has {order} that is no order; make it again with gqa-calibrate")


def fingerprint(checkpoint: Checkpoint, modules: list[AttentionModule]) -> str:
    """SHA-256 of the attention tensors' names, shapes, dtypes and first bytes."""
    return digest_of(checkpoint, {f"{m.path}.{tail}": spec for m in modules for tail, spec in m.tensors.items()})


def digest_of(checkpoint: Checkpoint, tensors: Mapping[str, TensorSpec]) -> str:
    """SHA-256 of names, shapes, dtypes and first bytes."""
    digest = hashlib.sha256()
    for name, spec in sorted(tensors.items()):
        digest.update(f"{name} {spec.dtype} {list(spec.shape)}\n".encode())
        if not checkpoint.has_range(spec):
            digest.update(checkpoint.read(spec).reshape(-1)[:_SAMPLE].float().numpy().tobytes())
            continue
        with checkpoint.path(spec.file).open("rb") as stream:
            stream.seek(spec.begin)
            digest.update(stream.read(min(_SAMPLE, spec.nbytes)))
    return digest.hexdigest()
