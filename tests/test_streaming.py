"""Streaming: what memory a conversion needs, who copies the bytes, and that no way of copying changes them."""

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config, contents, llama
from torch import Tensor

from gqa.checkpoint import write as writer
from gqa.checkpoint.headers import format_header
from gqa.convert import convert_checkpoint, plan_conversion
from gqa.convert import merge as rewrite
from gqa.convert.maps import HeadMaps

MIB = 1 << 20

# Says "ready" when everything is imported and a first conversion (argv[2]) has run, waits for a line, converts argv[1].
_CHILD = """
import sys
from gqa.convert import convert_checkpoint
convert_checkpoint(sys.argv[2], 2, sys.argv[2] + "-out", method="mean")
print("ready", flush=True)
sys.stdin.readline()
convert_checkpoint(sys.argv[1], 2, sys.argv[1] + "-out", jobs=2, checksums=True, method="mean")
print("done", flush=True)
"""


def sparse_llama(directory: Path, hidden: int = 1024, wide: int = 16384, vocabulary: int = 90112) -> int:
    """0.8 GB in two shards, all zeros in sparse files: small keys and values among large tensors.

    Returns the bytes of the largest tensor that a conversion changes.
    """
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    for shard, edge in enumerate(["model.embed_tokens.weight", "lm_head.weight"]):
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {edge: ("BF16", (vocabulary, hidden))}
        for layer in (2 * shard, 2 * shard + 1):
            at = f"model.layers.{layer}"
            for name in ("gate", "up"):
                tensors[f"{at}.mlp.{name}_proj.weight"] = ("BF16", (wide, hidden))
            tensors[f"{at}.mlp.down_proj.weight"] = ("BF16", (hidden, wide))
            for name in "qkvo":
                tensors[f"{at}.self_attn.{name}_proj.weight"] = ("BF16", (hidden, hidden))
        shards.append(tensors)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        weight_map |= dict.fromkeys(tensors, file)
        header = format_header(tensors)
        with (directory / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + sum(2 * math.prod(shape) for _, shape in tensors.values()))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "vocab_size": vocabulary, "num_hidden_layers": 4}
    (directory / "config.json").write_text(json.dumps(config(8, **sizes)))
    return 2 * hidden * hidden


def anonymous(process: int) -> int:
    """Bytes of a process's anonymous memory: without the pages of files, which the system takes back when it likes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, which only Linux has")
def test_memory_is_that_of_the_largest_changed_tensor(tmp_path: Path) -> None:
    """Of each of two jobs. Shards of 385 MB: whoever reads one, or one embedding of 185 MB, is over the bound."""
    source = tmp_path / "source"
    source.mkdir()
    largest = sparse_llama(source)
    shards = [path.stat().st_size for path in source.glob("*.safetensors")]
    bound = 112 * MIB + 4 * largest * 2
    assert min(shards) > 2 * bound
    small = llama(tmp_path / "small")
    command = [sys.executable, "-c", _CHILD, str(source), str(small)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        before = peak = anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.close()
        while child.poll() is None:
            try:
                peak = max(peak, anonymous(child.pid))
            except (OSError, StopIteration):  # it is just leaving
                break
            time.sleep(0.003)
        assert child.stdout.read() == "done\n"
    assert peak - before < bound, f"{(peak - before) / MIB:.0f} MiB"


def test_untouched_neighbours_move_as_one_range_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama(tmp_path / "source", shards=1)
    plan = plan_conversion(source, 2, method="mean")
    ranges: list[int] = []
    kernel: list[int] = []
    computed: list[int] = []
    copy_in_kernel = writer._copy_in_kernel

    def copy_range(*arguments: object) -> None:
        ranges.append(arguments[3])  # type: ignore[arg-type]
        writer.copy_range(*arguments)  # type: ignore[arg-type]

    def in_kernel(*arguments: Any) -> int:
        kernel.append(copy_in_kernel(*arguments))
        return kernel[-1]

    def write_tensor(target: object, tensor: Tensor, *rest: object) -> None:
        computed.append(tensor.numel() * tensor.element_size())
        writer.write_tensor(target, tensor, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(rewrite, "copy_range", copy_range)
    monkeypatch.setattr(rewrite, "write_tensor", write_tensor)
    monkeypatch.setattr(writer, "_copy_in_kernel", in_kernel)
    monkeypatch.setattr(rewrite, "copy_file", lambda *paths: None)  # side files would be counted as well
    convert_checkpoint(source, 2, tmp_path / "out", method="mean")
    untouched = [t.nbytes for t in plan.tensors if t.change is None]
    assert sorted(computed) == sorted(t.nbytes for t in plan.changed)
    assert sum(ranges) == sum(untouched)
    assert len(ranges) == len(plan.changed) + 1  # what lies between two changed tensors is one range
    assert len(ranges) < len(untouched)
    if sys.platform == "linux":
        assert sum(kernel) == sum(untouched)


def unsupported(code: int) -> Callable[..., int]:
    def copy(*arguments: int, offset_src: int) -> int:
        raise OSError(code, "not here")

    return copy


@pytest.mark.parametrize(
    "kernel",
    [None, unsupported(errno.EXDEV), lambda *arguments, offset_src: 0],
    ids=["no copy_file_range", "EXDEV", "nothing moved"],
)
@pytest.mark.parametrize("chunk", [writer.CHUNK, 1000])
def test_every_way_down_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., int] | None, chunk: int
) -> None:
    source = llama(tmp_path / "source", shards=2)
    expected = contents(convert_checkpoint(source, 2, tmp_path / "a" / "out", method="mean").out)
    monkeypatch.setattr(writer, "CHUNK", chunk)
    if kernel is None:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    else:
        monkeypatch.setattr(os, "copy_file_range", kernel, raising=False)
    assert contents(convert_checkpoint(source, 2, tmp_path / "b" / "out", method="mean").out) == expected
    assert len(expected) > 4


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_jobs_change_nothing_but_the_time(tmp_path: Path, dtype: str | None) -> None:
    """Progress adds up to the bytes written. Hashes, which come from the pass that compares, are those of the files."""
    source = llama(tmp_path / "source", shards=3)
    threads, made = torch.get_num_threads(), []
    torch.set_num_threads(3)
    for jobs in (1, 2, 4):
        moved: list[int] = []
        how: dict[str, Any] = {"jobs": jobs, "dtype": dtype, "checksums": jobs > 1, "progress": moved.append}
        result = convert_checkpoint(source, 2, tmp_path / str(jobs), method="mean", **how)
        files = {path.name: path.read_bytes() for path in result.out.glob("*.safetensors")}
        headers = sum(8 + int.from_bytes(data[:8], "little") for data in files.values())
        assert sum(moved) == result.plan.total_bytes == sum(map(len, files.values())) - headers
        if result.checksums is not None:
            originals = {path.name: path.read_bytes() for path in source.glob("*.safetensors")}
            for kind, these in (("source", originals), ("output", files)):
                expected = {name: hashlib.sha256(data).hexdigest() for name, data in these.items()}
                assert result.checksums[kind] == expected
        assert (result.checksums is None) == (jobs == 1)
        made.append(contents(result.out))
    assert made[0] == made[1] == made[2]
    assert torch.get_num_threads() == 3, "the caller's threads are given back"
    torch.set_num_threads(threads)


def test_an_unused_head_does_not_reach_the_group() -> None:
    """Weight zero is absence, also where another group uses the head at that place, and also for NaN and Inf."""
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    heads = torch.randn(4, 3, 5).to(torch.bfloat16)
    heads[1] = torch.inf
    merged = HeadMaps(weights, weights).merge("key", heads)
    assert torch.equal(merged[0], heads[0])
    assert torch.equal(merged[1], ((heads[2].float() + heads[3].float()) / 2).to(torch.bfloat16))
    assert torch.equal(HeadMaps(weights * 0, weights).merge("key", heads), torch.zeros(2, 3, 5, dtype=torch.bfloat16))
