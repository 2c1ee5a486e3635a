"""`gqa-ablate --cache-bits`: cells with a KV cache of few bits are what `gqa-eval --cache-bits` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import snapshot
from studies import SAME, ablate, copied, measured, place, study
from test_ablation import by_cell, command, evaluated
from test_ablation_refusals import refused
from training import tiny_checkpoint, words_for

from gqa.eval.study.study import Cell


def test_cells_with_bits_are_what_the_commands_give(tmp_path: Path) -> None:
    """The base model, a conversion, and this one in the middle of a training, each with the bytes of codes and scales.
    Whole caches, as a control, give something else.
    """
    model, converted, trained = place() / "model", tmp_path / "converted", tmp_path / "trained"
    command("gqa-convert", "-q", "--groups", 1, "--method", "first", "-o", converted, model)
    plainly = {"schedule": "constant", "teacher": "none", "train": "all", "learning_rate": 3e-3}
    given = words_for(converted, place() / "train.jsonl", trained, alpha=0.1, batch_size=4, context=64, **plainly)
    command("gqa-uptrain", *given, "--heldout", place() / "heldout.jsonl")
    found = evaluated(model, converted, trained, "--kl", "--cache-bits", "4,2")
    whole, quantised = found[:3], {4: found[3:6], 2: found[6:]}
    measured(tmp_path / "study", methods="first", cache_bits="4,2")
    told = by_cell(tmp_path / "study")
    cells = [("none", 4, 0.0), ("first", 1, 0.0), ("first", 1, 0.1)]
    assert {cell[:2] + cell[5:] for cell in told} == {
        *((*cell[:2], cell[2], bits, None) for cell in cells for bits in (4, 2)),
        *(("first", 1, alpha, bits, None) for alpha in (0.0, 0.1, 0.3) for bits in (None, 4, 2)),
    }
    for bits, models in quantised.items():
        for (method, groups, alpha), expected, plain in zip(cells, models, whole, strict=True):
            row = told[Cell(method, groups, 0, "all", "none", alpha, bits)]
            assert row["loss"] == pytest.approx(expected["quality"]["nats_per_token"], abs=1e-6)
            assert row["kl"] == pytest.approx(expected["against_baseline"]["kl"]["mean"], abs=2e-3)
            assert row["kv_bytes_per_token"] == expected["kv_cache"]["bytes_per_token"]
            assert row["kv_bytes_per_token"] < plain["kv_cache"]["bytes_per_token"]
            assert abs(row["loss"] - plain["quality"]["nats_per_token"]) > 1e-5
            assert "decode_tokens_per_second" not in row


def test_a_study_of_before_grows_by_bits(tmp_path: Path) -> None:
    """Its rows and times stay as they are; rows of before bits were known are read."""
    out = copied(tmp_path)
    old = [{key: value for key, value in row.items() if key != "bits"} for row in by_cell(out).values()]
    (out / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in old))
    measured(out, **SAME | {"methods": "mean", "alphas": "0"}, cache_bits="2")
    found = by_cell(out)
    for row in old:
        assert row.items() <= found[Cell.of(row)].items()
    new = [(cell.method, cell.groups) for cell in found if cell.bits]
    assert new == [("mean", 1), ("none", 4)]
    before, after = (json.loads((where / "speeds.json").read_text()) for where in (study(), out))
    assert after.items() >= before.items()
    assert after.keys() - before.keys() == {"1-int2", "4-int2"}


def test_what_reads_no_such_cache_is_refused_before_anything_is_converted(tmp_path: Path) -> None:
    """Encoder-decoders and what attention is computed otherwise; bits that there are not."""
    out, t5 = tmp_path / "study", tiny_checkpoint(tmp_path / "t5" / "model", "gqa_t5", 4)
    refused(out, "--cache-bits is for decoders with key/value heads", model=t5, cache_bits="4")
    refused(out, "1 is not in the range", cache_bits="1")
    falcon = tiny_checkpoint(tmp_path / "falcon" / "model", "falcon", 4)
    result = ablate(out, model=falcon, cache_bits="4")
    assert (result.code, "layers of" in result.err) == (2, True), result
    assert not by_cell(out)
    own: dict[str, Any] = {"alphas": "0", "cache_bits": None, "model": falcon, "overwrite": True}
    assert len(measured(out, **own)) == 2  # the control


@pytest.mark.parametrize("name", ["max_loss_increase", "max_loss", "max_recall_loss"])
def test_two_bounds_are_refused(name: str, tmp_path: Path) -> None:
    refused(tmp_path / "study", "--kv-bytes asks for what loses least within it", kv_bytes=512, **{name: 1})
    assert snapshot(tmp_path) == {}
