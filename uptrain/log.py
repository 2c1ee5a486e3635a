"""What a run tells: one status line, metrics.jsonl, trackers."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

# bfloat16 peak of dense matrix products, FLOP/s, as the makers state it.
_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "L4": 121e12}
WARM_UP = 2  # steps that are not timed


class Log:
    """Call `step` once a step; rates are over everything since the first steps of this process."""

    def __init__(
        self, accelerator: Accelerator, path: Path | None, steps: int, first: int, parameters: int, quiet: bool
    ) -> None:
        from tqdm import tqdm

        self._accelerator, self._steps, self._first = accelerator, steps, first
        self._flops = 6 * parameters  # per token: forward and backward of every weight
        main = accelerator.is_main_process
        self._path = path if main else None
        self._terminal = sys.stderr.isatty()
        self._quiet = quiet or not main
        self._bar = tqdm(
            total=steps, initial=first, unit="step", file=sys.stderr, leave=False,
            disable=self._quiet or not self._terminal,
        )  # fmt: skip
        self._start, self._timed = time.perf_counter(), 0
        self._heldout: float | None = None
        self._said = -math.inf

    def step(self, step: int, tokens: int, numbers: dict[str, float]) -> dict[str, Any]:
        """`step` (from 1) is done and trained on `tokens`; `numbers` are its losses, rate and gradient norm."""
        now = time.perf_counter()
        done = step - self._first
        if done == WARM_UP:
            self._start, self._timed = now, 0
        elif done > WARM_UP:
            self._timed += tokens
        rate = self._timed / (now - self._start) if self._timed else 0.0
        self._heldout = numbers.get("heldout_loss", self._heldout)
        record: dict[str, Any] = {"step": step, **numbers, "tokens_per_second": round(rate, 1)}
        if (peak := self._peak()) and rate:
            record["mfu"] = rate * self._flops / peak
        record["memory_bytes"] = memory()
        if self._path:
            with self._path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        if self._accelerator.trackers:
            self._accelerator.log({k: v for k, v in record.items() if k != "step"}, step=step)
        self._bar.update()
        self._say(step, record, now)
        return record

    def _say(self, step: int, record: dict[str, Any], now: float) -> None:
        if self._quiet:
            return
        line = self._line(step, record)
        if self._terminal:
            self._bar.set_postfix_str(line.partition("  ")[2])
        elif step == self._steps or now - self._said > 5:  # a file gets a line every few seconds
            self._said = now
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def _line(self, step: int, record: dict[str, Any]) -> str:
        rate = record["tokens_per_second"]
        left = (self._steps - step) * record["step_tokens"] / rate if rate else math.nan
        parts = [f"step {step}/{self._steps}  {record['tokens']:,} tokens", f"loss {record['loss']:.4f}"]
        if "distillation" in record:
            parts.append(f"kl {record['distillation']:.4f}")
        if self._heldout is not None:
            parts.append(f"held-out {self._heldout:.4f}")
        parts += [f"lr {record['learning_rate']:.2e}", f"{rate:,.0f} tok/s"]
        if "mfu" in record:
            parts.append(f"mfu {record['mfu']:.0%}")
        parts.append(f"{record['memory_bytes'] / 2**30:.1f} GiB")
        if rate:
            parts.append(f"eta {int(left // 60)}:{int(left % 60):02d}")
        return " | ".join(parts)

    def _peak(self) -> float | None:
        """The device's peak FLOP/s, of all ranks, where it is known."""
        import torch

        if self._accelerator.device.type != "cuda" or self._accelerator.mixed_precision == "no":
            return None
        name = torch.cuda.get_device_name(self._accelerator.device)
        peak = next((value for key, value in _PEAKS.items() if key in name), None)
        return peak * self._accelerator.num_processes if peak else None

    def close(self) -> None:
        self._bar.close()


def memory() -> int:
    """The most that this process has held: of the GPU's memory where one is used, else of the machine's."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
