"""Streaming: what memory a conversion needs, who copies the bytes, and that no way of copying
changes them.
"""

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.checkpoints import MERGED, contents, header_only, llama
from support.training import Runs

from gqa.checkpoint import write as writer
from gqa.convert import rewrite
from gqa.convert.api import convert, convert_checkpoint, prepare
from gqa.convert.options import ConvertOptions
from gqa.core.console import Watcher

MIB = 1 << 20


def anonymous(process: int) -> int:
    """Bytes of anonymous memory of a process (pages of files are taken back by the system); 0 if it
    has ended.
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.scale  # 840 MB are written
@pytest.mark.skipif(
    sys.platform != "linux", reason="memory is read from /proc, which only Linux has"
)
def test_memory_is_that_of_the_largest_changed_tensor(tmp_path: Path, runs: Runs) -> None:
    """One shard of some 840 MB of zeros: whoever reads it, or one embedding of 185 MB, is over the
    bound.
    """
    from transformers import LlamaConfig

    source, hidden = tmp_path / "source", 1024
    source.mkdir()
    total = header_only(
        source,
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=16384,
            vocab_size=90112,
            num_hidden_layers=4,
            num_attention_heads=8,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        ),
    )
    # Two of the largest tensors that change, in float32
    bound = 112 * MIB + 4 * 2 * (2 * hidden * hidden)
    assert total > 5 * bound
    running = runs.begin(*MERGED, "-q", source, "-o", tmp_path / "out")
    before = peak = anonymous(running.pid)
    while now := anonymous(running.pid):
        peak = max(peak, now)
        time.sleep(0.003)
    assert running.wait() == 0, running.said()
    assert before > 0
    assert peak - before < bound, f"{(peak - before) / MIB:.0f} MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has copy_file_range")
def test_untouched_tensors_move_in_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, moved, copy = (
        llama(tmp_path / "source", shards=1, side_files=False),
        list[int](),
        os.copy_file_range,
    )

    def counted(*arguments: int, **offsets: int) -> int:
        moved.append(copy(*arguments, **offsets))
        return moved[-1]

    # Counts the bytes that the kernel copies
    monkeypatch.setattr(os, "copy_file_range", counted)
    plan = convert_checkpoint(source, 2, tmp_path / "out", method="mean").plan
    assert sum(moved) == sum(t.nbytes for t in plan.tensors if t.change is None)


@pytest.mark.parametrize(
    "kernel",
    [None, Mock(side_effect=OSError(errno.EXDEV, "not here")), lambda *arguments, offset_src: 0],
    ids=["no copy_file_range", "EXDEV", "nothing moved"],
)
def test_every_way_down_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., int] | None
) -> None:
    source = llama(tmp_path / "source", shards=2)
    expected = contents(convert_checkpoint(source, 2, tmp_path / "a" / "out", method="mean").out)
    # Small chunks, of which every tensor has several
    monkeypatch.setattr(writer, "CHUNK", 1000)
    if kernel is None:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    else:
        # A kernel that cannot copy here, or copies nothing
        monkeypatch.setattr(os, "copy_file_range", kernel, raising=False)
    assert (
        contents(convert_checkpoint(source, 2, tmp_path / "b" / "out", method="mean").out)
        == expected
    )
    assert len(expected) > 4


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_jobs_change_nothing_but_the_time(
    tmp_path: Path, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress adds up to the bytes written."""
    source = llama(tmp_path / "source", shards=3)
    threads, outputs = torch.get_num_threads(), []
    torch.set_num_threads(3)
    for jobs in (1, 4):
        moved, watcher = list[int](), Watcher(quiet=True)
        # As on a machine with so many processors
        monkeypatch.setattr(rewrite, "DEFAULT_JOBS", jobs)
        monkeypatch.setattr(watcher, "update", moved.append)
        fields: dict[str, Any] = {"output": tmp_path / str(jobs), "dtype": dtype}
        options = ConvertOptions(model=str(source), kv_heads=2, method="mean", **fields)
        result = convert(prepare(options), options, watcher)
        files = {path.name: path.read_bytes() for path in result.out.glob("*.safetensors")}
        headers = sum(8 + int.from_bytes(data[:8], "little") for data in files.values())
        assert sum(moved) == result.plan.total_bytes == sum(map(len, files.values())) - headers
        outputs.append(contents(result.out))
    assert outputs[0] == outputs[1]
    assert torch.get_num_threads() == 3, "the caller's threads are given back"
    torch.set_num_threads(threads)
