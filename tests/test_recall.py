"""Questions whose answers stand in the context: they do stand there, and a model that cannot look back fails them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import run
from embedded import SOURCE
from evaluations import done, few_questions, refused, results, told, words

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import read_checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.eval.recall import Questions, make_questions

STREAM = np.random.default_rng(1).integers(300, 4000, 8192)
CONTEXT, PREFIX = 512, 1


@pytest.fixture(scope="module")
def questions() -> list[Questions]:
    tokenizer = load_tokenizer(read_checkpoint(SOURCE))
    streams = {"text": STREAM, "samples": STREAM[::-1]}
    return make_questions(streams, tokenizer, 4096, CONTEXT, PREFIX)


def answered(asked: Questions) -> list[tuple[tuple[int, ...], int]]:
    """Of every answer, what is read before it and the token that is right."""
    found, start = [], 0
    for window in asked.windows:
        inside = asked.answers[(asked.answers >= start) & (asked.answers < start + window.scored)] - start
        places = len(window.ids) - window.scored + inside
        found += [(window.ids[:place], window.ids[place]) for place in places.tolist()]
        start += window.scored
    return found


def test_every_kind_is_asked_at_every_distance(questions: list[Questions]) -> None:
    asked = {kind: [q.distance for q in questions if q.kind == kind] for kind in {q.kind for q in questions}}
    assert asked == {
        "text": [64, 192, 320], "samples": [64, 192, 320], "random": [64, 192, 320],
        "look-up": [128, 256, 512], "passkey": [128, 256, 512],
    }  # fmt: skip
    for one in questions:
        assert len(one.answers) == len(one.depth) == len(one.cluster) == len(answered(one))
        assert all(len(window.ids) - 1 <= CONTEXT for window in one.windows)
        assert {window.ids[0] for window in one.windows} == {PREFIX}


def test_answers_are_told_by_the_context(questions: list[Questions]) -> None:
    """By the first copy, by the key, and at the passkey's depth."""
    for one in questions:
        for number, (read, right) in enumerate(answered(one)):
            if one.kind in ("text", "samples", "random"):
                assert read[-one.distance] == right
                assert read[-1] == read[-one.distance - 1]  # the first token of a copy is not asked for
                continue
            asked = read[-2:] if one.kind == "look-up" else read[-(3 + number % 5) :]  # key and colon
            size = len(asked)
            places = [n for n in range(len(read) - size) if read[n : n + size] == asked]
            assert [read[place + size] for place in places] == [right]
            if one.kind == "passkey":
                assert abs(places[0] / len(read) - one.depth[number]) < 0.25


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        few_questions(patch)
        return results("SRC G2 --recall --context 128 --batch-size 4 --precision float32")


def test_recall_needs_no_text(report: dict[str, Any]) -> None:
    source, converted = report["models"]
    assert report["recall"] == {"context": 128}
    assert "text" not in report
    asked = [(one["kind"], one["distance"]) for one in source["recall"]]
    assert asked == [(one["kind"], one["distance"]) for one in converted["recall"]]
    assert {kind for kind, _ in asked} == {"samples", "random", "look-up", "passkey"}
    assert 0 <= converted["greedy"]["tokens"] < converted["greedy"]["longest"] <= 64
    assert [one["prompt"] for one in source["samples"]] == [one["prompt"] for one in converted["samples"]]
    assert all(
        mine["text"] != theirs["text"] for mine, theirs in zip(converted["samples"], source["samples"], strict=True)
    )
    assert source["greedy"]["tokens"] == source["greedy"]["longest"] == converted["greedy"]["longest"]


def test_a_report_asks_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_questions(monkeypatch)
    text = "SRC --data TEXT --context 128 --tokens 300"
    shown = done(text, "-o", tmp_path / "with").out
    assert "Recall from the context" in shown
    assert "recall.png" in shown
    shown = done(text, "--no-recall", "-o", tmp_path / "without").out + done(text).out
    assert "Recall" not in shown
    assert not (tmp_path / "without" / "recall.png").exists()


def test_what_keeps_recall_from_being_measured_keeps_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def samples(*args: object, **more: object) -> None:
        raise RefusedError("it writes nothing")

    monkeypatch.setattr("gqa.eval.evaluate.sampled_blocks", samples)
    text = "SRC --data TEXT --context 128 --tokens 300"
    assert "not measured it writes nothing" in told(text, "-o", tmp_path / "report")
    assert "it writes nothing" in (tmp_path / "report" / "report.html").read_text()
    asked = run(*words(text), "--recall", program="gqa-eval")
    assert (asked.code, asked.err) == (1, "gqa-eval: it writes nothing; the rest is measured\n")
    assert "it writes nothing" in refused("SRC --recall --context 128")
    monkeypatch.setattr("gqa.eval.evaluate.time_decoding", samples)  # nor is anything else measured
    assert "it writes nothing" in refused("SRC --decode --decode-contexts 8 --decode-steps 2", "-o", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_recall_is_for_decoders() -> None:
    assert "--recall is for decoders" in refused("T5 --recall")
    assert "at least 128 tokens" in refused("SRC --recall --context 64")
