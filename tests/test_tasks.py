"""lm-evaluation-harness and gqa-eval on the same text: the same numbers, and the harness' own through --tasks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from embedded import SOURCE, load, texts
from evaluations import place, refused, results, words

from gqa.eval import evaluate
from gqa.eval.options import EvaluateOptions
from gqa.eval.subjects import open_subjects
from gqa.eval.tables import number
from gqa.eval.tasks import Harness

LOCAL = """dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
PERPLEXITY = (
    LOCAL
    + """task: local_perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
metadata: {{version: 7}}
"""
)
CHOICE = (
    LOCAL
    + """task: local_choice
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""
)
QUESTIONS = [("import", [" os", " zebra"]), ("def f(self,", [" x):", " :)"]), ("return", [" whale", " None"])]
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")  # gqa-eval calls them the same


@cache
def tasks() -> Path:
    """Data, and definitions of both tasks on each: several documents, or one alone that is longer than a window."""
    directory = place() / "tasks"
    directory.mkdir()
    questions = [json.dumps({"question": question, "choices": choices}) + "\n" for question, choices in QUESTIONS]
    (directory / "questions.jsonl").write_text("".join(questions))
    for name, count in (("several", 3), ("one", 1)):
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count, 1800)))
        (directory / f"{name}.txt").write_text(texts(1, 1800)[0])
        (directory / name).mkdir()
        (directory / name / "perplexity.yaml").write_text(PERPLEXITY.format(data=data))
        (directory / name / "choice.yaml").write_text(CHOICE.format(data=directory / "questions.jsonl"))
    return directory


@cache
def harness(model: Path, data: str, **model_args: Any) -> dict[str, Any]:
    """What lm_eval itself finds, with the model that it loads itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    with contextlib.redirect_stderr(io.StringIO()):
        found: Any = simple_evaluate(
            "hf", {"pretrained": str(model), "dtype": "float32"} | model_args, device="cpu", batch_size=4,
            tasks=["local_perplexity", "local_choice"], bootstrap_iters=1000,
            task_manager=TaskManager(include_path=str(tasks() / data), include_defaults=False),
        )  # fmt: skip
    return dict(found["results"])


@pytest.fixture(autouse=True)
def own_tasks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness takes seconds to read the thousands of tasks that come with it."""
    import lm_eval.tasks

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))


@pytest.mark.parametrize(("file", "context"), [("several.jsonl", 200), ("one.txt", 400)])
def test_rolling_perplexity_is_the_harness_on_the_same_documents(file: str, context: int) -> None:
    """Word perplexity too. That of a conversion is another."""
    found = results(f"SRC G4 --data {tasks()}/{file} --precision float32 --context {context}")["models"]
    theirs = harness(SOURCE, file.partition(".")[0], max_length=context)["local_perplexity"]
    for name in METRICS:
        ours, other = (model["quality"][name] for model in found)
        assert ours == pytest.approx(theirs[f"{name},none"], rel=1e-5), name
        assert other != pytest.approx(ours, rel=1e-2), name


def test_tasks_are_the_harness_own_numbers() -> None:
    line = f"SRC G4 --tasks local_*,local_choice --include-tasks {tasks()}/several --precision float32 --batch-size 4"
    result = run(*words(line), "--json", program="gqa-eval")
    assert result.code == 0, result
    found = json.loads(result.out)  # nothing of the harness is on stdout
    for model, path in zip(found["models"], (SOURCE, place() / "gqa4"), strict=True):
        theirs = harness(path, "several", max_length=512)
        assert set(model["tasks"]) == set(theirs) == {"local_perplexity", "local_choice"}
        for task, ours in model["tasks"].items():
            metrics = {key: value for key, value in theirs[task].items() if "," in key}
            assert ours["metrics"].keys() == metrics.keys()
            for key, value in metrics.items():
                assert ours["metrics"][key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
            assert ours["shots"] == 0
        assert model["tasks"]["local_perplexity"]["version"] == 7
        assert model["tasks"]["local_choice"]["documents"] == 3
        assert 0 < model["tasks"]["local_choice"]["metrics"]["acc,none"] < 1
    first, second = (model["tasks"]["local_perplexity"]["metrics"] for model in found["models"])
    assert first["bits_per_byte,none"] != pytest.approx(second["bits_per_byte,none"], rel=1e-2)
    assert all(number(one["bits_per_byte,none"]) in result.err for one in (first, second))
    accuracy = found["models"][0]["tasks"]["local_choice"]["metrics"]
    assert f"{accuracy['acc,none']:.4g} ± {accuracy['acc_stderr,none']:.2g}" in result.err
    assert "lm_eval" in found["versions"]
    assert result.err.startswith(
        "4 of 8 heads: KV cache 2x smaller\n\nMemory\n"
    )  # neither its log nor its progress where nobody looks


def test_shots_and_limit() -> None:
    line = f"SRC --tasks local_choice --include-tasks {tasks()}/one --shots 1 --limit 2"
    found = results(line)["models"][0]["tasks"]["local_choice"]
    assert (found["shots"], found["documents"]) == (1, 2)


@pytest.mark.scale  # a minute: each process reads all tasks that there are
def test_processes_share_documents() -> None:
    """Of which one has more than the other, and find what one process finds."""
    line = words(f"SRC G2 --tasks local_perplexity,local_choice --include-tasks {tasks()}/several --precision float32")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "gqa.eval"]
    program = [sys.executable, *launcher, *line, "--json", "-q"]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    both, one = (found["models"] for found in (json.loads(done.stdout), results(" ".join(line))))
    for ours, theirs in zip(both, one, strict=True):
        for task, expected in theirs["tasks"].items():
            assert ours["tasks"][task]["documents"] == expected["documents"]
            for name, value in expected["metrics"].items():
                wanted = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                assert ours["tasks"][task]["metrics"][name] == wanted, name
    assert "--limit 1 is less than the 2 processes" in subprocess.run(
        [*program, "--limit", "1"], capture_output=True, text=True
    ).stderr  # fmt: skip


def test_vllm_is_the_harness_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is told of the checkpoint, and loads it by itself."""
    import lm_eval.api.registry
    from lm_eval.models.huggingface import HFLM

    import gqa.eval.tasks as module

    told = []

    class Backend:
        @staticmethod
        def create_from_arg_obj(given: dict[str, Any], more: dict[str, Any]) -> Any:
            told.append(given | more)
            return HFLM(given["pretrained"], dtype=given["dtype"], device="cpu", batch_size=4)

    line = f"SRC --tasks local_choice --include-tasks {tasks()}/several --precision float32"
    expected = [model["tasks"] for model in results(line)["models"]]
    assert "--tasks-engine vllm needs vLLM; install it with: pip install vllm" in refused(f"{line} --tasks-engine vllm")
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(lm_eval.api.registry, "get_model", {"vllm": Backend}.get)
    monkeypatch.setattr(evaluate, "load", lambda *given: pytest.fail("a model was loaded"))
    found = results(f"{line} --tasks-engine vllm --tensor-parallel 2")["models"]
    assert [model["tasks"] for model in found] == expected
    assert [(one["pretrained"], one["tensor_parallel_size"]) for one in told] == [(m["path"], 2) for m in found]
    results(f"{line} --tasks-engine vllm --batch-size 3")
    assert [one["batch_size"] for one in told] == ["auto", 3]


def test_what_tasks_print_is_not_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noise.py").write_text("def noise(rows):\n    print('noise')\n    return rows\n")
    definition = CHOICE.format(data=tasks() / "questions.jsonl").replace("local_choice", "noisy")
    (tmp_path / "noisy.yaml").write_text(f"{definition}process_docs: !function noise.noise\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # who looks at it
    subjects, options = open_subjects([str(SOURCE)]), EvaluateOptions(tasks="noisy", include_tasks=tmp_path)
    for quiet in (False, True):
        found = Harness(subjects, options, quiet).run(subjects[0], lambda: load(SOURCE))
        assert found["noisy"]["documents"] == 3
        out, err = capsys.readouterr()
        assert (out, "noise" in err) == ("", not quiet)


def test_what_is_wrong_with_tasks_is_said_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "load", lambda *args: pytest.fail("a model was loaded"))
    said = refused(f"SRC --tasks local_choice,nothere --include-tasks {tasks()}/one")
    assert "lm-evaluation-harness has no task nothere; `lm-eval ls tasks` lists them" in said
    assert "is a file" in refused(f"SRC --tasks local_choice --include-tasks {tasks()}/one/choice.yaml")
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert "pip install 'gqa[tasks]'" in refused("SRC --tasks local_choice")


def test_a_task_that_cannot_be_run_is_one_line(tmp_path: Path) -> None:
    """It costs nothing that was measured before."""
    (tmp_path / "gone.yaml").write_text(CHOICE.format(data=tmp_path / "gone.jsonl").replace("local_choice", "gone"))
    line = f"SRC --tasks gone --include-tasks {tmp_path}"
    said = refused(line)
    assert "a task of gone cannot be run: " in said
    assert "gone.jsonl" in said
    more = ["--data", place() / "text.jsonl", "--context", 64, "--tokens", 300, "--json"]
    result = run(*words(line), *more, program="gqa-eval")
    found, (*_, last) = json.loads(result.out), result.err.strip().splitlines()
    assert (result.code, "quality" in found["models"][0]) == (1, True)
    assert last == f"gqa-eval: {found['tasks']['refused']}; the rest is measured"
    assert "\n\nTasks (lm-evaluation-harness)\nnot measured\na task of gone" in result.err


def test_tasks_that_make_their_texts_are_told_of_the_model(tmp_path: Path) -> None:
    """As RULER's are: which tokenizer, and how many tokens."""
    (tmp_path / "made.py").write_text(
        "import json, datasets\n"
        "def texts(**told):\n"
        f"    json.dump(told, open({str(tmp_path / 'told.json')!r}, 'w'))\n"
        "    return {'test': datasets.Dataset.from_list([{'text': 'import os'}])}\n"
    )
    (tmp_path / "made.yaml").write_text(
        'task: local_made\ndataset_path: ""\ntest_split: test\ncustom_dataset: !function made.texts\n'
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}]\n"
    )
    results("SRC --tasks local_made --include-tasks", tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["tokenizer"] == str(place() / SOURCE.name)
    assert told["max_seq_lengths"] == [4096]
