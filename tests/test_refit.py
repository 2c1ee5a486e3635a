"""The refit of W_O against plain least squares on the numbers themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scrambled import Ids, on_ids
from test_families import write_checkpoint
from tiny_models import TINY, build
from torch import Tensor

from gqa.convert import plan_conversion
from gqa.convert.align.calibration import Calibrator
from gqa.convert.align.closed_form import LayerResult, Task, closed_form


def test_the_refit_is_least_squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towards the source's inputs of W_O and what W_O turns into the drift, each position by what it counts; and the
    error that is said is the one that is left.
    """
    torch.manual_seed(0)
    found: list[tuple[Tensor, Tensor, float, float]] = []

    def compared(task: Task) -> LayerResult:
        drift = torch.randn(task.drift.shape) * task.inputs.std()
        task = replace(task, drift=drift, counts=torch.rand(task.counts.shape))
        result = closed_form(task)
        w_o = task.w_o().double().flatten(0, 1)
        merged = task.pair.merged(task.module, replace(result.maps, output=None))
        given = [seen.joined for seen in merged.observe(task.stream)]
        root = task.counts.double().sqrt().flatten()[:, None]
        rows = torch.cat(given).double().flatten(0, 1) * root
        target = (task.inputs.double() + drift.double() @ torch.linalg.pinv(w_o)).flatten(0, 1) * root
        best = torch.linalg.lstsq(rows, target, driver="gelsd").solution
        left = float(((rows @ best - target) @ w_o).square().sum() / (target @ w_o).square().sum())
        found.append((result.maps.output, best.mT, result.error, left))
        return result

    monkeypatch.setattr("gqa.convert.align.calibration.closed_form", compared)
    source = write_checkpoint(build(TINY["llama+bias"], 4), tmp_path / "source")
    plan = plan_conversion(source, 2, method="calibrated", headers_only=False)
    Calibrator(plan, Ids().ids(), on_ids(batch=24, ridge=0.0)).run(0)
    output, best, error, left = found[0]
    assert torch.allclose(output, best, rtol=0, atol=1e-5 * float(best.abs().max()))
    assert error == pytest.approx(left, rel=1e-5)
