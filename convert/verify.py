"""Reopen what was written and hold it against the plan. `verify_load` is the only place that runs a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from gqa.convert.checkpoint import Checkpoint, read_checkpoint
from gqa.convert.errors import OutputError, RefusedError, listing
from gqa.convert.plan import OutputTensor, Plan, make_plan
from gqa.convert.safetensors_header import TensorSpec

BLOCK = 1 << 16  # bytes of a sampled block
CHUNK = 8 << 20


def verify(
    plan: Plan, work: Path, *, tolerated: Sequence[str] = (), checksums: bool = False
) -> dict[str, dict[str, str]] | None:
    """Check a written directory from disk; with `checksums` every untouched byte, and the files' SHA-256 are returned.

    Names, shapes, dtypes, the index, the head counts that transformers reads from the new config, sampled (or all)
    bytes of untouched tensors, and that what was computed is finite unless `tolerated` says that its source is not.
    Raises OutputError: a result that fails is removed by the caller.
    """
    try:
        written = read_checkpoint(work, plan.checkpoint.name)
        again = make_plan(written, plan.groups)
    except RefusedError as error:
        raise OutputError(f"the result does not verify: {error}") from None
    if again.config.main.kv != plan.groups:
        raise OutputError(f"the result has {again.config.main.kv} KV heads, {plan.groups} were asked for")
    expected = {t.name: (t.dtype, t.shape) for t in plan.tensors}
    actual = {s.name: (s.dtype, s.shape) for s in written.tensors.values()}
    if wrong := {n for n in expected.keys() | actual.keys() if expected.get(n) != actual.get(n)}:
        raise OutputError(f"the result does not verify: {listing(wrong)} differ from the plan")
    for shard in plan.shards:
        with written.path(shard.file).open("rb") as stream:
            for tensor in shard.tensors:
                spec = written.tensors[tensor.name]
                if tensor.change is not None:
                    _check_finite(written, spec, tensor, tolerated)
                elif tensor.copied and not plan.checkpoint.is_pickled(_source(tensor)):
                    _check_copied(plan.checkpoint, _source(tensor), stream, spec, whole=checksums)
    return _hashes(plan.checkpoint, written) if checksums else None


def _source(tensor: OutputTensor) -> TensorSpec:
    assert tensor.source is not None
    return tensor.source


def _check_finite(written: Checkpoint, spec: TensorSpec, tensor: OutputTensor, tolerated: Sequence[str]) -> None:
    import torch

    assert tensor.change is not None
    if any(warning.startswith(source.name) for warning in tolerated for source in tensor.change.sources):
        return
    values = written.read(spec)
    if not bool(torch.isfinite(values).all()):
        raise OutputError(f"the result does not verify: {spec.name} has NaN or Inf though its source has none")


def _check_copied(source: Checkpoint, original: TensorSpec, copy: BinaryIO, spec: TensorSpec, *, whole: bool) -> None:
    size = original.nbytes
    blocks = (
        [(start, min(CHUNK, size - start)) for start in range(0, size, CHUNK)]
        if whole
        else sorted({(start, min(BLOCK, size)) for start in (0, max(0, size // 2 - BLOCK), max(0, size - BLOCK))})
    )
    with source.path(original.file).open("rb") as stream:
        for start, count in blocks:
            stream.seek(original.begin + start)
            copy.seek(spec.begin + start)
            if stream.read(count) != copy.read(count):
                raise OutputError(f"the result does not verify: the bytes of {spec.name} are not the source's")


def _hashes(source: Checkpoint, written: Checkpoint) -> dict[str, dict[str, str]]:
    return {
        "source": {file: _sha256(source.path(file)) for file in source.files},
        "output": {file: _sha256(written.path(file)) for file in written.files},
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify_load(directory: Path) -> None:
    """Load with transformers, no key missing or unexpected, and run one forward pass. Raises OutputError."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    name = (config.architectures or [""])[0]
    model_class = getattr(transformers, name, None) or transformers.AutoModelForCausalLM
    try:
        model, info = model_class.from_pretrained(directory, output_loading_info=True, trust_remote_code=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OutputError(f"transformers cannot load the result as {model_class.__name__}: {reason}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise OutputError(f"transformers reports {kind.replace('_', ' ')} in the result: {listing(info[kind])}")
    inputs = {"input_ids": torch.arange(8).unsqueeze(0)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        output = model.eval()(**inputs)
    if not bool(torch.isfinite(output[0].float()).all()):
        raise OutputError("one forward pass of the result gives NaN or Inf")
