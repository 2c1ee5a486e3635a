"""Downstream tasks, entirely through lm-evaluation-harness (the extra `tasks`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gqa.convert.errors import RefusedError, explain, listing


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    batch_size: int,
    shots: int | None = None,
    limit: int | None = None,
    include: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics by task, as lm-evaluation-harness names them, of a loaded model.

    Args:
        shots: Examples in the prompt; None leaves each task's own number.
        limit: Only that many documents of each task.
        include: A directory of task definitions of one's own (YAML).

    Raises:
        RefusedError: The harness is not installed, or does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError:
        raise RefusedError(
            "--tasks needs lm-evaluation-harness; install it with: pip install 'gqa-convert[tasks]'"
        ) from None
    manager = TaskManager(include_path=str(include) if include else None)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise RefusedError(f"lm-evaluation-harness has no task {listing(unknown)}; `lm-eval ls tasks` lists them")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        found = simple_evaluate(
            harness, tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager, bootstrap_iters=1000
        )
    except OSError as error:  # a data set that cannot be fetched
        raise RefusedError(f"a task of {listing(tasks)} could not be run: {explain(error)}") from None
    assert found is not None
    return {
        task: {key: value for key, value in metrics.items() if key != "alias"}
        for task, metrics in found["results"].items()
    }
