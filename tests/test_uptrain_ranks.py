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
from processes import free_port
from training import Runs, difference, losses, metrics, tiny_checkpoint, write_corpus

from gqa.uptrain.state import States

STEPS = 3


WAYS = {"4x2": (1, 2), "2 ranks x 2x2": (2, 2)}
LAUNCHED = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}  # as launchers may set it
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled": {"train": "kv", "optimizer": "adafactor", "teacher": "teacher", "distill": 0.5, "temperature": 2.0},
}


@pytest.mark.parametrize("name", RUNS)
def test_accumulation_and_ranks_change_nothing(runs: Runs, tmp_path: Path, name: str) -> None:
    options = {"steps": STEPS, "batch_size": 8, "heldout_fraction": 0.2} | RUNS[name]
    runs.finish(*runs.words(tmp_path / "8x1", micro_batch=1, **options))
    for way, (ranks, micro) in WAYS.items():
        runs.finish(*runs.words(tmp_path / way, micro_batch=micro, **options), ranks=ranks, **LAUNCHED)
        assert difference(tmp_path / way, tmp_path / "8x1") <= 1e-5, way
        one, other = (metrics(tmp_path / run / "gqa_uptraining.jsonl") for run in (way, "8x1"))
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, rel=1e-5), way
    runs.finish(*runs.words(tmp_path / "control", **options | {"batch_size": 4}))
    assert difference(tmp_path / "control", tmp_path / "8x1") > 1e-4


DEATHS = {  # where one process is killed, and for what another then waits
    "gqa.uptrain.dataloader.tokenise": (0, "the text to be tokenised"),
    "gqa.uptrain.loop._count": (1, "its share of a step"),
    "gqa.uptrain.state.States._complete": (1, "its share of a step"),
    "gqa.uptrain.run._export": (0, "the result to be written"),
}


@pytest.mark.parametrize(("place", "how"), DEATHS.items())
def test_when_a_process_dies_the_others_say_so(runs: Runs, tmp_path: Path, place: str, how: tuple[int, str]) -> None:
    dead, what = how
    before = f"os.environ['RANK'] == '{dead}' and die_in({place!r})"
    words = runs.words(tmp_path / "out", steps=4, save_every=2)
    processes = runs.begin_ranks(*words, ranks=2, before=before)
    assert processes[dead].wait() == -signal.SIGKILL
    assert processes[1 - dead].wait() == 1
    *_, last = processes[1 - dead].said().splitlines()
    assert last.startswith("gqa-uptrain: a process of this run has ended or does not answer, and the others wait for")
    assert f"wait for {what}; see its output" in last


def test_sharded_weights_change_nothing(runs: Runs, tmp_path: Path) -> None:
    """FSDP2: losses and exported weights are DDP's; a killed run continues from its shards, also without any, and
    from what was whole; with tied weights that one process reads.
    """
    words = {"model": "tied", "steps": 4, "teacher": "teacher", "save_every": 2, "keep_state": True}
    whole, sharded, alone, began = (tmp_path / name for name in ("ddp", "fsdp", "alone", "began"))
    runs.finish(*runs.words(whole, **words), ranks=2)
    killed = runs.run(*runs.words(sharded, **words), ranks=2, before="shard(True); kill_at(3)")
    assert killed.code == -signal.SIGKILL
    files = {path.name for path in States(Path(f"{sharded}-state"), 2).latest()[0].rglob("*.distcp")}
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
    told = str(tmp_path / "told")
    for way, before in (("ddp", ""), ("fsdp", "shard(); ")):
        runs.finish(*runs.words(tmp_path / way, **words), ranks=4, before=f"{before}tell_teacher({told + way!r})")
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=1e-6)
    assert difference(tmp_path / "fsdp", tmp_path / "ddp") <= 1e-6
    held = {
        way: {int(n) for rank in range(4) for n in Path(f"{told}{way}-{rank}").read_text().split()}
        for way in ("ddp", "fsdp")
    }
    assert len(held["ddp"]) == 1
    assert max(held["fsdp"]) <= 0.3 * max(held["ddp"])


def test_sharded_weights_in_bfloat16_give_the_numbers_of_whole_ones(runs: Runs, tmp_path: Path) -> None:
    """Sums leave the model in float32, and gradients are added in float32, micro-batch by micro-batch into shards:
    accelerate rounds all of that, and keeps whole gradients meanwhile.
    """
    words = {"steps": 3, "teacher": "teacher", "precision": "bfloat16", "micro_batch": 2}
    runs.finish(*runs.words(tmp_path / "ddp", **words), ranks=2)
    told = f"shard(); tell_gradients({str(tmp_path / 'told')!r})"
    runs.finish(*runs.words(tmp_path / "fsdp", **words), ranks=2, before=told)
    one, other = (metrics(tmp_path / way / "gqa_uptraining.jsonl") for way in ("ddp", "fsdp"))
    for expected, found in zip(one, other, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
    numbers = sum(tensor.numel() for tensor in load(tmp_path / "ddp").values())
    for rank in (0, 1):
        passes = [json.loads(line) for line in (tmp_path / f"told-{rank}").read_text().splitlines()]
        assert len(passes) == 6
        assert all(held < 0.6 * numbers for held, _ in passes), passes
        assert all(exact < 0.9 for _, exact in passes), passes


ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "adapters": ({"train": "lora", "lora_rank": 4, "steps": 2}, {"ranks": 2, "before": "shard()"}, 1e-6),
    "towers": ({"model": "nested"}, {"ranks": 1}, 1e-5),
}


@pytest.mark.parametrize("name", ALIKE)
def test_adapters_and_towers(runs: Runs, tmp_path: Path, name: str) -> None:
    """Adapters may be sharded. Text does not reach towers: DDP waits for every gradient that it expects."""
    options, how, most = ALIKE[name]
    words = {"steps": STEPS} | options
    runs.finish(*runs.words(tmp_path / "ddp", **words), ranks=2)
    runs.finish(*runs.words(tmp_path / "other", **words), **how)
    assert difference(tmp_path / "ddp", tmp_path / "other") <= most


def test_others_wait_for_the_first_process_longer_than_a_collective_would(runs: Runs, tmp_path: Path) -> None:
    """Text, states, and the result of shards are work of one process."""
    words = runs.words(tmp_path / "out", steps=2, save_every=2, keep_state=True)
    runs.finish(*words, ranks=2, before="shard(); slow(5, 4)")
    assert len(losses(tmp_path / "out")) == 2


def test_a_process_that_dies_is_not_waited_for(runs: Runs, tmp_path: Path) -> None:
    """The others end with one line that names what they wait for."""
    words = runs.words(tmp_path / "out", steps=1)
    dies = "import gqa.uptrain.setup as m; m.open_dataloader = lambda *_: os._exit(7)"
    port, running = free_port(), []
    for rank, before in enumerate((dies, "")):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        told = {name: str(value) for name, value in place.items()}
        running.append(runs.begin(*words, before=before, program="uptrain", **told))
    assert [one.wait() for one in running] == [7, 1]
    assert "the others wait for the text to be tokenised" in running[1].said().splitlines()[-1]


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


def test_the_launcher_says_the_precision(runs: Runs, tmp_path: Path) -> None:
    """accelerate's configuration files and --mixed_precision; what the command says itself goes before."""
    for given, expected in ((None, "bfloat16"), ("float32", "float32")):
        out = tmp_path / expected
        runs.finish(*runs.words(out, steps=1, precision=given), ACCELERATE_MIXED_PRECISION="bf16")
        assert json.loads((out / "gqa_uptraining.json").read_text())["options"]["precision"] == expected


def test_trackers_end_nothing_that_ranks_share(runs: Runs, tmp_path: Path) -> None:
    """accelerate's own end of training takes the processes' group away, and the result is not written yet."""
    notes = (
        "import unittest.mock, accelerate.tracking as t; t.LOGGER_TYPE_TO_CLASS['notes'] = unittest.mock.MagicMock()"
    )
    runs.finish(*runs.words(tmp_path / "out", steps=1, report_to="notes"), ranks=2, before=notes)


def test_the_teacher_writes_text_once(runs: Runs, tmp_path: Path) -> None:
    """In the first process; all read the same."""
    for ranks in (1, 2):
        cache, told = str(tmp_path / f"cache{ranks}"), str(tmp_path / f"told{ranks}")
        words = runs.words(tmp_path / str(ranks), teacher="teacher", context=16, heldout_tokens=128)
        words[words.index("--data") + 1] = "self:1K"
        runs.finish(*words, ranks=ranks, before=f"keep_samples({cache!r}, 4, {told!r})")
    assert (tmp_path / "told1-0").read_text() == (tmp_path / "told2-0").read_text()
    assert not (tmp_path / "told2-1").exists()
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
