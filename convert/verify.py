"""Reopen what was written and hold it against the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gqa.checkpoint.errors import OutputError, RefusedError, listing
from gqa.checkpoint.files import read_header
from gqa.checkpoint.read import Checkpoint, read_checkpoint, stored_as
from gqa.checkpoint.write import drop_written
from gqa.convert.heads.config import read_config, target_heads
from gqa.convert.heads.modules import attention_modules, module_changes
from gqa.convert.plan import OutputTensor, Plan, Shard

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 16  # bytes of a sampled block
CHUNK = 1 << 20  # bytes compared at a time when all are; they stay in the processor's cache


def verify(plan: Plan, work: Path) -> None:
    """Check a written directory from disk: names, shapes, dtypes, the index, the head counts that transformers reads
    from the new config. Raises OutputError: a result that fails is removed by the caller.
    """
    try:
        written = replace(read_checkpoint(work), name=plan.checkpoint.name)
        config = read_config(written.config, written.name)
        for layer in range(config.layers):
            actual, expected = config.heads(layer).kv, target_heads(plan.config, layer, plan.groups).kv
            if actual != expected:
                raise OutputError(f"layer {layer} of the result has {actual} KV heads, {expected} were asked for")
        for module in attention_modules(written, config):
            module_changes(module, config, plan.groups)  # shapes are held against the config
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from error
    _check_tensors(plan.tensors, written)


def verify_shard(plan: Plan, path: Path, shard: Shard, tolerated: Collection[str], whole: bool) -> str:
    """Check one written file from disk: sampled bytes of untouched tensors, all with `whole`, and that what was
    computed is finite unless its source, one of `tolerated`, is not. Its SHA-256 where it was read whole, else nothing.

    Raises OutputError.
    """
    try:
        tensors = {spec.name: spec for spec in read_header(path, shard.file)}
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from error
    written = Checkpoint(plan.checkpoint.name, path.parent, {}, tensors, (shard.file,))
    _check_tensors(shard.tensors, written)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as copy:
        if whole:
            digest.update(copy.read(tensors[shard.tensors[0].name].begin))
        for tensor in shard.tensors:
            spec = tensors[tensor.name]
            known = any(part.name in tolerated for part in tensor.sources)
            if tensor.change and not known and not all_finite(written.read(spec)):
                raise OutputError(f"the result does not verify: {spec.name} has NaN or Inf though its source has none")
            with _original(plan.checkpoint, tensor) as original:
                for start, count in _blocks(spec.nbytes, whole) if whole or original else ():
                    data = _read(copy, spec.begin + start, count)
                    if original and data != original(start, count):
                        raise OutputError(f"the result does not verify: {spec.name} is not as it was in the source")
                    digest.update(data)
            if whole:
                drop_written(copy)
    return digest.hexdigest() if whole else ""


@contextmanager
def _original(source: Checkpoint, tensor: OutputTensor) -> Iterator[Callable[[int, int], bytes] | None]:
    """A function from (start, count) to those bytes of the source of a tensor; None where they are not copied."""
    import torch

    spec = tensor.sources[0]
    if not tensor.copied:
        yield None
    elif not source.has_range(spec):
        stored = stored_as(source.read(spec), spec.dtype).contiguous().reshape(-1)
        data = memoryview(stored.view(torch.uint8).numpy())  # type: ignore[arg-type]
        yield lambda start, count: bytes(data[start : start + count])
    else:
        with source.path(spec.file).open("rb", buffering=0) as stream:
            yield lambda start, count: _read(stream, spec.begin + start, count)


def _check_tensors(planned: Iterable[OutputTensor], written: Checkpoint) -> None:
    expected = {t.name: (t.dtype, t.shape) for t in planned}
    actual = {s.name: (s.dtype, s.shape) for s in written.tensors.values()}
    if wrong := {n for n in expected.keys() | actual.keys() if expected.get(n) != actual.get(n)}:
        raise OutputError(f"the result does not verify: {listing(wrong)} differ from the plan")


def sha256(path: Path) -> str:
    """Of a whole file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(stream: BinaryIO, position: int, count: int) -> bytes:
    stream.seek(position)
    return stream.read(count)


def _blocks(size: int, whole: bool) -> list[tuple[int, int]]:
    """(start, count) of all of it, or of a block at the start, in the middle and at the end."""
    if whole:
        return [(start, min(CHUNK, size - start)) for start in range(0, size, CHUNK)]
    return sorted({(start, min(BLOCK, size)) for start in (0, max(0, size // 2 - BLOCK), max(0, size - BLOCK))})


def all_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor Inf: the sum says so faster, but may overflow."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
