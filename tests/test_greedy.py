"""How long a model says what the baseline says: what reading along finds is what writing gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embedded import SOURCE
from evaluations import model_directory
from transformers import AutoModelForCausalLM, PreTrainedModel

from gqa.corpus.likelihood import ChunkedHead
from gqa.eval.recall import agreement, continued, prompts
from gqa.eval.scoring import Window, score

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


def hits(model: PreTrainedModel, windows: list[Window]) -> Any:
    return score(ChunkedHead(model), windows, batch_size=4).hits


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    return continued(load(SOURCE), OPENINGS, STEPS)


def test_the_baseline_writes_greedily_whatever_the_lengths(windows: list[Window]) -> None:
    base = load(SOURCE)
    assert [list(window.ids) for window in windows] == [written(base, opening) for opening in OPENINGS]
    assert [len(window.ids) - window.scored for window in windows] == [len(opening) for opening in OPENINGS]


def test_reading_along_finds_where_a_model_writes_something_else(windows: list[Window]) -> None:
    other = load(model_directory() / "gqa4")
    expected = []
    for window, opening in zip(windows, OPENINGS, strict=True):
        texts = zip(window.ids[len(opening) :], written(other, opening)[len(opening) :], strict=False)
        same = [one == another for one, another in texts]
        expected.append(same.index(False) if False in same else window.scored)
    found = agreement(hits(other, windows), windows)
    assert found["tokens"] == pytest.approx(sum(expected) / len(expected))
    assert found["tokens"] < found["longest"]
    assert found["tokens_low"] <= found["tokens"] <= found["tokens_high"]


def test_prompts_are_in_the_chat_template_where_there_is_one() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    assert prompts(tokenizer, [range(100)]) == [list(range(32))]
    tokenizer.chat_template = "{% for m in messages %}user: {{ m.content }}\n{% endfor %}bot:"
    found = prompts(tokenizer, [range(100)])
    assert len(found) > 5
    assert tokenizer.decode(found[0]).endswith("known for?\nbot:")
