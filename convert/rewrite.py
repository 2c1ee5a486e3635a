"""Run a plan: shards are written `jobs` at a time, side files, then index and config."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gqa.checkpoint.errors import OutputError
from gqa.checkpoint.files import TensorSpec, new_shard, write_index
from gqa.checkpoint.provenance import PROVENANCE
from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.checkpoint.write import (
    Progress,
    copy_file,
    copy_range,
    no_progress,
    write_tensor,
    write_text,
)
from gqa.convert.heads.modules import Change
from gqa.convert.methods import Merging
from gqa.convert.plan import OutputTensor, Plan, Shard
from gqa.convert.verify import all_finite, sha256, verify, verify_shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

CAST_CHUNK = 4 << 20  # numbers cast at a time


@dataclass(frozen=True)
class _Job:
    """What the threads of one run share.

    not_finite: (tensor, heads of it) with NaN or Inf in the source.
    """

    plan: Plan
    merging: Merging
    work: Path
    checksums: bool
    progress: Progress
    not_finite: list[tuple[str, str]] = field(default_factory=list)


class _CancelledError(Exception):
    """Another thread failed or the user interrupted."""


def write(
    plan: Plan, merging: Merging, work: Path, *, checksums: bool, jobs: int, progress: Progress | None
) -> tuple[list[str], dict[str, dict[str, str]] | None]:
    """Fill the directory `work` and verify it; warnings, and the checksums. Raises OutputError.

    Merging is memory-bound: one torch thread per job.
    """
    import torch

    stop = threading.Event()

    def advance(count: int) -> None:
        if stop.is_set():
            raise _CancelledError
        (progress or no_progress)(count)

    job, source = _Job(plan, merging, work, checksums, advance), plan.checkpoint
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                written = [*pool.map(lambda shard: _make_shard(job, shard), plan.shards)]
                read = [*pool.map(lambda file: sha256(source.path(file)), source.files)] if checksums else []
            except BaseException:
                stop.set()
                raise
        _write_side_files(plan, work)
        verify(plan, work)
    finally:
        torch.set_num_threads(threads)
    files = [shard.file for shard in plan.shards]
    hashes = {"source": dict(zip(source.files, read, strict=False)), "output": dict(zip(files, written, strict=True))}
    warnings = [f"{name} has NaN or Inf in its {part} heads" for name, part in job.not_finite]
    return warnings, hashes if checksums else None


def _make_shard(job: _Job, shard: Shard) -> str:
    """Write and verify one output file; its SHA-256 with --checksums, else nothing."""
    job.progress(0)
    _write_shard(job, shard)
    return verify_shard(job.plan, job.work / shard.file, shard, {name for name, _ in job.not_finite}, job.checksums)


def _write_shard(job: _Job, shard: Shard) -> None:
    """One output file: header, then tensors in order."""
    import numpy as np

    checkpoint, change = job.plan.checkpoint, None
    merged: dict[str, Tensor] = {}
    # Memory to read into, the same for all tensors: fresh pages for every tensor cost as much as reading it.
    largest = max((tensor.sources[0].nbytes for tensor in shard.tensors if tensor.change), default=0)
    buffer = np.empty(max(largest, 8 * CAST_CHUNK), np.uint8)
    with new_shard(job.work / shard.file, shard.tensors) as target:
        for tensor, count in _runs(shard, checkpoint):
            source = tensor.sources[0]
            if count:
                with checkpoint.path(source.file).open("rb") as stream:
                    copy_range(stream, target, source.begin, count, job.progress)
            elif tensor.change is None:
                _cast(job, target, tensor, buffer)
            else:
                if tensor.change is not change:
                    change, merged = tensor.change, _merge(job, tensor.change, buffer)
                write_tensor(target, stored_as(merged[tensor.name], tensor.dtype), job.progress)


def _runs(shard: Shard, checkpoint: Checkpoint) -> Iterator[tuple[OutputTensor, int]]:
    """(first tensor, bytes to copy): neighbours that are neighbours in the source, too, move as one range. Zero bytes
    where the tensor is computed or cast.
    """
    position, keyed = 0, []
    for tensor in shard.tensors:
        source = tensor.sources[0]
        moves = tensor.copied and checkpoint.has_range(source)
        keyed.append((tensor, (source.file, source.begin - position) if moves else tensor.name))
        position += tensor.nbytes
    for key, run in groupby(keyed, itemgetter(1)):
        tensors = [tensor for tensor, _ in run]
        yield tensors[0], 0 if isinstance(key, str) else sum(tensor.nbytes for tensor in tensors)


def _cast(job: _Job, target: BinaryIO, tensor: OutputTensor, buffer: NDArray[np.uint8]) -> None:
    """Write an untouched tensor in another dtype, out of a `.bin` or computed by a view, a bounded piece at a time."""
    source = tensor.sources[0]
    for piece in _pieces(job.plan.checkpoint, source, buffer):
        cast = stored_as(piece, tensor.dtype)
        if cast.dtype != piece.dtype and not all_finite(cast) and not cast.isfinite().equal(piece.isfinite()):
            raise OutputError(f"{source.name} has numbers too large for {tensor.dtype}; give another --dtype")
        write_tensor(target, cast, job.progress)


def _pieces(checkpoint: Checkpoint, spec: TensorSpec, buffer: NDArray[np.uint8]) -> Iterator[Tensor]:
    """The numbers of a tensor, CAST_CHUNK at a time."""
    if not checkpoint.has_range(spec):
        yield from checkpoint.read(spec).reshape(-1).split(CAST_CHUNK)
        return
    size = max(spec.nbytes, 1) // max(spec.numel, 1)
    for start in range(spec.begin, spec.end, CAST_CHUNK * size):
        end = min(start + CAST_CHUNK * size, spec.end)
        yield checkpoint.read(replace(spec, shape=((end - start) // size,), begin=start, end=end), buffer)


def _merge(job: _Job, change: Change, buffer: NDArray[np.uint8]) -> dict[str, Tensor]:
    """Merge in float32 (float64 for F64) and round once: to the stored dtype, or to that of --dtype.

    `HeadMaps` returns heads in the dtype of its inputs. Inputs are cast up first if rounding comes later: with --dtype,
    or after the sums in `join` (`ReadsValues`).
    """
    import torch

    read, sources = job.plan.checkpoint.read, change.sources
    # The buffer can be reused: results are written before the next tensor is read.
    tensors = [read(sources[0], buffer)] + [read(spec) for spec in sources[1:]]
    precise = torch.float64 if sources[0].dtype == "F64" else torch.float32
    if job.plan.dtype or not change.rule.projection:
        tensors = [tensor.to(precise) for tensor in tensors]
    for part, heads in change.split(tensors).items():
        if part != "whole" and not all_finite(heads):
            job.not_finite.append((sources[0].name, part))
    return dict(zip(change.outputs, job.merging.apply(change, tensors), strict=True))


def _write_side_files(plan: Plan, work: Path) -> None:
    """Everything that is not weights; index and config last, so that nothing earlier looks like a checkpoint."""
    for name in plan.checkpoint.side_files:
        if name not in ("README.md", PROVENANCE):
            copy_file(plan.checkpoint.path(name), work / name)
    for name, text in plan.checkpoint.added.items():
        write_text(work / name, text)
    write_index(work, {shard.file: shard.tensors for shard in plan.shards})
    write_text(work / "config.json", json.dumps(plan.new_config, indent=2, ensure_ascii=False) + "\n")
