"""Run a plan: shards are written one after another (or `jobs` at a time), side files, then index and config."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypedDict

from gqa.checkpoint.errors import OutputError
from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.provenance import PROVENANCE
from gqa.checkpoint.read import Checkpoint, stored_as
from gqa.checkpoint.shards import new_shard, write_index
from gqa.checkpoint.write import (
    DEFAULT_JOBS,
    OutputDirectory,
    Progress,
    copy_file,
    copy_range,
    require_space,
    unwatched,
    write_tensor,
    write_text,
)
from gqa.convert import card
from gqa.convert.heads.config import format_config
from gqa.convert.heads.modules import Change
from gqa.convert.plan import OutputTensor, Plan, Shard
from gqa.convert.verify import verify, verify_load

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

CAST_CHUNK = 4 << 20  # numbers cast at a time


@dataclass(frozen=True)
class Conversion:
    """What a run did."""

    out: Path
    plan: Plan
    warnings: tuple[str, ...]
    checksums: dict[str, dict[str, str]] | None = None


@dataclass
class _Job:
    """What the jobs of one run share."""

    plan: Plan
    work: Path
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)
    warnings: list[str] = field(default_factory=list)
    own: threading.local = field(default_factory=threading.local)

    def buffer(self, size: int) -> NDArray[np.uint8]:
        """Memory of this thread, the same each time: fresh pages for every tensor cost as much as reading it."""
        import numpy as np

        buffer: NDArray[np.uint8] | None = getattr(self.own, "buffer", None)
        if buffer is None or buffer.nbytes < size:
            buffer = self.own.buffer = np.empty(size, np.uint8)
        return buffer


class Writing(TypedDict, total=False):
    """What `run_plan` takes by name."""

    overwrite: bool
    checksums: bool
    load: bool
    jobs: int
    progress: Callable[[int], None] | None


def run_plan(
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    checksums: bool = False,
    load: bool = False,
    jobs: int = DEFAULT_JOBS,
    progress: Callable[[int], None] | None = None,
) -> Conversion:
    """Write, verify and publish `out`. Raises RefusedError before the first byte, OutputError after."""
    with OutputDirectory(out, plan.checkpoint.directory, overwrite) as output:
        require_space(plan.total_bytes, output.out)
        job = _Job(plan, output.work, progress or unwatched)
        with _one_thread_per_job():
            _write_shards(job, jobs)
            _write_side_files(plan, output.work)
            hashes = verify(plan, output.work, tolerated=job.warnings, checksums=checksums, jobs=jobs)
        write_text(output.work / PROVENANCE, card.provenance(plan, hashes))
        write_text(output.work / "README.md", card.model_card(plan, out.name))
        if load:
            verify_load(output.work)
        output.commit()
    return Conversion(out, plan, (*plan.warnings, *job.warnings), hashes)


@contextmanager
def _one_thread_per_job() -> Iterator[None]:
    """Merging waits for memory, not for arithmetic: several threads on one tensor would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_shards(job: _Job, jobs: int) -> None:
    if jobs == 1 or len(job.plan.shards) == 1:
        for shard in job.plan.shards:
            _write_shard(job, shard)
        return
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        try:
            futures = [pool.submit(_write_shard, job, shard) for shard in job.plan.shards]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            job.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        failed = next((f for f in done if f.exception()), None)
        if failed is not None:
            job.stop.set()
            pool.shutdown(cancel_futures=True)
            failed.result()


def _write_shard(job: _Job, shard: Shard) -> None:
    """One output file: header, then tensors in order; neighbouring untouched tensors move as one range."""
    computed: dict[int, list[Tensor]] = {}
    with ExitStack() as stack, new_shard(job.work / shard.file, shard.tensors) as target:
        opened: dict[str, BinaryIO] = {}
        for tensor, source, count in _runs(shard, job.plan.checkpoint):
            if count:
                if source.file not in opened:
                    opened[source.file] = stack.enter_context(job.plan.checkpoint.path(source.file).open("rb"))
                copy_range(opened[source.file], target, source.begin, count, job.progress, job.stop)
            elif tensor.change is None:
                _cast(job, target, tensor, source)
            else:
                if id(tensor.change) not in computed:
                    computed = {id(tensor.change): _compute(job, tensor.change)}
                write_tensor(
                    target, stored_as(computed[id(tensor.change)][tensor.index], tensor.dtype), job.progress, job.stop
                )


def _runs(shard: Shard, checkpoint: Checkpoint) -> Iterator[tuple[OutputTensor, TensorSpec, int]]:
    """(first tensor, its source, bytes to copy); zero bytes where the tensor is computed or cast."""
    index = 0
    while index < len(shard.tensors):
        tensor = shard.tensors[index]
        index += 1
        if tensor.source is None or not tensor.copied or not checkpoint.has_range(tensor.source):
            source = tensor.source or (tensor.change.sources[0] if tensor.change else None)
            assert source is not None
            yield tensor, source, 0
            continue
        end = tensor.source.end
        while index < len(shard.tensors):
            following = shard.tensors[index]
            source = following.source
            if source is None or not following.copied or source.file != tensor.source.file or source.begin != end:
                break
            end = source.end
            index += 1
        if end > tensor.source.begin:
            yield tensor, tensor.source, end - tensor.source.begin


def _cast(job: _Job, target: BinaryIO, tensor: OutputTensor, source: TensorSpec) -> None:
    """An untouched tensor in another dtype, out of a `.bin` or computed by a view, a bounded piece at a time."""
    checkpoint = job.plan.checkpoint
    if not checkpoint.has_range(source):
        pieces = iter(checkpoint.read(source).reshape(-1).split(CAST_CHUNK))
    else:
        size = source.nbytes // max(source.numel, 1)
        pieces = (checkpoint.read(piece, job.buffer(piece.nbytes)) for piece in _slices(source, size))
    for piece in pieces:
        cast = stored_as(piece, tensor.dtype)
        if cast.dtype != piece.dtype and not bool(cast.isfinite().all()) and bool(piece.isfinite().all()):
            raise OutputError(f"{source.name} has numbers too large for {tensor.dtype}; give another --dtype")
        write_tensor(target, cast, job.progress, job.stop)


def _slices(spec: TensorSpec, size: int) -> Iterator[TensorSpec]:
    for start in range(0, spec.numel, CAST_CHUNK):
        count = min(CAST_CHUNK, spec.numel - start)
        begin = spec.begin + start * size
        yield replace(spec, shape=(count,), begin=begin, end=begin + count * size)


def _compute(job: _Job, change: Change) -> list[Tensor]:
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
        finite = part == "whole" or bool(heads.sum().isfinite()) or bool(heads.isfinite().all())  # a sum may overflow
        if not finite:
            job.warnings.append(f"{change.sources[0].name} has NaN or Inf in its {part} heads")
    return job.plan.merging.apply(change, tensors)


def _write_side_files(plan: Plan, work: Path) -> None:
    """Everything that is not weights; index and config last, so that nothing earlier looks like a checkpoint."""
    for name in plan.checkpoint.side_files:
        if name not in ("README.md", PROVENANCE):
            copy_file(plan.checkpoint.path(name), work / name)
    for name, text in plan.checkpoint.added.items():
        write_text(work / name, text)
    write_index(work, {shard.file: shard.tensors for shard in plan.shards})
    write_text(work / "config.json", format_config(plan.new_config))
