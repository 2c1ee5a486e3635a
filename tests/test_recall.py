"""Questions whose answers stand in the context, and greedy texts: what looks back passes both, what
cannot fails.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.embedded import SOURCE
from support.evaluations import evaluate_models, few_questions, model_directory, refused, results
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gqa.core.errors import RefusedError
from gqa.eval.recall import Questions, agreement, greedy_texts, make_questions, summarize
from gqa.eval.scoring import score
from gqa.models.chunked_head import ChunkedHead

CONTEXT, PREFIX, VOCABULARY = 512, 1, 4096


@pytest.fixture(scope="module")
def questions() -> list[Questions]:
    stream = np.random.default_rng(1).integers(300, 4000, 8192)
    streams = {"text": stream, "generated": stream[::-1]}
    return make_questions(
        streams, AutoTokenizer.from_pretrained(SOURCE), VOCABULARY, CONTEXT, PREFIX
    )


def answers(question: Questions) -> list[tuple[tuple[int, ...], int]]:
    """The tokens before each answer, and the right token."""
    pairs, start = [], 0
    for window in question.windows:
        inside = (
            question.answers[
                (question.answers >= start) & (question.answers < start + window.scored)
            ]
            - start
        )
        positions = len(window.ids) - window.scored + inside
        pairs += [(window.ids[:position], window.ids[position]) for position in positions.tolist()]
        start += window.scored
    return pairs


def test_every_kind_has_every_distance(questions: list[Questions]) -> None:
    kinds = {question.kind for question in questions}
    assert {kind: [q.distance for q in questions if q.kind == kind] for kind in kinds} == {
        "text": [64, 192, 320],
        "generated": [64, 192, 320],
        "random": [64, 192, 320],
        "values": [128, 256, 512],
        "passkeys": [128, 256, 512],
    }
    for question in questions:
        assert len(question.answers) == len(answers(question))
        assert all(len(window.ids) - 1 <= CONTEXT for window in question.windows)
        assert {window.ids[0] for window in question.windows} == {PREFIX}


def test_a_small_vocabulary_has_no_words_to_look_up() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    for size, kinds in {24: {"text", "random", "passkeys"}, 6: {"text", "random"}}.items():
        few = make_questions({"text": np.arange(4096) % size}, tokenizer, size, CONTEXT, PREFIX)
        assert {question.kind for question in few} == kinds


def test_the_context_determines_answers(questions: list[Questions]) -> None:
    """By the first copy, by the key, and by the passkey at each of five depths."""
    for question in questions:
        for number, (context, right) in enumerate(answers(question)):
            if question.kind in ("text", "generated", "random"):
                assert context[-question.distance] == right
                # The first token of a copy is no answer
                assert context[-1] == context[-question.distance - 1]
                continue
            # Key and colon
            key = context[-2:] if question.kind == "values" else context[-(3 + number % 5) :]
            size = len(key)
            starts = [n for n in range(len(context) - size) if context[n : n + size] == key]
            assert [context[start + size] for start in starts] == [right]
            if question.kind == "passkeys":
                assert abs(starts[0] / len(context) - number // 5 / 4) < 0.25


class Induction:
    """In place of a `ChunkedHead`: after two tokens it predicts what followed them the last time
    (Olsson et al., "In-context Learning and Induction Heads", 2022), if that was at most `reach`
    tokens ago.
    """

    vocabulary, model = (
        VOCABULARY,
        SimpleNamespace(device=torch.device("cpu"), name_or_path="induction"),
    )

    def __init__(self, reach: int) -> None:
        self._reach = reach

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, T, 1) predicted tokens."""
        predicted = torch.zeros_like(input_ids)
        for row, ids in enumerate(input_ids.tolist()):
            followed = dict[tuple[int, ...], int]()
            for end in range(2, len(ids)):
                position = followed.get(tuple(ids[end - 1 : end + 1]), -self._reach - 1)
                predicted[row, end] = ids[position] if end - position < self._reach else 0
                followed[tuple(ids[end - 2 : end])] = end
        return predicted[..., None]

    def logits(self, predicted: torch.Tensor) -> torch.Tensor:
        return 20.0 * torch.nn.functional.one_hot(predicted[:, 0], VOCABULARY)


@pytest.mark.parametrize(("reach", "least", "most"), [(CONTEXT, 0.97, 1.0), (4, 0.0, 0.1)])
def test_what_looks_back_passes_and_what_cannot_fails(
    questions: list[Questions], reach: int, least: float, most: float
) -> None:
    windows = [window for one in questions for window in one.windows]
    head: Any = Induction(reach)
    records = summarize(questions, score(head, windows, batch_size=4)["hits"])
    assert {one["kind"] for one in records} == {"text", "generated", "random", "values", "passkeys"}
    for one in records:
        assert least <= one["accuracy"] <= most, one


STEPS = 16
OPENINGS = [[1, 300 + n, 40 * n + 700, *range(900, 900 + n)] for n in range(4)]  # of four lengths


def load(path: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def written(model: PreTrainedModel, opening: list[int]) -> list[int]:
    """One token after another, nothing cached or padded."""
    ids = list(opening)
    with torch.no_grad():
        while len(ids) < len(opening) + STEPS and (ids[-1] != 2 or len(ids) == len(opening)):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def test_a_greedy_text_and_where_a_model_leaves_it() -> None:
    """The baseline writes greedily whatever the lengths; reading along finds where a model writes
    something else.
    """
    base, other, expected = load(SOURCE), load(model_directory() / "gqa4"), []
    windows = greedy_texts(base, OPENINGS, STEPS)
    assert [list(window.ids) for window in windows] == [
        written(base, opening) for opening in OPENINGS
    ]
    assert [len(window.ids) - window.scored for window in windows] == [
        len(opening) for opening in OPENINGS
    ]
    for window, opening in zip(windows, OPENINGS, strict=True):
        texts = zip(
            window.ids[len(opening) :], written(other, opening)[len(opening) :], strict=False
        )
        same = [one == another for one, another in texts]
        expected.append(same.index(False) if False in same else window.scored)
    found = agreement(score(ChunkedHead(other), windows, batch_size=4)["hits"], windows)
    assert found["tokens"] == pytest.approx(sum(expected) / len(expected))
    assert found["tokens"] < found["longest"]


def test_recall_needs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    few_questions(monkeypatch)
    record = results("SRC G2 --recall --context 128 --batch-size 4 --precision float32")
    source, converted = record["models"]
    assert record["recall"] == {"context": 128}
    assert "text" not in record
    kinds = [(line["kind"], line["distance"]) for line in source["recall"]]
    assert kinds == [(line["kind"], line["distance"]) for line in converted["recall"]]
    assert {kind for kind, _ in kinds} == {"generated", "random", "values", "passkeys"}
    assert 0 <= converted["greedy"]["tokens"] < converted["greedy"]["longest"] <= 64
    for ours, theirs in zip(converted["samples"], source["samples"], strict=True):
        assert ours["prompt"] == theirs["prompt"]
        assert ours["text"] != theirs["text"]
    assert (
        source["greedy"]["tokens"] == source["greedy"]["longest"] == converted["greedy"]["longest"]
    )


def test_a_report_has_recall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be measured is refused before anything is scored, with the option that leaves it
    out.
    """
    few_questions(monkeypatch)
    text = "SRC --data TEXT --context 128 --tokens 300"
    assert "Recall from the context" in evaluate_models(text, "-o", tmp_path / "with").out
    assert "Recall" not in evaluate_models(text, "--no-recall", "-o", tmp_path / "without").out
    # Refused before anything is scored
    monkeypatch.setattr("gqa.eval.evaluate.score", Mock(side_effect=AssertionError))
    short = refused("SRC --data TEXT --context 64", "-o", tmp_path / "short")
    assert (
        "at least 128 tokens, but --context is 64; pass a larger --context, or --no-recall" in short
    )
    with monkeypatch.context() as patch:
        # A model whose text holds nothing to ask for
        patch.setattr(
            "gqa.eval.recall.sampled_blocks", Mock(side_effect=RefusedError("it writes nothing"))
        )
        assert "recall cannot be measured: it writes nothing, or pass --no-recall" in refused(
            text, "-o", tmp_path / "mute"
        )
    # A model of code that cannot write text
    monkeypatch.setattr(
        "transformers.LlamaForCausalLM.generate", Mock(side_effect=ValueError("no cache"))
    )
    assert (
        "cannot write text (no cache), so recall cannot be measured; pass --no-recall"
        in refused(f"{text} --recall")
    )
