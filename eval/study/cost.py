"""What a study would cost, before it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

from gqa.checkpoint.loading import load_model
from gqa.convert.estimate import TRAINING, operations
from gqa.convert.methods import METHODS
from gqa.convert.plan import make_plan
from gqa.corpus.likelihood import ChunkedHead
from gqa.eval.recall import DISTANCES, READ
from gqa.eval.scoring import score
from gqa.eval.study.ablation import Study
from gqa.eval.study.report import CELL
from gqa.eval.study.study import Cell
from gqa.eval.tables import Table, table

TEACHING = 1.0  # forward passes for each token that is trained on


def passes(study: Study, cells: Sequence[Cell]) -> dict[Cell, float]:
    """Tokens of forward passes that each of `cells`, in their order, takes. The first cell of a conversion pays for the
    conversion, and each cell of a training for the tokens since the one before.
    """
    checkpoint, reach = study.subject.checkpoint, sum(distance <= study.text.context for distance in DISTANCES)
    asking = 0 if study.options.recall is False else 3 * READ * reach  # roughly: three kinds of second copies
    found = {}
    for _, some in groupby(cells, key=lambda cell: cell.conversion):
        first, converting = (group := list(some))[0], 0.0
        if first.method in METHODS:  # else nothing is merged
            plan = make_plan(checkpoint, first.groups, first.method)
            counted = operations(plan, METHODS[first.method], study.options.maps)  # as gqa-convert --dry-run does it
            converting = counted / (2 * checkpoint.parameters)
        for run in study.options.runs(group):
            before = 0
            for cell in run:
                tokens, of_each = study.tokens.get(cell.alpha, 0), TRAINING + TEACHING * (cell.teacher != "none")
                found[cell] = converting + (tokens - before) * of_each + study.text.tokens + asking
                converting, before = 0.0, tokens
    return found


def forward_rate(study: Study) -> float:
    """Tokens a second of the source: the fastest of three passes over some windows, after a first one."""
    options = study.options
    head = ChunkedHead(load_model(study.subject.path, dtype=options.dtype, device=options.devices[0]))
    windows, seconds = study.text.windows[: options.eval_batch], []
    for _ in range(4):
        start = time.perf_counter()
        score(head, windows, batch_size=options.eval_batch)
        seconds.append(time.perf_counter() - start)
    return sum(len(window.ids) for window in windows) / min(seconds[1:])


def cost_table(study: Study) -> Table:
    rate, left = forward_rate(study), passes(study, study.left)
    records = [
        cell._asdict() | {
            "tokens": study.tokens.get(cell.alpha, 0),
            "seconds": left[cell] / rate if cell in left else "done",
        }
        for cell in study.cells
    ]  # fmt: skip
    note = (
        f"{len(left)} of {len(records)} cells to measure, about "
        f"{sum(left.values()) / rate / study.options.jobs / 60:.1f} minutes and the source's evaluation; from "
        f"{rate:,.0f} tokens/s of a forward pass timed now: training counts {TRAINING:g} passes (a teacher "
        f"{TEACHING:g} more), measuring 1, converting as gqa-convert --dry-run says"
    )
    columns = CELL | {"train tokens": "{tokens:,}", "seconds": "{seconds:,.0f}"}
    return table(f"Study of {study.subject.name}", columns, records, note)
