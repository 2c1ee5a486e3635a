"""Pareto front, recommendation, claims of the paper, and the report: against tables made by hand and a browser."""

from __future__ import annotations

import json
import math
import random
import shlex
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pandas
import pytest
from matplotlib.figure import Figure
from studies import copied, gqa_ablate, row, rows, study

from gqa.convert.methods import METHODS
from gqa.eval.plots import look
from gqa.eval.study import plots
from gqa.eval.study.plots import draw_study
from gqa.eval.study.report import Results, _tables, _verdicts, open_results
from gqa.eval.study.tradeoff import Bounds, least_recall, pareto_front, points, recommend

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SOURCE: dict[str, Any] = {"kv_bytes_per_token": 400}
RECALLING = {**SOURCE, "recall_text": 0.9, "recall_first_reading": 0.4}
# A source of 2 nats and 4 heads of 100 bytes.
TABLE = [
    row("mean", 1, 0.0, 5.0), row("mean", 1, 0.1, 2.35), row("refined", 1, 0.1, 2.2),
    row("mean", 2, 0.1, 2.15), row("refined", 2, 0.0, 2.09), row("refined", 2, 0.1, 2.04), row("first", 2, 0.0, 2.095),
    row("random", 2, 0.1, 2.02), row("random", 2, 0.1, 2.3, seed=1),
    row("none", 4, 0.0, 2.0), row("none", 4, 0.1, 1.9),
]  # fmt: skip


def base(source: dict[str, Any]) -> dict[str, Any]:
    return row("none", 4, 0.0, 2.0) | source


def test_pareto_front_against_all_pairs() -> None:
    generator = random.Random(0)
    for _ in range(200):
        pairs = [(generator.randrange(6), generator.randrange(6)) for _ in range(generator.randrange(1, 12))]
        front = pareto_front(pairs)
        beaten = [any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in pairs) for p in pairs]
        assert sorted(front) == [i for i, is_beaten in enumerate(beaten) if not is_beaten]
        costs, losses = [pairs[i][0] for i in front], [pairs[i][1] for i in front]
        assert costs == sorted(costs)
        assert losses == sorted(losses, reverse=True)


RANDOM = [one for one in TABLE if one["method"] == "random"]  # its seeds' mean is within 0.17, the worse seed is not
# The same source, with 25 bytes a head in 4 bits and 15 in 2.
BITS = [
    row("none", 4, 0.0, 2.01, bits=4, kv_bytes_per_token=100), row("none", 4, 0.0, 2.3, bits=2, kv_bytes_per_token=60),
    row("refined", 2, 0.0, 2.1, bits=4, kv_bytes_per_token=50), row("refined", 1, 0.0, 2.2),
    row("refined", 2, 0.1, 2.005), row("refined", 2, 0.0, 2.005),
]  # fmt: skip


def recalling(*shares: float) -> list[dict[str, Any]]:
    """One conversion to a head each, that loses the more the more it recalls."""
    return [row("refined", 1, 0.01 * n, 2.0 + share / 20, recall_text=share) for n, share in enumerate(shares)]


SEEDS = [row("random", 1, 0.0, 2.0, seed=seed, recall_text=share) for seed, share in enumerate((0.95, 0.8))]
# Rows, the source, bounds, and what is chosen: method, heads, alpha and bits.
CHOSEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any], Bounds, tuple[str, int, float, int] | None]] = {
    "less training before less loss": (TABLE, SOURCE, Bounds(0.1), ("refined", 2, 0.0, 0)),
    "a smaller cache before less training": (TABLE, SOURCE, Bounds(0.25), ("refined", 1, 0.1, 0)),
    "every seed must be within": (RANDOM, SOURCE, Bounds(0.17), None),
    "the control: one seed is": (RANDOM[:1], SOURCE, Bounds(0.17), ("random", 2, 0.1, 0)),
    "nothing is within": (TABLE, SOURCE, Bounds(0.01), None),
    "the source's own cache is no saving": (TABLE[-2:], SOURCE, Bounds(0.5), None),
    "nothing is measured": ([], SOURCE, Bounds(0.5), None),
    "what loses least, not what is smallest": (BITS, SOURCE, Bounds(kv_bytes=150), ("none", 4, 0.0, 4)),
    "bits and fewer heads": (BITS, SOURCE, Bounds(kv_bytes=60), ("refined", 2, 0.0, 4)),
    "of the same loss heads and the least training": (BITS, SOURCE, Bounds(kv_bytes=200), ("refined", 2, 0.0, 0)),
    "nothing is so small": (BITS, SOURCE, Bounds(kv_bytes=49), None),
    "the base model is so small": (BITS, SOURCE, Bounds(kv_bytes=400), None),
    "every seed counts": (RANDOM, SOURCE, Bounds(kv_bytes=200), ("random", 2, 0.1, 0)),
    "a bound of losses takes bits, too": (BITS, SOURCE, Bounds(0.05), ("none", 4, 0.0, 4)),
    "and both": (BITS, SOURCE, Bounds(0.15), ("refined", 2, 0.0, 4)),
    "the control: no bits": (BITS[3:], SOURCE, Bounds(0.15), ("refined", 2, 0.0, 0)),
    "what falls by less than the bound": (recalling(0.86, 0.87), RECALLING, Bounds(), ("refined", 1, 0.0, 0)),
    "what recalls too little": (recalling(0.84, 0.87), RECALLING, Bounds(), ("refined", 1, 0.01, 0)),
    "the control: no bound": (recalling(0.84, 0.87), RECALLING, Bounds(recall=100), ("refined", 1, 0.0, 0)),
    "nothing recalls enough": (recalling(0.84, 0.7), RECALLING, Bounds(), None),
    "a source that finds no more than it reads": (
        recalling(0.3, 0.2), RECALLING | {"recall_text": 0.6}, Bounds(), ("refined", 1, 0.0, 0)),
    "a source that was not asked": (recalling(0.3, 0.2), SOURCE, Bounds(), ("refined", 1, 0.0, 0)),
    "every seed must recall": (SEEDS, RECALLING, Bounds(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_recommended(name: str) -> None:
    """The smallest cache within the bounds, or what loses least within so many bytes."""
    rows, source, bounds, expected = CHOSEN[name]
    chosen = recommend(points(rows), source, bounds).chosen
    assert (None if chosen is None else (chosen.method, chosen.groups, chosen.alpha, chosen.bits)) == expected


def test_why() -> None:
    text = recommend(points(TABLE), SOURCE, Bounds(0.1)).text
    assert "recommended refined, 2 KV heads, untrained: +0.0900 nats per token, with 200 bytes of KV cache" in text
    assert "(50% of the base model's)" in text
    assert "recall      not measured" in text
    assert "3 of 8 combinations are within 0.1 nats" in text
    assert "at best refined, 1 KV head, alpha 0.1: +0.2000 nats per token" in text
    assert "refined, 2 KV heads, alpha 0.1: +0.0400 nats per token is better" in text
    nothing = recommend(points(TABLE), SOURCE, Bounds(0.01)).text
    assert "recommended nothing: of 8 combinations none is within 0.01 nats" in nothing
    assert "closest     refined, 2 KV heads, alpha 0.1: +0.0400 nats per token" in nothing


def test_heads_in_a_verdict_are_whole_where_they_are() -> None:
    """Also where a table has some that are not, of layers with heads of their own."""
    rows = [row("refined", groups, 0.0, 2.01, budget=budget) for groups, budget in ((2, None), (2.5, 0.625))]
    rows = [one | {f"perplexity_{name}": 1.01 for name in ("ratio", "ratio_low", "ratio_high")} for one in rows]
    for some, told in ((rows, "2 of 4 heads"), (rows[1:], "2.5 of 4 heads")):
        results = Results(Path(), [one | {"kv_heads": [4, 1]} for one in (*some, base(SOURCE))])
        assert f" {told}: " in _verdicts(results, recommend(results.points, results.source, Bounds()))[0]


def test_a_quantised_cache_alone_is_told() -> None:
    alone = "a quantised cache alone does it: no heads need to be merged"
    text = recommend(points(BITS), SOURCE, Bounds(kv_bytes=150)).text
    assert "recommended base model, int4 cache, 4 KV heads, untrained: +0.0100 nats per token, with 100 bytes" in text
    assert "it loses least of 4 combinations with a KV cache of at most 150 bytes a token" in text
    assert alone in text
    both = recommend(points(BITS), SOURCE, Bounds(0.15)).text
    assert "recommended refined, int4 cache, 2 KV heads, untrained: +0.1000 nats per token, with 50 bytes" in both
    assert "a quantised cache alone: base model, int4 cache, 4 KV heads, untrained: +0.0100" in both
    assert alone not in both
    assert "a quantised cache alone" not in recommend(points(BITS), SOURCE, Bounds(kv_bytes=59)).text
    assert (
        "of 6 combinations none has a KV cache of at most 9 bytes"
        in recommend(points(BITS), SOURCE, Bounds(kv_bytes=9)).text
    )
    assert (
        "nothing: the base model has a KV cache of at most 400 bytes"
        in recommend(points(BITS), SOURCE, Bounds(kv_bytes=400)).text
    )


def test_pictures_are_drawn_where_there_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", Mock())
    source = {**row("none", 4, 0.0, 2.0), **SOURCE}
    for table, names in ((BITS, ["tradeoff", "alphas"]), (BITS[:3], ["tradeoff"]), ([source], [])):
        assert [name for name, _ in draw_study(points(table), source, tmp_path)] == names
    looks = plots._looks(points(BITS))
    assert len({(one["linestyle"], one["fillstyle"], one["color"]) for one in looks.values()}) == len(looks)


def test_the_recommendation_says_what_recall_decides() -> None:
    text = recommend(points(recalling(0.84, 0.87)), RECALLING, Bounds()).text
    assert "alpha 0.01: +0.0435 nats per token, 87.0% of second copies right, with" in text
    assert "within 0.1 nats per token above the base model and 5 points of recall below it" in text
    assert (
        "recall      the base model gets 90.0% of second copies of the text right, and 40.0% where they stand first"
        in text
    )
    assert "it alone rules out 1: the best of them is refined, 1 KV head, untrained: +0.0420 nats" in text
    nothing = recommend(points(recalling(0.84, 0.7)), RECALLING, Bounds()).text
    assert "closest     refined, 1 KV head, untrained: +0.0420 nats per token, 84.0% of second copies" in nothing
    assert "allow more with max_recall_loss (from Python)" in nothing
    assert "it recalls too little for a bound" in least_recall(RECALLING | {"recall_text": 0.6}, Bounds())[1]
    refused = recommend(points(recalling(0.8)), SOURCE | {"recall_refused": "too short"}, Bounds()).text
    assert "recall      not measured: too short" in refused


def test_recall_that_was_not_measured_is_told() -> None:
    results = open_results(study())
    for told in ("--recall needs a context of at least 128 tokens", "this study has no numbers of it"):
        (table,) = (table for table in _tables(results) if table.title == "Recall: second copies of the text")
        assert (table.header, told in table.rows[0][0]) == (("not measured",), True)
        results.source.pop("recall_refused", None)


def test_failed_cells_do_not_count() -> None:
    failed = {**row("refined", 1, 0.0, 2.0), "error": "it did not work"}
    pandas.testing.assert_frame_equal(points([*TABLE, failed]), points(TABLE))
    assert points([failed]).empty


def test_recommend_of_what_is_measured(tmp_path: Path) -> None:
    out = copied(tmp_path)
    worse = [{**one, "loss_increase": one["loss_increase"] + 10} for one in rows(out)]
    (out / "results.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in worse))
    for budget, says in (("1", "recommended nothing: of 6"), ("100", "recommended mean, 1 KV head")):
        result = gqa_ablate("-o", out, "--max-loss-increase", budget)
        assert result.code == 0
        assert says in result.out


def test_pictures_of_what_has_lost_everything_leave_room_for_the_rest(tmp_path: Path) -> None:
    """Losses that differ by a tenth of a nat are drawn apart beside a control that loses three; none is cut off, nor is
    what is better than the base model.
    """
    table = [row("mean", 1, 0.0, 5.0), row("refined", 1, 0.0, 2.1), row("refined", 2, 0.0, 2.02)]
    for better in (0.0, 0.05):
        figure = Figure()
        axis, increases = figure.subplots(), points(table).loss_increase - better
        plots._above_base([axis], increases)
        places = axis.transAxes.inverted().transform(axis.transData.transform([(0, loss) for loss in increases]))[:, 1]
        assert ((places > 0) & (places < 1)).all()
        assert abs(places[1] - places[0]) > 0.15
        assert {"x 1", "x 1.11", "x 20.1"} <= {label.get_text() for label in figure.axes[1].get_yticklabels()}


# ----------------------------------------------------------------------------------------------------------- report


def test_the_report_has_everything_in_it() -> None:
    environment = rows(study())[0]["environment"]
    assert {"torch", "transformers", "gqa"} <= set(environment["versions"])
    assert str(study().parent) not in str(environment["argv"])
    html = (study() / "report.html").read_text()
    assert unescape(html).count(shlex.join(["gqa-ablate", *environment["argv"]])) == 1
    assert "9 cells, measured in" in html
    places = [html.index(text) for text in ("Recommended: ", "data:image", "Study of model", "Made with")]
    assert places == sorted(places)
    for name in ("tradeoff", "alphas"):
        assert ElementTree.parse(study() / f"{name}.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert (study() / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert html.count("data:image/svg+xml;base64,") == 2
    assert "http:" not in html.replace("http://www.w3.org", "")
    assert "https:" not in html


def test_the_page_begins_with_what_is_recommended() -> None:
    """In the words of gqa-eval's reports."""

    def asked(text: float, random: float) -> dict[str, Any]:
        found = [("text", text), ("random", random)]
        told = [{"kind": kind, "distance": 64, "answers": 9, "accuracy": share} for kind, share in found]
        return {"recall_text": text, "recall_by_distance": told}

    ratio = {"perplexity_ratio": 1.0942, "perplexity_ratio_low": 1.08, "perplexity_ratio_high": 1.1}
    source = base({**SOURCE, **asked(0.9, 0.6), "recall_first_reading": 0.4})
    for alpha, trained in ((0.0, "untrained"), (0.05, "trained on 5 % of the text")):
        results = Results(Path(), [row("refined", 2, alpha, 2.09, **ratio, **asked(0.88, 0.4)), source])
        first, why, *_ = _verdicts(results, recommend(results.points, source, Bounds()))
        assert first == (
            f"Recommended: refined, {trained}. 2 of 4 heads: KV cache 2x smaller, perplexity x1.09 (95 %: 1.08-1.10), "
            "recall 90% -> 88% (random tokens 60% -> 40%)."
        )
        assert why.startswith("Why: 1 of 1 combinations are within 0.1 nats")
        for bound in (None, math.nan):  # of a single window
            alone = row(
                "refined", 2, alpha, 2.09, **ratio | {"perplexity_ratio_low": bound, "perplexity_ratio_high": bound}
            )
            results = Results(Path(), [alone, base(SOURCE)])
            told, *_ = _verdicts(results, recommend(results.points, results.source, Bounds()))
            assert told.endswith("KV cache 2x smaller, perplexity x1.09.")
        nothing, *_ = _verdicts(results, recommend(results.points, source, Bounds(loss=0.01)))
        assert nothing.startswith("Recommended: nothing: of 1 combinations none is within 0.01 nats")


def test_a_registered_method_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: each has a look of its own, and none that of the source."""
    names = [*METHODS, *(f"new{number}" for number in range(9))]
    for name in names:
        monkeypatch.setitem(METHODS, name, METHODS.get(name, METHODS["mean"]))
    table = [row("none", 4, 0.0, 2.0), *(row(name, 1, 0.0, 3.0) for name in names)]
    assert [name for name, _ in draw_study(points(table), table[0], tmp_path)] == ["tradeoff"]
    looks = plots._looks(points(table[1:]))
    assert len({(looks[name]["color"], looks[name]["marker"]) for name in names}) == len(names)
    assert look(0)["color"] not in {looks[name]["color"] for name in names}
    assert looks["mean"].items() >= look(1).items()


def opened(path: Path) -> tuple[str, list[str]]:
    """The page as the browser has it after its scripts, and the lines of its console."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
             "--enable-logging=stderr", "--dump-dom", path.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the report in")
def test_the_report_opens_and_sorts_in_a_browser(tmp_path: Path) -> None:
    """Its scripts say nothing on the console; one that is broken, as a control, is seen there."""
    html = (study() / "report.html").read_text()
    click = '<script>document.querySelectorAll("table")[0].querySelectorAll("th button")[4].click();</script>'
    (tmp_path / "sorted.html").write_text(html.replace("</body>", f"{click}<script>nothing.here();</script></body>"))
    dom, (broken,) = opened(tmp_path / "sorted.html")
    assert "nothing is not defined" in broken
    body = dom.partition("<tbody>")[2].partition("</tbody>")[0]
    losses = [float(line.split("<td")[5].partition(">")[2].partition("<")[0]) for line in body.split("<tr>")[1:]]
    assert len(losses) == 3
    assert losses == sorted(losses)
    assert 'aria-sort="ascending"' in dom
