"""Downstream tasks, entirely through lm-evaluation-harness (the extra `tasks`)."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from importlib.util import find_spec
from typing import IO, Any

from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError, explain, listing
from gqa.checkpoint.loading import ranks
from gqa.eval.options import EvaluateOptions
from gqa.eval.subjects import Subject

_LENGTHS = tuple(4096 << n for n in range(6))  # that RULER's tasks have metrics for


class Harness:
    """The tasks that `options` ask for: names or patterns (`mmlu_*`) of tasks, groups or tags. Finding them needs no
    model, so what is wrong with them is said before one runs.

    Tasks that make their texts themselves (RULER, niah_*) are told the first model's tokenizer, and how many tokens all
    models read. Unless `quiet`, the harness' log and progress bars are on stderr; nothing of it goes to stdout.

    Raises:
        RefusedError: The harness is not installed, or does not know a task; a model has no tokenizer.
    """

    def __init__(self, subjects: Sequence[Subject], options: EvaluateOptions, quiet: bool) -> None:
        names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
        if not names:
            raise RefusedError("--tasks names no task; `lm-eval ls tasks` lists them")
        for subject in subjects:
            _ = subject.tokenizer
        processes = ranks().num_processes
        if options.limit and options.limit < processes:
            raise RefusedError(f"--limit {options.limit} is less than the {processes} processes that share documents")
        if options.tasks_engine == "vllm" and (processes > 1 or not find_spec("vllm")):
            several = "shares a model by --tensor-parallel; start it without a launcher"
            told = several if processes > 1 else "needs vLLM; install it with: pip install vllm"
            raise RefusedError(f"--tasks-engine vllm {told}")
        limit = min((subject.positions for subject in subjects if subject.positions), default=_LENGTHS[-1])
        lengths = [length for length in _LENGTHS if length <= limit] or [_LENGTHS[0]]
        try:
            from lm_eval.tasks import TaskManager
        except ModuleNotFoundError:
            raise RefusedError(
                "--tasks needs lm-evaluation-harness; install it with: pip install 'gqa[tasks]'"
            ) from None
        self._options, self._quiet = options, quiet or not sys.stderr.isatty()
        with self._output():
            self._manager = TaskManager(
                include_path=str(options.include_tasks) if options.include_tasks else None,
                metadata={"tokenizer": subjects[0].path, "max_seq_lengths": lengths},
            )
            found = {task: self._manager.match_tasks([task]) for task in names}
        if unknown := [task for task, names in found.items() if not names]:
            raise RefusedError(f"lm-evaluation-harness has no task {listing(unknown)}; `lm-eval ls tasks` lists them")
        self.tasks = list(dict.fromkeys(name for names in found.values() for name in names))

    def measure(self, subjects: Sequence[Subject], load: Callable[[Subject], PreTrainedModel]) -> None:
        """Add to each record what `run` finds. Raises RefusedError."""
        found = [self.run(subject, partial(load, subject)) for subject in subjects]
        for subject, tasks in zip(subjects, found, strict=True):  # of all or of none
            subject.record["tasks"] = tasks

    def run(self, subject: Subject, load: Callable[[], PreTrainedModel]) -> dict[str, Any]:
        """Of every task (and subtask) its version, shots, number of documents, and the harness' metrics by its names.

        Several processes share the documents, and all but the first get nothing. Raises RefusedError where a task
        cannot be run; mostly a data set that cannot be fetched.
        """
        from lm_eval import simple_evaluate

        options = self._options
        model = None if options.tasks_engine == "vllm" else load()
        try:
            with self._output():
                found: Any = simple_evaluate(
                    self._harnessed(model, subject) if model else "vllm",
                    model_args=None if model else self._for_vllm(subject),
                    batch_size="auto" if options.batch_size == EvaluateOptions.batch_size else options.batch_size,
                    tasks=self.tasks, num_fewshot=options.shots, limit=options.limit,
                    task_manager=self._manager, bootstrap_iters=1000, log_samples=False,
                )  # fmt: skip
        except Exception as error:  # whatever definitions, data sets and their libraries raise
            raise RefusedError(f"a task of {listing(self.tasks)} cannot be run: {explain(error)}") from None
        results = found["results"] if found else {}  # of the first process alone
        return {
            task: {
                "version": found["versions"].get(task),
                "shots": found["n-shot"].get(task),
                "documents": metrics.get("sample_len"),
                "metrics": {key: value for key, value in metrics.items() if "," in key},
            }
            for task, metrics in results.items()
        }

    def _harnessed(self, model: PreTrainedModel, subject: Subject) -> Any:
        """The model as the harness wants it, which takes one that it has not loaded for that of a single process."""
        from accelerate import Accelerator
        from lm_eval.models.huggingface import HFLM

        found: Any = HFLM(pretrained=model, tokenizer=subject.tokenizer, batch_size=self._options.batch_size)
        if (state := ranks()).num_processes > 1:
            found.accelerator = Accelerator(cpu=state.device.type == "cpu")
            found._rank, found._world_size = state.process_index, state.num_processes
        return found

    def _for_vllm(self, subject: Subject) -> dict[str, Any]:
        return {
            "pretrained": subject.path,
            "dtype": self._options.precision,
            "tensor_parallel_size": self._options.tensor_parallel,
            "trust_remote_code": subject.trust_remote_code,
        }

    @contextmanager
    def _output(self) -> Iterator[None]:
        """stdout is for results."""
        place: IO[str] = io.StringIO() if self._quiet else sys.stderr
        with redirect_stdout(place), redirect_stderr(place):
            yield
