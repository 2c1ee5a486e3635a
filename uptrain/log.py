"""What a run tells: one status line, metrics.jsonl, trackers."""

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

# bfloat16 peak of dense matrix products, FLOP/s, as the makers state it; of a name the first that fits.
_PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "GH200": 989e12,
    "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX 4090": 165e12,
}  # fmt: skip
WARM_UP = 2  # steps that are not timed


class Log:
    """`trained` after each step, then `step`; `begin` where something that is not training came between.

    The rate is that of training alone, without evaluations and saves; the time that is left is that of everything.
    """

    def __init__(self, setup: Setup, first: int, quiet: bool, heldout: float | None) -> None:
        """`first` steps were done before: what metrics.jsonl tells of later ones is dropped, as they are done again.
        `heldout` is the loss of held-out text as the model is, where that is known.
        """
        self._accelerator, self._path, self._steps = setup.accelerator, setup.metrics, setup.dataloader.steps
        self._flops = 6 * setup.model.num_parameters()  # per token: forward and backward of every weight
        self._main, self._terminal = self._accelerator.is_main_process, watched()
        if self._main:
            _cut(self._path, first)
        self._quiet = quiet or not self._main
        self._bar = progress_bar(self._steps, "step", "training", self._quiet, done=first)
        self._began = self._since = time.perf_counter()
        self._done, self._tokens, self._seconds = 0, 0, 0.0
        self._heldout = heldout
        self._said = -math.inf

    def begin(self) -> None:
        """The next step begins now."""
        self._since = time.perf_counter()

    def trained(self, tokens: int) -> None:
        """A step on so many tokens ends now."""
        now = time.perf_counter()
        self._done += 1
        if self._done > WARM_UP:
            self._tokens += tokens
            self._seconds += now - self._since
        self._since = now

    def step(self, step: int, numbers: dict[str, float]) -> dict[str, Any]:
        """`step` (from 1) is done; `numbers` are its losses, rate and gradient norm. Returns the whole record."""
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
                told = "free some space and continue from the last state with --resume"
                raise OutputError(f"{self._path} could not be written ({explain(error)}); {told}") from error
        if self._accelerator.trackers:
            self._accelerator.log({k: v for k, v in record.items() if k != "step"}, step=step)
        self._bar.update()
        self._say(step, record)
        return record

    def _say(self, step: int, record: dict[str, Any]) -> None:
        if self._quiet:
            return
        now = time.perf_counter()
        left = (now - self._began) / self._done * (self._steps - step)
        told = self._told(record)
        if self._terminal:
            self._bar.set_postfix_str(" | ".join(told))
        elif step == self._steps or now - self._said > 5:  # a file gets a line every few seconds
            self._said = now
            line = f"step {step}/{self._steps} | eta {int(left // 60)}:{int(left % 60):02d}"
            for part in told:  # those that fit; all of them are in the metrics
                line += f" | {part}" if len(line) + 3 + len(part) <= WIDTH else ""
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def _told(self, record: dict[str, Any]) -> list[str]:
        """From what is most important on."""
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
        """The device's peak FLOP/s, of all ranks, where it is known."""
        if self._accelerator.device.type != "cuda" or self._accelerator.mixed_precision == "no":
            return None
        peak = peak_of(torch.cuda.get_device_name(self._accelerator.device))
        return peak * self._accelerator.num_processes if peak else None

    def close(self) -> None:
        self._bar.close()


def peak_of(name: str) -> float | None:
    """Of the GPU of that name, where it is known: whole words, as an L40 is no L4."""
    return next((peak for known, peak in _PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def _cut(path: Path, steps: int) -> None:
    """Keep the first `steps` lines of a file, which are of as many steps."""
    kept = path.read_text().splitlines(keepends=True)[:steps] if path.is_file() else []
    with replacing(path) as fresh:
        fresh.write_text("".join(kept))


def memory(device: torch.device) -> int:
    """The most that this process has held: of the memory of the GPU that it uses, or else of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
