"""What is written wrong is noticed before it is published: bytes are damaged on their way to the disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import llama, weights
from test_edges import save_bin

from gqa.checkpoint.write import write_tensor
from gqa.convert import OutputError, convert_checkpoint, verify
from gqa.convert import merge as rewrite


def damage(directory: Path, offset: int) -> None:
    """One bit of a finished shard."""
    path = sorted(directory.glob("*.safetensors"))[0]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, **options: Any) -> None:
    """Convert a checkpoint; after its shards are written and before they are verified, a bit is changed."""
    source = llama(tmp_path / "m", tensors=weights() | {"lm_head.weight": torch.randn(4096, 64)}, shards=1)
    original = rewrite._write_side_files

    def write_and_damage(plan: Any, work: Path) -> None:
        original(plan, work)
        damage(work, offset)

    monkeypatch.setattr(rewrite, "_write_side_files", write_and_damage)
    convert_checkpoint(source, 2, tmp_path / "out", **options)


def test_a_damaged_copy_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="is not as it was in the source"):
        converted(tmp_path, monkeypatch, -1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("checksums", [False, True])
def test_checksums_compare_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checksums: bool) -> None:
    """A bit between two sampled blocks of a tensor of 1 MiB: what `--checksums` is for."""
    monkeypatch.setattr(verify, "BLOCK", 1 << 10)
    if checksums:
        with pytest.raises(OutputError, match=re.escape("lm_head.weight is not as it was in the source")):
            converted(tmp_path, monkeypatch, -(1 << 18), checksums=True)
    else:
        converted(tmp_path, monkeypatch, -(1 << 18))


def test_a_damaged_header_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OutputError, match="the result does not verify"):
        converted(tmp_path, monkeypatch, 12)


def test_a_damaged_copy_of_a_bin_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "m")
    save_bin(source, weights(), 1)

    def write_wrong(target: Any, tensor: torch.Tensor, *rest: Any) -> None:
        write_tensor(target, tensor + 1, *rest)

    monkeypatch.setattr(rewrite, "write_tensor", write_wrong)
    with pytest.raises(OutputError, match="is not as it was in the source"):
        convert_checkpoint(source, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()
