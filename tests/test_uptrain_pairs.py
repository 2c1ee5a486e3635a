"""Uptraining of encoder-decoders: the loss against transformers' own, and runs on pairs, plain text
and `self`.
"""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import check_refused, edit_json, run
from support.documents import lines
from support.faults import kill_at, shard
from support.loss_oracles import assert_equals
from support.tiny_models import TINY, build
from support.training import PAIRS as PAIR_ROWS
from support.training import (
    Runs,
    difference,
    expert_options,
    fresh_accelerator,
    losses,
    material,
    pair_material,
    trained,
    training_model,
    words_for,
)
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.read import read_checkpoint
from gqa.models.loading import load_model
from gqa.models.tokenizer import load_tokenizer
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.scope import freeze_parameters, trained_names
from gqa.uptrain.setup import prepare

_CUSTOM = ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "m2m_100")
MODELS = [*(f"gqa_{name}" for name in _CUSTOM), "t5gemma"]
LENGTHS = [(9, 7), (12, 3), (5, 11)]  # of sources and targets


def made(name: str, seed: int = 0) -> PreTrainedModel:
    return build(TINY[name], 2, seed=seed).eval()


def padded(filled: int) -> dict[str, Tensor]:
    """A batch of `LENGTHS`, padded at the end: sources with `filled` where the mask is 0, labels
    with -100.
    """
    generator = torch.Generator().manual_seed(0)
    source, labels = torch.full((3, 12), filled), torch.full((3, 11), -100)
    mask = torch.zeros(3, 12, dtype=torch.long)
    for row, (one, other) in enumerate(LENGTHS):
        source[row, :one] = torch.randint(10, 60, (one,), generator=generator)
        labels[row, :other] = torch.randint(10, 60, (other,), generator=generator)
        mask[row, :one] = 1
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loss_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and every gradient; what stands in padded places makes no difference, what stands in
    others does.
    """
    model = made(name)
    given = padded(model.config.pad_token_id)
    assert_equals(monkeypatch, model(**given, use_cache=False).loss, model, given)
    training = training_model(model)
    with torch.no_grad():
        loss, _ = training(**given)
        other, _ = training(**padded(33))
        unmasked, _ = training(
            **given | {"attention_mask": torch.ones_like(given["attention_mask"])}
        )
    assert float(other) == pytest.approx(loss.item(), abs=1e-4)
    assert abs(float(unmasked) - loss.item()) > 1e-3


def options(name: str, out: Path, data: str | None = "text.jsonl", **given: Any) -> UptrainOptions:
    place = pair_material()
    sources = () if data is None else (data if data.startswith("self") else str(place / data),)
    short = {
        "context": 32,
        "batch_size": 4,
        "steps": 4,
        "learning_rate": 1e-2,
        "validation_tokens": 256,
    }
    return UptrainOptions(str(place / name), out, data=sources, **short | given)


PAIRS = {"data": "pairs.jsonl", "text_column": "said", "target_column": "meant"}
DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "spans": ("t5", {}),
    "denoising": ("bart", {}),
    "pairs": ("marian", PAIRS),
    "self": ("t5", {"data": "self"}),
    "self without marks": ("marian", {"data": "self:1K"}),
    "nothing is said": ("bart", {"data": None, "validation_tokens": 64}),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", DATA)
def test_training_comes_nearer_to_the_teacher(tmp_path: Path, name: str) -> None:
    model, given = DATA[name]
    progress, record = trained(options(model, tmp_path / "out", **given))
    before, after = progress.first_validation, progress.lowest_validation
    assert after["kl"] < 0.98 * before["kl"], (before, after)
    assert record["steps"] == 4
    assert record["teacher"] == f"{model}-base"
    assert not record["options"]["repeats"]


def words(name: str, out: Path, data: str | None = "text.jsonl", **given: Any) -> list[str]:
    """Of the command, for a short run."""
    short = {"context": 32, "batch_size": 4, "steps": 4, "validation_tokens": 256}
    place = pair_material()
    return words_for(
        place / name, place / data if data and data != "self" else data, out, **short | given
    )


@pytest.mark.parametrize(("name", "trains"), [("gqa_marian", False), ("gqa_bart", True)])
def test_computed_positions_do_not_train(tmp_path: Path, name: str, trains: bool) -> None:
    """Marian's class computes its sinusoids again whenever it is loaded; BART's positions are
    stored, and train.
    """
    made(name).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    freeze_parameters(loaded, read_checkpoint(tmp_path), "all")
    assert sum("embed_positions" in key for key in trained_names(loaded)) == 2 * trains


WAYS: dict[str, dict[str, Any]] = {"2x2": {"ranks": 2}, "shards": {"ranks": 2, "before": [shard]}}


def test_passes_ranks_shards_and_states_change_nothing(runs: Runs, tmp_path: Path) -> None:
    """Other pairs beside one make other padding, and no other loss.

    Of T5 no module but the whole holds what encoder and decoder share: its shards, and its
    teacher's.
    """
    given = {"save_every": 2, "keep_state": True}
    killed = words("t5", tmp_path / "killed", micro_batch=1, **given)
    assert runs.run(*killed, before=[partial(kill_at, 3)]).code == -signal.SIGKILL
    runs.finish(*killed)
    runs.finish(*words("t5", tmp_path / "1x1", micro_batch=1, **given))
    for way, how in WAYS.items():
        runs.finish(*words("t5", tmp_path / way, **given), **how)
    for way in ("killed", *WAYS):
        most = 1e-5 if way in WAYS else 0
        assert difference(tmp_path / way, tmp_path / "1x1") <= most, way
        assert losses(tmp_path / way) == pytest.approx(losses(tmp_path / "1x1"), rel=most)
    assert difference(pair_material() / "t5", tmp_path / "1x1") > 1e-4


@pytest.mark.usefixtures("alone")
def test_alpha_is_a_prefix_of_the_pairs(tmp_path: Path) -> None:
    """79 rows have both columns; a twentieth is held back, and none of it trains.

    Tokens count by their mean.
    """
    seen = {}
    for alpha in (0.25, 0.5):
        given = options("marian", tmp_path / "out", **PAIRS | {"alpha": alpha, "steps": None})
        data = prepare(given).dataloader
        seen[alpha] = [
            tuple(data.block(number)["labels"].tolist()) for number in range(data.steps * 4)
        ]
        held = {tuple(block["labels"].tolist()) for block in data.validation_blocks}
        assert len(held) == 3
        assert not held & set(seen[alpha])
    assert seen[0.5][:16] == seen[0.25]
    assert len(set(seen[0.5])) == len(seen[0.5]) > 16
    rounded = re.search(r"of (\S+) tokens on average", data.summary)
    assert rounded
    mean = float(rounded[1])
    tokens = {"tokens": round(20.5 * mean), "validation_tokens": round(2.5 * mean), "steps": None}
    setup = prepare(options("marian", tmp_path / "out", **PAIRS | tokens))
    assert setup.dataloader.steps == 20 // 4
    assert len(setup.dataloader.validation_blocks) == 2


@pytest.mark.usefixtures("alone")
def test_tokens_count_by_the_mean_of_the_pairs_that_are_left(tmp_path: Path) -> None:
    """Half of the pairs are long, and are left out: they have a passage of the held-out text."""
    passage = " ".join(f"passage {n}" for n in range(30))
    long = [{"said": f"{passage} {n}", "meant": f"{n} {passage}"} for n in range(79)]
    data = lines(tmp_path / "data.jsonl", *PAIR_ROWS, *long)
    heldout = lines(tmp_path / "heldout.jsonl", {"said": passage, "meant": passage})

    given = PAIRS | {"data": str(data), "validation": str(heldout), "context": 64, "batch_size": 1}
    given |= {"tokens": 900, "steps": None}
    loader = prepare(options("marian", tmp_path / "out", **given)).dataloader

    assert loader.overlap
    assert loader.overlap.documents == len(long)
    assert loader.tokens_until(loader.steps) == pytest.approx(900, rel=0.1)


@pytest.mark.usefixtures("alone")
def test_pairs_need_no_eos_of_the_tokenizer(tmp_path: Path) -> None:
    """They end with that of the config."""
    model = Path(shutil.copytree(pair_material() / "marian", tmp_path / "marian"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit_json(model / name, lambda tokens: tokens | {"eos_token": None})
    checkpoint = read_checkpoint(model)
    assert load_tokenizer(checkpoint).eos_token_id is None
    given = options("marian", tmp_path / "out", teacher="none", **PAIRS)

    loader = prepare(replace(given, model=str(model))).dataloader

    ends = {int(loader.block(number)["labels"][-1]) for number in range(4)}
    assert ends == {checkpoint.config["eos_token_id"]}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["spans", "pairs", "self"])
def test_validation_tokens_are_those_of_both_sides_of_a_pair(tmp_path: Path, name: str) -> None:
    model, given = DATA[name]
    data = prepare(options(model, tmp_path / "out", **given)).dataloader
    sides = [
        token
        for block in data.validation_blocks
        for side in ("input_ids", "labels")
        for token in block[side]
    ]
    assert data.validation_tokens == len(sides) > 0


@pytest.mark.usefixtures("alone")
def test_of_pairs_that_the_teacher_writes_each_counts_as_a_block(tmp_path: Path) -> None:
    given = {"data": "self", "tokens": 32 * 8, "steps": None, "context": 32, "batch_size": 2}
    data = prepare(options("t5", tmp_path / "out", **given)).dataloader
    assert data.steps * 2 == 8
    assert data.tokens_until(data.steps) != 32 * 8
    help_text = " ".join(run("--help", program="gqa-uptrain").out.split())
    assert "a generated pair counts as --context tokens." in help_text


@pytest.mark.usefixtures("alone")
def test_the_teacher_writes_pairs_with_the_attention_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def load_noting_attention(*given: Any, **options: Any) -> PreTrainedModel:
        used.append(options.get("attention"))
        return load_model(*given, **options)

    # All implementations write the same text, so no result shows which one it was
    monkeypatch.setattr("gqa.convert.generate.text_pairs.load_model", load_noting_attention)
    given = {"data": "self", "seed": 77, "attn_implementation": "eager"}
    prepare(options("t5", tmp_path / "out", **given))
    assert used == ["eager"]


@pytest.mark.usefixtures("alone")
def test_of_pairs_that_are_cut_those_count_that_are_trained_on(tmp_path: Path) -> None:
    """Three tokens a side cut every pair, of which two are trained on; 64 cut none."""
    few = PAIRS | {"batch_size": 1, "steps": 2}
    for context, ending in ((3, "; 2 are cut to 3 a side"), (64, " tokens on average")):
        data = prepare(options("marian", tmp_path / "out", **few | {"context": context})).dataloader
        assert data.summary.endswith(ending)


@pytest.mark.usefixtures("alone")
def test_tokens_of_pairs_are_counted(tmp_path: Path) -> None:
    """Not estimated from a mean: those of both sides of every pair that is trained on, with special
    tokens.
    """
    data = prepare(options("marian", tmp_path / "out", **PAIRS | {"steps": 5})).dataloader
    counts = [sum(len(data.block(n)[side]) for side in ("input_ids", "labels")) for n in range(20)]
    assert len(set(counts)) > 3
    for step in (0, 1, 5):
        assert data.tokens_until(step) == sum(counts[: 4 * step])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "marian",
        {},
        "has neither sentinels nor a mask token, so plain text makes no pairs; pass pairs with "
        "--text-column and",
    ),
    (
        "t5",
        PAIRS | {"streaming": True},
        "--target-column cannot be used with a stream; remove --streaming",
    ),
    (
        "t5",
        {"data": "self", "target_column": "meant"},
        "pass the dataset with --data, or remove --target-column",
    ),
    ("t5", {"repeats": True}, "repeats works only with decoders, but t5 is an encoder-decoder"),
    (
        "t5",
        PAIRS | {"alpha": 0.001, "steps": None},
        "--alpha 0.001 is less than one pair; raise it\n",
    ),
    (
        "t5",
        PAIRS | {"alpha": 1, "steps": None, "batch_size": 99},
        "--alpha makes only 76 pairs, less than one batch of 99",
    ),
]


@pytest.mark.usefixtures("alone")
def test_refusals(tmp_path: Path) -> None:
    for name, given, says in REFUSED:
        with fresh_accelerator(), expert_options(given) as rest:
            done = run(*words(name, tmp_path / "out", **rest), program="gqa-uptrain")
        assert says in check_refused(done, program="gqa-uptrain", advice="")
    decoder = words_for(
        material() / "model",
        out=tmp_path / "out",
        **PAIRS | {"data": pair_material() / "pairs.jsonl"},
    )
    done = run(*decoder, program="gqa-uptrain")
    assert "--target-column works only with encoder-decoders, but model is not one" in done.err
    assert not list(tmp_path.iterdir())
