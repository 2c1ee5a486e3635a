"""The losses of transformers, which those in slices must equal."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from transformers import PreTrainedModel

import gqa.corpus.likelihood
import gqa.models.chunked_head
from support.training import training_model

VOCABULARY = 96


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-5) -> None:
    """Gradients of the mean: the largest number is about 1."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= atol * max(1.0, float(tensor.abs().max())), (name, error)


def assert_equals(
    monkeypatch: pytest.MonkeyPatch,
    expected: Tensor,
    model: PreTrainedModel,
    given: dict[str, Tensor],
    **options: Any,
) -> None:
    """The mean loss as training computes it, and its gradients, for any number of slices."""
    expected.backward()
    wanted = gradients(model)
    for rows in (7, 20, 999):
        set_slices(monkeypatch, rows)
        training = training_model(model, **options)
        loss, told = training(**given)
        assert training._head.split, "its head is not taken apart"
        (loss / told[0]).backward()
        assert float(loss.detach() / told[0]) == pytest.approx(expected.item(), abs=1e-5)
        assert_close(gradients(model), wanted)


def set_slices(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    # So few rows of logits at once that even a tiny batch is several slices
    monkeypatch.setattr(gqa.corpus.likelihood, "CHUNK_NUMBERS", rows * VOCABULARY)
    monkeypatch.setattr(gqa.models.chunked_head, "CHUNK_NUMBERS", rows * VOCABULARY)
    monkeypatch.setattr(gqa.models.chunked_head, "LEAST_ROWS", 1)
