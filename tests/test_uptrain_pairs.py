"""Uptraining of encoder-decoders: the loss against transformers' own, and runs on pairs, plain text and `self`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_losses import assert_close, gradients, set_slices
from tiny_models import TINY, build
from torch import Tensor
from training import training_model
from transformers import PreTrainedModel

from gqa.uptrain.training_model import predictions

MODELS = ["gqa_t5", "gqa_mt5", "gqa_umt5", "gqa_bart", "gqa_mbart", "gqa_pegasus", "gqa_marian", "gqa_m2m_100", "t5gemma"]
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
