"""Learning rates by step: pure functions, so that a resumed run is where it would have been."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

Schedule = Literal["constant", "linear", "cosine", "wsd"]


def warmup_steps(given: int | None, schedule: Schedule, steps: int) -> int:
    """Steps of warm-up: those `given`, else none with `constant` and 5 % (100 at most) with schedules that end.

    So a constant schedule knows nothing of the length: the first steps of a smaller alpha are those of a larger one.
    """
    if given is not None:
        return given
    return 0 if schedule == "constant" else min(100, steps // 20)


def rate_factor(step: int, steps: int, schedule: Schedule, warmup: int = 0, decay: float = 0.2) -> float:
    """What the learning rate is multiplied by in `step` (from 0) of `steps`.

    All rise linearly over `warmup` steps. Then `constant` stays, `linear` and `cosine` fall to zero at the end, and
    `wsd` (warm-up, stable, decay; MiniCPM, arXiv 2404.06395, section 4) stays until the last `decay` of all steps and
    falls linearly over them.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    share = Fraction(repr(float(decay)))  # 0.1 of 30 is 3, and not a little more as in binary
    falling = max(1, math.ceil(steps * share) if schedule == "wsd" else steps - warmup)
    left = max(0, min(falling, steps - step)) / falling
    return 0.5 * (1 - math.cos(math.pi * left)) if schedule == "cosine" else left
