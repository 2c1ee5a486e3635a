"""lm-evaluation-harness and gqa-eval on the same text: the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from embedded import SOURCE, texts
from evaluations import place, results

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


@pytest.mark.parametrize(("file", "context"), [("several.jsonl", 200), ("one.txt", 400)])
def test_rolling_perplexity_is_the_harness_on_the_same_documents(file: str, context: int) -> None:
    """Word perplexity too. That of a conversion is another."""
    found = results(f"SRC G4 --data {tasks()}/{file} --precision float32 --context {context}")["models"]
    theirs = harness(SOURCE, file.partition(".")[0], max_length=context)["local_perplexity"]
    for name in METRICS:
        ours, other = (model["quality"][name] for model in found)
        assert ours == pytest.approx(theirs[f"{name},none"], rel=1e-5), name
        assert other != pytest.approx(ours, rel=1e-2), name


def test_the_harness_runs_a_conversion() -> None:
    """As docs/evaluation.md says it: with the checkpoint alone."""
    source, found = (harness(model, "several") for model in (SOURCE, place() / "gqa4"))
    assert 0 < found["local_choice"]["acc,none"] < 1
    assert found["local_perplexity"]["bits_per_byte,none"] > source["local_perplexity"]["bits_per_byte,none"]
