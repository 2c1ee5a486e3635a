"""The log of a training: metrics.jsonl, with a line for each step, and what is shown meanwhile."""

from __future__ import annotations

import json

import torch

from gqa.checkpoint.write import finite, replacing
from gqa.core.console import Watcher
from gqa.core.devices import peak_memory
from gqa.core.errors import explain
from gqa.uptrain.schedule import RATE_CUT
from gqa.uptrain.setup import ReadyRun
from gqa.uptrain.state_files import TrainingProgress


class Log:
    """Writes a record of each step to metrics.jsonl, and shows its losses."""

    def __init__(self, run: ReadyRun, first: int, watcher: Watcher) -> None:
        """`first` steps are done already; later lines of metrics.jsonl are dropped, as those steps
        are repeated.
        """
        self._device = run.accelerator.device
        self._objective = run.options.objective
        self._is_main = run.accelerator.is_main_process
        self._path = run.log_path
        self._watcher = watcher
        self._has_warned = False

        watcher.stage("training", run.dataloader.steps, "step", first)
        if self._is_main and (first or self._path.is_file()):
            try:
                self._keep_lines_until(first)
            except OSError as error:
                self._warn(error, "steps that are repeated are in it twice")

    def _keep_lines_until(self, last: int) -> None:
        """Drop all lines of the file but those of the steps until `last`."""
        self._path.touch()  # users delete it
        lines = self._path.read_text(errors="replace").splitlines(keepends=True)
        steps_done = range(1, last + 1)
        with replacing(self._path) as temporary:
            temporary.write_text("".join(line for line in lines if _step_of(line) in steps_done))

    def step(self, progress: TrainingProgress, numbers: dict[str, float], seconds: float) -> None:
        """Record a step, which took so many seconds: `numbers` are its losses, learning rate and
        gradient norm.
        """
        if not self._is_main:
            return

        tokens_per_second = numbers["step_tokens"] / seconds
        record = {
            "step": progress.step,
            **numbers,
            "tokens_per_second": round(tokens_per_second, 1),
            "memory_bytes": peak_bytes(self._device),
        }
        self._append(json.dumps(finite(record)) + "\n")

        losses = self._shown_losses(progress, numbers)
        note = [f"{name} {loss:.4f}" for name, loss in losses.items()]
        self._watcher.update(note=", ".join([*note, f"{tokens_per_second:,.0f} tok/s"]))

    def lowered_rate(self, progress: TrainingProgress) -> None:
        """Say that the run goes on at a lower learning rate, and from which weights."""
        if not self._is_main:
            return
        divisor = round(1 / RATE_CUT) ** progress.rate_cuts
        self._watcher.note(
            f"step {progress.step:,}: the loss on validation text is not lower than at step "
            f"{progress.best_step:,}; the run goes on from there, at 1/{divisor} of the "
            "learning rate"
        )

    def _append(self, line: str) -> None:
        """Append a line; warn once if that fails."""
        try:
            with self._path.open("a") as stream:
                stream.write(line)
        except OSError as error:
            if not self._has_warned:
                self._warn(error, "steps are missing in it")
            self._has_warned = True

    def _warn(self, error: OSError, what: str) -> None:
        """Say what is wrong with the file. A log is not worth a training, which goes on."""
        reason = error.strerror or explain(error)
        self._watcher.warn(f"{self._path}: {reason}; {what}. The run goes on")

    def _shown_losses(
        self, progress: TrainingProgress, numbers: dict[str, float]
    ) -> dict[str, float]:
        """What the run lowers, by the name that people see: in this step, and at best so far."""
        name = self._objective.replace("_", "-")
        losses = {name: numbers[self._objective]}
        if progress.lowest_validation:
            losses[f"lowest validation {name}"] = progress.lowest_validation[self._objective]
        return losses


def _step_of(line: str) -> int:
    """The step that a line of the log records; 0 for half a line, of a run that was killed."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return 0
    return step if isinstance(step, int) and line.endswith("\n") else 0


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process in bytes: of the GPU that it uses, else of the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_memory()
