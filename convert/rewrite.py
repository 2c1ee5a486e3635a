"""Write the output of a plan and verify it; `ConvertedCheckpoint` is the place to begin reading."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gqa.checkpoint.files import TensorSpec, read_header
from gqa.checkpoint.provenance import METRICS, PROVENANCE, UPTRAINING
from gqa.checkpoint.read import Checkpoint, read_checkpoint, stored_as
from gqa.checkpoint.write import DEFAULT_JOBS, Progress, copy_range, no_progress, write_tensor
from gqa.checkpoint.writer import CheckpointWriter, new_shard
from gqa.convert.head_maps import StoredMaps
from gqa.convert.heads.config import read_config
from gqa.convert.heads.config_edits import target_heads
from gqa.convert.heads.modules import Change, attention_modules, module_changes
from gqa.convert.plan import OutputTensor, Plan, Shard
from gqa.core.errors import CorruptError, OutputError, RefusedError, listing, verification_error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from gqa.convert.head_maps import MergeHeads

CAST_CHUNK = 4 << 20  # numbers cast at a time
SAMPLED_BYTES = 1 << 16  # bytes of a sampled block


class _CancelledError(Exception):
    """Another thread failed or the user interrupted."""


class ConvertedCheckpoint(CheckpointWriter):
    """The output of a plan: shards are written and verified several at a time."""

    def __init__(
        self, plan: Plan, maps: StoredMaps | None, progress: Progress = no_progress
    ) -> None:
        """
        Args:
            plan: What is written.
            maps: Those of the plan's method; None if the method reads nothing.
            progress: Called with numbers of bytes that are written.
        """
        super().__init__(
            plan.checkpoint,
            {shard.file: shard.tensors for shard in plan.shards},
            config=json.dumps(plan.new_config, indent=2, ensure_ascii=False) + "\n",
            not_copied=("README.md", PROVENANCE, UPTRAINING, METRICS),
        )
        self._shards = plan.shards
        self._casts = plan.dtype is not None
        self._base_config = plan.config
        self._kv_heads = plan.kv_heads
        self._merge_without_maps = partial(
            plan.method.merge_without_maps, config=plan.config, seed=plan.seed
        )
        self._maps = maps
        self._progress = progress
        self._stop = threading.Event()

    def write_shards(self, directory: Path) -> None:
        """Write and verify all shards, several at a time.

        Raises OutputError, and CorruptError for heads with NaN or Inf.
        """
        import torch

        # Merging is bound by memory, so one torch thread for each shard is enough.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)

        try:
            with ThreadPoolExecutor(DEFAULT_JOBS) as pool:
                try:
                    list(pool.map(partial(self._write_shard, directory), self._shards))
                except BaseException:
                    self._stop.set()
                    raise
        finally:
            torch.set_num_threads(threads)

    def _write_shard(self, directory: Path, shard: Shard) -> None:
        """Write and verify one output file: header, then tensors in order."""
        self._advance(0)
        path = directory / shard.file
        with new_shard(path, shard.tensors) as target:
            self.append_tensors(target, shard.tensors)
        self.verify_shard(path, shard)

    def append_tensors(self, target: BinaryIO, tensors: Sequence[OutputTensor]) -> None:
        """Copy, cast or change each tensor."""
        import numpy as np

        # Memory to read into, the same for all tensors: fresh pages for every tensor cost as much
        # as reading it.
        largest = max((tensor.source.nbytes for tensor in tensors if tensor.change), default=0)
        buffer = np.empty(max(largest, 8 * CAST_CHUNK), np.uint8)
        for tensor in tensors:
            self._append_tensor(target, tensor, buffer)

    def _append_tensor(
        self, target: BinaryIO, tensor: OutputTensor, buffer: NDArray[np.uint8]
    ) -> None:
        """Write one tensor; `buffer`: memory to read into."""
        checkpoint = self.source
        source = tensor.source
        if tensor.copied and checkpoint.has_range(source):
            with checkpoint.path(source.file).open("rb") as stream:
                copy_range(stream, target, source.begin, source.nbytes, self._advance)
        elif tensor.change is None:
            self._cast(target, tensor, buffer)
        else:
            changed = self._changed_tensor(tensor.change, buffer)
            write_tensor(target, _cast_checked(changed, tensor), self._advance)

    def _cast(self, target: BinaryIO, tensor: OutputTensor, buffer: NDArray[np.uint8]) -> None:
        """Write a tensor whose heads stay and that is cast, unpickled (`.bin`) or computed by a
        view, a bounded piece at a time.
        """
        for piece in _pieces(self.source, tensor.source, buffer):
            write_tensor(target, _cast_checked(piece, tensor), self._advance)

    def _advance(self, count: int) -> None:
        """Report bytes that are written. Raises _CancelledError if another shard has failed."""
        if self._stop.is_set():
            raise _CancelledError
        self._progress(count)

    # --------------------------------------------------------------- the numbers of changed tensors

    def _changed_tensor(self, change: Change, buffer: NDArray[np.uint8]) -> Tensor:
        """A tensor with merged or repeated heads.

        Heads are merged in float32 (float64 for F64) and rounded once: to the stored dtype, or to
        that of --dtype. `HeadMaps` returns heads in the dtype of its inputs. Inputs are cast up
        first if rounding comes later: with --dtype, or if the tensor is no projection (a norm, gate
        or sink).
        """
        import torch

        # The buffer can be reused: results are written before the next tensor is read.
        tensor = self.source.read(change.source, buffer)
        if not all_finite(tensor):
            raise CorruptError(
                f"{change.source.name} of {self.source.name} contains NaN or Inf; download the "
                "checkpoint again"
            )
        rounds_later = self._casts or not change.rule.projection
        if rounds_later:
            precise = torch.float64 if change.source.dtype == "F64" else torch.float32
            tensor = tensor.to(precise)
        return self.converted(change, tensor)

    def converted(self, change: Change, tensor: Tensor) -> Tensor:
        """The tensor of the result for a stored tensor: split into heads, merged or repeated, and
        joined.

        A tensor that the method has trained is among its maps as it will be stored.
        """
        if self._maps is not None and change.source.name in self._maps.names:
            return self._maps.tensor(change.source.name)
        return change.mapped(tensor, self._head_merge(change))

    def _head_merge(self, change: Change) -> MergeHeads:
        """What happens to the heads of each role."""
        maps = self._maps.of_module(change.module) if self._maps is not None else None
        if maps is not None:
            return maps.merge
        return self._merge_without_maps(change)

    # --------------------------------------------------------------------------------- verification

    def verify_shard(self, path: Path, shard: Shard) -> None:
        """Check one written file from disk: its header, sampled bytes of copied tensors, and that
        changed tensors are finite.

        Raises OutputError.
        """
        try:
            tensors = {spec.name: spec for spec in read_header(path, shard.file)}
        except RefusedError as error:
            raise verification_error(str(error)) from error
        written = Checkpoint(self.source.name, path.parent, {}, tensors, (shard.file,))

        expected = {(tensor.name, tensor.dtype, tensor.shape) for tensor in shard.tensors}
        actual = {(spec.name, spec.dtype, spec.shape) for spec in tensors.values()}
        different = {name for name, _, _ in expected ^ actual}
        if different:
            raise verification_error(f"{listing(different)} differ from the plan")

        with path.open("rb") as copy:  # an unbuffered read stops at 2 GiB
            for tensor in shard.tensors:
                spec = tensors[tensor.name]
                if tensor.change and not all_finite(written.read(spec)):
                    raise verification_error(f"{spec.name} has NaN or Inf, but its source has none")
                if tensor.copied and not _is_copy(self.source, tensor.source, copy, spec):
                    raise verification_error(f"{spec.name} differs from the source")

    def verify(self, directory: Path) -> None:
        """Check the whole, whose shards were verified when they were written: the index, and the
        head counts that transformers reads from the new config.

        Raises OutputError: a result that fails is removed by the caller.
        """
        try:
            written = replace(read_checkpoint(directory), name=self.source.name)
            config = read_config(written.config, written.name)

            for layer in range(config.layers):
                actual = config.heads(layer).kv
                expected = target_heads(self._base_config, layer, self._kv_heads).kv
                if actual != expected:
                    raise verification_error(
                        f"layer {layer} has {actual} KV heads instead of {expected}"
                    )

            for module in attention_modules(written, config):
                module_changes(module, config, self._kv_heads)  # checks shapes against the config
        except RefusedError as error:
            raise verification_error(str(error)) from error


def _cast_checked(numbers: Tensor, tensor: OutputTensor) -> Tensor:
    """Numbers of a tensor in the dtype in which it is stored.

    Raises OutputError if some of them become infinite.
    """
    cast = stored_as(numbers, tensor.dtype)
    if cast.dtype == numbers.dtype or all_finite(cast):
        return cast
    # Inf and NaN that were there before are no error.
    if not cast.isfinite().equal(numbers.isfinite()):
        raise OutputError(
            f"{tensor.source.name} has numbers too large for {tensor.dtype}; pass another --dtype"
        )
    return cast


def _pieces(
    checkpoint: Checkpoint, spec: TensorSpec, buffer: NDArray[np.uint8]
) -> Iterator[Tensor]:
    """The numbers of a tensor, CAST_CHUNK at a time."""
    if not checkpoint.has_range(spec):
        yield from checkpoint.read(spec).reshape(-1).split(CAST_CHUNK)
        return

    size = max(spec.nbytes, 1) // max(spec.numel, 1)  # bytes of a number
    for begin in range(spec.begin, spec.end, CAST_CHUNK * size):
        end = min(begin + CAST_CHUNK * size, spec.end)
        piece = replace(spec, shape=((end - begin) // size,), begin=begin, end=end)
        yield checkpoint.read(piece, buffer)


def _is_copy(source: Checkpoint, original: TensorSpec, copy: BinaryIO, spec: TensorSpec) -> bool:
    """Whether a written tensor has the bytes of its source: a block at the start, in the middle and
    at the end. Tensors without a byte range in the source (`.bin`, a view) are compared whole.
    """
    import numpy as np
    import torch

    if not source.has_range(original):
        stored = stored_as(source.read(original), original.dtype).contiguous()
        expected = stored.reshape(-1).view(torch.uint8).numpy()
        actual = np.frombuffer(_read(copy, spec.begin, spec.nbytes), np.uint8)
        return np.array_equal(expected, actual)

    size = min(SAMPLED_BYTES, spec.nbytes)
    middle = max(0, spec.nbytes // 2 - SAMPLED_BYTES)
    last = max(0, spec.nbytes - SAMPLED_BYTES)
    starts = {0, middle, last}
    with source.path(original.file).open("rb", buffering=0) as stream:
        for start in starts:
            expected_block = _read(stream, original.begin + start, size)
            if _read(copy, spec.begin + start, size) != expected_block:
                return False
    return True


def _read(stream: BinaryIO, position: int, count: int) -> bytes:
    """`count` bytes from a position on."""
    stream.seek(position)
    return stream.read(count)


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither NaN nor Inf. Its sum is a faster test, but may overflow."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
