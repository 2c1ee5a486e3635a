"""examples/accelerate: accelerate reads every file as it is meant, and those that CPUs can follow are launched."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from processes import free_port
from training import Runs

from gqa.uptrain.cli import command

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))
BY_NAME = {path.stem: path for path in CONFIGS}


def arguments(name: str, *more: str) -> argparse.Namespace:
    """What `accelerate launch` makes of a file."""
    given = launch_command_parser().parse_args(
        ["--config_file", str(BY_NAME[name]), *more, "-m", "gqa.uptrain", "MODEL"]
    )
    found: argparse.Namespace = _validate_launch_command(given)[0]
    return found


def test_every_key_is_accelerates_own(tmp_path: Path) -> None:
    """accelerate itself refuses unknown keys at the top and ignores those of its sections."""
    assert set(BY_NAME) == {"one-gpu", "ddp", "fsdp2", "two-nodes", "fsdp2-two-nodes"}
    known = {action.dest for action in launch_command_parser()._actions}
    for path in CONFIGS:
        config = load_config_from_file(str(path))
        assert config.mixed_precision == "bf16"
        assert {*config.fsdp_config} <= known, path
        assert config.num_processes % config.num_machines == 0
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(BY_NAME["ddp"].read_text() + "num_proceses: 8\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(wrong))


def test_processes_and_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate starts, and what such a process makes of its environment."""
    one = arguments("one-gpu")
    assert (one.num_processes, one.multi_gpu, one.use_fsdp) == (1, False, False)
    for name, nodes in (("ddp", 1), ("fsdp2", 1), ("two-nodes", 2), ("fsdp2-two-nodes", 2)):
        launched = arguments(name)
        assert launched.multi_gpu != launched.use_fsdp
        environment = prepare_multi_gpu_env(launched)
        assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert (launched.num_machines, launched.nproc_per_node) == (nodes, "8")
        if launched.use_fsdp:
            for variable in environment:
                if variable.startswith(("FSDP_", "ACCELERATE_")):
                    monkeypatch.setenv(variable, environment[variable])
            fsdp = FullyShardedDataParallelPlugin()
            assert (fsdp.fsdp_version, fsdp.reshard_after_forward, fsdp.activation_checkpointing) == (2, True, False)
            assert fsdp.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
            assert fsdp.state_dict_type.name == "SHARDED_STATE_DICT"
    second = arguments("two-nodes", "--machine_rank", "1", "--main_process_ip", "node0")
    prepare_multi_gpu_env(second)
    assert (second.nnodes, second.node_rank, second.rdzv_endpoint) == ("2", 1, "node0:29500")


@pytest.mark.parametrize(("name", "variable"), [("DeepSpeed", "DEEPSPEED"), ("FSDP1", "FSDP")])
def test_deepspeed_and_fsdp1_are_refused(name: str, variable: str, runs: Runs, tmp_path: Path) -> None:
    """Before anything is written. FSDP without a version is version 1."""
    done = runs.run(*runs.words(tmp_path / "out", steps=1), **{f"ACCELERATE_USE_{variable}": "true"})
    message = f"gqa-uptrain: a configuration of {name} is not for gqa-uptrain; use examples/accelerate/fsdp2.yaml\n"
    assert (done.code, done.err) == (2, message)
    assert not list(tmp_path.glob("out*"))


def test_the_commands_in_comments_parse() -> None:
    options = {name for parameter in command.params for name in parameter.opts}
    for path in CONFIGS:
        comment = "\n".join(line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#"))
        line = re.search(r"accelerate launch (.*)", comment.replace("\\\n", " "))
        assert line, path
        found = launch_command_parser().parse_args(shlex.split(line[1]))
        assert Path(found.config_file) == path.relative_to(ROOT)
        assert (found.module, found.training_script) == (True, "gqa.uptrain")
        assert {word for word in found.training_script_args if word.startswith("-")} <= options


@pytest.mark.scale  # launchers of two nodes
def test_two_nodes_train_as_one(runs: Runs, tmp_path: Path) -> None:
    """Two launchers, on CPUs, of which one tells for both; --precision, because bfloat16 is not equal for other shares
    of a batch.
    """

    def words(name: str) -> list[str]:
        return runs.words(tmp_path / name, steps=2, batch_size=4, precision="float32", warmup=0, quiet=False, json=True)

    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(BY_NAME["two-nodes"])]
    launch += ["--num_processes", "2", "--main_process_port", free_port(), "--machine_rank"]
    running = [
        subprocess.Popen(
            [*launch, str(rank), "-m", "gqa.uptrain", *words("nodes")], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    runs.finish(*words("one"))
    for process in running:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said[-3000:]
        assert said.count("written     ") == said.count('{"tool": "gqa-uptrain"') == (process is running[0]), said
    one, both = (json.loads((tmp_path / name / "gqa_uptraining.json").read_text()) for name in ("one", "nodes"))
    assert [found["ranks"] for found in (one, both)] == [1, 2]
    assert both["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert one["losses"]["heldout_after"] < one["losses"]["heldout_before"]
