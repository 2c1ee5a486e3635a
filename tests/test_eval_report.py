"""What `gqa-eval` leaves behind: its JSON, its report with verdicts and tables; what a study
recommends and draws.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure
from support.checkpoints import Result, run
from support.evaluations import (
    evaluate_models,
    few_questions,
    model_directory,
    refused,
    results,
    words,
)

from gqa.checkpoint.write import finite
from gqa.convert.verdict import Level
from gqa.eval.metrics import METRICS
from gqa.eval.options import EvaluateOptions
from gqa.eval.page import Table, Verdict, format_number, write_page
from gqa.eval.report import open_report, tables, verdicts
from gqa.study.options import Cell
from gqa.study.plots import draw_study
from gqa.study.recommendation import recommend


def keys_of_metrics(section: str) -> set[str]:
    """Keys that metrics declare; a new metric adds its own."""
    return {key for metric in METRICS if metric.section == section for key in metric.keys}


MODEL_KEYS = {
    "name",
    "path",
    "revision",
    "model_type",
    "parameters",
    "weight_bytes",
    "provenance",
    "training",
    "heads",
    "kv_cache",
    "dtype",
    "attention",
    "quality",
    "decode",
    "recall",
    "greedy",
    "samples",
}
KEYS = {
    "": {
        "schema",
        "argv",
        "created",
        "versions",
        "device",
        "threads",
        "ranks",
        "options",
        "models",
        "text",
        "memory",
        "recall",
    },
    "text": {
        "data",
        "protocol",
        "context",
        "tokens",
        "documents",
        "bytes",
        "words",
        "windows",
        "cut",
    },
    "models/0": MODEL_KEYS,
    "models/1": MODEL_KEYS | {"against_baseline"},
    "models/1/kv_cache": {
        "bytes_per_token",
        "cross_bytes_per_token",
        "context",
        "bytes_at_context",
        "bits",
        "fits",
    },
    "models/1/quality": {
        "nats",
        "tokens",
        "token_perplexity",
        "word_perplexity",
        "byte_perplexity",
        "bits_per_byte",
        "nats_per_token",
    }
    | keys_of_metrics("quality"),
    "models/1/against_baseline": {
        "log_ratio",
        "ratio",
        "log_ratio_error",
        "ratio_low",
        "ratio_high",
        "kl",
        "top1_agreement",
        "top1_agreement_error",
        "acceptance",
        "acceptance_error",
    }
    | keys_of_metrics("against_baseline"),
}
FULL = (
    "SRC G2 --data TEXT --context 128 --kl --decode --decode-batches 1 --decode-contexts 4,8 "
    "--decode-steps 2 --memory 1GB"
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """The output with nearly everything measured, and the directory of its report."""
    out = tmp_path_factory.mktemp("full") / "new" / "report"
    with pytest.MonkeyPatch.context() as patch:
        few_questions(patch)
        return run(*words(FULL), "--json", "-o", out, program="gqa-eval"), out


def test_json_has_these_keys(full: tuple[Result, Path]) -> None:
    """Whoever reads results.json relies on them: another schema is another number."""
    record = json.loads(full[0].out)
    files = ["report.html", "results.json"]
    assert record | {"files": files} == json.loads((full[1] / "results.json").read_text())
    assert record["schema"] == 5
    for path, keys in KEYS.items():
        part = record
        for key in filter(None, path.split("/")):
            part = part[int(key) if key.isdigit() else key]
        assert set(part) == keys, path
    assert record["models"][1]["provenance"]["options"]["kv_heads"] == 2
    assert record["options"]["decode_contexts"] == [4, 8]
    assert record["options"]["kl"] is True


def test_every_metric_is_in_the_record_and_in_its_table(full: tuple[Result, Path]) -> None:
    result, _ = full
    _, converted = json.loads(result.out)["models"]
    for metric in METRICS:
        assert metric.is_measured(converted), metric.title
        for column in metric.columns:
            assert column.cell(converted[metric.section]) in result.err, column.title


def test_report(full: tuple[Result, Path]) -> None:
    """One page without other files, whose tables do not mix with JSON on stdout."""
    result, out = full
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "results.json"]
    assert result.err.startswith("damaged    gqa2: 2 of 8 KV heads, ")
    assert "\nDecoding\n" in result.err
    assert result.err.endswith(f"\nwritten to {out}: results.json, report.html\n")
    html, record = (out / "report.html").read_text(), json.loads(result.out)
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert links
    assert all(link.startswith("data:") for link in links)
    assert (
        escape(shlex.join(["gqa-eval", *map(str, words(FULL)), "--json", "-o", str(out)])) in html
    )
    (verdict,) = verdicts(record)
    assert (
        f'<p class="verdict {verdict.level}"><b class="level">\u2717 {verdict.level}</b> ' in html
    )
    assert f"</b> {escape(verdict.text)}</p>" in html
    assert f">{record['models'][1]['quality']['token_perplexity']:.5g}</td>" in html
    assert len(re.findall(r'<div class="sample">', html)) == 4


@pytest.mark.parametrize(
    ("models", "title"),
    [
        ("SRC", "stdlib-mha"),
        ("SRC G2", "gqa2 compared with stdlib-mha"),
        ("SRC G2 G2 G2", "3 models compared with stdlib-mha"),
    ],
)
def test_the_title_of_a_report_names_few_models_and_counts_many(
    models: str, title: str, tmp_path: Path
) -> None:
    out = tmp_path / "report"
    done = run(*words(f"{models} --memory 1GB"), "-o", out, program="gqa-eval")
    assert done.code == 0, done.err
    (heading,) = re.findall("<h1>(.*)</h1>", (out / "report.html").read_text())
    assert heading == title


def test_text_of_a_page_stays_text(tmp_path: Path) -> None:
    picture = '<svg xmlns="http://www.w3.org/2000/svg"/>'
    (tmp_path / "x.svg").write_text(picture)
    tables = [
        Table("<b>", ("<i>",), (("<script>alert(1)</script>",),), "<em>"),
        Table("two", ("a",), (("1",),)),
    ]
    write_page(
        tmp_path,
        title="<u>",
        verdicts=[Verdict("<cite>", "good")],
        lead="<dfn>",
        commands=["<q>"],
        foot="<s>",
        tables=tables,
        pictures=[("x", '"><a')],
        samples=[("<code>", [("<kbd>", "<a>", "<strong>")])],
    )
    html = (tmp_path / "report.html").read_text()
    assert html.count("<script>") == 1
    assert not re.search("<(a|b|i|u|q|s|em|code|kbd|strong|cite|dfn)>", html)
    assert b64encode(picture.encode()).decode() in html
    assert re.findall("<details( open)?>\n<summary>(.*?)<", html)[:2] == [
        (" open", "&lt;b&gt;"),
        ("", "two"),
    ]


def test_json_has_the_records_of_conversion_and_training(tmp_path: Path) -> None:
    """Under names that distinguish the checkpoints: as the user names them,
    if two have one name.
    """
    for parent, training in (("a", '{"tokens": 512}'), ("b", "{")):
        copy = shutil.copytree(model_directory() / "gqa2", tmp_path / parent / "m")
        (copy / "gqa_uptraining.json").write_text(training)
    models = results(f"SRC G2 {tmp_path}/a/m {tmp_path}/b/m --memory 1GB")["models"]
    names = [
        f"{model_directory()}/stdlib-mha",
        f"{model_directory()}/gqa2",
        f"{tmp_path}/a/m",
        f"{tmp_path}/b/m",
    ]
    assert [model["name"] for model in models] == names
    assert [model["training"] for model in models] == [None, None, {"tokens": 512}, None]
    assert [model["provenance"] is None for model in models] == [True, False, False, False]


def test_json_has_no_nan() -> None:
    values = {"a": [math.nan, math.inf, -math.inf, 1.5], "b": (1, None, "NaN")}
    written = json.loads(json.dumps(finite(values, infinity=str), allow_nan=False))
    assert written == {"a": [None, "inf", "-inf", 1.5], "b": [1, None, "NaN"]}


def test_a_report_replaces_only_a_report_and_only_if_asked(tmp_path: Path) -> None:
    """The second of two runs is refused before it measures anything; whatever fails leaves
    everything as it was.
    """
    out, line = tmp_path / "report", "SRC --memory 1GB --no-recall"
    evaluate_models(line, "-o", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "exists; choose another directory with -o, or replace it with --overwrite" in refused(
        line, "-o", out
    )
    with open_report(EvaluateOptions(("m",), output=out, overwrite=True)):
        assert "another run is writing" in refused(line, "--overwrite", "-o", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    evaluate_models(line, "-o", out, "--overwrite")
    assert sorted(path.name for path in out.iterdir()) == sorted(before)
    assert (out / "results.json").read_bytes() != before["results.json"]
    (out / "notes.md").write_text("mine")
    assert "holds notes.md, which --overwrite will not remove" in refused(
        line, "-o", out, "--overwrite"
    )
    (tmp_path / "results.json").write_text('{"mine": 1}')
    assert "holds report/notes.md, " in refused(line, "-o", tmp_path, "--overwrite")
    (tmp_path / "file").touch()
    assert "file exists and is not a directory" in refused(line, "-o", tmp_path / "file")
    model = shutil.copytree(model_directory() / "gqa2", tmp_path / "gqa2")
    assert "no results.json lists it as part of a result" in refused(
        line, "-o", model, "--overwrite"
    )
    assert (model / "model.safetensors").is_file()


CACHE = {"heads": {"kv": 8}, "kv_cache": {"bytes_per_token": 800}}
FEWER = {"heads": {"kv": 2}, "kv_cache": {"bytes_per_token": 200}}
RATIO = {
    "quality": {},
    "against_baseline": {"ratio": 1.0903, "ratio_low": 1.0841, "ratio_high": 1.1},
}


def recall(*shares: float) -> dict[str, Any]:
    lines = [
        {"kind": "generated", "accuracy": share, "answers": n}
        for share, n in zip(shares, (300, 100), strict=True)
    ]
    return {"recall": [*lines, {"kind": "random", "accuracy": shares[0] / 2, "answers": 10}]}


@pytest.mark.parametrize(
    ("before", "after", "level", "verdict"),
    [
        (
            {},
            FEWER | RATIO,
            "trade-off",
            "2 of 8 KV heads, KV cache 4x smaller, perplexity x1.09 (95% interval 1.08-1.10), "
            "recall not measured",
        ),
        (
            recall(0.9, 0.8),
            FEWER | RATIO | recall(0.9, 0.8),
            "trade-off",
            "2 of 8 KV heads, KV cache 4x smaller, perplexity x1.09 (95% interval 1.08-1.10), "
            "recall 88% -> 88% (random tokens 45% -> 45%)",
        ),
        (
            recall(0.9, 0.8),
            FEWER | recall(0.5, 0.1),
            "damaged",
            "2 of 8 KV heads, KV cache 4x smaller, recall 88% -> 40% (random tokens 45% -> 25%)",
        ),
        ({}, {"kv_cache": {"bytes_per_token": 1600}}, None, "all 8 KV heads, KV cache 2x larger"),
        (
            {},
            {"quality": {}, "against_baseline": {"ratio": 1234.5}},
            "damaged",
            "all 8 KV heads, the same KV cache, perplexity x1,234, recall not measured",
        ),
    ],
)
def test_a_verdict_says_what_is_saved_and_what_it_costs(
    before: dict[str, Any], after: dict[str, Any], level: Level | None, verdict: str
) -> None:
    first, second = {"name": "a", **CACHE, **before}, {"name": "b", **CACHE, **after}
    assert verdicts({"models": [first, second]}) == [Verdict(f"b: {verdict}", level)]
    assert verdicts({"models": [first]}) == []


def test_the_timings_name_the_numerics_of_every_model() -> None:
    point = {"seconds_per_token": 1.0, "fastest": 1.0, "slowest": 1.0, "prefill_seconds": 1.0}
    models = []
    for name, attention, dtype in (("a", "sdpa", "bfloat16"), ("b", "sdpa", "float32")):
        numerics = {"attention": attention, "dtype": dtype}
        decode = {"steps": 2, "repeats": 5, "points": [point | numerics]}
        models.append({"name": name, "decode": decode})
    note = tables({"models": models})[-1].note
    assert note.endswith("repeats of 2 tokens, sdpa, bfloat16 and float32")


def test_a_table_is_aligned_and_continues_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal that is less wide; elsewhere lines have no limit. Numbers have five digits."""
    shown = [
        format_number(value)
        for value in (1.0, 9.99999, 58.51248, 12345.6, 149182.7, math.inf, math.nan, 0.05)
    ]
    assert shown == ["1.0000", "10.0000", "58.512", "12,346", "1.492e+05", "inf", "nan", "0.05"]
    table = Table("T", ("a", "number"), (("x", "1"), ("long", "22")), "note")
    assert table.text() == "T\na     number\nx          1\nlong      22\nnote"
    names = [f"{'base/' * 8}{kind}" for kind in ("refined", "mean")]
    numbers = [f"number{n}" for n in range(1, 10)]
    table = Table(
        "T", ("model", *numbers), tuple((name, *"123456789") for name in names), "note " * 50
    )
    assert [len(line.split()) for line in table.text().splitlines()] == [1, 10, 10, 10, 50]
    # A terminal, which pytest is not
    monkeypatch.setattr("sys.stdout", Mock(isatty=lambda: True))
    monkeypatch.setenv("COLUMNS", "100")
    *lines, _, _, last = table.text().splitlines()
    assert max(map(len, lines)) <= 100 < len(lines[1]) + 9
    assert [line.split()[0] for line in lines] == ["T", *(["model", *names] * 2)]
    assert [cell for line in lines[2::3] for cell in line.split()[1:]] == list("123456789")
    assert last.endswith("note")


# ---------------------------------------------------------------------------- the report of a study


def row(method: str, groups: int, alpha: float, loss: float | None, **more: Any) -> dict[str, Any]:
    """A measured row of a base model of 2 nats and 4 KV heads of 100 bytes."""
    columns = {
        "loss": loss,
        "loss_increase": loss and loss - 2,
        "perplexity_ratio": 1.5,
        "error": None,
    }
    columns |= {"kv_bytes_per_token": 100 * groups, "train_tokens": int(1000 * alpha)}
    return Cell(method, groups, alpha)._asdict() | columns | more


BASE = row("none", 4, 0.0, 2.0)
ROWS = [
    BASE,
    row("none", 4, 0.1, 1.9),
    row("mean", 1, 0.0, 5.0),
    row("mean", 1, 0.1, 2.35),
    row("refined", 1, 0.1, 2.2),
    row("mean", 2, 0.1, 2.15),
    row("first", 2, 0.0, 2.095),
    row("refined", 2, 0.0, 2.09),
    row("refined", 2, 0.1, 2.04),
]
FAILED = [row("refined", 1, 0.0, 0.0, error="it did not work"), row("random", 1, 0.0, None)]
# Rows, the bound, what is chosen, and what is said.
RECOMMENDED: dict[str, tuple[list[dict[str, Any]], float, Cell | None, list[str]]] = {
    "less training before less loss": (
        ROWS,
        0.1,
        Cell("refined", 2, 0.0),
        [
            "recommended trade-off: refined, 2 of 4 KV heads, untrained: "
            "+0.0900 nats per token (perplexity x1.5), "
            "KV cache 200 bytes per token (50%)",
            "why         3 of 7 combinations are within 0.1 nats per token of the base model",
            "smaller     trade-off: refined, 1 of 4 KV heads, alpha 0.1: +0.2000 nats",
            "better      trade-off: refined, 2 of 4 KV heads, alpha 0.1: +0.0400 nats",
        ],
    ),
    "a smaller cache before less training": (
        ROWS,
        0.25,
        Cell("refined", 1, 0.1),
        ["why         5 of 7"],
    ),
    "nothing is within": (
        ROWS,
        0.01,
        None,
        [
            "recommended nothing: none of 7 combinations is within 0.01 nats",
            "closest     trade-off: refined, 2 of 4 KV heads, alpha 0.1: +0.0400 nats",
            "advice      add more heads, longer training or other methods to the study, or raise "
            "--max-loss-increase",
        ],
    ),
    "the base model's own cache is no saving": (
        ROWS[:2],
        0.5,
        None,
        ["nothing: no KV cache smaller"],
    ),
    "a cell that failed or whose loss is infinite": (
        [*ROWS, *FAILED],
        9,
        Cell("mean", 1, 0.0),
        ["why         7 of 7"],
    ),
    "recall": (
        [BASE, row("mean", 1, 0.0, 2.0, recall_text=0.87)],
        0.1,
        Cell("mean", 1, 0.0),
        ["recall 87.0%"],
    ),
    "lost recall": (
        [
            BASE | {"recall_text": 0.9},
            row("mean", 1, 0.0, 2.0, recall_text=0.7, perplexity_ratio=1.0),
        ],
        0.1,
        Cell("mean", 1, 0.0),
        ["recommended damaged: mean"],
    ),
}


@pytest.mark.parametrize("name", RECOMMENDED)
def test_the_smallest_cache_within_the_bound_is_recommended(name: str) -> None:
    rows, bound, cell, says = RECOMMENDED[name]
    chosen, lines = recommend(rows, bound)
    text = "\n".join(map(str, lines))
    assert (chosen and Cell.of(chosen)) == cell
    assert [words for words in says if words not in text] == []


def test_a_limit_that_would_recommend_a_damaged_model_is_not_advised() -> None:
    _, lines = recommend([BASE, row("mean", 1, 0.0, 4.2, perplexity_ratio=9.0)], 0.01)
    assert [str(line).split()[0] for line in lines] == ["recommended", "closest", "advice"]
    assert lines[1].level == "damaged"
    assert lines[2].text == "add more heads, longer training or other methods to the study"


def test_pictures_are_drawn_where_there_are_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their legends name what is drawn in any panel: "first" is in the second alone.

    Beside a cell that loses three nats, losses that differ by a twentieth are drawn apart, and what
    is better than the base model is not cut off.
    """
    figures = list[Figure]()
    # What is drawn is looked at, not its pixels
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: figures.append(self))
    for table, names in ((ROWS, ["tradeoff", "alphas"]), (ROWS[:3], ["tradeoff"]), ([BASE], [])):
        assert [name for name, _ in draw_study(table, tmp_path)] == names
    drawn, control = {"mean", "first", "refined"}, "base model, trained further"
    legends = [{text.get_text() for text in figure.legends[0].get_texts()} for figure in figures]
    assert legends == [{*drawn, "base model"}, {*drawn, control}, {"mean", "base model"}]
    axis = figures[1].axes[0]
    points = axis.transData.transform([(0, loss) for loss in (3.0, 0.09, 0.04, 0.0, -0.1)])
    heights = axis.transAxes.inverted().transform(points)[:, 1]
    assert (heights[:-1] > heights[1:] + 0.08).all()
    assert heights[0] < 1
    assert heights[-1] > 0
    assert draw_study([BASE, ROWS[2] | {"loss_increase": 50.0}], tmp_path)  # above the largest tick
