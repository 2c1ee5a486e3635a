"""docs/guide-7b.md: its commands, planned at the shape of Llama-2-7B, fit the GPU that it names.

The checkpoints are headers without weights; each command is the page's, with `--dry-run`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import header_only, run
from support.embedded import SOURCE
from support.pages import blocks, commands
from transformers import LlamaConfig

from gqa.convert.advice import default_training_memory, next_line
from gqa.convert.api import prepare
from gqa.convert.options import ConvertOptions
from gqa.convert.plan import Plan
from gqa.core import devices

PAGE = Path(__file__).parents[1] / "docs/guide-7b.md"
GPU = 80 * 10**9  # bytes
# Room for activations: of 1.3B parameters they took 4 GiB with four blocks at a time
# (docs/results.md), here it is one block of a layer that is twice as wide.
ACTIVATIONS = 15 * 10**9
# Without these options training needs more than the room for activations.
SAVING = {"--checkpointing", "--micro-batch 1", "--precision bfloat16"}


def commands_of(program: str) -> list[str]:
    """The commands of the page that start a program."""
    lines = [words for words in commands(PAGE) if words[0] == program]
    assert lines, f"the page has no {program}"
    return [shlex.join(words) for words in lines]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the guide works: the base model and its conversion."""
    root = tmp_path_factory.mktemp("guide")
    for name, kv_heads in (("Llama-2-7b-hf", 32), ("Llama-2-7b-hf-gqa8-refined", 8)):
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=kv_heads,
            max_position_embeddings=4096,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )
        (root / name).mkdir()
        header_only(root / name, config)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SOURCE / file, root / name)
    record = {
        "source": {"model": "Llama-2-7b-hf", "path": "../Llama-2-7b-hf"},
        "options": {"method": "refined"},
    }
    (root / name / "gqa_conversion.json").write_text(json.dumps(record))
    return root


def dry_run(command: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """The lines and the record of a command of the page as a dry run."""
    program, *words = shlex.split(command)
    monkeypatch.chdir(models)
    flags = [flag for flag in ("--dry-run", "--json") if flag not in words]
    done = run(*words, *flags, program=program)
    assert done.code == 0, done.err
    return done.err, json.loads(done.out)


@pytest.mark.parametrize("command", commands_of("gqa-convert"))
def test_the_conversion_fits(command: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, record = dry_run(command, models, monkeypatch)
    assert record["estimates"]["refined"]["memory_bytes"] < GPU


@pytest.mark.parametrize("command", commands_of("gqa-uptrain"))
def test_the_training_fits(command: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, record = dry_run(command, models, monkeypatch)
    assert {option for option in SAVING if option in command} == SAVING
    assert record["memory"] + ACTIVATIONS < GPU


def plan_and_advice(memory: int, models: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, str]:
    """The plan of the guide's conversion, and its last line on a GPU of so many bytes."""
    monkeypatch.setattr(devices, "total_memory", lambda device: memory)
    monkeypatch.setattr(devices, "native_bfloat16", lambda device: True)
    monkeypatch.chdir(models)
    options = ConvertOptions("./Llama-2-7b-hf", kv_heads=8, method="refined", overwrite=True)
    plan = prepare(options)
    out = Path("./Llama-2-7b-hf-gqa8-refined")
    return plan, next_line(plan, None, options, out, {})


def test_the_conversion_ends_with_a_training_plan_that_fits_the_gpu(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command is that of step 5, without its number of tokens."""
    _, line = plan_and_advice(GPU, models, monkeypatch)
    (advised,) = re.findall(r"look at the plan first: (gqa-uptrain .*)$", line)
    (planned,) = (one for one in commands_of("gqa-uptrain") if "--dry-run" in one)
    words = {word.removeprefix("./") for word in shlex.split(planned)} - {"--tokens", "10M"}
    assert set(shlex.split(advised)) == words
    assert f"\nnext        {line}\n" in PAGE.read_text()


def test_the_conversion_ends_with_plain_training_where_that_fits(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, line = plan_and_advice(2 * GPU, models, monkeypatch)
    assert line.endswith("distill from the base model: gqa-uptrain Llama-2-7b-hf-gqa8-refined")


def test_the_memory_of_training_is_that_of_a_dry_run_and_activations(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, record = dry_run(commands_of("gqa-uptrain")[0], models, monkeypatch)
    plan, _ = plan_and_advice(GPU, models, monkeypatch)
    activations = default_training_memory(plan) - record["memory"]
    tokens = 2048
    layers = 32
    numbers = 17 * 4096
    assert activations == 4 * numbers * layers * tokens


def test_training_all_weights_would_not_fit(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{commands_of('gqa-uptrain')[0]} --train all"
    _, record = dry_run(command, models, monkeypatch)
    assert record["memory"] > GPU


@pytest.mark.parametrize("program", ["gqa-convert", "gqa-uptrain"])
def test_the_page_shows_what_a_dry_run_prints(
    program: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = next(one for one in commands_of(program) if "--dry-run" in one)
    lines, _ = dry_run(command, models, monkeypatch)
    shown = [text for _, text in blocks(PAGE, "text") if text.splitlines()[0] in lines]
    assert len(shown) == 1
    left_out = "..."
    shown_lines = [line for line in shown[0].splitlines() if line != left_out]
    assert [line for line in shown_lines if line not in lines] == []


def test_the_result_of_a_step_is_the_input_of_the_next(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = commands_of("gqa-uptrain")[-1]
    _, record = dry_run(training, models, monkeypatch)
    converted = shlex.split(training)[1]
    assert converted == "./Llama-2-7b-hf-gqa8-refined"
    names = {converted, f"./{Path(record['output']).name}"}
    (measured,) = commands_of("gqa-eval")
    (served,) = commands_of("vllm")
    assert names < set(shlex.split(measured))
    assert set(shlex.split(served)) & names


def test_the_quick_start_trains_by_the_plan_of_the_guide() -> None:
    page = PAGE.with_name("quickstart.md")
    lines = [shlex.join(words) for words in commands(page) if "Llama-2-7b" in str(words)]
    training = [line for line in lines if line.startswith("gqa-uptrain") and "--dry" not in line]
    assert training
    assert set(training) <= set(commands_of("gqa-uptrain"))
