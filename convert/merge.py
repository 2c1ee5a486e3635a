"""Run a plan: shards are written one after another (or `jobs` at a time), side files, then index and config."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gqa.checkpoint.errors import OutputError
from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.provenance import PROVENANCE
from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.checkpoint.shards import new_shard, write_index
from gqa.checkpoint.write import (
    CancelledError,
    Finished,
    Progress,
    copy_file,
    copy_range,
    require_space,
    unwatched,
    write_tensor,
    write_text,
)
from gqa.convert.fetching import bytes_in, files_of, jobs_within
from gqa.convert.heads.modules import Change
from gqa.convert.plan import OutputTensor, Plan, Shard
from gqa.convert.verify import all_finite, in_threads, sha256, verify, verify_shard

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

CAST_CHUNK = 4 << 20  # numbers cast at a time


@dataclass
class _Job:
    """What the jobs of one run share.

    finished: What is done; `odd` are (tensor, heads of it) with NaN or Inf in the source.
    ahead: How many neighbouring shards may be under way: what is held at once counts on it.
    unfinished: The numbers of those that are not done.
    left: Each file of the source with the shards that still read it.
    """

    plan: Plan
    work: Path
    checksums: bool
    progress: Progress
    finished: Finished
    ahead: int
    unfinished: set[int]
    left: dict[str, set[str]]
    turn: threading.Condition = field(default_factory=threading.Condition)
    stop: threading.Event = field(default_factory=threading.Event)
    own: threading.local = field(default_factory=threading.local)

    def halt(self) -> None:
        """Jobs stop between two chunks, or while they wait for their turn."""
        with self.turn:
            self.stop.set()
            self.turn.notify_all()

    def buffer(self, size: int) -> NDArray[np.uint8]:
        """Memory of this thread, the same each time: fresh pages for every tensor cost as much as reading it."""
        import numpy as np

        buffer: NDArray[np.uint8] | None = getattr(self.own, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            buffer = self.own.buffer = np.empty(size, np.uint8)
        return buffer


def write(
    plan: Plan, work: Path, *, checksums: bool, jobs: int, progress: Progress | None, resume: str = ""
) -> tuple[list[str], dict[str, dict[str, str]] | None]:
    """Fill the directory `work` and verify it; what was odd, and the checksums. Raises OutputError.

    Shards that another run finished there, which said the same `resume`, are taken as they are. What is fetched for a
    shard is deleted once the last one that reads it is verified.
    Merging waits for memory, not for arithmetic: several threads on one tensor would only wait for each other.
    """
    import torch

    finished, remote = Finished(work, resume), plan.checkpoint.remote
    missing = sum(shard.nbytes for shard in plan.shards if shard.file not in finished.shards)
    if remote:
        space = shutil.disk_usage(work).free + bytes_in(remote.directory) - missing
        jobs = jobs_within(plan, jobs, space)
    else:
        require_space(missing, work)
    left: dict[str, set[str]] = {}
    for shard in plan.shards:
        for file in files_of(plan, shard):
            left.setdefault(file, set()).add(shard.file)
    numbers = range(len(plan.shards))
    job = _Job(plan, work, checksums, progress or unwatched, finished, jobs, {*numbers}, left)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        in_threads(jobs, partial(_make_shard, job), numbers, job.halt)
        _write_side_files(plan, work)
        verify(plan, work)
    finally:
        torch.set_num_threads(threads)
    hashes = {"source": dict(finished.sources), "output": dict(finished.shards)} if checksums else None
    return [f"{name} has NaN or Inf in its {part} heads" for name, part in finished.odd], hashes


def _make_shard(job: _Job, number: int) -> None:
    """One output file, written and verified unless it is there; what no other one reads is let go of."""
    shard, finished, source = job.plan.shards[number], job.finished, job.plan.checkpoint
    with job.turn:
        job.turn.wait_for(lambda: job.stop.is_set() or number - min(job.unfinished) < job.ahead)
    if job.stop.is_set():
        raise CancelledError
    if shard.file in finished.shards:
        digest = finished.shards[shard.file]
        job.progress(shard.nbytes)
    else:
        _write_shard(job, shard)
        digest = verify_shard(job.plan, job.work / shard.file, shard, {name for name, _ in finished.odd}, job.checksums)
    with job.turn:
        for readers in job.left.values():
            readers.discard(shard.file)
        read = [file for file in files_of(job.plan, shard) if not job.left[file]]
    hashes = {file: sha256(source.path(file)) for file in read if job.checksums and file not in finished.sources}
    with job.turn:
        finished.shards[shard.file] = digest
        finished.sources |= hashes
        finished.save()
        job.unfinished.discard(number)
        job.turn.notify_all()
    if remote := source.remote:
        for file in read:
            remote.release(file)


def _write_shard(job: _Job, shard: Shard) -> None:
    """One output file: header, then tensors in order."""
    checkpoint, change = job.plan.checkpoint, None
    made: dict[str, Tensor] = {}
    with new_shard(job.work / shard.file, shard.tensors) as target:
        for tensor, count in _runs(shard, checkpoint):
            source = tensor.sources[0]
            if count:
                with checkpoint.path(source.file).open("rb") as stream:
                    copy_range(stream, target, source.begin, count, job.progress, job.stop)
            elif tensor.change is None:
                _cast(job, target, tensor, source)
            else:
                if tensor.change is not change:
                    change, made = tensor.change, _compute(job, tensor.change)
                write_tensor(target, stored_as(made[tensor.name], tensor.dtype), job.progress, job.stop)


def _runs(shard: Shard, checkpoint: Checkpoint) -> Iterator[tuple[OutputTensor, int]]:
    """(first tensor, bytes to copy): neighbours that are neighbours in the source, too, move as one range. Zero bytes
    where the tensor is computed or cast.
    """
    position, found = 0, []
    for tensor in shard.tensors:
        source = tensor.sources[0]
        moves = tensor.copied and checkpoint.has_range(source)
        found.append((tensor, (source.file, source.begin - position) if moves else tensor.name))
        position += tensor.nbytes
    for place, run in groupby(found, itemgetter(1)):
        tensors = [tensor for tensor, _ in run]
        yield tensors[0], 0 if isinstance(place, str) else sum(tensor.nbytes for tensor in tensors)


def _cast(job: _Job, target: BinaryIO, tensor: OutputTensor, source: TensorSpec) -> None:
    """An untouched tensor in another dtype, out of a `.bin` or computed by a view, a bounded piece at a time."""
    for piece in _pieces(job, source):
        cast = stored_as(piece, tensor.dtype)
        if cast.dtype != piece.dtype and not all_finite(cast) and not cast.isfinite().equal(piece.isfinite()):
            raise OutputError(f"{source.name} has numbers too large for {tensor.dtype}; give another --dtype")
        write_tensor(target, cast, job.progress, job.stop)


def _pieces(job: _Job, spec: TensorSpec) -> Iterator[Tensor]:
    checkpoint, size = job.plan.checkpoint, max(spec.nbytes, 1) // max(spec.numel, 1)
    if not checkpoint.has_range(spec):
        yield from checkpoint.read(spec).reshape(-1).split(CAST_CHUNK)
        return
    for start in range(spec.begin, spec.end, CAST_CHUNK * size):
        end = min(start + CAST_CHUNK * size, spec.end)
        piece = replace(spec, shape=((end - start) // size,), begin=start, end=end)
        yield checkpoint.read(piece, job.buffer(piece.nbytes))


def _compute(job: _Job, change: Change) -> dict[str, Tensor]:
    """Merge in float32 (float64 for F64) and round once: to the stored dtype, or to that of --dtype.

    `HeadMaps` multiplies so and gives heads in the dtype that they had. What is rounded later is wide before: to the
    dtype of --dtype, or after sums in `join` (`ReadsValues`).
    """
    import torch

    read, sources = job.plan.checkpoint.read, change.sources
    # What is computed is written before the next tensor is read, so that nothing can still lie in the buffer.
    tensors = [read(sources[0], job.buffer(sources[0].nbytes))] + [read(spec) for spec in sources[1:]]
    precise = torch.float64 if change.sources[0].dtype == "F64" else torch.float32
    if job.plan.dtype or not change.rule.projection:
        tensors = [tensor.to(precise) for tensor in tensors]

    for part, heads in change.split(tensors).items():
        if part != "whole" and not all_finite(heads):
            job.finished.odd.append((change.sources[0].name, part))
    return dict(zip(change.outputs, job.plan.merging.apply(change, tensors), strict=True))


def _write_side_files(plan: Plan, work: Path) -> None:
    """Everything that is not weights; index and config last, so that nothing earlier looks like a checkpoint."""
    for name in plan.checkpoint.side_files:
        if name not in ("README.md", PROVENANCE):
            copy_file(plan.checkpoint.path(name), work / name)
    for name, text in plan.checkpoint.added.items():
        write_text(work / name, text)
    write_index(work, {shard.file: shard.tensors for shard in plan.shards})
    write_text(work / "config.json", json.dumps(plan.new_config, indent=2, ensure_ascii=False) + "\n")
