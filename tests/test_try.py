"""`make try`: the script that shows what two models write, and the commands of the target."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from support.embedded import SOURCE
from support.training import tiny_checkpoint

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/try.py"


def written(*words: object) -> str:
    """What the script prints; in this process, which has imported transformers already."""
    printed = StringIO()
    command = [str(SCRIPT), *map(str, words)]
    with mock.patch.object(sys, "argv", command), redirect_stdout(printed):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def test_both_models_continue_the_prompt_side_by_side(tmp_path: Path) -> None:
    small = tiny_checkpoint(tmp_path / "small", kv_heads=2)
    text = written(SOURCE, small, "--prompt", "def first(x):\n", "--tokens", 8)
    table, _, _ = text.rpartition("\n\n")
    heads, _, prompt, *continuation = table.splitlines()
    base, converted = heads.split(" | ")
    assert base.rstrip() == "8 KV heads (stdlib-mha)"
    assert converted == "2 KV heads (small)"
    assert prompt.count("def first(x):") == 2
    assert "".join(continuation).replace("|", "").strip()


def test_the_same_model_writes_the_same_twice() -> None:
    text = written(SOURCE, SOURCE, "--prompt", "import ", "--tokens", 8)
    table, _, _ = text.rpartition("\n\n")
    halves = [row.partition(" | ") for row in table.splitlines()]
    assert [left.rstrip() for left, _, _ in halves] == [right for _, _, right in halves]


def test_the_sizes_of_the_models_say_what_to_expect(tmp_path: Path) -> None:
    text = written(SOURCE, "--prompt", "import ", "--tokens", 8)
    _, _, advice = text.rpartition("\n\n")
    assert "stdlib-mha has 5.8 million parameters" in " ".join(advice.split())


def test_the_last_line_is_what_the_conversion_measured(tmp_path: Path) -> None:
    small = tiny_checkpoint(tmp_path / "small", kv_heads=2)
    cache = {"bytes_per_token_before": 6144, "bytes_per_token_after": 1536}
    quality = {"tokens": 8160, "ratio": 1.21, "ratio_low": 1.18, "ratio_high": 1.24}
    quality["recall"] = {"base": 0.81, "converted": 0.79}
    record = {"kv_cache": cache, "quality": quality}
    (small / "gqa_conversion.json").write_text(json.dumps(record))

    text = written(SOURCE, small, "--prompt", "import ", "--tokens", 2)
    _, _, last = text.rpartition("\n\n")
    assert " ".join(last.split()) == (
        "Result: trade-off (quality was lost; training recovers a part of it): KV cache 4x "
        "smaller, perplexity x1.21 (95% interval 1.18-1.24) on 8,160 tokens of text that the base "
        "model generated, recall 81% -> 79%"
    )


@pytest.mark.parametrize("gpu", [True, False])
def test_the_target_converts_and_shows_samples(gpu: bool, tmp_path: Path) -> None:
    """It takes torch's builds for CPUs unless there is an NVIDIA GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: a GPU'\n" if gpu else "#!/bin/sh\nexit 1\n")
    tool.chmod(0o755)
    done = subprocess.run(
        ["make", "-n", "try", f"TRY={tmp_path / 'environment'}"],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    quick = "--method calibrated --overwrite"
    assert f"gqa-convert --kv-heads 2 {quick} examples/stdlib-mha\n" in done.stdout
    assert "examples/try.py examples/stdlib-mha examples/stdlib-mha-gqa2-calibrated" in done.stdout
    assert ("whl/cpu" in done.stdout) is not gpu
    assert "hundreds of MB" in done.stdout
    assert f". {tmp_path}/environment/bin/activate" in done.stdout
