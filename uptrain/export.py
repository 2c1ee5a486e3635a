"""A trained model as a checkpoint: its weights under the names, in the dtypes and the files of the checkpoint that it
came from, and everything else byte for byte. So nothing that read that one has to learn anything to read this one.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from transformers import PreTrainedModel

from gqa.checkpoint.errors import OutputError, RefusedError, listing
from gqa.checkpoint.headers import TensorSpec, format_header
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.names import stored_shapes, stored_tensors, tied_names
from gqa.checkpoint.read import INDEX, SINGLE, TORCH_DTYPES, Checkpoint, holds_weights, read_checkpoint
from gqa.checkpoint.write import OutputDirectory, copy_file, copy_range, write_bytes, write_text
from gqa.uptrain.card import UPTRAINING, card

if TYPE_CHECKING:
    from torch import Tensor

METRICS = "gqa_uptraining.jsonl"
ADAPTER = "adapter"
_WRITTEN = frozenset({"README.md", UPTRAINING, METRICS, "config.json"})


def export(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    source: Checkpoint,
    out: Path,
    record: dict[str, Any],
    *,
    overwrite: bool = False,
    extra: dict[str, Path] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write `weights` (a state dict of `model`, which was loaded from `source`), verified by loading them again.

    `extra` are more files by their name in the output. The directory appears at once, complete. Raises OutputError.
    """
    with OutputDirectory(out, source.directory, overwrite) as output:
        work = output.work
        require_space(source, work)
        _write_weights(stored_tensors(model, weights), source, work)
        for name in source.side_files:
            if name not in _WRITTEN and not holds_weights(name) and not name.startswith(f"{ADAPTER}/"):
                copy_file(source.path(name), work / name)
        for name, path in (extra or {}).items():
            copy_file(path, work / name)
        write_text(work / UPTRAINING, json.dumps(record, indent=2) + "\n")
        write_text(work / "README.md", card(source, out.name, record))
        copy_file(source.path("config.json"), work / "config.json")
        _verify(work, source, trust_remote_code)
        output.commit()


def check_exportable(model: PreTrainedModel, source: Checkpoint) -> None:
    """Raise RefusedError, before anything is trained, where what a model's class stores is not what its source has."""
    stored = stored_shapes(model)
    known = {name: spec.shape for name, spec in source.tensors.items()}
    tied = tied_names(model)
    odd = [name for name, shape in stored.items() if known.get(name, shape) != shape]
    odd += [name for name in stored if name not in known and name not in tied]
    if odd or not known.keys() & stored.keys():
        raise RefusedError(
            f"{type(model).__name__} would store {listing(odd or stored)} otherwise than {source.name} does; load it "
            "with transformers, save it again and train that"
        )


def require_space(source: Checkpoint, where: Path) -> None:
    """Raise OutputError unless a checkpoint of the size of `source` fits where the first directory above exists."""
    needed = sum(spec.nbytes for spec in source.tensors.values())
    place = next(path for path in (where, *where.absolute().parents) if path.is_dir())
    if (free := shutil.disk_usage(place).free) < needed:
        raise OutputError(
            f"no space left: the result takes {needed:,} bytes, {free:,} are free at {place}; free some space or give "
            "another output with -o"
        )


def _write_weights(stored: dict[str, Tensor], source: Checkpoint, work: Path) -> None:
    """The files of the source with their tensors in their order; what the class does not read stays as it is."""
    by_file: dict[str, list[TensorSpec]] = {file: [] for file in source.files}
    for spec in source.tensors.values():
        by_file[spec.file].append(spec)
    files = [SINGLE] if len(by_file) == 1 else [f"model-{i:05d}-of-{len(by_file):05d}.safetensors"
                                                for i in range(1, len(by_file) + 1)]  # fmt: skip
    for file, specs in zip(files, by_file.values(), strict=True):
        with (work / file).open("wb", buffering=0) as target:
            write_bytes(target, format_header({spec.name: (spec.dtype, spec.shape) for spec in specs}))
            for spec in specs:
                if spec.name in stored:
                    write_bytes(target, _bytes(_cast(stored.pop(spec.name), spec)))
                else:
                    _copy(source, spec, target)
            os.fsync(target.fileno())
    if len(files) > 1:
        weight_map = {spec.name: file for file, specs in zip(files, by_file.values(), strict=True) for spec in specs}
        specs = list(source.tensors.values())
        total = {"total_parameters": sum(s.numel for s in specs), "total_size": sum(s.nbytes for s in specs)}
        write_text(work / INDEX, json.dumps({"metadata": total, "weight_map": weight_map}, indent=2) + "\n")


def _copy(source: Checkpoint, spec: TensorSpec, target: BinaryIO) -> None:
    if not source.has_range(spec):
        write_bytes(target, _bytes(source.read(spec)))
        return
    with source.path(spec.file).open("rb") as stream:
        copy_range(stream, target, spec.begin, spec.nbytes, lambda n: None, threading.Event())


def _cast(tensor: Tensor, spec: TensorSpec) -> Tensor:
    import torch

    dtype = getattr(torch, TORCH_DTYPES[spec.dtype]) if spec.dtype in TORCH_DTYPES else tensor.dtype
    cast = tensor.detach().cpu().to(dtype)
    if cast.is_floating_point() and not bool(cast.isfinite().all()) and bool(tensor.isfinite().all()):
        raise OutputError(f"{spec.name} has become too large for {spec.dtype}, in which {spec.file} stores it")
    return cast


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _verify(work: Path, source: Checkpoint, trust_remote_code: bool) -> None:
    try:
        written = read_checkpoint(work)
        load_model(str(work), trust_remote_code=trust_remote_code)
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from None
    expected = {name: (spec.dtype, spec.shape) for name, spec in source.tensors.items()}
    actual = {name: (spec.dtype, spec.shape) for name, spec in written.tensors.items()}
    if wrong := {name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name)}:
        raise OutputError(f"the result does not verify: {listing(wrong)} not as in {source.name}")
