"""`gqa-eval` as its user meets it: the output, with every option that has no test of its own."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import edit_json, run
from embedded import SOURCE, copy_source
from evaluations import evaluate_models, model_directory, refused, results, words
from hub_server import Hub
from training import Runs

from gqa.eval import subjects
from gqa.eval.subjects import Subject

ROOT = Path(__file__).parents[1]
LOAD = Subject.load


def test_the_tables() -> None:
    verdicts, quality, memory = (
        part.splitlines() for part in evaluate_models("SRC G4 G2 --data TEXT").out.split("\n\n")
    )
    assert [line.partition(", ")[0] for line in verdicts] == [
        "gqa4: 4 of 8 heads: KV cache 2x smaller", "gqa2: 2 of 8 heads: KV cache 4x smaller"
    ]  # fmt: skip
    assert quality[0] == f"Quality on {model_directory() / 'text.jsonl'}"
    assert [line.split()[0] for line in quality[1:5]] == ["model", "stdlib-mha", "gqa4", "gqa2"]
    perplexities = [float(line.split()[2]) for line in quality[2:5]]
    assert perplexities == sorted(perplexities)
    ratios = [float(line.split()[3]) for line in quality[3:5]]
    assert ratios == pytest.approx([value / perplexities[0] for value in perplexities[1:]], rel=1e-3)
    assert re.match("rolling windows of 512 tokens: .* bytes; in bfloat16$", " ".join(quality[5:]))
    assert [line.split()[3:6:2] for line in memory[2:]] == [["6.0", "1"], ["3.0", "0.5"], ["1.5", "0.25"]]


def test_printed_numbers_do_not_depend_on_the_batch_size() -> None:
    line = "SRC G2 --data TEXT --tokens 300 --kl"
    printed = {evaluate_models(f"{line} --context 128 --batch-size {size}").out for size in (1, 64)}
    assert len(printed) == 1
    assert evaluate_models(f"{line} --context 127").out not in printed


def test_the_default_context_is_that_of_the_model(tmp_path: Path) -> None:
    """The tables show the default of 512."""
    short = copy_source(tmp_path)
    edit_json(short / "config.json", lambda config: config.update(max_position_embeddings=100))
    assert results(f"{short} --data TEXT --tokens 300")["text"]["context"] == 100


def test_memory() -> None:
    """What fits of 512 tokens, and at all: 6 layers of 32 numbers a key or a value, in 2 bytes each."""
    result = run(*words("SRC G2 --memory 80GB --json"), program="gqa-eval")
    assert "80 GB hold weights and KV cache (act" in " ".join(result.err.split())
    for model, heads in zip(json.loads(result.out)["models"], (8, 2), strict=True):
        free, token = 80 * 10**9 - model["weight_bytes"], 2 * 6 * heads * 32 * 2
        assert model["kv_cache"]["fits"] == {"batch": free // (512 * token), "longest": free // token}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[Any]]]:
    """Of each model that is loaded: how many are in memory before, and the devices that have its layers."""
    models, noted = list[Any](), list[tuple[int, set[Any]]]()

    def load(subject: Subject, *args: Any) -> Any:
        alive, model = sum(reference() is not None for reference in models), LOAD(subject, *args)
        models.append(weakref.ref(model))
        noted.append((alive, set(getattr(model, "hf_device_map", {"": None}).values())))
        return model

    monkeypatch.setattr(Subject, "load", load)
    return noted


def test_one_model_is_in_memory_at_a_time(loads: list[tuple[int, set[Any]]]) -> None:
    """But to be timed all are loaded at once, and with --kl one beside the baseline."""
    results("SRC G4 G2 --data TEXT --context 64 --tokens 100 --decode --decode-contexts 8 --decode-steps 1")
    results("SRC G4 G2 --data TEXT --context 64 --tokens 100 --kl")
    assert [alive for alive, _ in loads] == [0, 1, 2, 0, 0, 0, 0, 1, 1]


def test_a_model_larger_than_memory(loads: list[tuple[int, set[Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that memory does not hold are read from the disk, with the same scores; decoding too."""
    line = "SRC G2 --data TEXT --context 128 --tokens 200 --precision float32 --kl --decode --decode-contexts 8 "
    line += "--decode-steps 1 --decode-batches 2"
    whole = results(line)
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 12_000_000})
    spread = results(f"{line} --device auto")
    assert [devices for _, devices in loads] == [{None}] * 4 + [{"cpu", "disk"}] * 4
    for ours, theirs in zip(spread["models"], whole["models"], strict=True):
        assert ours["quality"]["nats"] == pytest.approx(theirs["quality"]["nats"], rel=1e-6)
        assert len(ours["decode"]["points"]) == len(theirs["decode"]["points"]) == 1
    kl = [result["models"][1]["against_baseline"]["kl"]["mean"] for result in (spread, whole)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-5)
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 1000})
    assert "the embedding of" in refused("SRC --data TEXT --device auto")
    two = SimpleNamespace(num_processes=2, is_main_process=True)
    monkeypatch.setattr(subjects, "ranks", lambda: two)
    assert "--device auto is for one process, and there are 2" in refused("SRC --data TEXT --device auto")


def test_ranks_print_one_result(runs: Runs) -> None:
    """Nor does anything that they print depend on how many shared the work."""
    line = words("SRC G2 --data TEXT --context 64 --tokens 500 --precision float32 --kl")
    assert runs.finish(*line, ranks=2, program="eval").out == run(*line, program="gqa-eval").out


def test_hub_ids(tmp_path: Path, hub: Hub, runs: Runs) -> None:
    """Of models, and of a data set's configuration, whose test split is the default."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copyfile(model_directory() / "text.jsonl", data / "test.jsonl")
    (data / "train.jsonl").write_text(json.dumps({"text": "import os\n" * 99, "other": ""}) + "\n")
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files:\n  - {split: train, path: train.jsonl}\n"
        "  - {split: test, path: test.jsonl}\n---\n"
    )
    hub.repo("lab/mha", SOURCE)
    hub.repo("lab/data", data)
    commit = hub.repo("lab/gqa", model_directory() / "gqa2").refs["main"]
    line = words("lab/mha lab/gqa --data lab/data:a --context 64 --json -q --revision main")
    at = f"at_hub({hub.endpoint!r}, {str(tmp_path / 'home')!r}, 'one')"
    result = runs.finish(*line, program="eval", before=at)
    assert result.err == ""
    models = json.loads(result.out)["models"]
    assert [model["name"] for model in models] == ["lab/mha", "lab/gqa"]
    assert models[1]["revision"] == commit
    local = results("SRC G2 --data TEXT --context 64")["models"]
    assert [model["quality"] for model in models] == [model["quality"] for model in local]
