"""The output of a run: one status line, metrics.jsonl, trackers."""

from __future__ import annotations

import json
import math
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gqa.checkpoint.console import WIDTH, progress_bar, watched
from gqa.checkpoint.errors import OutputError, explain
from gqa.checkpoint.write import finite, replacing
from gqa.uptrain.setup import Setup

# Peak FLOP/s of dense bfloat16 matrix products, from the makers' data sheets; the first name that matches counts.
_PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12,
    "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX 4090": 165e12,
}  # fmt: skip
WARM_UP = 2  # steps that are not timed


class Log:
    """Call `end_step` right after each step, then `step`; `begin_step` after an evaluation or a save.

    The token rate counts training alone; the remaining time includes evaluations and saves.
    """

    def __init__(self, setup: Setup, first: int, quiet: bool, heldout: float | None) -> None:
        """`first` steps are done already; later lines of metrics.jsonl are dropped, as those steps are repeated.
        `heldout` is the held-out loss of the model before training, if known.
        """
        self._accelerator, self._path, self._steps = setup.accelerator, setup.metrics, setup.dataloader.steps
        self._flops = 6 * setup.model.num_parameters()  # per token: forward and backward of every weight
        self._main, self._terminal = self._accelerator.is_main_process, watched()
        if self._main:
            _truncate(self._path, first)
        self._quiet = quiet or not self._main
        self._bar = progress_bar(self._steps, "step", "training", self._quiet, done=first)
        self._start = self._step_start = time.perf_counter()
        self._done, self._tokens, self._seconds = 0, 0, 0.0
        self._heldout = heldout
        self._last_line = -math.inf

    def begin_step(self) -> None:
        self._step_start = time.perf_counter()

    def end_step(self, tokens: int) -> None:
        """Time a step on so many tokens."""
        now = time.perf_counter()
        self._done += 1
        if self._done > WARM_UP:
            self._tokens += tokens
            self._seconds += now - self._step_start
        self._step_start = now

    def step(self, step: int, numbers: dict[str, float]) -> None:
        """Record `step` (from 1): `numbers` are its losses, learning rate and gradient norm."""
        rate = self._tokens / self._seconds if self._seconds else 0.0
        self._heldout = numbers.get("heldout_loss", self._heldout)
        record: dict[str, Any] = {"step": step, **numbers, "tokens_per_second": round(rate, 1)}
        if (peak := self._peak()) and rate:
            record["mfu"] = rate * self._flops / peak
        record["memory_bytes"] = memory(self._accelerator.device)
        if self._main:
            try:
                with self._path.open("a") as stream:
                    stream.write(json.dumps(finite(record)) + "\n")
            except OSError as error:
                raise OutputError(
                    f"{self._path} could not be written ({explain(error)}); free some space and continue from the last "
                    "state with --resume"
                ) from error
        if self._accelerator.trackers:
            self._accelerator.log({k: v for k, v in record.items() if k != "step"}, step=step)
        self._bar.update()
        self._show(step, record)

    def _show(self, step: int, record: dict[str, Any]) -> None:
        if self._quiet:
            return
        now = time.perf_counter()
        remaining = (now - self._start) / self._done * (self._steps - step)
        parts = self._status(record)
        if self._terminal:
            self._bar.set_postfix_str(" | ".join(parts))
        elif step == self._steps or now - self._last_line > 5:  # a file gets a line every few seconds
            self._last_line = now
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
        parts.append(f"lr {record['learning_rate']:.2e}")
        if "mfu" in record:
            parts.append(f"mfu {record['mfu']:.0%}")
        parts += [f"{record['memory_bytes'] / 2**30:.1f} GiB", f"{record['tokens']:,} tokens"]
        return parts

    def _peak(self) -> float | None:
        """Peak FLOP/s of all ranks' devices, if known."""
        if self._accelerator.device.type != "cuda" or self._accelerator.mixed_precision == "no":
            return None
        peak = peak_of(torch.cuda.get_device_name(self._accelerator.device))
        return peak * self._accelerator.num_processes if peak else None

    def close(self) -> None:
        self._bar.close()


def peak_of(name: str) -> float | None:
    """Peak FLOP/s of a GPU by its name, if known: whole words, as an L40 is no L4."""
    return next((peak for known, peak in _PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def _truncate(path: Path, steps: int) -> None:
    """Keep the first `steps` lines of a file, one for each step."""
    lines = path.read_text().splitlines(keepends=True)[:steps] if path.is_file() else []
    with replacing(path) as temporary:
        temporary.write_text("".join(lines))


def memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: of the GPU that it uses, else of the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
