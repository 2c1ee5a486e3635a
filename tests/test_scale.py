"""What large models and more than two processes need (`make test-scale`)."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.faults import note_memory, shard
from support.repository import SCRIPTS
from support.training import Runs, tiny_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.scale

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "head_dim": 64}


def test_no_process_holds_a_model(runs: Runs, tmp_path: Path) -> None:
    """Each of four reads its rows of both models, less than half together.

    Control: each of two, all of both.
    """
    size = {}
    for name, heads in (("model", 4), ("teacher", 16)):
        made = tiny_checkpoint(tmp_path / name, kv_heads=heads, num_attention_heads=16, **SIZES)
        size[name] = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    assert min(size.values()) > 300 << 20
    ways = {
        "alone": (4, [shard], "none"),
        "taught": (4, [shard], "teacher"),
        "whole": (2, [], "teacher"),
    }
    for way, (ranks, before, teacher) in ways.items():
        words = [tmp_path / "model", *runs.words(tmp_path / "out", steps=1, batch_size=4)[1:]]
        words += ["--teacher", tmp_path / teacher if teacher in size else teacher]
        runs.finish(
            *words, ranks=ranks, before=[*before, partial(note_memory, str(tmp_path / way))]
        )
        held = [int(path.read_text()) for path in tmp_path.glob(f"{way}-*")]
        both = size["model"] + size.get(teacher, 0)
        assert len(held) == ranks
        if way == "whole":
            assert min(held) > both, (held, size)
        else:
            assert max(held) < both / 2, (way, held, size)


def peak_of(
    model: Path,
    method: str,
    blocks: int,
    length: int,
    groups: int,
    more: int = 0,
    scores: int = 1 << 25,
) -> int:
    """Bytes that calibrating on so many blocks takes beyond what was resident before."""
    script = SCRIPTS / "calibration_peak.py"
    words = [sys.executable, script, model, method, more, blocks, length, groups, scores]
    done = subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)},
    )
    return int(done.stdout)


@pytest.mark.parametrize("method", ["calibrated", "refined"])
def test_calibration_holds_two_streams(tmp_path: Path, method: str) -> None:
    """The peak of memory is less than 3.5 times the hidden states of the text (two streams,
    targets, and parts of them) and two layers; where something keeps one more after each layer, it
    is more.
    """
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=512,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    allowed = 4 * int(3.5 * 768 * 64 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512))
    for more in (0, 1):
        peak = peak_of(tmp_path, method, 768, 64, 4, more)
        assert (peak < allowed) is (more == 0), (peak, allowed)


def test_long_blocks_are_looked_at_in_pieces(tmp_path: Path) -> None:
    """Of a block of 32,768 tokens the scores of one head are 4.3 GB.

    Control: a quarter of them at once, of 24,576.
    """
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=512,
        max_position_embeddings=32768,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert peak_of(tmp_path, "calibrated", 1, 32768, 1) < 1e9
    assert peak_of(tmp_path, "calibrated", 1, 24576, 1, scores=1 << 40) > 1.5e9
