"""When a training evaluates, and the learning rate of each step."""

from __future__ import annotations

import math

from gqa.uptrain.options import Schedule

EVALUATIONS = 4  # held-out evaluations of a run, unless `eval_every` is given
MAX_WARMUP_STEPS = 100  # by default


def warmup_steps(warmup: int | None, schedule: Schedule, steps: int) -> int:
    """Steps of warm-up: `warmup`, else none with `constant` and 5 % (100 at most) with schedules
    that end.

    So a constant schedule knows nothing of the length: the first steps of a smaller alpha are those
    of a larger one.
    """
    if warmup is not None:
        return warmup
    if schedule == "constant":
        return 0
    return min(MAX_WARMUP_STEPS, steps // 20)


def evaluation_interval(eval_every: int | None, steps: int) -> int:
    """Steps between two held-out evaluations."""
    return eval_every or math.ceil(steps / EVALUATIONS)


def rate_factor(step: int, steps: int, schedule: Schedule, warmup: int = 0) -> float:
    """What the learning rate is multiplied by in `step` (from 0) of `steps`.

    All rise linearly over `warmup` steps. Then `constant` stays, and `linear` and `cosine` fall to
    zero at the end.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0

    left = (steps - step) / (steps - warmup)  # the share of the steps after the warm-up
    if schedule == "cosine":
        return 0.5 * (1 - math.cos(math.pi * left))
    assert schedule == "linear"
    return left
