"""Read a directory as a Checkpoint (config, tensor table, side files) without trusting its
contents.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.files import (
    BITS,
    FURTHER_MODULE,
    INDEX,
    SINGLE,
    TOKENIZER_FILES,
    TORCH_INDEX,
    TORCH_SINGLE,
    WEIGHT_SUFFIXES,
    TensorSpec,
    read_header,
    side_files,
    weight_files,
)
from gqa.checkpoint.model_config import check_against_headers, check_numbers
from gqa.checkpoint.nearby import checkpoints_hint
from gqa.core.errors import CorruptError, MissingError, RefusedError, explain, listing
from gqa.core.json_text import read_json_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

# Float dtypes: their names in safetensors -> in torch.
TORCH_OF_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
# Dtypes that `.bin` files may have: their names in torch -> in safetensors.
SAFETENSORS_OF_TORCH = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# Name suffixes of packed weights and scales in GPTQ, AWQ, bitsandbytes and compressed-tensors.
_PACKED = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".SCB",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight.absmax",
    ".weight.quant_map",
)
# Causal masks that old versions of transformers stored next to weights, as U8 or BOOL.
CAUSAL_MASK = re.compile(r".*\.(attn|attention)\.(masked_)?bias")
_PACKED_DTYPES = frozenset(
    (
        "U8",
        "I8",
        "U32",
        "I32",
        *(name for name in BITS if name.startswith(("F4", "F6_", "F8"))),
    )
)


@dataclass(frozen=True)
class ModelClass:
    """A model type and, if config.json has it, the name of its class."""

    model_type: str
    architecture: str | None

    def __str__(self) -> str:
        return f"{self.model_type} ({self.architecture})" if self.architecture else self.model_type


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk (in a dry run from the hub, without its weights).

    Attributes:
        name: Its name in messages: that of its directory, or of its repository at the hub.
        directory: Where its files are.
        config: Its config.json.
        tensors: Its tensors by name, in the order of files and bytes.
        files: Its weight files.
        side_files: Its other files that a result copies.
        left_out: Its other files that a result does not copy.
        revision: The commit at the hub, if it comes from there.
        hub_id: The model id, if it comes from there.
        stored: The stored checkpoint, if this is a view of it in another class.
        view_kind: The kind of such a view: `native` or `custom modeling code`.
        extra_files: Additional text files of the result: contents by name.
        warnings: About files that a result would lack.
    """

    name: str
    directory: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorSpec]
    files: tuple[str, ...]
    side_files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    revision: str | None = None
    hub_id: str | None = None
    stored: Checkpoint | None = None
    view_kind: str | None = None
    extra_files: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    _pickled: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def path(self, file: str) -> Path:
        """The path of a file of the checkpoint, links followed (the hub's cache holds some)."""
        return member_path(self.directory, file)

    def read(self, spec: TensorSpec, buffer: NDArray[np.uint8] | None = None) -> Tensor:
        """One tensor, in its stored dtype and shape.

        Args:
            spec: Its entry in `tensors`, with a dtype of TORCH_OF_SAFETENSORS. Tensors of others
                are only copied as bytes (of a `.bin` file they can be read).
            buffer: At least `spec.nbytes` long; the tensor is read into it and valid until its next
                use.

        Raises:
            CorruptError: The file was truncated.
        """
        import numpy as np
        import torch

        if spec.file in self._pickled:
            return self._pickled[spec.file][spec.name]

        raw = np.empty(spec.nbytes, np.uint8) if buffer is None else buffer[: spec.nbytes]
        with self.path(spec.file).open("rb") as stream:
            stream.seek(spec.begin)
            count = stream.readinto(raw.data)
        if count != spec.nbytes:
            raise CorruptError(
                f"{spec.file} became shorter while it was read, so {spec.name} is incomplete; "
                "repeat the command when nothing else writes to it"
            )

        dtype = getattr(torch, TORCH_OF_SAFETENSORS[spec.dtype])
        if not raw.nbytes:
            return torch.empty(spec.shape, dtype=dtype)
        return torch.from_numpy(raw).view(dtype).reshape(spec.shape)

    def has_range(self, spec: TensorSpec) -> bool:
        """Whether the bytes `[begin, end)` of the file are the tensor; not for `.bin` files and
        computed tensors.
        """
        return spec.file not in self._pickled

    @property
    def parameters(self) -> int:
        """Number of stored parameters."""
        return sum(spec.numel for spec in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors.values())

    @property
    def packed(self) -> list[str]:
        """Names of tensors with quantized weights or their scales."""
        return [name for name, spec in self.tensors.items() if is_packed(spec)]

    @property
    def classes(self) -> tuple[ModelClass, ...]:
        """The model class; for a view in another class both, the stored one first."""
        names = self.config.get("architectures")
        architecture = None
        if isinstance(names, list) and names and isinstance(names[0], str):
            architecture = names[0]
        own_class = ModelClass(str(self.config.get("model_type")), architecture)

        if self.stored is None:
            return (own_class,)
        return (*self.stored.classes, own_class)


def is_packed(spec: TensorSpec) -> bool:
    """Whether a tensor holds quantized weights, or their scales."""
    if spec.name.endswith(_PACKED):
        return True
    is_matrix = len(spec.shape) > 1 and not CAUSAL_MASK.fullmatch(spec.name)
    return is_matrix and spec.dtype in _PACKED_DTYPES


def stored_as(tensor: Tensor, dtype: str) -> Tensor:
    """Cast a tensor to a float storage dtype; unchanged for other dtypes."""
    import torch

    if dtype not in TORCH_OF_SAFETENSORS:
        return tensor
    return tensor.to(getattr(torch, TORCH_OF_SAFETENSORS[dtype]))


def member_path(directory: Path, name: str) -> Path:
    """The real path of a file of the checkpoint, all links followed.

    A link may lead to another file of the directory, or into a cache of the hub (if the directory
    is in one, only to blobs of the same model). Any other is refused.

    Raises:
        MissingError: There is no such file.
        CorruptError: The link leaves, or it is no regular file.
        PermissionError: It cannot be read.
    """
    if not name or name.startswith(("/", "\\")) or ".." in Path(name).parts or Path(name).drive:
        raise CorruptError(
            f"{name!r} is not the name of a file inside {directory}; download the checkpoint again"
        )

    real = directory / name
    # A file in the directory itself leads nowhere. To resolve its path takes eight times as long,
    # and every tensor that is read asks for it.
    is_directly_inside = "/" not in name and "\\" not in name
    if not (is_directly_inside and _is_plain_file(real)):
        real = _resolved(directory, name)

    if not os.access(real, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(real))
    return real


def _is_plain_file(path: Path) -> bool:
    """Whether a path is itself a regular file, and no link to one."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(mode)


def _resolved(directory: Path, name: str) -> Path:
    """Where a file of a checkpoint leads. Raises the errors of `member_path`."""
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except PermissionError:  # it exists, and the system's own words say what is wrong
        raise
    # It is missing, a link to itself, or has an impossible name.
    except (OSError, RuntimeError, ValueError) as error:
        if os.path.islink(path):
            raise MissingError(
                f"{name} in {directory} is a broken link: it points to {os.readlink(path)}, which "
                "does not exist; put the file itself in its place"
            ) from error
        raise MissingError(f"{directory} has no file {name}; download it again") from error

    if not _is_allowed_target(directory, real):
        raise CorruptError(
            f"{name} is a link that leaves {directory}: it points to {real}; put the file itself "
            "in its place"
        )
    if not real.is_file():
        raise CorruptError(f"{name} in {directory} is not a regular file; download it again")
    return real


def _is_allowed_target(directory: Path, real: Path) -> bool:
    """Whether links of a checkpoint may lead to a real path.

    Only the real path counts, so that nothing that a download contains (such as a directory that
    looks like a cache, with links in it) leads to other files of the user.
    """
    root = directory.resolve()
    if real.is_relative_to(root):
        return True

    repository = root.parent.parent
    is_in_cache = root.parent.name == "snapshots" and repository.name.startswith("models--")
    if is_in_cache:
        return real.is_relative_to(repository / "blobs")

    return any(
        parent.name in ("blobs", "snapshots") and parent.parent.name.startswith("models--")
        for parent in real.parents
    )


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object in UTF-8 that can be written again. Raises CorruptError."""
    value = read_json_file(member_path(directory, name), name)
    if not isinstance(value, dict):
        raise CorruptError(
            f"{name} holds a JSON {type(value).__name__}, not an object; download it again"
        )
    return value


def what_to_pass(present: AbstractSet[str]) -> str:
    """What to give instead of a directory or repository with these files, which is no checkpoint of
    transformers.
    """
    suffixes = {Path(name).suffix for name in present}
    if "adapter_config.json" in present:
        return "it is an adapter: merge it into its base model, and pass the merged checkpoint"
    if suffixes & {".gguf", ".onnx"}:
        return "pass the checkpoint from which the GGUF or ONNX file was made"
    return (
        "pass a checkpoint: a directory with config.json and weights in safetensors or .bin files"
    )


def read_checkpoint(
    directory: Path,
    read_table: Callable[[str], list[TensorSpec]] | None = None,
    present: AbstractSet[str] = frozenset(),
) -> Checkpoint:
    """Read config, index and headers of a local directory.

    Args:
        directory: The directory that contains config.json.
        read_table: Reads headers by file, for weights that are not in the directory.
        present: Names of all files, if weights are not in the directory.

    Raises:
        RefusedError, CorruptError: It cannot be read; the message is one line.
    """
    if not directory.is_dir():
        raise RefusedError(
            f"{directory} is not a directory; pass the one that contains config.json"
        )
    present = present or {path.name for path in directory.iterdir()}
    if "config.json" not in present:
        remedy = checkpoints_hint(directory) or what_to_pass(present)
        raise MissingError(f"{directory} has no config.json; {remedy}")
    config = read_json(directory, "config.json")

    # 1. The weight files and their tensors.
    files, index = weight_files(config, present, partial(read_json, directory))
    if not files:
        weights = listing(name for name in present if Path(name).suffix in WEIGHT_SUFFIXES)
        raise MissingError(
            f"{directory} has neither {SINGLE} nor {TORCH_SINGLE}, nor an index of one of them; "
            f"its weights: {weights or 'none'}; {what_to_pass(present)}"
        )

    pickled = {file: _load_pickled(directory, file) for file in files if file.endswith(".bin")}
    if read_table:
        with ThreadPoolExecutor(8) as pool:
            tables = dict(zip(files, pool.map(read_table, files), strict=True))
    elif pickled:
        tables = {file: table for file, (_, table) in pickled.items()}
    else:
        tables = {file: read_header(member_path(directory, file), file) for file in files}
    index_content = read_json(directory, index) if index else None
    tensors = merge_tables(tables, index_content)

    # 2. The other files.
    rewritten = {"config.json", INDEX, TORCH_INDEX, index, *files}
    side, left_out, warnings = _checked_side_files(directory, rewritten)

    # 3. Whether the config can be that of these tensors.
    hub_id, revision = cached_revision(directory)
    name = hub_id.split("/")[-1] if hub_id else directory.resolve().name
    check_numbers(config, name)
    largest = max(spec.numel for spec in tensors.values())
    check_against_headers(config, name, len(tensors), largest)

    return Checkpoint(
        name=name,
        directory=directory,
        config=config,
        tensors=tensors,
        files=tuple(files),
        side_files=side,
        left_out=left_out,
        revision=revision,
        hub_id=hub_id,
        warnings=warnings,
        _pickled={file: stored for file, (stored, _) in pickled.items()},
    )


def cached_revision(directory: Path) -> tuple[str | None, str | None]:
    """Hub id and commit of a directory in the hub's cache (models--owner--name/snapshots/commit),
    else (None, None).
    """
    path = directory.resolve()
    repository = path.parent.parent.name
    if path.parent.name != "snapshots" or not repository.startswith("models--"):
        return None, None
    return repository.removeprefix("models--").replace("--", "/"), path.name


def merge_tables(
    tables: Mapping[str, list[TensorSpec]], index: Mapping[str, Any] | None
) -> dict[str, TensorSpec]:
    """One table of all files, in the order of files and bytes.

    Raises CorruptError if a tensor is in two files, or the files disagree with their index.
    """
    tensors: dict[str, TensorSpec] = {}
    for table in tables.values():
        for spec in table:
            if spec.name in tensors:
                raise CorruptError(
                    f"duplicate tensor: {spec.name} is in two files, {tensors[spec.name].file} and "
                    f"{spec.file}; remove the stale one or download the checkpoint again"
                )
            tensors[spec.name] = spec
    if not tensors:
        raise CorruptError(f"{listing(tables)} hold no tensors; download the checkpoint again")

    actual_files = {name: spec.file for name, spec in tensors.items()}
    index_files = actual_files if index is None else index["weight_map"]
    for name in sorted(actual_files.keys() | index_files.keys()):
        actual = actual_files.get(name, "no file")
        expected = index_files.get(name, "no file")
        if expected != actual:
            raise CorruptError(
                f"the index says that {name} is in {expected}, but it is in "
                f"{actual}; download the checkpoint again"
            )
    return tensors


def _load_pickled(directory: Path, file: str) -> tuple[dict[str, Tensor], list[TensorSpec]]:
    """The memory-mapped tensors of a `.bin`, and their table; unpickles plain tensors only."""
    path = member_path(directory, file)
    state = _unpickle(path, file)

    table = []
    end = 0
    repeated_bytes = 0
    # What is no dict has no tensors with names either: the check below refuses it, and shows it.
    items: list[tuple[Any, Any]] = [(state, None)]
    if isinstance(state, dict):
        items = [*state.items()]

    for name, tensor in items:
        dtype = _storage_dtype(name, tensor)
        if dtype is None:
            raise CorruptError(
                f"{file} holds something other than named dense tensors of "
                f"{listing(SAFETENSORS_OF_TORCH, 20)}: "
                f"{str(name)[:99]!r}; save the checkpoint as safetensors first"
            )
        # A view may repeat the same numbers any number of times
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            repeated_bytes += tensor.nbytes
        if repeated_bytes > path.stat().st_size:
            raise CorruptError(
                f"{file} repeats stored numbers to tensors larger than itself: {name[:99]!r}; save "
                "the checkpoint as safetensors first"
            )

        begin = end
        end += tensor.nbytes
        table.append(TensorSpec(name, dtype, tuple(tensor.shape), file, begin, end))
    return {name: tensor.detach() for name, tensor in state.items()}, table


def _unpickle(path: Path, file: str) -> Any:
    """What a `.bin` contains, memory-mapped; never runs code. Raises CorruptError."""
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # The restricted unpickler raises any kind on a broken or hostile file.
    except Exception as error:
        has_code = isinstance(error, pickle.UnpicklingError)
        why = "it contains code, which is never run" if has_code else explain(error)
        raise CorruptError(
            f"{file} is not a file of plain tensors that can be mapped ({why}); "
            "download it again, or save the checkpoint as safetensors first"
        ) from error


def _storage_dtype(name: Any, tensor: Any) -> str | None:
    """The dtype in safetensors of a named dense tensor in memory; None for anything else."""
    import torch

    if not isinstance(name, str) or not name.isprintable() or name == "__metadata__":
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None

    return SAFETENSORS_OF_TORCH.get(str(tensor.dtype).removeprefix("torch."))


def _checked_side_files(
    directory: Path, rewritten: AbstractSet[str | None]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """`side_files` of a directory, checked with `member_path`, and warnings about files that are
    left out.

    Args:
        directory: The checkpoint's directory.
        rewritten: Names of the files that a result writes anew.

    Raises:
        CorruptError, PermissionError: A file that transformers would read cannot be read.
    """
    names, not_followed = _names_below(directory)
    side, left_out = side_files([name for name in names if name not in rewritten])

    broken = dict[str, str]()
    for name in side:
        try:
            member_path(directory, name)
        except PermissionError:
            if _is_read_by_libraries(name):
                raise
            broken[name] = f"{name} cannot be read"
        except CorruptError as error:
            # What is no link is a pipe or a device, under a name that we would copy.
            is_link = os.path.islink(directory / name)
            if _is_read_by_libraries(name) or not is_link:
                raise
            broken[name] = str(error).rpartition("; ")[0]
    side = [name for name in side if name not in broken]

    reasons = (*broken.values(), *not_followed.values())
    warnings = [f"{reason}; it is left out" for reason in reasons]
    return tuple(side), tuple(left_out), tuple(warnings)


def _is_read_by_libraries(name: str) -> bool:
    """Whether libraries read a file of a model: its tokenizer, configs and code.

    Not its logs, pictures and texts.
    """
    if "/" in name and not FURTHER_MODULE.match(name):
        return False
    patterns = (*TOKENIZER_FILES, "*.json", "*.py", "*.jinja")
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _names_below(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Names of all files below a directory that are not hidden; and by name, why a directory is not
    listed: a link that leaves, or one that cannot be read.

    Links to directories are followed as those of files. One that leads to where it is, or where
    another link leads, is ignored: its files are listed already.
    """
    names = list[str]()
    not_followed = dict[str, str]()
    targets = set[Path]()
    waiting = [directory]
    while waiting:
        folder = waiting.pop()
        try:
            paths = sorted(folder.iterdir())
        except PermissionError:
            if folder == directory:
                raise
            name = folder.relative_to(directory).as_posix()
            not_followed[name] = f"{name} cannot be read"
            continue

        for path in paths:
            if path.name.startswith("."):  # hidden files are not part of a model
                continue
            name = path.relative_to(directory).as_posix()
            if not path.is_dir():
                names.append(name)
                continue

            if path.is_symlink():
                real = path.resolve()
                if not _is_allowed_target(directory, real):
                    not_followed[name] = (
                        f"{name} is a link that leaves {directory}: it points to {real}"
                    )
                    continue
                if real in targets or path.parent.resolve().is_relative_to(real):
                    continue
                targets.add(real)
            waiting.append(path)
    return names, not_followed
