"""Downstream tasks, entirely through lm-evaluation-harness (the extra `tasks`)."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gqa.checkpoint.errors import RefusedError, explain, listing


class Harness:
    """The tasks that were asked for. Finding them needs no model, so what is wrong with them is said before one runs.

    Args:
        tasks: Names or patterns (`mmlu_*`) of tasks, groups or tags.
        include: A directory of task definitions of one's own (YAML).
        metadata: What tasks are told that make their texts themselves (RULER, niah_*): `tokenizer`, a path or hub id,
            and `max_seq_lengths`.
        shots: Examples in the prompt; None leaves each task's own number.
        limit: Only that many documents of each task.
        quiet: Keep the harness' log and progress bars back. Nothing of it goes to stdout in any case.

    Raises:
        RefusedError: The harness is not installed, or does not know a task.
    """

    def __init__(
        self, tasks: Sequence[str], include: Path | None = None, shots: int | None = None, limit: int | None = None,
        quiet: bool = False, metadata: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        try:
            from lm_eval.tasks import TaskManager
        except ModuleNotFoundError:
            raise RefusedError(
                "--tasks needs lm-evaluation-harness; install it with: pip install 'gqa[tasks]'"
            ) from None
        self._shots, self._limit, self._quiet = shots, limit, quiet
        with self._output():
            self._manager = TaskManager(include_path=str(include) if include else None, metadata=metadata)
            found = {task: self._manager.match_tasks([task]) for task in tasks}
        if unknown := [task for task, names in found.items() if not names]:
            raise RefusedError(f"lm-evaluation-harness has no task {listing(unknown)}; `lm-eval ls tasks` lists them")
        self.tasks = list(dict.fromkeys(name for names in found.values() for name in names))

    def run(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> dict[str, Any]:
        """Of every task (and subtask) its version, shots, number of documents, and the harness' metrics by its names.

        Raises RefusedError where a task cannot be run; mostly a data set that cannot be fetched.
        """
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        try:
            with self._output():
                found: Any = simple_evaluate(
                    HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                    tasks=self.tasks, num_fewshot=self._shots, limit=self._limit, task_manager=self._manager,
                    bootstrap_iters=1000, log_samples=False,
                )  # fmt: skip
        except Exception as error:  # whatever definitions, data sets and their libraries raise
            raise RefusedError(f"a task of {listing(self.tasks)} cannot be run: {explain(error)}") from None
        return {
            task: {
                "version": found["versions"].get(task),
                "shots": found["n-shot"].get(task),
                "documents": metrics.get("sample_len"),
                "metrics": {key: value for key, value in metrics.items() if "," in key},
            }
            for task, metrics in found["results"].items()
        }

    @contextmanager
    def _output(self) -> Iterator[None]:
        """stdout is for results."""
        place: IO[str] = io.StringIO() if self._quiet else sys.stderr
        with redirect_stdout(place), redirect_stderr(place):
            yield
