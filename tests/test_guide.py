"""docs/guide-7b.md, docs/guide-qwen.md and docs/generate-with-vllm.md: their commands, planned at
the shapes of their models, fit the GPU that the guide names; their sums are those that are printed.
Their scripts, and those of examples/ that they copy, run on small files and with stand-ins for the
programs that are not here.

The checkpoints are headers without weights; each command is a page's, with `--dry-run`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import header_only, run
from support.embedded import SOURCE
from support.evaluations import NO_HARNESS
from support.pages import blocks, commands
from support.patches import use_bfloat16
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.advice import Advice
from gqa.convert.api import prepare
from gqa.convert.generate.sampling import sequences_of_model
from gqa.convert.options import ConvertOptions
from gqa.core import devices
from gqa.models.loading import WEIGHTS_SHARE
from gqa.uptrain.run_length import text_blocks_among

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guide-7b.md"
QWEN_PAGE = PAGE.with_name("guide-qwen.md")
VLLM_PAGE = PAGE.with_name("generate-with-vllm.md")
README = ROOT / "README.md"
PAGES = (PAGE, QWEN_PAGE, VLLM_PAGE)
TASKS = ROOT / "examples/tasks.sh"
COMPARE = ROOT / "examples/compare_answers.py"
SPLIT = ROOT / "examples/split_text.py"
OWN_TASK = ROOT / "examples/own_task.yaml"
SUMS = PAGE.with_name("guide-numbers.md")
GPU = 48 * 10**9  # bytes
SMALL_GPU = 24 * 10**9
LARGE_GPU = 80 * 10**9  # the one whose times are computed
FREE_SPACE_SHOWN = 212.4  # GiB, on the disk of the page
# Room for activations: twice what is planned for one block of Qwen2.5-7B, 4,096 tokens.
ACTIVATIONS = 4 * 2**30
# Without these options training needs more than the room for activations.
SAVING = {"--gradient-checkpointing", "--micro-batch 1"}


LLAMA = "Llama-2-7b-hf"
LLAMA_13B = "Llama-2-13b-hf"
QWEN = "Qwen2.5-7B"
# The options of the guide's training, without its text.
GUIDE_RUN = "--tokens 10M --micro-batch 1 --gradient-checkpointing"
DEFAULT_CONTEXT = "--context 2048"


def commands_of(program: str, model: str = "", pages: Sequence[Path] = PAGES) -> list[str]:
    """The commands of the pages that start a program, in any environment, for a model."""
    every = [words for page in pages for words in commands(page)]
    lines = [words for words in every if Path(words[0]).name == program]
    assert lines, f"the pages have no {program}"
    return [line for line in map(shlex.join, lines) if model in line]


def servers(page: Path = PAGE) -> list[str]:
    """The commands of a page that start a server of vLLM."""
    return [one for one in commands_of("vllm", pages=[page]) if shlex.split(one)[1] == "serve"]


def measurement(model: str) -> list[str]:
    """The words of the command that measures a model and its results."""
    (line,) = (one for one in commands_of("gqa-eval", model) if "--memory" in one)
    return shlex.split(line)


def llama_config(kv_heads: int, **shape: int) -> LlamaConfig:
    """The shape and the dtype of the published Llama-2-7b-hf, but for what `shape` says."""
    shape_7b = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    return LlamaConfig(
        vocab_size=32000,
        **(shape_7b | shape),
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        dtype="float16",
        architectures=["LlamaForCausalLM"],
    )


SHAPE_13B = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}


def qwen_config(kv_heads: int) -> Qwen2Config:
    """The shape and the dtype of the published Qwen2.5-7B."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131072,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )


def write_headers(
    directory: Path, config: Any, buffers: Mapping[str, tuple[int, ...]], base: str | None = None
) -> None:
    """Headers of a checkpoint, with the example's tokenizer; `base`: it is converted from that."""
    directory.mkdir()
    header_only(directory, config, buffers)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SOURCE / file, directory)
    if base:
        record = {
            "source": {"model": base, "path": f"../{base}"},
            "options": {"method": "refined"},
        }
        (directory / "gqa_conversion.json").write_text(json.dumps(record))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the guide works: the base models, their conversions, and a text."""
    root = tmp_path_factory.mktemp("guide")
    # The published checkpoint stores these too
    frequencies = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (64,) for layer in range(32)
    }
    write_headers(root / LLAMA, llama_config(32), frequencies)
    for kv_heads in (8, 16):
        converted = root / f"{LLAMA}-gqa{kv_heads}-refined"
        write_headers(converted, llama_config(kv_heads), frequencies, LLAMA)
    write_headers(root / LLAMA_13B, llama_config(40, **SHAPE_13B), {})
    converted = root / f"{LLAMA_13B}-gqa20-refined"
    write_headers(converted, llama_config(20, **SHAPE_13B), {}, LLAMA_13B)
    write_headers(root / QWEN, qwen_config(4), {})
    write_headers(root / f"{QWEN}-gqa2-refined", qwen_config(2), {}, QWEN)
    # The reader's own text, and what the script would write with vLLM
    for name in ("train.jsonl", "generated-0.jsonl"):
        (root / name).write_text('{"text": "a"}\n')
    return root


def one_line(page: Path) -> str:
    """The words of a page, wherever its lines end."""
    return " ".join(page.read_text().split())


def dry_run(command: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """The lines and the record of a command of the page as a dry run."""
    program, *words = shlex.split(command)
    monkeypatch.chdir(models)
    use_bfloat16(monkeypatch, native=True)
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


def test_training_keys_and_values_fits_a_small_gpu(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"{commands_of('gqa-uptrain', LLAMA)[0]} --train kv --optimizer adafactor"
    _, record = dry_run(command, models, monkeypatch)
    assert record["memory"] + 2 * record["activations"] < SMALL_GPU


def advice_on(
    memory: int, models: Path, monkeypatch: pytest.MonkeyPatch, kv_heads: int = 16
) -> Advice:
    """What the guide's conversion advises on a GPU of so many bytes."""
    monkeypatch.setattr(devices, "total_memory", lambda device: memory)
    use_bfloat16(monkeypatch, native=True)
    monkeypatch.chdir(models)
    options = ConvertOptions(f"./{LLAMA}", kv_heads=kv_heads, method="refined", overwrite=True)
    return Advice(prepare(options), None, options, Path(f"./{LLAMA}-gqa16-refined"), {})


def test_the_conversion_ends_with_a_training_plan_that_fits_the_gpu(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command is that of step 5, without its text, its number of tokens, and the context
    of Llama 2 7B, which is the default.
    """
    line = advice_on(GPU, models, monkeypatch).next_line()
    (advised,) = re.findall(r"a run that needs less\): (gqa-uptrain .*)$", line)
    (planned,) = (one for one in commands_of("gqa-uptrain", LLAMA) if "--dry-run" in one)
    words = {word.removeprefix("./") for word in shlex.split(planned)}
    words -= {"--tokens", "10M", "--data", "train.jsonl", *DEFAULT_CONTEXT.split()}
    assert set(shlex.split(advised)) == words


def test_the_conversion_ends_with_plain_training_where_that_fits(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = advice_on(2 * GPU, models, monkeypatch).next_line()
    assert line == "for better quality uptrain it: gqa-uptrain Llama-2-7b-hf-gqa16-refined"


def test_more_heads_are_advised_first_where_a_number_is_between(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between 8 and 32 heads there are 16, between 16 and 32 there is no divisor of 32."""
    line = advice_on(2 * GPU, models, monkeypatch, kv_heads=8).next_line()
    assert line.startswith("for better quality keep more KV heads, or uptrain it: gqa-uptrain ")


def test_the_memory_of_training_is_that_of_a_dry_run_and_activations(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, record = dry_run(commands_of("gqa-uptrain")[0], models, monkeypatch)
    above = advice_on(GPU, models, monkeypatch).training_memory - record["memory"]
    tokens = 2048
    layers = 32
    numbers = 17 * 4096
    activations = 2 * numbers * layers * tokens
    # The advice counts the stored frequencies as weights of attention: weight, gradient and AdamW
    # in float32, copies in bfloat16, and the teacher's in float16
    frequencies = 64 * layers
    # It does not know that the head is a linear layer, which is rounded and shared
    head = 32000 * 4096
    assert above == activations + (4 + 4 + 8 + 2 + 2) * frequencies + (2 + 2) * head


def plan_of_training(
    options: str,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str = f"{LLAMA}-gqa16-refined",
) -> tuple[float, float]:
    """GiB that a training needs, without activations and with them."""
    _, record = dry_run(f"gqa-uptrain ./{model} {options}", models, monkeypatch)
    memory = record["memory"]
    return memory / 2**30, (memory + record["activations"]) / 2**30


@pytest.mark.parametrize(
    "options",
    [
        "--train kv --optimizer adafactor",
        "--train kv",
        "--optimizer adafactor",
        "",
        "--train all --optimizer adafactor",
        "--train all",
    ],
)
def test_the_page_of_sums_says_what_a_training_needs(
    options: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, everything = plan_of_training(f"{GUIDE_RUN} {options}", models, monkeypatch)
    row = f"`{options}`" if options else "the default"
    (sums,) = (line for line in SUMS.read_text().splitlines() if line.startswith(f"| {row} |"))
    assert sums.endswith(f"| {weights:.1f} GiB | {everything:.1f} GiB |")


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        ("48 GB, 80 GB", ""),
        ("32 GB, 40 GB", "--optimizer adafactor"),
        ("24 GB", "--train kv --optimizer adafactor"),
        ("24 GB, only with 8 KV heads", "--train kv"),
    ],
)
def test_the_guide_says_what_to_add_for_a_gpu(
    gpu: str, options: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 and with 8 KV heads; what it does not call too much fits."""
    row = f"`{options}`" if options else "nothing"
    start = f"| {gpu} | {row} |"
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(start))
    smallest = 10**9 * int(re.findall(r"\d+", gpu)[0]) / 2**30
    cells = line.removeprefix(start).strip("| ").split(" | ")
    for kv_heads, cell in zip((16, 8), cells, strict=True):
        model = f"{LLAMA}-gqa{kv_heads}-refined"
        _, everything = plan_of_training(f"{GUIDE_RUN} {options}", models, monkeypatch, model)
        fits = "does not fit" not in cell
        assert cell.removeprefix("does not fit: ") == f"{everything:.0f} GiB"
        assert (everything < smallest) == fits


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--tokens 10M", "Without these two, 10M tokens would need about {} GiB"),
        (f"{GUIDE_RUN} --train all --optimizer adafactor", "fits 80 GB: {} GiB"),
    ],
)
def test_the_guide_says_what_other_trainings_need(
    options: str, sentence: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, everything = plan_of_training(options, models, monkeypatch)
    assert sentence.format(f"{everything:.0f}") in one_line(PAGE)


@pytest.mark.parametrize("kv_heads", [8, 16])
def test_the_page_of_sums_says_what_the_disk_must_hold(
    kv_heads: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models, and two saved states while it trains; both conversions for those who compare."""

    def converted(heads: int) -> int:
        return read_checkpoint(models / f"{LLAMA}-gqa{heads}-refined").nbytes

    base = read_checkpoint(models / LLAMA).nbytes
    result, other = converted(kv_heads), converted(24 - kv_heads)
    _, record = dry_run(
        f"gqa-uptrain ./{LLAMA}-gqa{kv_heads}-refined {GUIDE_RUN}", models, monkeypatch
    )
    states = 2 * record["state"]
    lines = SUMS.read_text().partition("\n## Disk space\n")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if "GiB |" in line]
    shown = [row[1 if kv_heads == 16 else 2] for row in rows[:7]]
    sizes = [base, result, other, result, result, states]
    assert shown == [f"{size / 2**30:.1f} GiB" for size in [*sizes, sum(sizes)]]
    if kv_heads == 16:
        less = [base + result, base + result + other, base + 2 * result + states]
        assert [row[1] for row in rows[-3:]] == [f"{size / 2**30:.1f} GiB" for size in less]


@pytest.mark.parametrize("kv_heads", [8, 16])
def test_the_page_of_sums_says_what_the_host_must_hold(
    kv_heads: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that are loaded into CPU memory first, because they fill too much of a 40 GB GPU."""
    base = read_checkpoint(models / LLAMA)
    converted = read_checkpoint(models / f"{LLAMA}-gqa{kv_heads}-refined")
    _, record = dry_run(
        f"gqa-uptrain ./{LLAMA}-gqa{kv_heads}-refined {GUIDE_RUN}", models, monkeypatch
    )
    at_the_start = 4 * converted.parameters + base.nbytes
    assert GPUS["40 GB (39 GiB)"] * WEIGHTS_SHARE < at_the_start
    assert at_the_start < GPUS["48 GB (44 GiB)"] * WEIGHTS_SHARE
    lines = SUMS.read_text().partition("\n### CPU memory (RAM)\n")[2].splitlines()
    cells = [line.strip("| ").split(" | ")[1 if kv_heads == 16 else 2] for line in lines[3:9]]
    best = f"{record['state'] / 4 / 2**30:.1f} GiB"  # a quarter of weights, average and AdamW
    assert cells[0] == f"{base.nbytes / 2**30:.1f} GiB"
    assert cells[2:4] == [best, f"{best} more"]
    assert cells[5] == f"{at_the_start / 2**30:.1f} GiB"


def test_longer_blocks_need_more_activations(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, usual = plan_of_training(GUIDE_RUN, models, monkeypatch)
    _, longer = plan_of_training(f"{GUIDE_RUN} --context 4096", models, monkeypatch)
    assert f"With 4096, training needs {longer - usual:.1f} GiB more" in one_line(PAGE)


def test_13_billion_parameters_train_on_a_large_gpu(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"{LLAMA_13B}-gqa20-refined"
    options = f"{GUIDE_RUN} --optimizer adafactor"
    _, everything = plan_of_training(options, models, monkeypatch, model)
    needs = f"Llama 2 13B with 20 of 40 KV heads needs {everything:.0f} GiB"
    assert f"{needs} with `--optimizer adafactor`" in one_line(PAGE)
    assert everything < LARGE_GPU / 2**30


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("neither `--micro-batch 1` nor `--gradient-checkpointing`", ""),
        ("`--gradient-checkpointing`", "--gradient-checkpointing"),
        ("`--micro-batch 1`", "--micro-batch 1"),
        ("both", "--gradient-checkpointing --micro-batch 1"),
    ],
)
def test_the_page_of_sums_says_what_activations_need(
    row: str, options: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, everything = plan_of_training(f"--tokens 10M {options}", models, monkeypatch)
    assert f"\n| {row} | {everything - weights:.1f} GiB |\n" in SUMS.read_text()


def test_training_all_weights_would_not_fit(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"{commands_of('gqa-uptrain')[0]} --train all"
    _, record = dry_run(command, models, monkeypatch)
    assert record["memory"] > GPU


@pytest.mark.parametrize("model", [LLAMA, QWEN])
@pytest.mark.parametrize("program", ["gqa-convert", "gqa-uptrain"])
def test_the_page_shows_what_a_dry_run_prints(
    program: str, model: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = next(one for one in commands_of(program, model) if "--dry-run" in one)
    usage = shutil.disk_usage(models)
    free = int(FREE_SPACE_SHOWN * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    lines, _ = dry_run(command, models, monkeypatch)
    all_shown = [text for page in PAGES for _, text in blocks(page, "text")]
    shown = [text for text in all_shown if text.splitlines()[0] in lines]
    assert len(shown) == 1
    cells = (line.split() for line in shown[0].splitlines() if line != "...")
    patterns = [
        r"\s+".join(".+" if cell == "..." else re.escape(cell) for cell in row) for row in cells
    ]
    on_this_machine = [pattern.replace("cuda", "cpu") for pattern in patterns]
    assert [one for one in on_this_machine if not re.search(f"^{one}$", lines, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("page", "model", "kv_heads"), [(PAGE, LLAMA, 16), (QWEN_PAGE, QWEN, 2)], ids=["llama", "qwen"]
)
def test_the_result_of_a_step_is_the_input_of_the_next(
    page: Path, model: str, kv_heads: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = [one for one in commands_of("gqa-uptrain", model) if "--dry-run" not in one]
    converted = f"./{model}-gqa{kv_heads}-refined"
    results = set()
    for training in trainings:
        _, record = dry_run(training, models, monkeypatch)
        assert shlex.split(training)[1] == converted
        if "-o" not in shlex.split(training):  # that is the longer run
            results.add(f"./{Path(record['output']).name}")
    assert len(results) == 1, "whatever text it trains on"
    names = {converted} | results
    assert names | {f"./{model}"} < {*measurement(model)}
    answering = [shlex.split(one)[3] for one in commands_of("sh", model)]
    served = [set(shlex.split(one)) for one in servers(page)]
    if model == QWEN:  # the guide shows the commands of the base model
        assert {*answering} == results
        assert [bool(words & results) for words in served] == [True]
    else:
        assert {*answering} == {f"./{model}"} | results
        assert [bool(words & results) for words in served] == [False, True], "the base model first"


def test_the_conversions_that_are_compared_are_made() -> None:
    gqa8 = f"{LLAMA}-gqa8-refined"
    (compared,) = (shlex.split(one) for one in commands_of("gqa-eval", gqa8))
    made = [shlex.split(one) for one in commands_of("gqa-convert", LLAMA)]
    heads = {words[words.index("--kv-heads") + 1] for words in made if "--dry-run" not in words}
    conversions = [f"./{LLAMA}-gqa{number}-refined" for number in sorted(heads, key=int)]
    assert compared[1 : compared.index("--data")] == [f"./{LLAMA}", *conversions]


def write_samples(
    directory: Path, task: str, date: str, rows: Sequence[dict[str, Any]], model: str = "model"
) -> None:
    """Answers in a file as lm_eval writes it."""
    path = directory / model / f"samples_{task}_{date}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers(*scores: object, metric: str = "exact_match") -> list[dict[str, Any]]:
    """Rows of lm_eval, one for each question."""
    return [
        {"doc_id": number, "filter": "none", "metrics": [metric], metric: score}
        for number, score in enumerate(scores)
    ]


def test_the_script_compares_the_answers_of_two_models(tmp_path: Path) -> None:
    """The last run of each task, the questions that both models answered, and scores that are
    numbers.
    """
    base, result = tmp_path / "tasks-base", tmp_path / "tasks-result"
    early, late = "2026-01-01T10-00-00.000001", "2026-01-02T09-00-00.000001"
    write_samples(base, "squad_completion", early, answers(0, 0, 0, 0))
    write_samples(base, "squad_completion", late, answers(1, 1, 0, 1, 1))
    write_samples(result, "squad_completion", early, answers(1, 0, 0, 0))
    write_samples(base, "ifeval", early, answers(True, False, metric="strict"))
    write_samples(result, "ifeval", early, answers(True, True, metric="strict"))
    write_samples(base, "lists", early, answers([1, 0], [1, 1]))
    write_samples(result, "lists", early, answers([1, 0], [1, 1]))
    words = [sys.executable, str(COMPARE), base.name, result.name]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "ifeval none strict: +50.0 points, at worst -50.0 (standard error 50.0, 2 questions)",
        "squad_completion none exact_match: -50.0 points, at worst -107.7 (standard error 28.9, 4 "
        "questions)",
    ]
    write_samples(tmp_path / "tasks-other", "swde", early, answers(1, 0))
    words[-1] = "tasks-other"
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: the directories have no answers to the same questions\n"


def test_own_questions_are_a_task_of_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may have spaces around it; one that differs is wrong."""
    lm_eval = pytest.importorskip("lm_eval", reason=NO_HARNESS)
    tasks = pytest.importorskip("lm_eval.tasks", reason=NO_HARNESS)
    shutil.copy(OWN_TASK, tmp_path)
    prompt = "x = 1\ny = 2\nx = 1\ny ="  # which the example model continues by " 2"
    rows = [{"prompt": prompt, "answer": answer} for answer in ("2", " 2 ", "3", "x")]
    (tmp_path / "own_task.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    record: Any = lm_eval.simple_evaluate(
        "hf",
        {"pretrained": str(ROOT / "examples/stdlib-mha"), "add_bos_token": True},
        device="cpu",
        batch_size=1,
        tasks=["own_task"],
        bootstrap_iters=10,
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    assert record["results"]["own_task"]["exact_match,trimmed"] == 0.5


def test_answers_of_several_models_in_a_directory_are_not_compared(tmp_path: Path) -> None:
    """A longer run, whose name sorts before the shorter one's: neither is the other's result."""
    base, result = tmp_path / "tasks-base", tmp_path / "tasks-result"
    early, late = "2026-01-01T10-00-00.000001", "2026-01-02T09-00-00.000001"
    write_samples(base, "triviaqa", early, answers(1, 1))
    write_samples(result, "triviaqa", early, answers(0, 0), "converted-uptrained")
    write_samples(result, "triviaqa", late, answers(1, 1), "converted-100M-uptrained")
    words = [sys.executable, str(COMPARE), base.name, result.name]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: tasks-result has answers of several models (tasks-result/converted-100M-uptrained, "
        "tasks-result/converted-uptrained); move all but one of these directories away\n"
    )


def split_text(
    directory: Path, lines: list[str], *options: str
) -> subprocess.CompletedProcess[str]:
    """examples/split_text.py in a directory, on a file of lines, with the example's tokenizer."""
    (directory / "text.jsonl").write_text("".join(f"{line}\n" for line in lines))
    words = [sys.executable, str(SPLIT), "text.jsonl", str(ROOT / "examples/stdlib-mha"), *options]
    return subprocess.run(words, cwd=directory, capture_output=True, text=True)


def test_the_script_splits_text_into_the_three_files_of_the_guide(tmp_path: Path) -> None:
    """Every document is in one file, once; the token counts are those of the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/stdlib-mha")
    texts = [f"def f{number}(x):\n    return x\u2028 + {number}\n" for number in range(40)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in [*texts, texts[0]]]
    done = split_text(tmp_path, lines, "--heldout", "100", "--validation", "50")
    assert done.returncode == 0, done.stderr

    files = [tmp_path / name for name in ("heldout.jsonl", "validation.jsonl", "train.jsonl")]
    contents = [
        [json.loads(line)["text"] for line in path.read_text().split("\n")[:-1]] for path in files
    ]
    assert sorted(text for file in contents for text in file) == sorted(texts)
    tokens = [sum(len(tokenizer(text)["input_ids"]) for text in file) for file in contents]
    assert 100 <= tokens[0] < 150
    assert 50 <= tokens[1] < 100
    *said, note = done.stdout.splitlines()
    assert [line.split()[:2] for line in said] == [
        [path.name, f"{count:,}"] for path, count in zip(files, tokens, strict=True)
    ]
    assert note.startswith("Half of the lines have fewer than 2,048 tokens")


def test_the_script_counts_chats_in_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    """Those of ShareGPT as the same chats in `messages`."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/stdlib-mha")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    turns = [("human", "user", "def f"), ("gpt", "assistant", "return 1")]
    chat = [{"role": role, "content": text} for _, role, text in turns]
    shared = [{"from": name, "value": text} for name, _, text in turns]
    rows = [{"messages": chat}, {"conversations": shared}, {"text": "x"}]

    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "text.jsonl").write_text(lines)
    words = [
        sys.executable,
        str(SPLIT),
        "text.jsonl",
        "model",
        "--heldout",
        "1",
        "--validation",
        "1",
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens = len(tokenizer("<user>def f\n<assistant>return 1\n")["input_ids"])
    counts = sorted(int(line.split()[1]) for line in done.stdout.splitlines()[:3])
    assert counts == [len(tokenizer("x")["input_ids"]), tokens, tokens]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"text": "a"}', "{text"], "error: line 2 of text.jsonl is not JSON"),
        (['{"prompt": "a"}'], "has neither `text` nor a chat in `messages` or `conv"),
        (['{"text": "a"}'], "so nothing is left to train on; lower --heldout"),
        (['{"messages": [{"role": "user", "content": "a"}]}'], "has no chat template; write each"),
    ],
)
def test_text_that_cannot_be_split(lines: list[str], says: str, tmp_path: Path) -> None:
    done = split_text(tmp_path, lines)
    assert done.returncode == 1
    assert says in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_the_files_of_an_earlier_split_stay(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("mine")
    done = split_text(tmp_path, ['{"text": "a"}'])
    assert done.stderr == "error: train.jsonl exists; move it away\n"
    assert (tmp_path / "train.jsonl").read_text() == "mine"


def test_the_guide_compares_answers_that_it_has_collected() -> None:
    collected = {f"tasks-{shlex.split(one)[2]}" for one in commands_of("sh")}
    compared = [
        shlex.split(one)[2:] for one in commands_of("python") if COMPARE.name in shlex.split(one)
    ]
    assert len(compared) == 5
    assert {directory for pair in compared for directory in pair} <= collected


VLLM = """
class Text:
    def __init__(self, text, finish_reason):
        self.text, self.finish_reason = text, finish_reason


class Request:
    def __init__(self, chat):
        prompt = chat[-1]["content"]
        self.outputs = [Text(prompt.upper(), "length" if "cut" in prompt else "stop")]


class LLM:
    def __init__(self, **options):
        self.longest = options["max_model_len"]

    def get_tokenizer(self):
        return self

    def encode(self, text):
        return text.split()

    def chat(self, chats, sampling):
        assert all(len(self.encode(chat[-1]["content"])) < self.longest for chat in chats)
        return [Request(chat) for chat in chats]


def SamplingParams(**options):
    pass
"""


def test_the_script_for_prompts_writes_whole_answers(tmp_path: Path) -> None:
    """With a stand-in for vLLM that refuses long prompts, as vLLM does; a second run appends.

    A prompt of one message, and a chat with a system prompt, which counts to its length.
    """
    (script,) = (text for _, text in blocks(VLLM_PAGE, "python") if "model.chat" in text)
    (tmp_path / "answer.py").write_text(script)
    (tmp_path / "vllm.py").write_text(VLLM)
    prompts = ["hello", "cut this", "word " * 2048]
    system = {"role": "system", "content": "Shout."}
    user = {"role": "user", "content": "hello"}
    long_system = {"role": "system", "content": "word " * 2048}
    rows = [
        *({"prompt": prompt} for prompt in prompts),
        {"messages": [system, user]},
        {"messages": [long_system, user]},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [sys.executable, "answer.py"]
    for _ in range(2):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "5 prompts, 3 short enough, 2 whole answers\n"
    chats = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    answer = {"role": "assistant", "content": "HELLO"}
    assert chats == [{"messages": [user, answer]}, {"messages": [system, user, answer]}] * 2


def test_the_scripts_that_the_guide_copies_are_there() -> None:
    (copied,) = (shlex.split(one)[1:-1] for one in commands_of("cp"))
    assert copied == [f"../gqa/{script.relative_to(ROOT)}" for script in (TASKS, COMPARE)]


def write_lm_eval(directory: Path) -> None:
    """A program in place of lm_eval that says how it was called."""
    program = directory / ".venv-vllm/bin/lm_eval"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)


def test_tasks_run_on_each_model_and_cache(tmp_path: Path) -> None:
    shutil.copy(TASKS, tmp_path)
    write_lm_eval(tmp_path)
    outputs = set()
    for line in commands_of("sh", pages=[PAGE]):
        _, file, name, model, context, *more = words = shlex.split(line)
        assert file == TASKS.name
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        called = done.stdout.splitlines()
        given = dict(pairwise(called))
        outputs.add(given["--output_path"])
        assert given["--output_path"] == f"tasks-{name}"
        arguments = dict(one.split("=") for one in given["--model_args"].split(","))
        assert arguments["pretrained"] == model
        assert arguments["max_model_len"] == context
        assert arguments.get("kv_cache_dtype") == ("".join(more).partition("=")[2] or None)
        served = next(shlex.split(one) for one in servers() if model in shlex.split(one))
        for option in ("max_model_len", "gpu_memory_utilization"):
            flag = f"--{option.replace('_', '-')}"
            assert arguments[option] == served[served.index(flag) + 1]
    assert len(outputs) == len(commands_of("sh", pages=[PAGE]))


def test_tasks_run_with_what_the_guide_says_to_edit(tmp_path: Path) -> None:
    """Other tasks, more options, and transformers instead of vLLM."""
    script = TASKS.read_text()
    for before, after in (
        ("TASKS=triviaqa,squad_completion\n", "TASKS=gsm8k\n"),
        ('MORE=""\n', 'MORE="--apply_chat_template --limit 50"\n'),
        ("ENGINE=vllm\n", "ENGINE=hf\n"),
    ):
        assert script.count(before) == 1
        script = script.replace(before, after)
    (tmp_path / TASKS.name).write_text(script)
    write_lm_eval(tmp_path)
    words = ["sh", TASKS.name, "base", "./model", "2048"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    called = done.stdout.splitlines()
    given = dict(pairwise(called))
    assert given["--model"] == "hf"
    assert given["--tasks"] == "gsm8k"
    assert given["--model_args"] == "pretrained=./model,add_bos_token=True,max_length=2048"
    assert called[-3:] == ["--apply_chat_template", "--limit", "50"]


def test_tasks_are_not_run_into_a_directory_that_exists(tmp_path: Path) -> None:
    """It would then have answers of two models."""
    write_lm_eval(tmp_path)
    (tmp_path / "tasks-result").mkdir()
    words = ["sh", str(TASKS), "result", "./model", "2048"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: tasks-result exists: pass another NAME, or move tasks-result away\n"
    )


def test_tasks_in_transformers_refuse_a_cache_of_vllm(tmp_path: Path) -> None:
    script = TASKS.read_text().replace("ENGINE=vllm\n", "ENGINE=hf\n")
    (tmp_path / TASKS.name).write_text(script)
    write_lm_eval(tmp_path)
    words = ["sh", TASKS.name, "fp8", "./model", "2048", "dtype=float16", "kv_cache_dtype=fp8"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: kv_cache_dtype is an option of vLLM: leave it out with ENGINE=hf\n"
    )
    subprocess.run(words[:-1], cwd=tmp_path, capture_output=True, check=True)


def test_tasks_without_a_context_are_refused(tmp_path: Path) -> None:
    """As with a variable of the guide that is not set."""
    words = ["sh", str(TASKS), "base", "./model"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sh tasks.sh NAME MODEL CONTEXT")


def test_tasks_without_lm_eval_are_refused(tmp_path: Path) -> None:
    words = ["sh", str(TASKS), "base", "./model", "2048"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: there is no .venv-vllm/bin/lm_eval here: run this in the directory of .venv-vllm, "
        "or set LM_EVAL\n"
    )


def test_answers_that_are_not_there_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "tasks-base").mkdir()
    words = [sys.executable, str(COMPARE), "tasks-base", "tasks-result"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: there is no directory tasks-result; run tasks.sh for this model first\n"
    )


def test_the_result_is_served_with_the_options_of_the_base_model_and_an_8_bit_cache() -> None:
    base, result = (shlex.split(one)[3:] for one in servers())
    assert result == [*base, "--kv-cache-dtype", "fp8"]


# GPUs by the bytes that they have for weights and sequences.
GPUS = {
    "80 GB": LARGE_GPU,
    "48 GB (44 GiB)": 44 * 2**30,
    "40 GB (39 GiB)": 39 * 2**30,
    "24 GB (22 GiB)": 22 * 2**30,
}
# Seconds of a decoding step for each layer: of the measured model, 7.1 s for 255 tokens after the
# first in 24 layers (docs/results.md).
STEP_OF_A_LAYER = 7.1 / 255 / 24


def sequences_at_once(path: Path, tokens: int, dtype: torch.dtype, gpu: int) -> int:
    """Sequences that `gqa-uptrain` generates at once."""
    checkpoint = read_checkpoint(path)
    return sequences_of_model(checkpoint, tokens, dtype, gpu - checkpoint.nbytes)


def test_the_page_says_how_long_text_is_generated(models: Path) -> None:
    """By the number of sequences at once, if a step takes as long for each layer as measured."""
    rows = {}
    for gpu, size in GPUS.items():
        llama = sequences_at_once(models / LLAMA, 2048, torch.float16, size)
        qwen = sequences_at_once(models / QWEN, 4096, torch.bfloat16, size)
        hours = [
            10e6 * STEP_OF_A_LAYER * layers / sequences / 3600
            for layers, sequences in ((32, llama), (28, qwen))
        ]
        rows[gpu] = hours
        row = f"| {gpu} | {llama} | {hours[0]:.1f} hours | {qwen} | {hours[1]:.1f} hours |"
        assert row in SUMS.read_text()
    llama_hours = [hours for hours, _ in rows.values()]
    shown = "2.2 hours on 80 GB, 4.5 on 48 GB, 5.4 on 40 GB, 15 on 24 GB"
    assert llama_hours == pytest.approx([2.2, 4.5, 5.4, 15], rel=0.03)
    # What stands in parentheses is of cards that are limited by their memory
    assert shown in re.sub(r" \([^()]*\)", "", PAGE.read_text())
    assert "about half an hour on 80 GB and an hour on 48 GB" in one_line(QWEN_PAGE)


def test_the_time_to_generate_is_that_of_the_measured_model_by_its_layers(models: Path) -> None:
    step = STEP_OF_A_LAYER * 32
    tokens = 2048
    several = sequences_at_once(models / LLAMA, tokens, torch.float16, LARGE_GPU)
    page = one_line(SUMS)
    assert f"{several} sequences of {tokens:,} tokens" in page
    assert f"32 layers take {1000 * step:.0f} ms" in page
    assert f"28 layers, {1000 * STEP_OF_A_LAYER * 28:.0f} ms" in page
    assert f"about {round(several / step, -1):,.0f} tokens per second" in page
    hours = [tokens * step / several / 3600 for tokens in (10e6, 100e6)]
    assert f"10M tokens take {hours[0]:.1f} hours, and 100M take {hours[1]:.0f}" in page
    in_six_hours = 6 * 3600 * several / step / 1e6
    assert f"about {in_six_hours:.0f}M tokens" in one_line(PAGE.with_name("scale.md"))


def test_the_text_of_vllm_is_enough_for_the_training(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the blocks repeat passages of the others; 8,192 tokens are held out."""
    (training,) = (one for one in commands_of("gqa-uptrain") if "generated-*" in one)
    _, record = dry_run(training, models, monkeypatch)
    block = 2048
    blocks_of_run = record["steps"] * record["tokens_per_step"] // block
    needed = text_blocks_among(blocks_of_run) * block + 8192
    scripts = [text for _, text in blocks(VLLM_PAGE, "python")]
    for script in scripts:
        compile(script, VLLM_PAGE, "exec")
    (written,) = re.findall(r"^TOKENS = ([\d_]+)$", "\n".join(scripts), re.MULTILINE)
    assert needed < int(written) < 1.2 * needed


def test_the_page_says_how_fast_vllm_can_write_at_most(models: Path) -> None:
    """The weights and the caches of sequences that are half written, read once a step."""
    (sequences,) = re.findall(r"^AT_ONCE = (\d+)$", VLLM_PAGE.read_text(), re.MULTILINE)
    cache = int(sequences) * (2048 // 2) * 512 * 2**10
    read = read_checkpoint(models / LLAMA).nbytes + cache
    rate = int(sequences) * 3.35e12 / read
    page = one_line(VLLM_PAGE)
    assert f"reads about {read / 2**30:.0f} GiB" in page
    assert f"at most {round(rate, -2):,.0f} tokens per second" in page
    assert f"5.5M tokens take {5.5e6 / rate / 60:.0f} minutes" in page


def test_the_page_says_what_fits_into_the_cache_of_vllm(models: Path) -> None:
    rows = {
        "base model": (LLAMA, 512),
        "base model with `fp8`": (LLAMA, 256),
        "result (16 heads) with `fp8`": (f"{LLAMA}-gqa16-refined", 128),
        "result with `int8_per_token_head`": (f"{LLAMA}-gqa16-refined", 132),
        "result without an 8-bit cache": (f"{LLAMA}-gqa16-refined", 256),
        "8 heads": (f"{LLAMA}-gqa8-refined", 128),
        "8 heads with `fp8`": (f"{LLAMA}-gqa8-refined", 64),
    }
    gib = 2**30
    available = 0.9 * 79 * gib
    for name, (model, kib) in rows.items():
        weights = read_checkpoint(models / model).nbytes
        left = available - weights
        tokens = left / (kib * 1024)
        cells = (
            f"| {name} | {weights / gib:.1f} GiB | {left / gib:.1f} GiB | "
            f"{round(tokens, -2):,.0f} | {tokens / 2048:.1f}x |"
        )
        assert cells in PAGE.read_text()


def test_the_readme_converts_and_trains_by_the_plan_of_the_guide() -> None:
    lines = [shlex.join(words) for words in commands(README) if "Llama-2-7b" in str(words)]
    for program in ("gqa-convert", "gqa-uptrain"):
        shown = {line for line in lines if line.startswith(program)}
        assert shown
        assert shown <= {*commands_of(program)}


def test_the_page_shows_the_memory_of_its_models(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table that the measurement of step 6 ends with, of headers."""
    _, *words = measurement(LLAMA)
    without_text = words[: words.index("--data")]
    context, memory = (words[words.index(one) + 1] for one in ("--context", "--memory"))
    monkeypatch.chdir(models)
    write_headers(models / without_text[-1], llama_config(16), {}, LLAMA)
    options = ["--context", context, "--memory", memory, "--simulate-cache", "fp8"]
    done = run(*without_text, *options, program="gqa-eval")
    shutil.rmtree(without_text[-1])  # the other tests write it
    assert done.code == 0, done.err
    (shown,) = (text for _, text in blocks(PAGE, "text") if text.startswith("Memory\n"))
    assert shown in done.out
