"""lm-evaluation-harness and gqa-eval on the same text: the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from embedded import SOURCE, texts
from evaluations import model_directory, results

TASK = """task: local_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
metadata: {{version: 7}}
"""


def harness(model: Path, data: Path, directory: Path, **model_args: Any) -> dict[str, float]:
    """Perplexities by lm_eval, with the model that it loads itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    (directory / "perplexity.yaml").write_text(TASK.format(data=data))
    with contextlib.redirect_stderr(io.StringIO()):
        record: Any = simple_evaluate(
            "hf", {"pretrained": str(model), "dtype": "float32"} | model_args, device="cpu", batch_size=4,
            tasks=["local_perplexity"], bootstrap_iters=10,
            task_manager=TaskManager(include_path=str(directory), include_defaults=False),
        )  # fmt: skip
    return dict(record["results"]["local_perplexity"])


@pytest.mark.parametrize(("model", "count", "context"), [("SRC", 3, 200), ("SRC", 1, 400), ("G4", 3, 1024)])
def test_rolling_perplexity_is_that_of_the_harness(model: str, count: int, context: int, tmp_path: Path) -> None:
    """Word perplexity too, of several documents and of one that is longer than a window. That of another model
    differs."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(count, 1800)))
    path, other = (SOURCE, "G4") if model == "SRC" else (model_directory() / "gqa4", "SRC")
    line = f"{path} {other} --data {data} --precision float32 --context {min(context, 512)}"
    ours, others = (each["quality"] for each in results(line)["models"])
    theirs = harness(path, data, tmp_path, max_length=min(context, 512))
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert ours[name] == pytest.approx(theirs[f"{name},none"], rel=1e-5), name
        assert others[name] != pytest.approx(ours[name], rel=1e-2), name
