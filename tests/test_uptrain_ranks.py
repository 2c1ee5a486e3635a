"""However the blocks of a step are shared out, the result is the same: micro-batches, ranks, sharded weights."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load
from hub_server import Hub, Machine
from training import Runs, difference, losses, metrics, tiny_checkpoint, write_corpus

from gqa.uptrain.cli import command
from gqa.uptrain.state import States

LAUNCHED = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}  # as launchers may set it
SHARED = {"micro_batch": 2}, {"ranks": 2, **LAUNCHED}  # 2 processes, each with 2 x 2 blocks of a step
ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({"heldout_fraction": 0.2}, *SHARED),
    "documents": (
        {"mask_documents": True, "train": "kv", "optimizer": "adafactor", "heldout_fraction": 0.2,
         "teacher": "teacher", "distill": 0.5, "temperature": 2.0}, *SHARED,
    ),
    "adapters": ({"train": "lora", "lora_rank": 4, "micro_batch": 4}, {}, {"ranks": 2, "before": "shard()"}),
    "towers": ({"model": "nested", "micro_batch": 4}, {}, {"ranks": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_accumulation_and_ranks_change_nothing(runs: Runs, tmp_path: Path, name: str) -> None:
    """Adapters may be sharded. Text does not reach towers: DDP waits for every gradient that it expects."""
    options, changes, how = ALIKE[name]
    words = {"steps": 3, "batch_size": 8, "micro_batch": 1} | options
    runs.finish(*runs.words(tmp_path / "one", **words))
    runs.finish(*runs.words(tmp_path / "other", **words | changes), **how)
    assert difference(tmp_path / "other", tmp_path / "one") <= 1e-5
    found, expected = (metrics(tmp_path / out / "gqa_uptraining.jsonl") for out in ("other", "one"))
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    if changes:
        runs.finish(*runs.words(tmp_path / "control", **words | {"batch_size": 4}))
        assert difference(tmp_path / "control", tmp_path / "one") > 1e-4


WHOLE, SHARDED = "whole", "sharded"
CONTINUED = {"model": [(WHOLE, SHARDED)], "tied": [(SHARDED, SHARDED), (SHARDED, WHOLE)]}


@pytest.mark.parametrize("model", CONTINUED)
def test_sharded_weights_change_nothing(runs: Runs, tmp_path: Path, model: str) -> None:
    """FSDP2: losses and exported weights are those of one process; a run continues from its shards, also without any,
    and from what was whole.
    """
    words = {"model": model, "steps": 4, "teacher": "teacher", "save_every": 2, "keep_state": True}
    how: dict[str, Any] = {WHOLE: {}, SHARDED: {"ranks": 2, "before": f"shard({model == 'tied'})"}}
    for name, options in how.items():
        runs.finish(*runs.words(tmp_path / name, **words), **options)
    files = {path.name for path in States(tmp_path / "sharded-state", 2).latest()[0].rglob("*.distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp"}, "nothing was sharded"
    for before, after in CONTINUED[model]:
        state = tmp_path / f"{before}-{after}-state"
        shutil.copytree(tmp_path / f"{before}-state", state)
        shutil.rmtree(state / "step-00000004")
        runs.finish(*runs.words(tmp_path / f"{before}-{after}", **words), "--resume", **how[after])
    for name in (SHARDED, *map("-".join, CONTINUED[model])):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / WHOLE), rel=1e-6), name
        assert difference(tmp_path / name, tmp_path / WHOLE) <= 5e-6, name


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
    words = {"steps": 3, "batch_size": 8, "teacher": "teacher", "precision": "bf16", "micro_batch": 2}
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


def test_others_wait_for_the_first_process_longer_than_a_collective_would(runs: Runs, tmp_path: Path) -> None:
    """Text, states, and the result of shards are work of one process."""
    words = runs.words(tmp_path / "out", steps=2, save_every=2, keep_state=True)
    runs.finish(*words, ranks=2, before="shard(); slow(5, 4)")
    assert len(losses(tmp_path / "out")) == 2


@pytest.mark.usefixtures("alone")
def test_hub_ids(tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, teacher and a streamed data set by their names on a hub: the data set's present state has no text, the one
    that is asked for has.
    """
    for name, field in (("data", "text"), ("newer", "body")):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "train.jsonl", field=field)
    hub.repo("lab/mha", tiny_checkpoint(tmp_path / "mha", kv_heads=4))
    hub.repo("lab/mha-gqa2", tiny_checkpoint(tmp_path / "gqa2"))
    hub.repo("lab/data", tmp_path / "newer").add("v1", tmp_path / "data")
    words = ["--data", "lab/data", "--data-revision", "v1", "--streaming", "--tokens", "1K"]
    words += ["--teacher", "lab/mha", "-o", "out", "--json", "-q"]
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
    done = machine.run("lab/mha-gqa2", *words, program="gqa-uptrain")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert (record["model"], record["teacher"], record["data"]) == ("lab/mha-gqa2", "lab/mha", ["lab/data"])
    assert record["options"]["data_revision"] == "v1"
    assert (record["tokens"], record["steps"], record["ranks"]) == (960, 15, 1)
    assert load(machine.work / "out").keys() == load(tmp_path / "gqa2").keys()


def test_launchers_start_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `-m gqa.uptrain`, which is the command."""
    monkeypatch.setattr(sys, "argv", ["gqa-uptrain", "--cats"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("gqa.uptrain", run_name="__main__")


def test_the_launcher_says_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's configuration files and --mixed_precision; what the command says itself goes before."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for given, expected in (([], "bf16"), (["--precision", "no"], "no")):
        assert command.make_context("gqa-uptrain", ["MODEL", *given]).params["precision"] == expected


def test_trackers_end_nothing_that_ranks_share(runs: Runs, tmp_path: Path) -> None:
    """accelerate's own end of training takes the processes' group away, and the result is not written yet."""
    notes = (
        "import unittest.mock, accelerate.tracking as t; t.LOGGER_TYPE_TO_CLASS['notes'] = unittest.mock.MagicMock()"
    )
    runs.finish(*runs.words(tmp_path / "out", steps=1, report_to="notes"), ranks=2, before=notes)


def test_the_teacher_writes_text_on_all_ranks(runs: Runs, tmp_path: Path) -> None:
    """The same text, of which each wrote its share."""
    for ranks in (1, 2):
        cache, told = str(tmp_path / f"cache{ranks}"), str(tmp_path / f"told{ranks}")
        words = runs.words(tmp_path / str(ranks), teacher="teacher", context=16, heldout_tokens=64)
        words[words.index("--data") + 1] = "self:1K"
        runs.finish(*words, ranks=ranks, before=f"keep_samples({cache!r}, 4, {told!r})")
    written = [len((tmp_path / f"told{name}").read_text().split()) for name in ("1-0", "2-0", "2-1")]
    assert written[0] == written[1] + written[2]
    assert abs(written[1] - written[2]) <= 1
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
