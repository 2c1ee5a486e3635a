"""Questions whose answers stand in the context: they do stand there, and a model that cannot look back fails them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from embedded import SOURCE
from evaluations import evaluate_models, few_questions, flat_output, refused, results

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_tokenizer
from gqa.checkpoint.read import read_checkpoint
from gqa.eval.recall import Questions, make_questions

STREAM = np.random.default_rng(1).integers(300, 4000, 8192)
CONTEXT, PREFIX = 512, 1


@pytest.fixture(scope="module")
def questions() -> list[Questions]:
    tokenizer = load_tokenizer(read_checkpoint(SOURCE))
    streams = {"text": STREAM, "samples": STREAM[::-1]}
    return make_questions(streams, tokenizer, 4096, CONTEXT, PREFIX)


def answers(question: Questions) -> list[tuple[tuple[int, ...], int]]:
    """The tokens before each answer, and the right token."""
    pairs, start = [], 0
    for window in question.windows:
        inside = question.answers[(question.answers >= start) & (question.answers < start + window.scored)] - start
        positions = len(window.ids) - window.scored + inside
        pairs += [(window.ids[:position], window.ids[position]) for position in positions.tolist()]
        start += window.scored
    return pairs


def test_every_kind_has_every_distance(questions: list[Questions]) -> None:
    kinds = {question.kind for question in questions}
    assert {kind: [q.distance for q in questions if q.kind == kind] for kind in kinds} == {
        "text": [64, 192, 320], "samples": [64, 192, 320], "random": [64, 192, 320],
        "look-up": [128, 256, 512], "passkey": [128, 256, 512],
    }  # fmt: skip
    for question in questions:
        assert len(question.answers) == len(question.cluster) == len(answers(question))
        assert all(len(window.ids) - 1 <= CONTEXT for window in question.windows)
        assert {window.ids[0] for window in question.windows} == {PREFIX}


def test_the_context_determines_answers(questions: list[Questions]) -> None:
    """By the first copy, by the key, and by the passkey at each of five depths."""
    for question in questions:
        for number, (context, right) in enumerate(answers(question)):
            if question.kind in ("text", "samples", "random"):
                assert context[-question.distance] == right
                assert context[-1] == context[-question.distance - 1]  # the first token of a copy is no answer
                continue
            key = context[-2:] if question.kind == "look-up" else context[-(3 + number % 5) :]  # key and colon
            size = len(key)
            starts = [n for n in range(len(context) - size) if context[n : n + size] == key]
            assert [context[start + size] for start in starts] == [right]
            if question.kind == "passkey":
                assert abs(starts[0] / len(context) - number // 5 / 4) < 0.25


def test_recall_needs_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    few_questions(monkeypatch)
    record = results("SRC G2 --recall --context 128 --batch-size 4 --precision float32")
    source, converted = record["models"]
    assert record["recall"] == {"context": 128}
    assert "text" not in record
    kinds = [(line["kind"], line["distance"]) for line in source["recall"]]
    assert kinds == [(line["kind"], line["distance"]) for line in converted["recall"]]
    assert {kind for kind, _ in kinds} == {"samples", "random", "look-up", "passkey"}
    assert 0 <= converted["greedy"]["tokens"] < converted["greedy"]["longest"] <= 64
    for ours, theirs in zip(converted["samples"], source["samples"], strict=True):
        assert ours["prompt"] == theirs["prompt"]
        assert ours["text"] != theirs["text"]
    assert source["greedy"]["tokens"] == source["greedy"]["longest"] == converted["greedy"]["longest"]


def test_a_report_has_recall_unless_it_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_questions(monkeypatch)
    text = "SRC --data TEXT --context 128 --tokens 300"
    assert "Recall from the context" in evaluate_models(text, "-o", tmp_path / "with").out
    shown = evaluate_models(text, "--no-recall", "-o", tmp_path / "without").out + evaluate_models(text).out
    assert "Recall" not in shown
    assert "needs a context of at least 128 tokens" in flat_output(
        "SRC --data TEXT --context 64 --tokens 300", "-o", tmp_path / "short"
    )


def test_recall_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report says why; who asks for recall is refused before anything else is measured."""
    monkeypatch.setattr("gqa.eval.recall.sampled_blocks", Mock(side_effect=RefusedError("it writes nothing")))
    text = "SRC --data TEXT --context 128 --tokens 300"
    assert "not measured it writes nothing" in flat_output(text, "-o", tmp_path / "report")
    assert "it writes nothing" in (tmp_path / "report" / "report.html").read_text()
    monkeypatch.setattr("gqa.eval.evaluate.score", Mock(side_effect=AssertionError))
    assert "it writes nothing" in refused(f"{text} --recall")
