"""examples/accelerate: accelerate reads every file as it is meant, and DeepSpeed and FSDP1 are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from training import Runs

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


@pytest.mark.parametrize(("name", "variable"), [("DeepSpeed", "DEEPSPEED"), ("FSDP1", "FSDP")])
def test_deepspeed_and_fsdp1_are_refused(name: str, variable: str, runs: Runs, tmp_path: Path) -> None:
    """Before anything is written. FSDP without a version is version 1."""
    done = runs.run(*runs.words(tmp_path / "out", steps=1), **{f"ACCELERATE_USE_{variable}": "true"})
    message = f"gqa-uptrain: a configuration of {name} is not for gqa-uptrain; use examples/accelerate/fsdp2.yaml\n"
    assert (done.code, done.err) == (2, message)
    assert not list(tmp_path.glob("out*"))
