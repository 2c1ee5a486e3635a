"""Loss by position: bins, ratios and windows as long as a model's context."""

from __future__ import annotations

import numpy as np
import pytest
from evaluations import few_questions, results

from gqa.corpus.windows import Window
from gqa.eval import positions, text
from gqa.eval.positions import LONGEST, READ, by_context, long_windows, read_before


def test_loss_by_position() -> None:
    windows = [Window(tuple(range(513)), 512)] * 3
    found = by_context(np.tile(np.arange(1, 513), 3).astype(np.float32), windows)
    assert [(b["from"], b["to"]) for b in found][-3:] == [(65, 128), (129, 256), (257, 512)]
    assert found[-1]["nats"] == pytest.approx((257 + 512) / 2)
    assert sum(b["tokens"] for b in found) == 3 * 512
    assert "ratio" not in found[0]


def test_the_ratio_is_of_the_position() -> None:
    """A model that is worse only behind 256 tokens is the base's equal before."""
    random = np.random.default_rng(0)
    context = np.tile(np.arange(1, 513), 40)
    base = random.gamma(2, 1, len(context))
    model = base + np.where(context > 256, 0.5, 0.0) + random.normal(0, 0.2, len(context))
    *near, far = by_context(model, [Window(tuple(range(513)), 512)] * 40, base, np.repeat(np.arange(40), 512))
    assert far["from"] == 257
    assert far["ratio_low"] < np.exp(0.5) < far["ratio_high"]
    assert far["ratio_high"] - far["ratio_low"] < 0.05
    for one in near:
        assert one["ratio_low"] - 0.03 < 1 < one["ratio_high"] + 0.03
        assert one["ratio_high"] < far["ratio_low"]


def test_windows_are_as_long_as_the_context_and_the_text_permit() -> None:
    stream = np.arange(100_000)
    assert {len(window.ids) - 1 for window in long_windows(stream, 4096, 2048, 7)} == {4096}
    assert {len(window.ids) - 1 for window in long_windows(stream, None, 2048, 7)} == {LONGEST}
    assert {len(window.ids) - 1 for window in long_windows(stream[:9000], 131_072, 2048, 7)} == {4096}
    assert long_windows(stream, 2048, 2048, 7) == long_windows(stream[:5000], 4096, 2048, 7) == []
    windows = long_windows(stream, 4096, 2048, 7)
    assert sum(window.scored for window in windows) == READ
    seen = [token for window in windows for token in window.ids[1:]]
    assert len(set(seen)) == len(seen)  # no token twice
    assert {window.ids[0] for window in windows} == {7}
    assert max(seen) == 99_999


def test_positions_count_what_is_read() -> None:
    windows = long_windows(np.arange(3000), 1024, 512, 7)
    assert read_before(windows).tolist() == [*range(1, 1025)] * 2
    assert len(set(positions.runs(windows).tolist())) == 2 * (1024 // positions.RUN + 1)


def test_reports_read_as_far_as_the_model_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no context is asked for: the embedded model has 512 positions, and text is scored in windows of 128."""
    few_questions(monkeypatch)
    monkeypatch.setattr(positions, "READ", 2048)
    monkeypatch.setattr(text, "MAX_CONTEXT", 128)
    monkeypatch.setattr(text.choose_context, "__defaults__", (128,))
    line = "--data TEXT --recall --precision float32"
    found = results(f"SRC G2 {line}")
    assert found["text"]["context"] == found["recall"]["context"] == 128
    base, converted = (model["by_context"] for model in found["models"])
    assert base[-1]["to"] == converted[-1]["to"] == 512
    assert converted[-1]["ratio_low"] < converted[-1]["ratio"] < converted[-1]["ratio_high"]
    far = np.exp(converted[-1]["nats"] - base[-1]["nats"])
    assert converted[-1]["ratio"] == pytest.approx(far, rel=1e-5)
    assert results(f"SRC {line} --context 128")["models"][0]["by_context"][-1]["to"] == 128
