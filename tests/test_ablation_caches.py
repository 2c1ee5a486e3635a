"""`gqa-ablate --kv-budgets` and --cache-bits: cells whose layers have heads of their own are what `gqa-convert --groups
LIST` makes, and a study grows by bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from studies import PLAINLY, SAME, copied, measured, place, rows, study
from test_ablation import by_cell, command, evaluated
from training import words_for

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.merge.allot import heads_within
from gqa.convert.merge.options import CalibrationText, MapsOptions
from gqa.eval.study import ablation
from gqa.eval.study.study import Cell

SHARE = 0.625  # of 2 layers of 4 heads: 5 heads
HOW: dict[str, Any] = {"calibration_tokens": 640, "calibration_context": 64, "groups": "2", "kv_budgets": SHARE}


def options() -> MapsOptions:
    return MapsOptions(CalibrationText((str(place() / "train.jsonl"),), tokens=640, length=64), device="cpu")


def test_cells_of_a_budget_are_what_the_commands_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As converted, with a cache of few bits, and trained; the same number of heads in all layers is another cell. What
    was measured of the layers is not measured again.
    """
    out, converted, trained = tmp_path / "study", tmp_path / "converted", tmp_path / "trained"
    measured(out, **HOW, methods="mean", alphas="0,0.1", cache_bits=4)
    told = by_cell(out)
    (heads,), _ = heads_within(read_checkpoint(place() / "model"), [SHARE], options())
    assert sorted(heads) == [1, 4]
    given = "--groups", ",".join(map(str, heads)), "--method", "mean"
    result = run("-q", *given, "-o", converted, place() / "model", program="gqa-convert")
    assert (result.code, "custom modelling code" in result.err) == (0, True), result
    words = words_for(converted, place() / "train.jsonl", trained, alpha=0.1, batch_size=4, context=64, **PLAINLY)
    command("gqa-uptrain", *words, "--heldout", place() / "heldout.jsonl")
    expected = evaluated(place() / "model", converted, trained, "--cache-bits", "4")
    for bits, models in ((None, expected[1:3]), (4, expected[4:6])):
        for alpha, model in zip((0.0, 0.1), models, strict=True):
            row = told[Cell("mean", 2.5, 0, "all", "none", alpha, bits, SHARE)]
            assert row["loss"] == pytest.approx(model["quality"]["nats_per_token"], abs=1e-6)
            assert row["kv_bytes_per_token"] == model["kv_cache"]["bytes_per_token"]
            assert row["kv_heads"] == list(heads)
            assert abs(row["loss"] - told[Cell("mean", 2, 0, "all", "none", alpha, bits)]["loss"]) > 1e-5
    monkeypatch.setattr(ablation, "heads_within", None)
    measured(out, **HOW, methods="mean,first", alphas="0", cache_bits=4)
    assert by_cell(out)[Cell("first", 2.5, 0, "all", "none", 0.0, None, SHARE)]["kv_heads"] == list(heads)
    assert "mean, heads by layer" in (out / "report.html").read_text()


def test_a_study_grows_by_bits(tmp_path: Path) -> None:
    """Its rows and times stay as they are."""
    out = copied(tmp_path)
    measured(out, **SAME | {"methods": "mean", "alphas": "0"}, cache_bits="2")
    assert rows(out)[:9] == rows(study())
    assert [(row["method"], row["groups"], row["bits"]) for row in rows(out)[9:]] == [("none", 4, 2), ("mean", 1, 2)]
