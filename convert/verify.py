"""Reopen what was written and hold it against the plan. Only `verify_load` runs the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from gqa.checkpoint.errors import OutputError, RefusedError, listing
from gqa.checkpoint.headers import TensorSpec
from gqa.checkpoint.read import Checkpoint, read_checkpoint, stored_as
from gqa.checkpoint.write import drop_written
from gqa.convert.plan import OutputTensor, Plan, Shard, make_plan

BLOCK = 1 << 16  # bytes of a sampled block
CHUNK = 1 << 20  # bytes compared at a time when all are; they stay in the processor's cache


def verify(
    plan: Plan, work: Path, *, tolerated: Sequence[str] = (), checksums: bool = False, jobs: int = 1
) -> dict[str, dict[str, str]] | None:
    """Check a written directory from disk; with `checksums` every untouched byte, and the files' SHA-256 are returned.

    Names, shapes, dtypes, the index, the head counts that transformers reads from the new config, sampled (or all)
    bytes of untouched tensors, and that what was computed is finite unless `tolerated` says that its source is not.
    Raises OutputError: a result that fails is removed by the caller.
    """
    try:
        written = replace(read_checkpoint(work), name=plan.checkpoint.name)
        again = make_plan(written, plan.groups)
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from None
    if again.config.main.kv != plan.groups:
        raise OutputError(f"the result has {again.config.main.kv} KV heads, {plan.groups} were asked for")
    expected = {t.name: (t.dtype, t.shape) for t in plan.tensors}
    actual = {s.name: (s.dtype, s.shape) for s in written.tensors.values()}
    if wrong := {n for n in expected.keys() | actual.keys() if expected.get(n) != actual.get(n)}:
        raise OutputError(f"the result does not verify: {listing(wrong)} differ from the plan")
    source = plan.checkpoint
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        outputs = pool.map(lambda shard: _check_shard(source, written, shard, tolerated, checksums), plan.shards)
        sources = pool.map(lambda file: _sha256(source.path(file)), source.files if checksums else ())
        try:
            output_hashes = {shard.file: digest for shard, digest in zip(plan.shards, outputs, strict=True)}
            source_hashes = dict(zip(source.files, sources, strict=checksums))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {"source": source_hashes, "output": output_hashes} if checksums else None


def _check_shard(source: Checkpoint, written: Checkpoint, shard: Shard, tolerated: Sequence[str], whole: bool) -> str:
    """One output file against the plan; `whole` reads all of it, once, and gives its SHA-256."""
    digest = hashlib.sha256()
    with written.path(shard.file).open("rb", buffering=0) as copy:
        if whole:
            digest.update(copy.read(written.tensors[shard.tensors[0].name].begin))
        for tensor in shard.tensors:
            spec = written.tensors[tensor.name]
            blocks = _chunks(spec.nbytes) if whole else _samples(spec.nbytes)
            if tensor.change is not None:
                _check_finite(written, spec, tensor, tolerated)
            if tensor.source is not None and tensor.copied:
                with _original(source, tensor.source) as original:
                    for start, count in blocks:
                        data = _read(copy, spec.begin + start, count)
                        if data != original(start, count):
                            raise OutputError(f"the result does not verify: {spec.name} is not as it was in the source")
                        digest.update(data)
            elif whole:
                for start, count in blocks:
                    digest.update(_read(copy, spec.begin + start, count))
            if whole:
                drop_written(copy)
    return digest.hexdigest()


@contextmanager
def _original(source: Checkpoint, spec: TensorSpec) -> Iterator[Callable[[int, int], bytes]]:
    """A function from (start, count) to those bytes of one tensor of the source."""
    import torch

    if not source.has_range(spec):
        stored = stored_as(source.read(spec), spec.dtype).contiguous().reshape(-1)
        data = memoryview(stored.view(torch.uint8).numpy())  # type: ignore[arg-type]
        yield lambda start, count: bytes(data[start : start + count])
        return
    with source.path(spec.file).open("rb", buffering=0) as stream:
        yield lambda start, count: _read(stream, spec.begin + start, count)


def _read(stream: BinaryIO, position: int, count: int) -> bytes:
    stream.seek(position)
    return stream.read(count)


def _chunks(size: int) -> list[tuple[int, int]]:
    return [(start, min(CHUNK, size - start)) for start in range(0, size, CHUNK)]


def _samples(size: int) -> list[tuple[int, int]]:
    """A block at the start, in the middle and at the end."""
    return sorted({(start, min(BLOCK, size)) for start in (0, max(0, size // 2 - BLOCK), max(0, size - BLOCK))})


def _check_finite(written: Checkpoint, spec: TensorSpec, tensor: OutputTensor, tolerated: Sequence[str]) -> None:
    import torch

    assert tensor.change is not None
    if any(warning.startswith(source.name) for warning in tolerated for source in tensor.change.sources):
        return
    values = written.read(spec)
    if not bool(values.sum().isfinite()) and not bool(torch.isfinite(values).all()):  # the sum alone may overflow
        raise OutputError(f"the result does not verify: {spec.name} has NaN or Inf though its source has none")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify_load(directory: Path) -> None:
    """Load with transformers, no key missing or unexpected, and run one forward pass. Raises OutputError."""
    import torch

    from gqa.checkpoint.loading import load_model

    try:
        model = load_model(str(directory))
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from None
    ids = torch.arange(8).unsqueeze(0)
    inputs = {"input_ids": ids}
    if model.main_input_name == "input_features":  # Whisper's spectrum, of which its encoder halves the length
        config = model.config
        inputs = {
            "input_features": torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions).to(model.dtype)
        }
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        output = model(**inputs)
    if not bool(torch.isfinite(output[0].float()).all()):
        raise OutputError("one forward pass of the result gives NaN or Inf")
