"""Read side: a directory becomes a Checkpoint (config, tensor table, side files); nothing in it is ever trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.convert.errors import CorruptError, RefusedError, listing
from gqa.convert.safetensors_header import TensorSpec, read_header

if TYPE_CHECKING:
    from torch import Tensor

MAX_JSON_BYTES = 64_000_000
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Weights in any format: what is not rewritten would be the old model beside the new one.
WEIGHT_SUFFIXES = frozenset(
    {
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".ot",
        ".gguf",
        ".ggml",
        ".onnx",
        ".onnx_data",
        ".tflite",
        ".mlmodel",
        ".npz",
    }
)
TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORED_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it lies on disk (or, for a dry run from the hub, as its headers describe it)."""

    name: str
    directory: Path | None
    config: dict[str, Any]
    tensors: Mapping[str, TensorSpec]
    files: tuple[str, ...]
    side_files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    revision: str | None = None
    hub_id: str | None = None
    _pickled: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def path(self, file: str) -> Path:
        """Where a file really lies (the hub's cache holds links), checked to belong to the checkpoint."""
        if self.directory is None:
            raise RefusedError(f"{self.name}: only its headers were fetched")
        return member_path(self.directory, file)

    def read(self, spec: TensorSpec) -> Tensor:
        """One tensor, in its stored dtype and shape. Raises CorruptError when the file has become shorter."""
        import numpy as np
        import torch

        if spec.file in self._pickled:
            return self._pickled[spec.file][spec.name]
        raw = np.fromfile(self.path(spec.file), np.uint8, count=spec.nbytes, offset=spec.begin)
        if raw.nbytes != spec.nbytes:
            raise CorruptError(f"{spec.file} became shorter while it was read: {spec.name} is not all there")
        if not raw.nbytes:
            return torch.empty(spec.shape, dtype=getattr(torch, TORCH_DTYPES[spec.dtype]))
        return torch.from_numpy(raw).view(getattr(torch, TORCH_DTYPES[spec.dtype])).reshape(spec.shape)

    def is_pickled(self, spec: TensorSpec) -> bool:
        """Whether the tensor comes from a `.bin`, where no byte range of the file is known to be it."""
        return spec.file in self._pickled


def member_path(directory: Path, name: str) -> Path:
    """The real path of a file of the checkpoint. Links may lead to the same hub cache entry's blobs, nowhere else."""
    if not name or name.startswith(("/", "\\")) or ".." in Path(name).parts or Path(name).drive:
        raise CorruptError(f"{name!r} is not the name of a file inside {directory}")
    try:
        real = (directory / name).resolve(strict=True)
    except (OSError, RuntimeError):
        raise CorruptError(f"{directory} has no file {name}; download it again") from None
    roots = [directory.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise CorruptError(f"{name} is a link that leaves {directory}: it points to {real}")
    if not real.is_file():
        raise CorruptError(f"{name} in {directory} is not a regular file")
    return real


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of bounded size."""
    path = member_path(directory, name)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CorruptError(f"{name} has {path.stat().st_size} bytes, at most {MAX_JSON_BYTES} are allowed")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{name} holds a JSON {type(value).__name__}, not an object")
    return value


def read_checkpoint(directory: Path, name: str | None = None, **provenance: str | None) -> Checkpoint:
    """Read config, index and headers of a local directory. Raises RefusedError or CorruptError with one line."""
    try:
        present = {p.name for p in directory.iterdir()}
    except NotADirectoryError:
        raise RefusedError(f"{directory} is a file; give the directory that holds config.json") from None
    except OSError as error:
        raise RefusedError(f"{directory} cannot be read: {error.strerror}") from None
    try:
        return _read_checkpoint(directory, present, name or directory.resolve().name, provenance)
    except PermissionError as error:
        raise RefusedError(f"{error.filename} cannot be read: {error.strerror}") from None


def _read_checkpoint(directory: Path, present: set[str], name: str, provenance: Mapping[str, str | None]) -> Checkpoint:
    if "config.json" not in present:
        hint = "an adapter is merged into its base model first" if "adapter_config.json" in present else "not a model?"
        raise RefusedError(f"{directory} has no config.json; {hint}")
    config = read_json(directory, "config.json")
    pickled: dict[str, dict[str, Tensor]] = {}
    if INDEX in present or SINGLE in present:
        index = read_json(directory, INDEX) if INDEX in present else None
        files = index_files(index, INDEX, ".safetensors") if index else [SINGLE]
        tables = {file: _safetensors_table(directory, file) for file in files}
    elif TORCH_INDEX in present or TORCH_SINGLE in present:
        index = read_json(directory, TORCH_INDEX) if TORCH_INDEX in present else None
        files = index_files(index, TORCH_INDEX, ".bin") if index else [TORCH_SINGLE]
        pickled = {file: _load_pickled(directory, file) for file in files}
        tables = {file: _pickled_table(file, tensors) for file, tensors in pickled.items()}
    else:
        others = listing(n for n in present if Path(n).suffix in WEIGHT_SUFFIXES) or "no weights at all"
        raise RefusedError(f"{directory} has neither {SINGLE} nor {TORCH_SINGLE} (nor their index) but {others}")
    tensors = merge_tables(tables)
    if index is not None:
        check_index(index, tensors)
    kept, left_out = _side_files(directory, {"config.json", INDEX, TORCH_INDEX, *files})
    return Checkpoint(
        name,
        directory,
        config,
        tensors,
        tuple(files),
        kept,
        left_out,
        _pickled=pickled,
        **provenance,
    )


def index_files(index: Mapping[str, Any], name: str, suffix: str) -> list[str]:
    """The shards an index names, sorted; every name must be that of a plain file of the directory."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError(f"{name} has no weight_map")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(rf"[\w][\w.\- ]*{re.escape(suffix)}", file):
            raise CorruptError(
                f"{name} says that {tensor} is in {file!r}; allowed are names of {suffix} files in the same directory"
            )
    return sorted(set(weight_map.values()))


def check_index(index: Mapping[str, Any], tensors: Mapping[str, TensorSpec]) -> None:
    """Index and headers must name the same tensors in the same files."""
    weight_map = index["weight_map"]
    for tensor, file in weight_map.items():
        if tensor not in tensors or tensors[tensor].file != file:
            where = f"it is in {tensors[tensor].file}" if tensor in tensors else "no file has it"
            raise CorruptError(f"the index says that {tensor} is in {file}, but {where}; download the checkpoint again")
    if extra := [t for t in tensors if t not in weight_map]:
        raise CorruptError(f"{listing(extra)} in the shards but not in the index; repair the index")


def merge_tables(tables: Mapping[str, list[TensorSpec]]) -> dict[str, TensorSpec]:
    """One table of all files, in the order of files and bytes; a tensor in two files is an error."""
    tensors: dict[str, TensorSpec] = {}
    for table in tables.values():
        for spec in table:
            if spec.name in tensors:
                raise CorruptError(f"{spec.name} is in two files, {tensors[spec.name].file} and {spec.file}")
            tensors[spec.name] = spec
    if not tensors:
        raise CorruptError(f"{listing(tables)} hold no tensors")
    return tensors


def _safetensors_table(directory: Path, file: str) -> list[TensorSpec]:
    path = member_path(directory, file)
    with path.open("rb") as stream:
        return read_header(stream, file, path.stat().st_size)


def _load_pickled(directory: Path, file: str) -> dict[str, Tensor]:
    """The tensors of a `.bin`, mapped from the file; never unpickled beyond plain tensors."""
    import pickle

    import torch

    path = member_path(directory, file)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, ValueError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CorruptError(
            f"{file} is not a file of plain tensors that can be mapped ({reason}); "
            "save the checkpoint as safetensors first"
        ) from None
    if not isinstance(state, dict) or not all(torch.is_tensor(t) for t in state.values()):
        raise CorruptError(f"{file} holds something other than named tensors; save the checkpoint as safetensors first")
    return {str(name): tensor for name, tensor in state.items()}


def _pickled_table(file: str, tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    import torch

    table, position = [], 0
    for name, tensor in tensors.items():
        dtype = _STORED_DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or tensor.layout is not torch.strided:
            raise CorruptError(f"{file}: {name} is {tensor.dtype} {tensor.layout}, which safetensors cannot hold")
        size = tensor.numel() * tensor.element_size()
        table.append(TensorSpec(name, dtype, tuple(tensor.shape), file, position, position + size))
        position += size
    return table


def _walk(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix()


def _side_files(directory: Path, rewritten: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What travels along as it is, and what is left behind because it holds the old weights in another form."""
    kept: list[str] = []
    left_out: list[str] = []
    for name in _walk(directory):
        stale = Path(name).suffix in WEIGHT_SUFFIXES or name.endswith(".index.json")
        if name not in rewritten:
            (left_out if stale else kept).append(name)
    return tuple(kept), tuple(left_out)
