"""What is written wrong is noticed before it is published: bytes are damaged on their way to the disk."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SINGLE, llama, weights
from test_edges import save_bin
from torch import Tensor

from gqa.checkpoint.write import write_tensor
from gqa.convert import OutputError, convert_checkpoint, verify
from gqa.convert import merge as rewrite


@pytest.mark.parametrize(
    ("offset", "checksums", "says"),
    [
        (-(1 << 20), False, "lm_head.weight is not as it was in the source"),  # at the start, in the middle, at the end
        (-(1 << 19) - 1, False, "lm_head.weight is not as it was in the source"),
        (-1, False, "lm_head.weight is not as it was in the source"),
        (12, False, "the result does not verify"),  # in the header
        (-(1 << 18), False, None),  # between two sampled blocks of a tensor of 1 MiB: what --checksums is for
        (-(1 << 18), True, "lm_head.weight is not as it was in the source"),
    ],
)
def test_a_damaged_copy_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, checksums: bool, says: str | None
) -> None:
    """After the shard is written and before it is verified, one bit of it is changed."""
    monkeypatch.setattr(verify, "BLOCK", 1 << 10)
    source = llama(tmp_path / "m", tensors=weights() | {"lm_head.weight": torch.randn(4096, 64)}, shards=1)
    original = rewrite._write_shard

    def write_and_damage(job: Any, shard: Any) -> None:
        original(job, shard)
        data = bytearray((job.work / SINGLE).read_bytes())
        data[offset] ^= 1
        (job.work / SINGLE).write_bytes(data)

    monkeypatch.setattr(rewrite, "_write_shard", write_and_damage)
    with pytest.raises(OutputError, match=re.escape(says)) if says else contextlib.nullcontext():
        convert_checkpoint(source, 2, tmp_path / "out", checksums=checksums, method="mean")
    assert (tmp_path / "out").exists() == (says is None)


@pytest.mark.parametrize(
    ("stored", "wrong", "says"),
    [
        ("bin", lambda tensor: tensor + 1, "is not as it was in the source"),
        ("safetensors", lambda tensor: tensor * float("nan"), "NaN or Inf though its source has none"),
    ],
)
def test_tensors_that_are_written_wrong_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, wrong: Callable[[Tensor], Tensor], says: str
) -> None:
    source = llama(tmp_path / "m")
    if stored == "bin":
        save_bin(source, weights(), 1)
    monkeypatch.setattr(
        rewrite, "write_tensor", lambda target, tensor, *rest: write_tensor(target, wrong(tensor), *rest)
    )
    with pytest.raises(OutputError, match=says):
        convert_checkpoint(source, 2, tmp_path / "out", method="mean")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
