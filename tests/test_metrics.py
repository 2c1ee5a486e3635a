"""The list of metrics, and what is made from it: docs/evaluating.md among others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from support.pages import with_table
from support.repository import ROOT

from gqa.eval.metrics import METRICS, RECALL_KINDS, Metric, measure_text
from gqa.eval.page import Column
from gqa.eval.scoring import ARRAYS, BASELINE, COMPARISONS, Scores, Window
from gqa.eval.text import CutDocument, Text, make_text

PAGE = ROOT / "docs/evaluating.md"
METRICS_HEADER = (
    "| metric (*column of the table*) | formula | better "
    "| `results.json` of `gqa-eval` | `results.jsonl` of `gqa-ablate` |\n|---|---|---|---|---|\n"
)
RECALL_HEADER = "| kind of recall | what the model reads | what is scored |\n|---|---|---|\n"


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def metric_rows() -> Iterator[tuple[str, ...]]:
    """Cells of the table of metrics: their columns in gqa-eval, and their names in JSON files."""
    for metric in METRICS:
        columns = [f"*{column.title}*" for column in metric.columns if column.title != metric.title]
        yield (
            f"{metric.title} ({', '.join(columns)})" if columns else metric.title,
            metric.meaning,
            metric.better,
            f"`{metric.section}`: {code(metric.keys)}",
            code(number.key for number in metric.row),
        )
    kinds = code(kind.row_key for kind in RECALL_KINDS)
    yield "recall", "right answers / answers", "higher", "`recall`: `accuracy`", kinds


def recall_rows() -> Iterator[tuple[str, ...]]:
    """Cells of the table of questions about the context."""
    for kind in RECALL_KINDS:
        yield code([kind.name]), kind.question, kind.counted


def evaluating_page() -> str:
    """docs/evaluating.md with its tables of metrics and questions written anew."""
    page = PAGE.read_text(encoding="utf-8")
    page = with_table(page, METRICS_HEADER, metric_rows())
    return with_table(page, RECALL_HEADER, recall_rows())


def test_the_page_shows_every_metric() -> None:
    """`python tests/test_metrics.py` writes the page anew."""
    message = "the page is old: run python tests/test_metrics.py"
    assert PAGE.read_text(encoding="utf-8") == evaluating_page(), message


def text_of(tokens: int) -> Text:
    """A text of two documents with so many tokens each."""
    windows = [
        Window(tuple(range(tokens + 1)), tokens, 0),
        Window(tuple(range(tokens + 1)), tokens, 1),
    ]
    documents = [CutDocument("a few words", [window]) for window in windows]
    return make_text(documents, "rolling", tokens)


def scores_of(text: Text) -> Scores:
    """Every array that there is, of random numbers."""
    random = np.random.default_rng(0)
    names = [*ARRAYS, *COMPARISONS, *(BASELINE + name for name in ARRAYS)]
    return {name: random.random(text.tokens) for name in names}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.title)
def test_a_metric_reads_its_arrays_and_writes_its_keys(metric: Metric) -> None:
    text = text_of(6)
    scores = scores_of(text)
    only_its_arrays = {name: scores[name] for name in metric.arrays}
    numbers = metric.measure(only_its_arrays, text)
    assert set(numbers) == set(metric.keys)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.title)
def test_numbers_of_rows_are_in_the_record(metric: Metric) -> None:
    """Of this metric or of another one."""
    text = text_of(6)
    scores = scores_of(text)
    record = {
        "quality": measure_text(scores, text, compares=False),
        "against_baseline": measure_text(scores, text, compares=True),
    }
    for number in metric.row:
        value = record
        for key in number.path.split("."):
            value = value[key]
        assert isinstance(value, float), number


def test_no_name_is_used_twice() -> None:
    keys = [(metric.section, key) for metric in METRICS for key in metric.keys]
    assert len(keys) == len({*keys})
    row_keys = [number.key for metric in METRICS for number in metric.row]
    row_keys += [kind.row_key for kind in RECALL_KINDS]
    assert len(row_keys) == len({*row_keys})


def test_a_metric_without_its_arrays_is_left_out() -> None:
    text = text_of(6)
    scores = scores_of(text)
    compared = measure_text(
        {name: scores[name] for name in ("nats", "baseline_nats")}, text, compares=True
    )
    assert "ratio" in compared
    assert "kl" not in compared


def test_a_cell_is_empty_without_its_number() -> None:
    column = Column("KL", "{kl[mean]:.2f}")
    assert column.cell({"kl": {"mean": 0.125}}) == "0.12"
    assert column.cell({"kl": {"mean": None}}) == ""
    assert column.cell({}) == ""


if __name__ == "__main__":
    PAGE.write_text(evaluating_page(), encoding="utf-8")
