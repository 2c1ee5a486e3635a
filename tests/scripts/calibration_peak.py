"""Print how many bytes beyond those resident before calibrating the layers of a model takes.

    python calibration_peak.py MODEL METHOD MORE BLOCKS LENGTH GROUPS SCORES

MORE: how many more copies of the hidden states are kept after each layer (the control).
SCORES: how many attention scores are computed at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from support.faults import resident
from torch import Tensor

import gqa.convert.merge.sensitivity as sensitivity
from gqa.convert.api import plan_conversion
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import MapsOptions, Refinement
from gqa.convert.plan import Plan


def calibrator_of(plan: Plan, blocks: int, length: int) -> Calibrator:
    """Of random text, so many blocks of so many tokens."""
    options = MapsOptions(
        text=CalibrationText(("x",), blocks * length, length),
        device="cpu",
        grouping="contiguous",
        refinement=Refinement(steps=2, autocast=False),
    )
    ids = torch.randint(512, (blocks, length))
    return Calibrator(plan, ids, options, plan.method.fit)


def calibrate(calibrator: Calibrator, copies: int) -> None:
    """All layers; `copies` of the base model's hidden states are kept after each."""
    kept: list[Tensor] = []
    for layer in range(calibrator.n_layers):
        calibrator.run(layer)
        kept += [calibrator.calibration_states.base.hidden.clone() for _ in range(copies)]


if __name__ == "__main__":
    model, method = sys.argv[1:3]
    copies, blocks, length, groups, sensitivity.SCORES_AT_ONCE = map(int, sys.argv[3:])
    plan = plan_conversion(Path(model), groups, method=method, grouping="contiguous")

    # What the first layer imports and allocates once is no part of the peak
    calibrator_of(plan, 16, 64).run(0)
    before = resident()

    calibrate(calibrator_of(plan, blocks, length), copies)
    print(resident("VmHWM") - before)
