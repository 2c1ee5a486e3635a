"""The recommendation, pictures and report of a study: against rows made by hand, and in a browser."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest
from matplotlib.figure import Figure
from test_ablation import rows, study

from gqa.eval.study import plots
from gqa.eval.study.options import Cell
from gqa.eval.study.plots import draw_study
from gqa.eval.study.report import recommend, write_study_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def row(method: str, groups: int, alpha: float, loss: float, **more: Any) -> dict[str, Any]:
    """A measured row of a base model of 2 nats and 4 KV heads of 100 bytes."""
    columns = {"loss": loss, "loss_increase": loss - 2, "perplexity_ratio": 1.5, "kv_bytes_per_token": 100 * groups}
    return {
        **Cell(method, groups, alpha)._asdict(),
        **columns,
        "train_tokens": int(1000 * alpha),
        "error": None,
        **more,
    }


BASE = row("none", 4, 0.0, 2.0)
ROWS = [
    BASE, row("none", 4, 0.1, 1.9), row("mean", 1, 0.0, 5.0), row("mean", 1, 0.1, 2.35), row("refined", 1, 0.1, 2.2),
    row("mean", 2, 0.1, 2.15), row("first", 2, 0.0, 2.095), row("refined", 2, 0.0, 2.09), row("refined", 2, 0.1, 2.04),
]  # fmt: skip
FAILED = row("refined", 1, 0.0, 0.0, error="it did not work")
DIVERGED = row("refined", 1, 0.0, 0.0) | {"loss": None, "loss_increase": None}
# Rows, the bound, what is chosen, and what is said.
RECOMMENDED: dict[str, tuple[list[dict[str, Any]], float, Cell | None, list[str]]] = {
    "less training before less loss": (ROWS, 0.1, Cell("refined", 2, 0.0), [
        "recommended refined, 2 of 4 KV heads, untrained: +0.0900 nats per token (perplexity x1.5), 200 bytes of KV "
        "cache a token (50%)",
        "why         3 of 7 combinations are within 0.1 nats per token above the base model",
        "smaller     refined, 1 of 4 KV heads, alpha 0.1: +0.2000 nats",
        "better      refined, 2 of 4 KV heads, alpha 0.1: +0.0400 nats",
    ]),
    "a smaller cache before less training": (ROWS, 0.25, Cell("refined", 1, 0.1), ["why         5 of 7"]),
    "nothing is within": (ROWS, 0.01, None, [
        "recommended nothing: of 7 combinations none is within 0.01 nats",
        "closest     refined, 2 of 4 KV heads, alpha 0.1: +0.0400 nats", "--max-loss-increase",
    ]),
    "the base model's own cache is no saving": (ROWS[:2], 0.5, None, ["nothing: no KV cache smaller"]),
    "failed cells do not count": ([*ROWS, FAILED], 0.25, Cell("refined", 1, 0.1), ["why         5 of 7"]),
    "nor those whose loss is infinite": ([*ROWS, DIVERGED], 9, Cell("mean", 1, 0.0), ["why         7 of 7"]),
    "recall": ([BASE, row("mean", 1, 0.0, 2.0, recall_text=0.87)], 0.1, Cell("mean", 1, 0.0), ["87.0% of second"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECOMMENDED)
def test_the_smallest_cache_within_the_bound_is_recommended(name: str) -> None:
    rows, bound, cell, says = RECOMMENDED[name]
    chosen, text = recommend(rows, bound)
    assert (chosen and Cell.of(chosen)) == cell
    assert [words for words in says if words not in text] == []


def test_pictures_are_drawn_where_there_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their legends name what is drawn in any panel: "first" is in the second alone."""
    legends = list[list[str]]()
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: legends.append([
        text.get_text() for text in self.legends[0].get_texts()]))  # fmt: skip
    for table, names in ((ROWS, ["tradeoff", "alphas"]), (ROWS[:3], ["tradeoff"]), ([BASE], [])):
        assert [name for name, _ in draw_study(table, tmp_path)] == names
    drawn, control = {"mean", "first", "refined"}, "base model, trained further"
    assert [*map(set, legends)] == [{*drawn, "base model"}, {*drawn, control}, {"mean", "base model"}]


@pytest.mark.parametrize("better", [0.0, 0.05])
def test_a_lossy_control_leaves_room_for_the_rest(better: float) -> None:
    """Losses that differ by a tenth of a nat are drawn apart beside a control that loses three; none is cut off, nor is
    what is better than the base model.
    """
    axis, losses = Figure().subplots(), [loss - better for loss in (3.0, 0.1, 0.02)]
    plots._scale_losses(axis, pandas.Series(losses))
    heights = axis.transAxes.inverted().transform(axis.transData.transform([(0, loss) for loss in losses]))[:, 1]
    assert ((heights > 0) & (heights < 1)).all()
    assert abs(heights[1] - heights[2]) > 0.15


def test_the_page_of_a_study(tmp_path: Path) -> None:
    environment = rows(study())[0]["environment"]
    assert {"torch", "transformers", "gqa"} <= set(environment["versions"])
    assert str(study().parent) in environment["argv"][0]
    out = shutil.copytree(study(), tmp_path / "study")
    *_, files = write_study_report(out, 0.1)
    assert files == ["report.html", "alphas.svg", "tradeoff.svg", "results.jsonl"]
    html = (out / "report.html").read_text()
    assert unescape(html).count(shlex.join(["gqa-ablate", *environment["argv"]])) == 1
    assert "recall is not measured: --recall needs a context of at least 128 tokens" in html
    positions = [html.index(text) for text in ("Recommended: ", "data:image", "Study of model", "Made with")]
    assert positions == sorted(positions)
    for name in ("tradeoff", "alphas"):
        assert ElementTree.parse(out / f"{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert html.count("data:image/svg+xml;base64,") == 2
    assert "http:" not in html.replace("http://www.w3.org", "")
    assert "https:" not in html


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the report in")
def test_the_report_sorts_in_a_browser(tmp_path: Path) -> None:
    """Its scripts write nothing to the console; a broken one, as a control, does."""
    click = 'document.querySelectorAll("table")[0].querySelectorAll("th button")[3].click(); nothing.here();'
    html = (study() / "report.html").read_text().replace("</body>", f"<script>{click}</script></body>")
    (tmp_path / "sorted.html").write_text(html)
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--enable-logging=stderr", "--dump-dom", (tmp_path / "sorted.html").as_uri()]
    done = subprocess.run([str(BROWSER), *words], capture_output=True, text=True, timeout=120, check=True)
    (broken,) = (line for line in done.stderr.splitlines() if "CONSOLE" in line)
    assert "nothing is not defined" in broken
    body = done.stdout.partition("<tbody>")[2].partition("</tbody>")[0]
    losses = [float(line.split("<td")[4].partition(">")[2].partition("<")[0]) for line in body.split("<tr>")[1:]]
    assert len(losses) == 3
    assert losses == sorted(losses)
