"""Uptraining of encoder-decoders: the loss against transformers' own, and runs on pairs, plain text and `self`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_losses import assert_close, gradients, set_slices
from tiny_models import TINY, build
from torch import Tensor
from training import tiny_checkpoint, trained, training_model, write_corpus
from transformers import AutoTokenizer, PreTrainedModel

from gqa.convert import convert_checkpoint
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.training_model import predictions

MODELS = [
    "gqa_t5",
    "gqa_mt5",
    "gqa_umt5",
    "gqa_bart",
    "gqa_mbart",
    "gqa_pegasus",
    "gqa_marian",
    "gqa_m2m_100",
    "t5gemma",
]
LENGTHS = [(9, 7), (12, 3), (5, 11)]  # of sources and targets


def made(name: str, seed: int = 0) -> PreTrainedModel:
    return build(TINY[name], 2, seed=seed).eval()


def padded(pad: int, filled: int) -> dict[str, Tensor]:
    """A batch of `LENGTHS`, padded at the end: sources with `filled` where the mask is 0, labels with -100."""
    generator = torch.Generator().manual_seed(0)
    source, labels = torch.full((3, 12), filled), torch.full((3, 11), -100)
    mask = torch.zeros(3, 12, dtype=torch.long)
    for row, (one, other) in enumerate(LENGTHS):
        source[row, :one] = torch.randint(10, 60, (one,), generator=generator)
        labels[row, :other] = torch.randint(10, 60, (other,), generator=generator)
        mask[row, :one] = 1
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("slices", [7, 999])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loss_of_transformers(name: str, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and every gradient; what stands in padded places makes no difference, what stands in others does."""
    set_slices(monkeypatch, slices)
    model = made(name)
    given = padded(model.config.pad_token_id, model.config.pad_token_id)
    expected = model(**given, use_cache=False).loss
    expected.backward()
    wanted = gradients(model)
    training = training_model(model)
    loss, told = training(**given)
    (loss / told[0]).backward()
    assert training._head.split, "its head is not taken apart"
    assert int(told[0]) == predictions(given) == sum(other for _, other in LENGTHS)
    assert float(loss.detach() / told[0]) == pytest.approx(expected.item(), abs=1e-5)
    assert_close(gradients(model), wanted)
    with torch.no_grad():
        other, _ = training(**padded(model.config.pad_token_id, 33))
        unmasked, _ = training(**given | {"attention_mask": torch.ones_like(given["attention_mask"])})
    assert float(other) == pytest.approx(loss.item(), abs=1e-4)
    assert abs(float(unmasked) - loss.item()) > 1e-3


@pytest.mark.parametrize("name", ["gqa_t5", "gqa_bart"])
def test_distillation(name: str) -> None:
    """An unconverted copy diverges by nothing; another by the divergence of whole logits at places that count."""
    model, other = made(name), made(name, seed=1)
    given = padded(model.config.pad_token_id, 5)
    _, told = training_model(model, copy.deepcopy(model))(**given)
    assert float(told[2]) == pytest.approx(0, abs=1e-6)
    _, told = training_model(model, other, temperature=1.0)(**given)
    with torch.no_grad():
        q, p = (one(**given, use_cache=False).logits.log_softmax(-1) for one in (model, other))
    expected = (p.exp() * (p - q)).sum(-1)[given["labels"] >= 0].sum()
    assert float(told[2]) == pytest.approx(float(expected), rel=1e-5)
    assert float(expected) > 0.1


@pytest.mark.parametrize("match", ["attention", "hidden"])
@pytest.mark.parametrize("name", ["gqa_t5", "gqa_bart"])
def test_matching_is_of_the_decoder(name: str, match: str) -> None:
    """The encoder's outputs are of other tokens."""
    model, other = made(name), made(name, seed=1)
    given: dict[str, Any] = padded(model.config.pad_token_id, 5)
    assert float(training_model(model, other, match=match)(**given)[1][3].detach()) > 0.1
    assert float(training_model(model, copy.deepcopy(model), match=match)(**given)[1][3].detach()) == 0


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T5 with sentinels and BART with a mask token, each converted to 2 KV heads; Marian, of which plain text makes no
    pairs; pairs and text.
    """
    found = tmp_path_factory.mktemp("pairs")
    for name, added in (("t5", {"additional_special_tokens": [f"<extra_id_{n}>" for n in range(6)]}),
                        ("bart", {"mask_token": "<mask>"}), ("marian", {})):  # fmt: skip
        where = tiny_checkpoint(found / f"{name}-base", f"gqa_{name}", 4, pad_token_id=0, dropout=0.0, dropout_rate=0.0)
        tokenizer = AutoTokenizer.from_pretrained(where)
        tokenizer.add_special_tokens(added)
        tokenizer.save_pretrained(where)
        convert_checkpoint(where, 2, found / name, method="mean")
    rows = [{"said": f"{n} in words is " + "one " * (n % 7 + 1), "meant": f"the number {n}"} for n in range(80)]
    rows[3]["meant"] = None
    (found / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_corpus(found / "text.jsonl")
    return found


def options(place: Path, name: str, out: Path, data: str | None = "text.jsonl", **given: Any) -> TrainOptions:
    sources = () if data is None else (data if data.startswith("self") else str(place / data),)
    short = {"block_size": 32, "batch_size": 4, "steps": 4, "learning_rate": 1e-2, "heldout_tokens": 256}
    return TrainOptions(str(place / name), out, data=sources, **short | given)


DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "spans": ("t5", {}),
    "denoising": ("bart", {}),
    "pairs": ("marian", {"data": "pairs.jsonl", "field": "said", "target_field": "meant"}),
    "self": ("t5", {"data": "self"}),
    "self without marks": ("marian", {"data": "self:4K"}),
    "nothing is said": ("bart", {"data": None, "heldout_tokens": 64}),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", DATA)
def test_training_comes_nearer_to_the_teacher(made_of: Path, tmp_path: Path, name: str) -> None:
    model, given = DATA[name]
    progress, record = trained(options(made_of, model, tmp_path / "out", **given))
    before, after = progress.heldout_before, progress.heldout_after
    assert after["distillation"] < 0.98 * before["distillation"], (before, after)
    assert (record["steps"], record["teacher"]) == (4, f"{model}-base")
    assert not record["options"]["repeats"]
