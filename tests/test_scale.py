"""What large models and more than two processes need (`make test-scale`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import header_only
from embedded import SOURCE
from training import Runs, tiny_checkpoint

pytestmark = pytest.mark.scale

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "head_dim": 64}


def test_no_process_holds_a_model(runs: Runs, tmp_path: Path) -> None:
    """Each of four reads its rows of the model, and of its teacher: together less than half of them. Control: where
    nothing is shared out each of two holds both.
    """
    size = {}
    for name, heads in (("model", 4), ("teacher", 16)):
        made = tiny_checkpoint(tmp_path / name, kv_heads=heads, num_attention_heads=16, **SIZES)
        size[name] = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    assert min(size.values()) > 300 << 20
    ways = {"alone": (4, "shard(); ", "none"), "taught": (4, "shard(); ", "teacher"), "whole": (2, "", "teacher")}
    for way, (ranks, before, teacher) in ways.items():
        words = [tmp_path / "model", *runs.words(tmp_path / "out", steps=1, batch_size=4)[1:]]
        words += ["--teacher", tmp_path / teacher if teacher in size else teacher]
        runs.finish(*words, ranks=ranks, before=f"{before}tell_memory({str(tmp_path / way)!r})")
        held = [int(path.read_text()) for path in tmp_path.glob(f"{way}-*")]
        both = size["model"] + size.get(teacher, 0)
        assert len(held) == ranks
        assert min(held) > both if way == "whole" else max(held) < both / 2, (way, held, size)


def test_dry_run_of_70b(tmp_path: Path) -> None:
    """From headers alone, in less than 2 GB: there are no weights to read."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=4096, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    total = header_only(tmp_path, config)
    for file in SOURCE.glob("*token*"):
        shutil.copyfile(file, tmp_path / file.name)
    assert total > 130e9
    words = [
        str(tmp_path),
        "--dry-run",
        "--data",
        "stdlib:heldout",
        "--steps",
        "2",
        "--teacher",
        str(tmp_path),
        "--json",
    ]
    code = (
        f"import sys; sys.argv = ['gqa-uptrain', *{words!r}]\n"
        "from gqa.uptrain.cli import command\n"
        "command.main(standalone_mode=False)\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    plan, peak = done.stdout.strip().splitlines()
    assert json.loads(plan)["parameters"] == total / 2
    assert int(peak.split()[1]) * 1024 < 2e9
