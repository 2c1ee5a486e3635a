"""benchmarks/gpu.py: every part runs with tiny models on a CPU, once.

Questions and peers of benchmarks/trust.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.embedded import SOURCE, texts

ROOT = Path(__file__).parents[1]


@pytest.mark.scale  # every part of it, launchers of one rank too
def test_every_part(tmp_path: Path) -> None:
    """The command, which finds gqa itself; the same again has nothing left to do."""
    (text := tmp_path / "text.txt").write_text("\n".join(texts(3)))
    words = [
        sys.executable,
        ROOT / "benchmarks/gpu.py",
        "--tiny",
        "--out",
        tmp_path,
        "--work",
        tmp_path / "work",
    ]
    words += ["--smollm2", SOURCE, "--text", text, "--minutes", "60"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_"))
    }
    for again in (False, True):
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.count(f"complete in {tmp_path}\n") == (5 if again else 0), (
            done.stdout + done.stderr
        )
    lines = {
        path.stem: map(json.loads, path.read_text().splitlines())
        for path in tmp_path.glob("*.jsonl")
    }
    rows = {part: {row.pop("name"): row for row in of_part} for part, of_part in lines.items()}
    for of_part in rows.values():
        assert [*of_part][:: len(of_part) - 1] == ["device", "complete"]
        del of_part["device"], of_part["complete"]
    decode = rows["decode"]
    assert (
        decode["sdpa 2 heads 32 context 1 batch"]["bytes"]
        < decode["sdpa 8 heads 32 context 1 batch"]["bytes"]
    )
    assert decode["sdpa 8 heads 32 context largest batch"]["batch"] == 3  # of 4 that are free
    assert all(row["tokens_per_second"] > 0 for name, row in decode.items() if name != "bandwidth")
    assert [*rows["convert"]] == ["calibrated", "refined"]
    assert len(rows["convert"]["calibrated"]["seconds"]) > 2  # stages
    assert [*rows["uptrain"]] == [
        "matrix product",
        "plain",
        "checkpointing",
        "one rank",
        "one rank fsdp2",
    ]
    for part, name in (("distill", "1 heads 512 tokens"), ("smollm2", "1 head")):
        row = rows[part][name]
        assert row["losses"]["distillation_after"] < row["losses"]["distillation_before"]
        assert [model["quality"]["tokens"] > 0 for model in row["text.txt"]] == [True] * 3


def test_answers_of_closed_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/trust.py: the expected answer is right, in code so is another one that returns the
    same; a wrong line, an error, and what needs more than a few builtins are not.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import trust  # type: ignore[import-not-found]

    questions = {kind: expected for kind, _, expected in trust.questions()}
    assert [
        trust.is_right(questions[kind], questions[kind]) for kind in ("copy", "variable", "sum")
    ] == [True] * 3
    assert not trust.is_right("0", questions["sum"])
    function = trust.FUNCTIONS[0]
    answers = (function[2], "sum([b, a])", "a - b", "a +", "open('x') or a + b")
    assert [trust.is_right(code, function) for code in answers] == [True, True, False, False, False]


def test_peers_keep_whole_heads_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head with the larger output is the one that is left; attention that changes nothing is
    removed first.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import trust
    from harness import Shape, random_llama  # type: ignore[import-not-found]

    model, ids = random_llama(Shape(32, 64, 2, 4, 4, 64)), torch.arange(20)[None]
    first, second = (layer.self_attn for layer in model.model.layers)
    with torch.no_grad():
        first.v_proj.weight[8:16] *= 100.0  # of the second head
        second.o_proj.weight *= 1e-3
    keys, output = first.k_proj.weight[8:16].clone(), first.o_proj.weight.clone()
    trust.remove_attention(model, 2, ids)
    assert (second.o_proj.weight == 0).all()
    assert first.o_proj.weight.equal(output)
    trust.keep_strongest(model, 2, ids)
    assert first.k_proj.weight[:8].equal(keys)
    assert first.v_proj.weight.shape == (16, 32)
    assert model.config.num_key_value_heads == 2
