"""`gqa-uptrain --dry-run`: what it says is what a run trains and stores."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Result, edit_json, edit_tensors, run, snapshot
from support.patches import forbid, use_bfloat16, use_speed
from support.training import converted_beside_base, fresh_accelerator, material

from gqa.convert.summary import size

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """Next to its base model."""
    return converted_beside_base(tmp_path)


def uptrain(*words: object) -> Result:
    return run(*map(str, words), program="gqa-uptrain")


def plan(*words: object) -> dict[str, Any]:
    """The record of a dry run."""
    done = uptrain(*words, "--dry-run", "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def line(text: str, name: str) -> str:
    """The line of an output that begins with a name."""
    return next(one for one in text.splitlines() if one.startswith(name))


def test_a_dry_run_writes_nothing(converted: Path) -> None:
    before = snapshot(converted.parent)
    done = uptrain(converted, "--tokens", "10M", "--dry-run")
    assert done.code == 0, done.err
    assert "length      10,000,000 tokens\n" in done.out
    assert done.out.endswith("dry run     no weights were read, and nothing was written\n")
    assert snapshot(converted.parent) == before


def test_the_output_directory_is_printed_in_the_plan_and_at_the_start(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(converted.parent)
    words = [converted.name, "--steps", 1, "--batch-size", 2, "--validation-tokens", 128]
    output_line = f"output      {converted.name}-uptrained"
    assert line(uptrain(*words, "--dry-run").out, "output ") == output_line

    done = uptrain(*words)
    assert done.code == 0, done.err
    at_the_start, _ = done.out.split("\nwritten ")
    assert line(at_the_start, "output ") == output_line


@pytest.mark.parametrize("scope", ["all", "attention", "kv", "lora"])
def test_a_dry_run_counts_the_parameters_that_a_run_trains(converted: Path, scope: str) -> None:
    words = [
        converted,
        "--train",
        scope,
        "--steps",
        1,
        "--batch-size",
        2,
        "--validation-tokens",
        128,
    ]
    planned = uptrain(*words, "--dry-run")
    done = uptrain(*words)
    assert done.code == 0, done.err
    assert line(planned.out, "model ") == line(done.out, "model ")
    assert line(planned.out, "teacher ") == line(done.out, "teacher ")


def test_memory_is_the_sum_of_what_a_process_keeps(converted: Path) -> None:
    """By the table of docs/scale.md; the teacher is stored in float32."""
    needs = plan(converted, "--train", "kv")
    assert needs["weights"] == 4 * needs["parameters"]
    assert needs["gradients"] == 4 * needs["trained"]
    assert needs["optimizer"] == 8 * needs["trained"]
    weights = (converted.parent / "base").glob("*.safetensors")
    assert needs["teacher"] == pytest.approx(sum(file.stat().st_size for file in weights), rel=0.1)
    assert needs["copies"] == 0, "nothing is rounded in float32"
    parts = ("weights", "gradients", "optimizer", "teacher")
    assert needs["memory"] == sum(needs[part] for part in parts)


def test_adafactor_and_no_teacher_need_less_memory(converted: Path) -> None:
    words = ("--teacher", "none", "--data", material() / "data.jsonl", "--optimizer", "adafactor")
    needs = plan(converted, *words)
    assert (needs["optimizer"], needs["teacher"]) == (0, 0)
    assert needs["memory"] == needs["weights"] + needs["gradients"]


@pytest.mark.parametrize(
    "words",
    [
        ("--tokens", "4K", "--context", 64),
        ("--steps", 3, "--batch-size", 2),
        ("--data", "self:2K"),
    ],
)
def test_a_dry_run_counts_the_steps_of_a_run(converted: Path, words: tuple[object, ...]) -> None:
    given = [converted, *words, "--validation-tokens", 128]
    planned = line(uptrain(*given, "--dry-run").out, "steps ")
    done = uptrain(*given)
    assert done.code == 0, done.err
    assert line(done.out, "steps ").startswith(planned)


def test_steps_that_depend_on_text_are_not_counted(converted: Path) -> None:
    planned = plan(converted, "--data", material() / "data.jsonl", "--alpha", 0.1)
    assert (planned["steps"], planned["tokens_per_step"], planned["activations"]) == (None,) * 3
    shown = uptrain(converted, "--data", "stdlib:train", "--alpha", 0.1, "--dry-run").out
    assert line(shown, "length ") == "length      0.1 of the data, which a dry run does not count"


def test_a_dry_run_says_that_a_source_is_no_file(converted: Path) -> None:
    """As a mistyped name of a file is none."""
    shown = uptrain(converted, "--data", "stdlib:train,train.jsnl", "--dry-run").out
    note = "no file here: a data set of the hub, which a dry run does not look up"
    assert line(shown, "data ") == f"data        stdlib:train, train.jsnl ({note})"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("0.3%", "0.3% of each weight tensor's root mean square"),
        (1e-4, "0.0001 for all weights"),
        (0.3, "0.3 for all weights (did you mean 0.3%, relative to each weight?)"),
    ],
)
def test_a_dry_run_says_what_the_learning_rate_is_of(
    converted: Path, given: object, shown: str
) -> None:
    planned = uptrain(converted, "--learning-rate", given, "--dry-run").out
    assert line(planned, "optimizer ") == f"optimizer   adamw, learning rate {shown}"


def test_a_dry_run_says_why_a_step_has_more_blocks(converted: Path) -> None:
    given = [converted, "--context", 64, "--tokens", "4K", "--dry-run"]
    by_default = line(uptrain(*given).out, "steps ")
    rounded = line(uptrain(*given, "--micro-batch", 16).out, "steps ")
    assert "micro-batch" not in by_default
    assert "each of 16 blocks, a multiple of --micro-batch (1,024 tokens)" in rounded


def test_activations_follow_the_options_that_change_them(converted: Path) -> None:
    """By the formula of models/training_memory.py, of one forward pass."""

    def activations(*words: object) -> int:
        length = ("--tokens", "1M", "--batch-size", 8, "--context", 64)
        return int(plan(converted, *length, *words)["activations"])

    config = json.loads((converted / "config.json").read_text())
    layers = config["num_hidden_layers"]
    hidden_states = 4 * config["hidden_size"] * 8 * 64
    usual = activations()
    assert usual == 17 * layers * hidden_states
    assert activations("--micro-batch", 2) == usual // 4
    assert activations("--precision", "bfloat16") == usual // 2
    assert activations("--gradient-checkpointing") == (layers + 17) * hidden_states


@pytest.mark.parametrize(("native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_the_default_precision_is_bfloat16_where_the_device_has_it(
    converted: Path, monkeypatch: pytest.MonkeyPatch, native: bool, expected: str
) -> None:
    """The plan says it, and the run computes in it."""
    use_bfloat16(monkeypatch, native)
    words = [converted, "--steps", 1, "--batch-size", 2, "--validation-tokens", 128]
    assert plan(*words)["precision"] == expected

    with fresh_accelerator():
        done = uptrain(*words)
    assert done.code == 0, done.err
    assert line(done.out, "precision ").split()[1].rstrip(";") == expected
    record = json.loads(
        (converted.with_name("converted-uptrained") / "gqa_uptraining.json").read_text()
    )
    assert record["options"]["precision"] == expected


def test_what_the_command_says_of_precision_goes_before_the_device(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_bfloat16(monkeypatch, native=True)
    assert plan(converted, "--precision", "float32")["precision"] == "float32"


def test_a_precision_of_the_launcher_that_cannot_be_used_is_refused(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    refused = "the launcher sets fp16, which cannot be used; pass --precision bfloat16 or float32"
    done = uptrain(converted, "--dry-run")
    assert done.code == 2
    assert refused in done.err


def test_the_estimate_counts_what_each_parameter_takes(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each token: forward twice and backward once, with the gradients of what trains; the
    teacher forward.
    """
    speed = 1e9
    use_speed(monkeypatch, speed)
    words = ("--tokens", 51200, "--batch-size", 1, "--context", 64)
    needs = plan(converted, *words)
    passes = 2 * needs["parameters"] + needs["trained"] + needs["teacher_parameters"]
    expected = 2.0 * 2 * 51200 * passes / speed
    assert needs["time"]["training"] == pytest.approx(expected)

    again = plan(converted, *words, "--gradient-checkpointing")["time"]["training"]
    assert again == pytest.approx(expected * (1 + needs["parameters"] / passes))

    text = ("--data", material() / "data.jsonl", "--teacher", "none")
    read = plan(converted, *words, *text)["time"]
    assert read["generating"] == 0 < needs["time"]["generating"]
    assert read["training"] < needs["time"]["training"]


def test_a_saved_state_has_the_size_that_a_dry_run_says(converted: Path) -> None:
    words = [converted, "--steps", 2, "--batch-size", 2, "--validation-tokens", 128]
    done = uptrain(*words, "--save-every", 1, "--keep-state")
    assert done.code == 0, done.err
    state = converted.with_name("converted-uptrained-state") / "step-00000001"
    stored = sum(file.stat().st_size for file in state.rglob("*") if file.is_file())
    assert stored == pytest.approx(plan(*words)["state"], rel=0.25)


def test_a_dry_run_refuses_what_a_run_refuses(converted: Path) -> None:
    refused: tuple[tuple[object, ...], ...] = (
        ("--alpha", 0.1),
        ("--steps", 1, "--tokens", 8),
        ("--teacher", "none"),
        ("--data", "none.jsonl"),
        ("--validation", "none.jsonl"),
        ("--data", "self:1K", "--tokens", "2K"),
        ("--data", "self:30"),
        ("--context", 100_000),
        ("--context", 1),
        ("--tokens", 64, "--batch-size", 999),
        ("--validation", "self"),
        ("--target-column", "meant"),
    )
    for words in refused:
        assert uptrain(converted, *words, "--dry-run").code == 2
        assert uptrain(converted, *words, "--dry-run").err == uptrain(converted, *words).err


def test_options_that_only_the_config_refuses_are_refused_before_weights_are_read(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid(monkeypatch, "gqa.uptrain.setup.load_trained_model", "weights were read")
    done = uptrain(converted, "--context", 100_000)
    assert done.code == 2
    assert "--context 100000 is more than the" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--data", "none.jsonl"), "none.jsonl"),
        (("--validation", "none.jsonl"), "none.jsonl"),
        (("--device", "nowhere"), "there is no device nowhere"),
        (("--train", "lora"), "--train lora needs peft"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_what_is_mistyped_or_missing_is_refused_before_weights_are_fetched(
    converted: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    forbid(monkeypatch, "gqa.uptrain.setup.fetch_weights", "weights were fetched")
    with fresh_accelerator():
        done = uptrain(converted, *words)
    done.expect(2, says=says)


@pytest.mark.parametrize("scope", ["attention", "kv"])
def test_a_dry_run_reads_names_as_a_run_does(converted: Path, scope: str) -> None:
    """Of a checkpoint whose names lack the prefix of the class."""

    def without_prefix(entries: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): entry for name, entry in entries.items()}

    expected = plan(converted, "--train", scope)["trained"]
    edit_tensors(converted, without_prefix)
    edit_json(
        converted / "model.safetensors.index.json",
        lambda index: index.update(weight_map=without_prefix(index["weight_map"])),
    )
    assert plan(converted, "--train", scope)["trained"] == expected


def test_a_dry_run_warns_of_an_output_that_is_there(converted: Path) -> None:
    done = uptrain(converted, "--dry-run", "-o", converted.parent / "base")
    assert done.code == 0
    assert re.match(r"warning: .*base exists; choose another directory", done.err), done.err


@pytest.mark.parametrize(("words", "copies"), [((), 2), (("--save-every", 1), 3)])
def test_a_dry_run_warns_of_a_disk_that_is_too_small_for_saved_states(
    converted: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    copies: int,
) -> None:
    """While one is saved, those that are kept are still there: one, or two with --save-every."""
    usage = shutil.disk_usage(converted)
    state = plan(converted)["state"]

    def said(free: int) -> Result:
        # A disk with less space
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        return uptrain(converted, *words, "--dry-run")

    enough = said(copies * state)
    assert enough.err == ""
    assert line(enough.out, "disk ").endswith(
        f"and up to {size(copies * state)} for saved states while it runs"
    )
    too_small = said(copies * state - 1).err
    assert f"the saved states of the run take {copies * state:,} bytes" in too_small
    assert too_small.startswith("warning: no space left")


def test_more_steps_than_a_state_can_be_named_after_are_refused(converted: Path) -> None:
    refusal = (
        "--steps makes 100,000,000 steps, but a run may have at most 99,999,999; pass a smaller "
        "number"
    )
    uptrain(converted, "--steps", 10**8, "--dry-run").expect(2, says=refusal)
    assert plan(converted, "--steps", 10**8 - 1)["steps"] == 10**8 - 1
