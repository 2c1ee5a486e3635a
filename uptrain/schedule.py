"""When a training evaluates, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]
# By schedule: the factor of the learning rate after the warm-up, from the share of the steps after
# the warm-up that is left: 1 at first, 0 at the end.
_FACTORS: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda left: 1.0,
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 * (1 - math.cos(math.pi * left)),
}

EVALUATIONS = 4  # of a run, at equal distances, unless `eval_every` is given
# One more after 1/16 of the steps: a rate that is too high shows early. Not after 1/8, where the
# loss may have risen for a while at a rate that is right for the whole run (docs/tried.md).
_EARLY_DIVISOR = 16
MAX_WARMUP_STEPS = 100  # by default
RATE_CUT = 1 / 3  # of the learning rate, where the validation loss has not become lower


def depends_on_length(schedule: Schedule) -> bool:
    """Whether the learning rate of a step depends on the number of steps of the run.

    That of a constant schedule does not, so the first steps of a smaller alpha are those of a
    larger one.
    """
    return schedule != "constant"


def warmup_steps(warmup: int | None, schedule: Schedule, steps: int) -> int:
    """Steps of warm-up: `warmup` if it is given; else 5 % of the steps, 100 at most, and none if
    the schedule does not depend on their number.
    """
    if warmup is not None:
        return warmup
    if not depends_on_length(schedule):
        return 0
    return min(MAX_WARMUP_STEPS, steps // 20)


def evaluation_interval(eval_every: int | None, steps: int) -> int:
    """Steps between two measurements of the validation losses."""
    return eval_every or math.ceil(steps / EVALUATIONS)


def evaluates_after(step: int, steps: int, eval_every: int | None) -> bool:
    """Whether the validation losses are measured once `step` of `steps` are done."""
    is_early = eval_every is None and step == steps // _EARLY_DIVISOR
    return is_early or step == steps or step % evaluation_interval(eval_every, steps) == 0


def rate_factor(step: int, steps: int, schedule: Schedule, warmup: int = 0) -> float:
    """What the learning rate is multiplied by in `step` (from 0) of `steps`.

    It rises linearly over `warmup` steps; then the schedule determines it.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = (steps - step) / (steps - warmup)
    return _FACTORS[schedule](left)
