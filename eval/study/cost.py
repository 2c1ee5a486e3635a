"""What a study would cost, before it runs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.loading import load_model
from gqa.convert.heads.modules import attention_modules
from gqa.corpus.likelihood import ChunkedHead
from gqa.eval.report import Table
from gqa.eval.scoring import score
from gqa.eval.study.ablation import Study
from gqa.eval.study.directory import Rows
from gqa.eval.study.study import UNMERGED, Cell

# Forward passes that something takes for each token. A backward pass is two; calibrating runs both models, and solves.
TRAINING, TEACHING, CALIBRATING = 3.0, 1.0, 5.0


@dataclass(frozen=True)
class Cost:
    """Estimated seconds of one cell; `done` ones are measured already."""

    cell: Cell
    train_tokens: int
    seconds: float
    done: bool


def estimate(study: Study, rate: float) -> list[Cost]:
    """Costs of all cells where a forward pass reads `rate` tokens a second. The first cell of a conversion pays for the
    conversion, and each cell of a training for the tokens since the one before.
    """
    done = Rows(study.directory).done()
    paid: set[Any] = set()
    trained: dict[tuple[Any, str], int] = {}
    found = []
    for cell in study.cells:
        tokens = study.tokens[cell.alpha] if cell.alpha else 0
        if cell in done:
            found.append(Cost(cell, tokens, 0.0, True))
            continue
        passes = float(study.text.tokens)
        if cell.conversion not in paid:
            paid.add(cell.conversion)
            passes += conversion_passes(study, cell.method)
        before = trained.get((cell.conversion, cell.training), 0)
        trained[cell.conversion, cell.training] = max(tokens, before)
        passes += (tokens - before) * (TRAINING + TEACHING * (cell.teacher != "none"))
        found.append(Cost(cell, tokens, passes / rate, False))
    return found


def conversion_passes(study: Study, method: str) -> float:
    """Tokens of forward passes of the whole model that a method takes; those of what looks at weights alone are 0."""
    maps = study.options.maps
    if method in UNMERGED or method not in ("calibrated", "refined"):
        return 0.0
    passes = CALIBRATING * maps.text.tokens
    if method == "refined":  # attention modules alone, forwards and backwards
        modules = attention_modules(study.subject.checkpoint, study.plan.config)
        share = sum(spec.numel for module in modules for spec in module.tensors.values()) / study.subject.parameters
        passes += TRAINING * share * maps.refinement.steps * maps.refinement.batch * maps.text.length
    return passes


def forward_rate(study: Study) -> float:
    """Tokens a second of the source: the fastest of three passes over some windows, after a first one."""
    options = study.options
    model = load_model(study.subject.path, dtype=options.dtype, device=options.devices[0])
    windows = study.text.windows[: options.eval_batch]
    head = ChunkedHead(model)
    score(head, windows, batch_size=options.eval_batch)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        score(head, windows, batch_size=options.eval_batch)
        seconds.append(time.perf_counter() - start)
    return sum(len(window.ids) for window in windows) / min(seconds)


def cost_table(study: Study) -> Table:
    rate = forward_rate(study)
    costs = estimate(study, rate)
    header = ("method", "KV heads", "seed", "trains", "teacher", "alpha", "train tokens", "seconds")
    rows = tuple((*_words(c.cell), f"{c.train_tokens:,}", "done" if c.done else f"{c.seconds:,.0f}") for c in costs)
    left = [cost for cost in costs if not cost.done]
    seconds = sum(cost.seconds for cost in left) / study.options.jobs
    note = (
        f"{len(left)} of {len(costs)} cells to measure, about {_duration(seconds)} and the source's evaluation; from "
        f"{rate:,.0f} tokens/s of a forward pass timed now: training counts {TRAINING:g} passes (a teacher "
        f"{TEACHING:g} more), measuring 1, calibrating {CALIBRATING:g}"
    )
    return Table(f"Study of {study.subject.name}", header, rows, note)


def _words(cell: Cell) -> Iterable[str]:
    return map(str, (*cell[:5], f"{cell.alpha:g}"))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
