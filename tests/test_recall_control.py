"""Each measure of recall sees something: a model that recalls passes it, and fails it with its keys out of place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from embedded import SOURCE
from induction import HEAD, HEADS, induction_model
from torch import Tensor
from transformers import LlamaForCausalLM

from gqa.checkpoint.loading import load_tokenizer
from gqa.checkpoint.read import read_checkpoint
from gqa.corpus.likelihood import ChunkedHead
from gqa.eval.recall import Questions, agreement, continued, make_questions, recall
from gqa.eval.scoring import score

VOCABULARY, CONTEXT = 4096, 256


def between_positions(keys: Tensor) -> Tensor:
    return keys[:, torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(0))]


def between_heads(keys: Tensor) -> Tensor:
    return keys.unflatten(-1, (HEADS, HEAD)).roll(1, 2).flatten(2)


def as_they_are(keys: Tensor) -> Tensor:
    return keys


@contextmanager
def shuffled(model: LlamaForCausalLM, shuffle: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in model.model.layers:
            hook = layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: shuffle(output))
            stack.callback(hook.remove)
        yield


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return induction_model(VOCABULARY, CONTEXT)


@pytest.fixture(scope="module")
def questions() -> list[Questions]:
    random = np.random.default_rng(2)
    streams = {kind: random.integers(300, VOCABULARY, 8192) for kind in ("text", "samples")}
    return make_questions(streams, load_tokenizer(read_checkpoint(SOURCE)), VOCABULARY, CONTEXT, 1)


def recalled(model: LlamaForCausalLM, questions: list[Questions]) -> list[dict[str, Any]]:
    windows = [window for one in questions for window in one.windows]
    return recall(questions, score(ChunkedHead(model), windows, batch_size=4))


def test_a_model_with_induction_heads_passes(model: LlamaForCausalLM, questions: list[Questions]) -> None:
    found = recalled(model, questions)
    assert {one["kind"] for one in found} == {"text", "samples", "random", "look-up", "passkey"}
    for one in found:
        assert one["accuracy"] > 0.97, one
        assert one["nats"] < 0.5, one


@pytest.mark.parametrize("shuffle", [between_positions, between_heads])
def test_shuffled_keys_fail_every_measure(
    model: LlamaForCausalLM, questions: list[Questions], shuffle: Callable[[Tensor], Tensor]
) -> None:
    with shuffled(model, shuffle):
        for one in recalled(model, questions):
            assert one["accuracy"] < 0.1, one
            assert one["nats"] > 3, one


def test_shuffled_keys_leave_the_greedy_text_at_once(model: LlamaForCausalLM) -> None:
    random = np.random.default_rng(3).integers(300, VOCABULARY, (6, 80)).tolist()
    texts = continued(model, [[1, *line, *line[:4]] for line in random], 32)
    assert [window.ids[-32:] for window in texts] == [tuple(line[4:36]) for line in random]
    for shuffle, least, most in ((as_they_are, 32, 32), (between_positions, 0, 1), (between_heads, 0, 1)):
        with shuffled(model, shuffle):
            hits = score(ChunkedHead(model), texts, batch_size=4).hits
        assert least <= agreement(hits, texts)["tokens"] <= most
