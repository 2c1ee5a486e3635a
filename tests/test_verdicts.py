"""Three levels of lost quality: one function, one set of thresholds, the same word wherever a
verdict is given.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from support.checkpoints import run
from support.evaluations import words

from gqa.convert import verdict
from gqa.convert.card import quality_paragraph
from gqa.convert.verdict import MEANINGS, Level, Loss
from gqa.eval.page import Verdict, write_page
from gqa.eval.report import loss_of_model
from gqa.study.recommendation import loss_of_row

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize(
    ("loss", "level"),
    [
        (Loss(1.0), "good"),
        (Loss(0.97), "good"),
        (Loss(1.05), "good"),
        (Loss(1.17), "trade-off"),
        (Loss(1.5), "trade-off"),
        (Loss(1.51), "damaged"),
        (Loss(13.0), "damaged"),
        (Loss(math.inf), "damaged"),
        (Loss(math.nan), "damaged"),
        (Loss(None), None),
    ],
)
def test_the_ratio_decides_the_level(loss: Loss, level: Level | None) -> None:
    assert loss.level == level


def test_a_model_is_good_only_if_the_whole_interval_is() -> None:
    assert Loss(1.03, 1.04).level == "good"
    assert Loss(1.03, 1.08).level == "trade-off"


def test_a_wide_interval_damages_no_model() -> None:
    assert Loss(1.4, 1.6).level == "trade-off"


@pytest.mark.parametrize(
    ("recall_loss", "level"),
    [(-0.1, "good"), (0.02, "good"), (0.05, "trade-off"), (0.3, "damaged")],
)
def test_lost_recall_counts_as_perplexity_does(recall_loss: float, level: Level) -> None:
    """Also alone, where perplexity was not measured; and it never hides a bad ratio."""
    assert Loss(1.0, None, recall_loss).level == level
    assert Loss(None, None, recall_loss).level == level
    assert Loss(13.0, None, recall_loss).level == "damaged"


def test_a_report_and_a_study_give_the_same_level() -> None:
    """From their own records of the same numbers."""
    for ratio, high, before, after in (
        (1.01, 1.02, 0.9, 0.9),
        (1.2, 1.3, 0.9, 0.9),
        (1.2, 1.3, 0.9, 0.5),
    ):
        answers = [
            [{"kind": "text", "answers": 10, "accuracy": share}] for share in (before, after)
        ]
        base = {"recall": answers[0]}
        model = {
            "recall": answers[1],
            "quality": {},
            "against_baseline": {"ratio": ratio, "ratio_high": high},
        }
        row = {"perplexity_ratio": ratio, "perplexity_ratio_high": high, "recall_text": after}
        loss = loss_of_row(row, {"recall_text": before})
        assert loss_of_model(base, model) == loss == Loss(ratio, high, before - after)


@pytest.mark.parametrize("level", MEANINGS)
def test_a_level_is_legible_without_color(level: Level, tmp_path: Path) -> None:
    """A word and a sign in the page, and a line of another style; a color of its own in light and
    dark.
    """
    write_page(tmp_path, title="t", verdicts=[Verdict("text", level)], foot="")
    html = (tmp_path / "report.html").read_text()
    assert re.search(rf'<p class="verdict {level}"><b class="level">\S {level}</b> text</p>', html)
    style = re.search(rf"\.verdict\.{level} {{ border-left: \d+px (\w+) var\(--{level}\); }}", html)
    assert style
    assert html.count(f"--{level}: #") == 2
    others = [other for other in MEANINGS if other != level]
    assert all(f"px {style[1]} var(--{other})" not in html for other in others)


def test_the_page_has_no_level_where_nothing_was_measured(tmp_path: Path) -> None:
    write_page(tmp_path, title="t", verdicts=[Verdict("half the cache")], foot="")
    assert '<p class="verdict">half the cache</p>' in (tmp_path / "report.html").read_text()


def test_the_terminal_and_the_page_say_the_level(tmp_path: Path) -> None:
    """Of the embedded model with the means of its heads, which ruin it."""
    out = tmp_path / "report"
    command = "SRC G2 --data TEXT --tokens 500 --context 128 --no-recall"
    done = run(*words(command), "-o", out, program="gqa-eval")
    assert done.code == 0, done.err
    assert done.out.startswith("damaged    gqa2: 2 of 8 KV heads, ")
    assert '<p class="verdict damaged">' in (out / "report.html").read_text()


def test_the_table_of_verdicts_has_the_thresholds() -> None:
    text = (DOCS / "reading.md").read_text()
    for level in MEANINGS:
        assert re.search(rf"\| (\*\*|){level}\1 \|", text), level
    assert f"x{verdict.GOOD_RATIO:g}" in text
    assert f"x{verdict.DAMAGED_RATIO:g}" in text
    assert "lost recall, percentage points" in text
    assert f"| up to {100 * verdict.GOOD_RECALL_LOSS:g} |" in text
    assert f"| above {100 * verdict.DAMAGED_RECALL_LOSS:g} |" in text


def test_the_quick_start_has_the_thresholds() -> None:
    text = " ".join((DOCS / "quickstart.md").read_text().split())
    good = f"x{verdict.GOOD_RATIO:g}"
    damaged = f"x{verdict.DAMAGED_RATIO:g}"
    assert f"**good** (up to {good})" in text
    assert f"**trade-off** (up to {damaged})" in text
    assert f"**damaged** (above {damaged})" in text
    assert f"lost more than {100 * verdict.GOOD_RECALL_LOSS:g} percentage points" in text
    assert f"one that lost more than {100 * verdict.DAMAGED_RECALL_LOSS:g} is damaged" in text


def test_a_card_says_the_level_and_what_it_means() -> None:
    paragraph = quality_paragraph("damaged", "perplexity x13.0 on 30 tokens of generated text")
    assert paragraph.startswith(f"**Damaged** ({MEANINGS['damaged']}). ")
