"""The output of a run: one status line, and metrics.jsonl."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from typing import Any

import torch

from gqa.checkpoint.console import WIDTH, is_interactive, progress_bar
from gqa.checkpoint.errors import OutputError, explain
from gqa.checkpoint.write import finite, replacing
from gqa.uptrain.setup import Setup

WARM_UP = 2  # steps that do not count for the token rate


class Log:
    """Writes a record of each step; the remaining time includes evaluations and saves, the token rate does not."""

    def __init__(self, setup: Setup, first: int, quiet: bool, heldout: float | None) -> None:
        """`first` steps are done already; later lines of metrics.jsonl are dropped, as those steps are repeated.
        `heldout` is the held-out loss of the model before training, if known.
        """
        self._device, self._main = setup.accelerator.device, setup.accelerator.is_main_process
        self._path, self._steps, self._first = setup.metrics, setup.dataloader.steps, first
        if self._main and self._path.is_file():
            lines = self._path.read_text().splitlines(keepends=True)[:first]
            with replacing(self._path) as temporary:
                temporary.write_text("".join(lines))
        self._quiet = quiet or not self._main
        self._bar = progress_bar(self._steps, "step", "training", self._quiet, done=first)
        self._start, self._last_line = time.perf_counter(), -math.inf
        self._tokens, self._seconds = 0, 0.0
        self._heldout = heldout

    def step(self, step: int, numbers: dict[str, float], seconds: float) -> None:
        """Record `step` (from 1), which took so many seconds: `numbers` are its losses, learning rate and gradient
        norm.
        """
        if step > self._first + WARM_UP:
            self._tokens += int(numbers["step_tokens"])
            self._seconds += seconds
        rate = self._tokens / self._seconds if self._seconds else 0.0
        self._heldout = numbers.get("heldout_loss", self._heldout)
        record = {"step": step, **numbers, "tokens_per_second": round(rate, 1), "memory_bytes": memory(self._device)}
        if self._main:
            try:
                with self._path.open("a") as stream:
                    stream.write(json.dumps(finite(record)) + "\n")
            except OSError as error:
                raise OutputError(
                    f"{self._path} could not be written ({explain(error)}); free some space and continue from the last "
                    "state with --resume"
                ) from error
        self._bar.update()
        if not self._quiet:
            self._show(step, record)

    def _show(self, step: int, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        parts = self._status(record)
        if is_interactive():
            self._bar.set_postfix_str(" | ".join(parts))
        elif step == self._steps or now - self._last_line > 5:  # a file gets a line every few seconds
            self._last_line = now
            remaining = (now - self._start) / (step - self._first) * (self._steps - step)
            line = f"step {step}/{self._steps} | eta {int(remaining // 60)}:{int(remaining % 60):02d}"
            for part in parts:  # as many as fit; metrics.jsonl has them all
                line += f" | {part}" if len(line) + 3 + len(part) <= WIDTH else ""
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def _status(self, record: dict[str, Any]) -> list[str]:
        """The parts of the status line, the most important first."""
        parts = [f"loss {record['loss']:.4f}"]
        if "distillation" in record:
            parts.append(f"kl {record['distillation']:.4f}")
        if self._heldout is not None:
            parts.append(f"held-out {self._heldout:.4f}")
        if rate := record["tokens_per_second"]:
            parts.append(f"{rate:,.0f} tok/s")
        memory_size = f"{record['memory_bytes'] / 2**30:.1f} GiB"
        return [*parts, f"lr {record['learning_rate']:.2e}", memory_size, f"{record['tokens']:,} tokens"]

    def close(self) -> None:
        self._bar.close()


def memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: of the GPU that it uses, else of the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
