"""`gqa-ablate` on encoder-decoders: cells are what the commands give one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from evaluations import results
from studies import measured, refused
from training import tiny_checkpoint, words_for

from gqa.corpus.sources import is_below, row_digest

COLUMNS = {"field": "said", "target_field": "meant"}


def write_pairs(path: Path, first: int, count: int) -> Path:
    rows = [
        {"said": f"def f{n}(x):" + " pass" * (5 * n % 7), "meant": f"return x + {n}" + " + 1" * (n % 5)}
        for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T5 of 4 heads, BART, a decoder; pairs."""
    found = tmp_path_factory.mktemp("studies")
    tiny_checkpoint(found / "t5", "gqa_t5", 4, pad_token_id=0, dropout_rate=0.0)
    tiny_checkpoint(found / "bart", "gqa_bart", 4)
    tiny_checkpoint(found / "decoder", kv_heads=4)
    write_pairs(found / "train.jsonl", 12, 80)
    write_pairs(found / "heldout.jsonl", 0, 8)  # as many as attention outputs are compared of
    return found


def options(place: Path, **more: Any) -> dict[str, Any]:
    """Of a study of pairs."""
    given = {"model": place / "t5", "data": place / "train.jsonl", "heldout": place / "heldout.jsonl", **COLUMNS}
    return given | {"methods": "mean", "groups": "2", "alphas": "0,0.05", "teacher": "source", **more}


def evaluated(place: Path, *models: Path, more: str = "--kl") -> list[dict[str, Any]]:
    """What gqa-eval says of models on the held-out pairs."""
    data = f"--data {place / 'heldout.jsonl'} --field said --target-field meant {more}"
    found: list[dict[str, Any]] = results(f"{' '.join(map(str, models))} {data}")["models"]
    return found


def test_a_cell_is_what_the_commands_give(place: Path, tmp_path: Path) -> None:
    """As converted, and as trained with the base model as teacher; another alpha, as a control, differs."""
    converted, trained = tmp_path / "converted", tmp_path / "trained"
    assert run(place / "t5", "--groups", 2, "--method", "mean", "-o", converted, "-q").code == 0
    how = {"alpha": 0.05, "batch_size": 4, "context": 64, "learning_rate": 3e-3, "train": "all"}
    words = words_for(converted, place / "train.jsonl", trained, **COLUMNS, **how, teacher=place / "t5")
    done = run(*words, "--heldout", place / "heldout.jsonl", program="gqa-uptrain")
    assert done.code == 0, done
    expected = evaluated(place, place / "t5", converted, trained)[1:]
    found = measured(tmp_path / "study", **options(place, alphas="0,0.05,0.4", skip=None))[1:]
    for row, model in zip(found, expected, strict=False):
        against = model["against_baseline"]
        assert row["loss"] * model["quality"]["tokens"] == pytest.approx(model["quality"]["nats"], abs=1e-4)
        assert row["loss_increase"] == pytest.approx(against["log_ratio"], abs=1e-6)
        assert row["kl"] == pytest.approx(against["kl"]["mean"], abs=1e-6)
        assert row["cross_bytes_per_token"] == row["kv_bytes_per_token"] == model["kv_cache"]["bytes_per_token"]
        assert not [name for name in row if name.startswith(("recall", "greedy"))]
    losses = [row["loss"] for row in found]
    assert len({round(loss, 5) for loss in losses}) == 3


def test_calibration_on_the_pairs_of_the_study(place: Path, tmp_path: Path) -> None:
    text = {"calibration_tokens": 640, "calibration_context": 64, "refine_steps": 3}
    _, row = measured(tmp_path / "study", **options(place, methods="refined", alphas="0", **text))
    words = ["--data", place / "train.jsonl", "--field", "said", "--target-field", "meant"]
    words += ["--tokens", 640, "--context", 64, "--refine-steps", 3, "-q", "-o", tmp_path / "out"]
    done = run(place / "t5", "--groups", 2, "--method", "refined", *words)
    assert done.code == 0, done
    (model,) = evaluated(place, tmp_path / "out", more="")
    assert row["loss"] == pytest.approx(model["quality"]["nats_per_token"], abs=1e-6)


def test_a_share_is_held_out(place: Path, tmp_path: Path) -> None:
    """Of pairs as gqa-uptrain holds it out, by a hash of both sides: what is measured is not trained on."""
    fraction = {"heldout": None, "heldout_fraction": 0.3}
    _, row = measured(tmp_path / "study", **options(place, alphas="0", **fraction))
    lines = (place / "train.jsonl").read_text().splitlines(keepends=True)
    digests = [row_digest(pair["said"], pair["meant"]) for pair in map(json.loads, lines)]
    held = tmp_path / "held.jsonl"
    held.write_text("".join(line for line, one in zip(lines, digests, strict=True) if is_below(one, 0.3)))
    other = measured(tmp_path / "other", **options(place, alphas="0", heldout=held))
    assert [row["loss"], row["bits_per_byte"]] == [other[1]["loss"], other[1]["bits_per_byte"]]
    assert 0 < len(held.read_text().splitlines()) < len(lines)
    everything = measured(tmp_path / "all", **options(place, alphas="0", heldout=place / "train.jsonl"))
    assert everything[1]["loss"] != row["loss"]


def test_the_page_names_pairs(place: Path, tmp_path: Path) -> None:
    measured(tmp_path / "study", **options(place, alphas="0"))
    page = " ".join((tmp_path / "study" / "report.html").read_text().split())
    assert "source and target texts of 64 tokens: " in page
    assert "rolling" not in page
    assert "recall is not measured: --recall is for decoders, and t5 is an encoder-decoder" in page


REFUSED = {
    "targets of a decoder": ({"model": "decoder"}, ["--target-field is for encoder-decoders, decoder is none"]),
    "no targets": ({"target_field": None}, ["t5 is an encoder-decoder: name the text to predict with --target-field"]),
    "no such column": ({"target_field": "none"}, ["has no field 'none'; it has 'meant', 'said'"]),
    "one column twice": ({"target_field": "said"}, ["are the same text"]),
    "nothing held out": ({"heldout": None}, ["nothing is held out"]),
    "a share of no pair": ({"heldout": None, "heldout_fraction": 1e-9}, ["holds out no"]),
    "calibration beyond the positions": (
        {"model": "bart", "methods": "mean,calibrated", "calibration_context": 128},
        ["bart has 64 positions, the context of calibration is 128; give at most 64"],
    ),
    "no whole step": ({"alphas": "0.01"}, ["alpha 0.01 is 0 tokens, less than one block"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str, place: Path, tmp_path: Path) -> None:
    changed, says = REFUSED[name]
    model = place / changed.get("model", "t5")
    refused(tmp_path / "study", *says, **options(place) | changed | {"model": model})
    assert list(tmp_path.iterdir()) == []
