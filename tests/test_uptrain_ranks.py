"""However the blocks of a step are shared out, the result is the same: micro-batches, ranks, sharded weights."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load
from hub_server import Hub, Machine
from training import Runs, difference, losses, metrics, tiny_checkpoint, write_corpus

from gqa.uptrain.state import States

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled": {"train": "kv", "optimizer": "adafactor", "teacher": "teacher", "distill": 0.5, "temperature": 2.0},
}


@pytest.mark.parametrize("name", RUNS)
def test_accumulation_and_ranks_change_nothing(runs: Runs, tmp_path: Path, name: str) -> None:
    options = {"steps": 3, "batch_size": 8, "heldout_fraction": 0.2} | RUNS[name]
    runs.finish(*runs.words(tmp_path / "8x1", micro_batch=1, **options))
    for way, (ranks, micro) in {"4x2": (1, 2), "2 ranks x 2x2": (2, 2)}.items():
        words = runs.words(tmp_path / way, micro_batch=micro, **options)
        runs.finish(*words, ranks=ranks, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="1")  # as launchers may set it
        assert difference(tmp_path / way, tmp_path / "8x1") <= 1e-5, way
        one, other = (metrics(tmp_path / run / "gqa_uptraining.jsonl") for run in (way, "8x1"))
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, rel=1e-5), way
    runs.finish(*runs.words(tmp_path / "control", **options | {"batch_size": 4}))
    assert difference(tmp_path / "control", tmp_path / "8x1") > 1e-4


def test_sharded_weights_change_nothing(runs: Runs, tmp_path: Path) -> None:
    """FSDP2: losses and exported weights are DDP's; a killed run continues from its shards, also without any, and
    from what was whole; with tied weights that one process reads.
    """
    words = {"model": "tied", "steps": 4, "teacher": "teacher", "save_every": 2, "keep_state": True}
    whole, sharded, alone, began = (tmp_path / name for name in ("ddp", "fsdp", "alone", "began"))
    runs.finish(*runs.words(whole, **words), ranks=2)
    killed = runs.run(*runs.words(sharded, **words), ranks=2, before="shard(True); kill_at(3)")
    assert killed.code == -signal.SIGKILL
    files = {path.name for path in States(Path(f"{sharded}-state")).latest()[0].rglob("*.distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp"}, "nothing was sharded"
    shutil.copytree(f"{sharded}-state", f"{alone}-state")
    runs.run(*runs.words(began, **words), before="kill_at(3)")
    for continued, how in ((sharded, {"ranks": 2, "before": "shard(True)"}), (alone, {}),
                           (began, {"ranks": 2, "before": "shard()"})):  # fmt: skip
        runs.finish(*runs.words(continued, **words), "--resume", **how)
        assert losses(continued) == pytest.approx(losses(whole), rel=1e-6)
        assert continued is began or difference(continued, whole) <= 1e-6


@pytest.mark.scale  # four processes
def test_a_teacher_is_shared_out_too(runs: Runs, tmp_path: Path) -> None:
    """Each of four processes holds a quarter of it and little more between its passes, and it teaches the same."""
    words = {"steps": 2, "batch_size": 8, "teacher": "teacher"}
    numbers = {}
    for way, before in (("ddp", ""), ("fsdp", "shard(); ")):
        notes = tmp_path / f"{way}-notes"
        runs.finish(*runs.words(tmp_path / way, **words), ranks=4, before=f"{before}note_teacher({str(notes)!r})")
        numbers[way] = {int(n) for rank in range(4) for n in Path(f"{notes}-{rank}").read_text().split()}
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-6)
    assert difference(tmp_path / "fsdp", tmp_path / "ddp") <= 1e-6
    assert len(numbers["ddp"]) == 1
    assert max(numbers["fsdp"]) <= 0.3 * max(numbers["ddp"])


def test_sharded_weights_in_bfloat16_give_the_numbers_of_whole_ones(runs: Runs, tmp_path: Path) -> None:
    """Sums leave the model in float32, and gradients are added in float32, micro-batch by micro-batch into shards:
    accelerate rounds all of that, and keeps whole gradients meanwhile.
    """
    words = {"steps": 3, "teacher": "teacher", "precision": "bfloat16", "micro_batch": 2}
    runs.finish(*runs.words(tmp_path / "ddp", **words), ranks=2)
    before = f"shard(); note_gradients({str(tmp_path / 'notes')!r})"
    runs.finish(*runs.words(tmp_path / "fsdp", **words), ranks=2, before=before)
    one, other = (metrics(tmp_path / way / "gqa_uptraining.jsonl") for way in ("ddp", "fsdp"))
    for expected, result in zip(one, other, strict=True):
        assert result == pytest.approx(expected, rel=1e-3)
    numbers = sum(tensor.numel() for tensor in load(tmp_path / "ddp").values())
    for rank in (0, 1):
        passes = [json.loads(line) for line in (tmp_path / f"notes-{rank}").read_text().splitlines()]
        assert len(passes) == 6
        assert all(size < 0.6 * numbers and exact < 0.9 for size, exact in passes), passes


ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "adapters": ({"train": "lora", "lora_rank": 4, "steps": 2}, {"ranks": 2, "before": "shard()"}, 1e-6),
    "towers": ({"model": "nested"}, {"ranks": 1}, 1e-5),
}


@pytest.mark.parametrize("name", ALIKE)
def test_adapters_and_towers(runs: Runs, tmp_path: Path, name: str) -> None:
    """Adapters may be sharded. Text does not reach towers: DDP waits for every gradient that it expects."""
    options, how, most = ALIKE[name]
    words = {"steps": 3} | options
    runs.finish(*runs.words(tmp_path / "ddp", **words), ranks=2)
    runs.finish(*runs.words(tmp_path / "other", **words), **how)
    assert difference(tmp_path / "ddp", tmp_path / "other") <= most


def test_processes_wait_for_hours_and_fail_together(runs: Runs, tmp_path: Path) -> None:
    """For the first process, which reads text and writes the result alone."""
    check = """
import torch.distributed as dist
init = dist.init_process_group
def init_process_group(*given, **options):
    note(NOTES, options["timeout"].total_seconds())
    return init(*given, **options)
dist.init_process_group = init_process_group
"""
    notes, empty = tmp_path / "notes", tmp_path / "empty.jsonl"
    empty.write_text("")
    words = [*runs.words(tmp_path / "out", steps=1), "--data", empty]
    done = runs.run(*words, ranks=2, before=check.replace("NOTES", repr(str(notes))))  # all have the same exit code
    assert done.code == 2
    assert "holds no text" in done.err
    assert [Path(f"{notes}-{rank}").read_text() for rank in (0, 1)] == ["21600.0\n"] * 2


def test_hub_ids(tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    """Model, teacher and a streamed data set by their names on a hub; a dry run fetches no weights."""
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data" / "train.jsonl")
    hub.repo("lab/mha", tiny_checkpoint(tmp_path / "mha", kv_heads=4))
    hub.repo("lab/mha-gqa2", tiny_checkpoint(tmp_path / "gqa2"))
    hub.repo("lab/data", tmp_path / "data")
    words = ["--data", "lab/data", "--streaming", "--tokens", "1K", "--heldout-tokens", "1K"]
    words += ["--teacher", "lab/mha", "-o", "out", "--json", "-q"]
    dry = machine.run("lab/mha-gqa2", *words, "--dry-run", program="gqa-uptrain")
    assert dry.code == 0, dry.err
    assert not [*machine.work.parent.rglob("snapshots/*/*.safetensors")], "headers are enough for the plan"
    done = machine.run("lab/mha-gqa2", *words, program="gqa-uptrain")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert (record["model"], record["teacher"], record["data"]) == ("lab/mha-gqa2", "lab/mha", ["lab/data"])
    assert (record["tokens"], record["steps"], record["ranks"]) == (960, 15, 1)
    assert load(machine.work / "out").keys() == load(tmp_path / "gqa2").keys()


@pytest.mark.parametrize(("precision", "expected"), [(None, "bfloat16"), ("float32", "float32")])
def test_the_launcher_says_the_precision(runs: Runs, tmp_path: Path, precision: str | None, expected: str) -> None:
    """accelerate's configuration files and --mixed_precision; what the command says itself goes before."""
    words = runs.words(tmp_path / "out", steps=1, precision=precision)
    runs.finish(*words, ACCELERATE_MIXED_PRECISION="bf16")
    assert json.loads((tmp_path / "out" / "gqa_uptraining.json").read_text())["options"]["precision"] == expected


def test_the_teacher_writes_text_once(runs: Runs, tmp_path: Path) -> None:
    """In the first process; all read the same."""
    for ranks in (1, 2):
        cache, notes = str(tmp_path / f"cache{ranks}"), str(tmp_path / f"notes{ranks}")
        words = runs.words(tmp_path / str(ranks), teacher="teacher", context=16, heldout_tokens=128)
        words[words.index("--data") + 1] = "self:1K"
        runs.finish(*words, ranks=ranks, before=f"keep_samples({cache!r}, 4, {notes!r})")
    assert (tmp_path / "notes1-0").read_text() == (tmp_path / "notes2-0").read_text()
    assert not (tmp_path / "notes2-1").exists()
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
