"""examples/accelerate: accelerate reads every file as it is meant, and those that CPUs can follow are launched."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from embedded import converted

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "examples" / "accelerate").glob("*.yaml"))
BY_NAME = {path.stem: path for path in CONFIGS}


def arguments(path: Path, *more: str) -> argparse.Namespace:
    """What `accelerate launch` makes of a file."""
    given = launch_command_parser().parse_args(["--config_file", str(path), *more, "-m", "gqa.uptrain", "MODEL"])
    found: argparse.Namespace = _validate_launch_command(given)[0]
    return found


def read(path: Path) -> ClusterConfig:
    return load_config_from_file(str(path))


def test_all_are_there() -> None:
    assert set(BY_NAME) == {"one-gpu", "ddp", "fsdp2", "zero2", "zero3", "two-nodes"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_key_is_accelerates_own(path: Path) -> None:
    """accelerate itself refuses unknown keys at the top and ignores those of its sections."""
    config = read(path)
    assert config.mixed_precision == "bf16"
    known = {action.dest for action in launch_command_parser()._actions}
    for section in ("fsdp_config", "deepspeed_config"):
        for key in getattr(config, section):
            assert key in known, f"{section}: accelerate has no {key}"
    assert config.num_processes % config.num_machines == 0


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(BY_NAME["ddp"].read_text() + "num_proceses: 8\n")
    with pytest.raises(ValueError, match="num_proceses"):
        read(wrong)


def test_one_gpu_is_one_process() -> None:
    found = arguments(BY_NAME["one-gpu"])
    assert (found.num_processes, found.multi_gpu, found.use_fsdp, found.use_deepspeed) == (1, False, False, False)


@pytest.mark.parametrize(("name", "nodes"), [("ddp", 1), ("fsdp2", 1), ("two-nodes", 2)])
def test_processes_of_a_node(name: str, nodes: int) -> None:
    found = arguments(BY_NAME[name])
    assert found.multi_gpu != found.use_fsdp
    environment = prepare_multi_gpu_env(found)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (found.num_machines, found.nproc_per_node) == (nodes, "8")


def test_fsdp_is_the_second_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    environment = prepare_multi_gpu_env(arguments(BY_NAME["fsdp2"]))
    for name, value in environment.items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert not plugin.activation_checkpointing


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_plugin(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import DeepSpeedPlugin

    found = arguments(BY_NAME[f"zero{stage}"])
    assert found.use_deepspeed
    found.deepspeed_fields_from_accelerate_config = ""  # the launcher's next line
    for name, value in prepare_deepspeed_cmd_env(found)[1].items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == stage
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    gathered = plugin.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
    assert gathered is (stage == 3)


def test_two_nodes_meet() -> None:
    found = arguments(BY_NAME["two-nodes"], "--machine_rank", "1", "--main_process_ip", "node0")
    prepare_multi_gpu_env(found)
    assert (found.nnodes, found.node_rank, found.rdzv_endpoint) == ("2", 1, "node0:29500")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_command_in_the_comment_parses(path: Path) -> None:
    from gqa.uptrain.cli import command

    comment = "\n".join(line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#"))
    line = re.search(r"accelerate launch (.*)", comment.replace("\\\n", " "))
    assert line
    words = shlex.split(line[1])
    found = launch_command_parser().parse_args(words)
    assert Path(found.config_file) == path.relative_to(ROOT)
    assert (found.module, found.training_script) == (True, "gqa.uptrain")
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in found.training_script_args if word.startswith("-")} <= options


# ------------------------------------------------------------------------------------------------- launched


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(config: Path, model: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Two steps of 4 blocks, on CPUs; --precision, because bfloat16 is not equal for other shares of a batch."""
    words = [
        "--data", "stdlib:train", "--steps", "2", "--batch-size", "4", "--block-size", "64", "--heldout-tokens", "256",
        "--precision", "no",
    ]  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *options,
         "-m", "gqa.uptrain", str(model), *words, "-o", str(out)],
        env=clean | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def finish(*launched: subprocess.Popen[str]) -> None:
    for process in launched:
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said[-3000:]


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "gqa_uptraining.json").read_text())
    return found


def test_launched_processes_and_nodes_train_as_one(tmp_path: Path) -> None:
    model = converted(tmp_path, 2)
    finish(launch(BY_NAME["one-gpu"], model, tmp_path / "one"))
    finish(launch(BY_NAME["ddp"], model, tmp_path / "ddp", "--num_processes", "2"))
    both = ("--num_processes", "2", "--main_process_port", free_port(), "--machine_rank")
    finish(*(launch(BY_NAME["two-nodes"], model, tmp_path / "nodes", *both, rank) for rank in ("0", "1")))
    one, ddp, nodes = (record(tmp_path / name) for name in ("one", "ddp", "nodes"))
    assert [found["ranks"] for found in (one, ddp, nodes)] == [1, 2, 2]
    for found in (ddp, nodes):
        assert found["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert one["losses"]["heldout_after"] < one["losses"]["heldout_before"]
