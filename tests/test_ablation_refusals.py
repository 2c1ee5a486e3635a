"""What `gqa-ablate` refuses, in one line and before anything is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import check_refused, edit_json, run, snapshot
from studies import SAME, ablate, copied, gqa_ablate, measured, rows
from training import tiny_checkpoint, write_corpus

from gqa.eval.study.directory import locked_work


def refused(out: Path, *says: str, code: int = 2, **options: Any) -> None:
    there = snapshot(out.parent)
    said = check_refused(ablate(out, **options), *says, code=code, program="gqa-ablate", advice="")
    assert "please report" not in said
    assert snapshot(out.parent) == there


REFUSED = {
    "unknown method": ({"methods": "mean,median"}, ["'--methods': 'median' is not one of 'auto'", "calibrated"]),
    "no method": ({"methods": ","}, ["'--methods': ',' names nothing"]),
    "no seeds": ({"seeds": 0}, ["'--seeds': '0' is not a whole number from 1"]),
    "groups that do not divide": ({"groups": "1,3"}, ["--groups 3 is not possible", "choose 1, 2 or 4"]),
    "no groups": ({"groups": "two"}, ["'--groups': 'two' is not a whole number"]),
    "alpha above 1": ({"alphas": "0,1.5"}, ["'--alphas': '1.5' is not a number from 0 to 1"]),
    "alpha of less than a step": ({"alphas": "0.0001"}, ["alpha 0.0001 is", "less than one block"]),
    "no data": ({"data": None}, ["no data is named", "--data"]),
    "data that is not there": ({"data": "nowhere.jsonl"}, ["nowhere.jsonl"]),
    "no text but samples": ({"data": "self:1M"}, ["--data self is no text"]),
    "nothing held out": ({"heldout": None}, ["nothing is held out", "--heldout-fraction"]),
    "unknown weights": ({"train": "some"}, ["'--train': 'some' is not one of", "lora"]),
    "unknown teacher": ({"teachers": "parent"}, ["'--teachers': 'parent' is not one of"]),
    "no model": ({"model": "nowhere"}, ["nowhere"]),
    "context beyond the model's": ({"context": 4096}, ["--context 4096 is more than the 64 positions"]),
    "less text than a window": ({"heldout_fraction": 0.0, "context": 4096}, ["--context 4096"]),
    "a device that is not there": ({"device": "cuda:99"}, ["cuda:99"]),
    "one bit": ({"cache_bits": "1"}, ["'--cache-bits': '1' is not a whole number from 2 to 8"]),
    "two bounds": ({"kv_bytes": 512, "max_loss_increase": 1}, ["--kv-bytes asks for what loses least within it"]),
    "the whole cache": ({"kv_budgets": 1}, ["'--kv-budgets': '1' is not a number above 0 below 1"]),
    "less than a head": ({"kv_budgets": 0.2}, ["--kv-budgets 0.2 is not possible for the 4 key", "least is 0.25"]),
}


def test_an_output_is_required() -> None:
    check_refused(run("nowhere", program="gqa-ablate"), "Missing option '-o'", program="gqa-ablate")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    options, says = REFUSED[name]
    refused(tmp_path / "study", *says, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_predicts_no_tokens(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "models" / "headless", kv_heads=4)
    edit_json(model / "config.json", lambda config: config.update(architectures=["LlamaModel"]))
    refused(tmp_path / "study", "headless is a LlamaModel, which does not predict", model=model)


def test_caches_that_a_model_cannot_have(tmp_path: Path) -> None:
    """Of encoder-decoders, and of what attention is computed otherwise, before anything is converted."""
    out, t5 = tmp_path / "study", tiny_checkpoint(tmp_path / "t5" / "model", "gqa_t5", 4)
    refused(out, "--cache-bits is for decoders with key/value heads", model=t5, cache_bits="4")
    refused(out, "layer", model=t5, kv_budgets=0.5)
    falcon = tiny_checkpoint(tmp_path / "falcon" / "model", "falcon", 4)
    result = ablate(out, model=falcon, cache_bits="4")
    assert (result.code, "layers of" in result.err) == (2, True), result
    assert not [row for row in rows(out) if not row["error"] and row["bits"]]
    own: dict[str, Any] = {"alphas": "0", "model": falcon, "overwrite": True}
    assert len(measured(out, **own)) == 3  # the control


def test_another_study_is_told_from_this_one(tmp_path: Path) -> None:
    out, other = copied(tmp_path), tiny_checkpoint(tmp_path / "other" / "model", kv_heads=2)
    text = write_corpus(tmp_path / "text.jsonl", 3, first=20)
    refused(out, "holds another study: learning_rate: 0.003 -> 0.001", learning_rate=1e-3, **SAME)
    refused(out, "content of the held-out text: ", "--overwrite", heldout=text, **SAME)
    refused(out, "fingerprint: ", model=other, **SAME)
    measured(out, **SAME)  # the control: these are the options


def test_what_is_no_study_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.md").write_text("one")
    refused(tmp_path / "thesis", "holds no study")
    refused(tmp_path / "thesis", "holds no study", overwrite=True)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "results.jsonl").write_text('{"name": "not a cell"}\n')
    for name, says in (("rows", "something else than rows of a study"), ("none", "holds no study")):
        check_refused(gqa_ablate("-o", tmp_path / name), says, program="gqa-ablate", advice="")


def test_overwrite_starts_over(tmp_path: Path) -> None:
    """And removes nothing that no study has written."""
    out = copied(tmp_path)
    (out / "notes.txt").write_text("mine")
    found = measured(out, overwrite=True, alphas="0", methods="mean", learning_rate=1e-4)
    assert [row["options"]["learning_rate"] for row in found] == [1e-4] * 2
    assert (out / "notes.txt").read_text() == "mine"
    before = (out / "results.jsonl").read_bytes()
    refused = ablate(out, overwrite=True, alphas="0", methods="mean", groups="3")
    assert refused.code == 2, refused
    assert (out / "results.jsonl").read_bytes() == before, "what is refused removes nothing"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_no_space_left(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that does not fit is lost, those before stay, and the study continues when there is space."""
    fsync, failing = os.fsync, [False, False, True]

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("results.jsonl") and failing.pop(0):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        result = ablate(tmp_path / "study", alphas="0")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert ("No space left" in result.err) == (number == errno.ENOSPC)
    assert "rows that were measured are kept, the same command continues" in result.err
    kept = rows(tmp_path / "study")
    assert [row["method"] for row in kept] == ["none", "mean"]
    assert measured(tmp_path / "study", alphas="0")[:2] == kept


def test_who_only_reads_changes_no_rows(tmp_path: Path) -> None:
    """Also where a killed run left half a line."""
    out = copied(tmp_path)
    with (out / "results.jsonl").open("a") as stream:
        stream.write('{"method": "fir')
    before = snapshot(out)["results.jsonl"]
    assert gqa_ablate("-o", out).code == 0
    assert snapshot(out)["results.jsonl"] == before


def test_two_runs_of_one_study(tmp_path: Path) -> None:
    with locked_work(tmp_path / "study"):
        refused(tmp_path / "study", "another run is working on", alphas="0")
    out = copied(tmp_path / "kept")
    with locked_work(out):
        refused(out, "another run is working on", overwrite=True, alphas="0")


@pytest.mark.parametrize("words", ["--groups 2", "--overwrite", "--dry-run", "--precision bfloat16", "--skip kl"])
def test_without_a_model_options_of_studies_are_refused(words: str, tmp_path: Path) -> None:
    said = check_refused(gqa_ablate("-o", tmp_path, *words.split()), program="gqa-ablate", advice="")
    assert f"{words.split()[0]} means nothing without MODEL" in said
