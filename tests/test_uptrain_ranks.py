"""However the blocks of a step are shared out, the result is the same: micro-batches, ranks,
sharded weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from support.checkpoints import load
from support.faults import kill_at, shard
from support.hub_server import Hub, Machine
from support.patches import use_data_hub
from support.training import Runs, difference, losses, metrics, tiny_checkpoint, write_corpus

from gqa.uptrain.state import States

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled": {"train": "kv", "optimizer": "adafactor", "teacher": "teacher"},
}


@pytest.mark.parametrize("name", RUNS)
def test_accumulation_and_ranks_change_nothing(runs: Runs, tmp_path: Path, name: str) -> None:
    options = {"steps": 3, "batch_size": 8, "validation_fraction": 0.2} | RUNS[name]
    runs.finish(*runs.words(tmp_path / "8x1", micro_batch=1, **options))
    for way, (ranks, micro) in {"4x2": (1, 2), "2 ranks x 2x2": (2, 2)}.items():
        words = runs.words(tmp_path / way, micro_batch=micro, **options)
        # As launchers may set it
        runs.finish(*words, ranks=ranks, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="1")
        assert difference(tmp_path / way, tmp_path / "8x1") <= 1e-5, way
        one, other = (metrics(tmp_path / run / "gqa_uptraining.jsonl") for run in (way, "8x1"))
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, rel=1e-5), way
    runs.finish(*runs.words(tmp_path / "control", **options | {"batch_size": 4}))
    assert difference(tmp_path / "control", tmp_path / "8x1") > 1e-4


def test_sharded_weights_change_nothing(runs: Runs, tmp_path: Path) -> None:
    """FSDP2: losses and exported weights are DDP's; a killed run continues from its shards, also
    without any, and from what was whole; with tied weights that one process reads.
    """
    words = {"model": "tied", "steps": 4, "teacher": "teacher", "save_every": 2, "keep_state": True}
    words["learning_rate"] = "0.3%"  # of whole weights, of which each process has a shard
    whole, sharded, alone, began = (tmp_path / name for name in ("ddp", "fsdp", "alone", "began"))
    runs.finish(*runs.words(whole, **words), ranks=2)
    killed = runs.run(
        *runs.words(sharded, **words), ranks=2, before=[partial(shard, True), partial(kill_at, 3)]
    )
    assert killed.code == -signal.SIGKILL
    latest = States(Path(f"{sharded}-state"), Path(sharded)).latest()
    files = {path.name for path in latest.path.rglob("*.distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp"}, "nothing was sharded"
    shutil.copytree(f"{sharded}-state", f"{alone}-state")
    runs.run(*runs.words(began, **words), before=[partial(kill_at, 3)])
    for continued, how in (
        (sharded, {"ranks": 2, "before": [partial(shard, True)]}),
        (alone, {}),
        (began, {"ranks": 2, "before": [shard]}),
    ):
        runs.finish(*runs.words(continued, **words), **how)
        assert losses(continued) == pytest.approx(losses(whole), rel=1e-6)
        if continued is not began:
            assert difference(continued, whole) <= 1e-6


def test_sharded_weights_in_bfloat16_give_the_numbers_of_whole_ones(
    runs: Runs, tmp_path: Path
) -> None:
    """Sums leave the model in float32, and gradients are added in float32: accelerate rounds all of
    that.
    """
    words = {"steps": 3, "teacher": "teacher", "precision": "bfloat16", "micro_batch": 2}
    runs.finish(*runs.words(tmp_path / "ddp", **words), ranks=2)
    runs.finish(*runs.words(tmp_path / "fsdp", **words), ranks=2, before=[shard])
    one, other = (metrics(tmp_path / way / "gqa_uptraining.jsonl") for way in ("ddp", "fsdp"))
    for expected, result in zip(one, other, strict=True):
        assert result == pytest.approx(expected, rel=1e-3)


ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "adapters": (
        {"train": "lora", "lora_rank": 4, "steps": 2, "learning_rate": "0.3%"},
        {"ranks": 2, "before": [shard]},
        1e-6,
    ),
    "towers": ({"model": "nested"}, {"ranks": 1}, 1e-5),
}


@pytest.mark.parametrize("name", ALIKE)
def test_adapters_and_towers(runs: Runs, tmp_path: Path, name: str) -> None:
    """Adapters may be sharded.

    Text does not reach towers: DDP waits for every gradient that it expects.
    """
    options, how, most = ALIKE[name]
    words = {"steps": 3} | options
    runs.finish(*runs.words(tmp_path / "ddp", **words), ranks=2)
    runs.finish(*runs.words(tmp_path / "other", **words), **how)
    assert difference(tmp_path / "ddp", tmp_path / "other") <= most


def test_processes_fail_together(runs: Runs, tmp_path: Path) -> None:
    """The first process reads the text alone; all end with its error."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    # All have the same exit code
    done = runs.run(*runs.words(tmp_path / "out", steps=1), "--data", empty, ranks=2)
    assert done.code == 2
    assert "has no text" in done.err


def test_hub_ids(
    tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """Model, teacher and a streamed data set by their names on a hub."""
    use_data_hub(monkeypatch, hub.endpoint)
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data" / "train.jsonl")
    hub.repo("lab/mha", tiny_checkpoint(tmp_path / "mha", kv_heads=4))
    hub.repo("lab/mha-gqa2", tiny_checkpoint(tmp_path / "gqa2"))
    hub.repo("lab/data", tmp_path / "data")
    words = ["--data", "lab/data", "--streaming", "--tokens", "1K", "--validation-tokens", "1K"]
    words += ["--teacher", "lab/mha", "-o", "out", "--json", "-q"]
    done = machine.run("lab/mha-gqa2", *words, program="gqa-uptrain")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["model"] == "lab/mha-gqa2"
    assert record["teacher"] == "lab/mha"
    assert record["data"] == ["lab/data"]
    assert record["tokens"] == 960
    assert record["steps"] == 15
    assert record["ranks"] == 1
    assert load(machine.work / "out").keys() == load(tmp_path / "gqa2").keys()


@pytest.mark.parametrize(("precision", "expected"), [(None, "bfloat16"), ("float32", "float32")])
def test_the_launcher_says_the_precision(
    runs: Runs, tmp_path: Path, precision: str | None, expected: str
) -> None:
    """accelerate's configuration files and --mixed_precision; what the command says itself goes
    before.
    """
    words = runs.words(tmp_path / "out", steps=1, precision=precision)
    runs.finish(*words, ACCELERATE_MIXED_PRECISION="bf16")
    assert (
        json.loads((tmp_path / "out" / "gqa_uptraining.json").read_text())["options"]["precision"]
        == expected
    )


def test_all_processes_read_what_the_teacher_writes(runs: Runs, tmp_path: Path) -> None:
    for ranks in (1, 2):
        words = runs.words(
            tmp_path / str(ranks), teacher="teacher", context=16, validation_tokens=128
        )
        words[words.index("--data") + 1] = "self:1K"
        runs.finish(*words, ranks=ranks)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


# --------------------------------------------------------------------- configurations of accelerate

BY_NAME = {
    path.stem: path
    for path in (Path(__file__).parents[1] / "examples" / "accelerate").glob("*.yaml")
}


def launched(path: Path) -> argparse.Namespace:
    """What `accelerate launch` makes of a file."""
    words = ["--config_file", str(path), "-m", "gqa.uptrain", "MODEL"]
    arguments: argparse.Namespace = _validate_launch_command(
        launch_command_parser().parse_args(words)
    )[0]
    return arguments


def test_configurations_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is accelerate's own, which refuses unknown ones at the top and ignores those of its
    sections; what it starts, and what such a process makes of its environment.
    """
    known = {action.dest for action in launch_command_parser()._actions}
    for name, nodes in (
        ("one-gpu", 1),
        ("ddp", 1),
        ("fsdp2", 1),
        ("two-nodes", 2),
        ("fsdp2-two-nodes", 2),
    ):
        config, options = load_config_from_file(str(BY_NAME[name])), launched(BY_NAME[name])
        assert {*config.fsdp_config} <= known, name
        processes = 1 if name == "one-gpu" else 8 * nodes
        assert config.mixed_precision == "bf16"
        assert options.num_machines == nodes
        assert config.num_processes == processes
        assert options.multi_gpu == (name in ("ddp", "two-nodes"))
        assert options.use_fsdp == name.startswith("fsdp2")
        environment = prepare_multi_gpu_env(options) if processes > 1 else {}
        if options.use_fsdp:
            for variable in environment:
                if variable.startswith(("FSDP_", "ACCELERATE_")):
                    monkeypatch.setenv(variable, environment[variable])
            fsdp = FullyShardedDataParallelPlugin()
            assert fsdp.fsdp_version == 2
            assert fsdp.reshard_after_forward is True
            assert fsdp.activation_checkpointing is False
            assert fsdp.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
            assert fsdp.state_dict_type.name == "SHARDED_STATE_DICT"
    assert len(BY_NAME) == 5
    (tmp_path / "wrong.yaml").write_text(BY_NAME["ddp"].read_text() + "num_proceses: 8\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(tmp_path / "wrong.yaml"))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "gqa-uptrain does not run with DeepSpeed; use examples/acc",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true"},
            "gqa-uptrain does not run with FSDP1; use examples/accelerate",
        ),
        (
            {"before": [shard]},
            "--optimizer adafactor does not work with FSDP2, which shards weights; use adamw",
        ),
    ],
)
def test_launchers_that_are_refused(
    how: dict[str, Any], says: str, runs: Runs, tmp_path: Path
) -> None:
    """Before anything is written. FSDP without a version is version 1."""
    done = runs.run(*runs.words(tmp_path / "out", steps=1, optimizer="adafactor"), **how)
    done.expect(2, err_lines=1)
    assert done.err.startswith(f"gqa-uptrain: {says}")
    assert not list(tmp_path.glob("out*"))
