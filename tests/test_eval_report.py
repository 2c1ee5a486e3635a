"""What `gqa-eval` leaves behind: its JSON, and the directory of a report."""

from __future__ import annotations

import errno
import json
import math
import os
import shlex
import shutil
import struct
import sys
from contextlib import nullcontext
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Result, run
from embedded import SOURCE, copy_source
from evaluations import done, few_questions, place, refused, results, words
from safetensors.torch import load_file, save_file
from test_page import checked

import gqa.eval
from gqa.checkpoint.errors import RefusedError
from gqa.eval import evaluate, report
from gqa.eval.report import as_json, verdicts
from gqa.eval.subjects import distinct_names
from gqa.eval.tables import Table, number

MODEL_KEYS = {
    "name", "path", "revision", "model_type", "parameters", "weight_bytes", "provenance", "training", "heads",
    "kv_cache", "dtype", "attention", "quality", "decode", "recall", "greedy", "samples",
}  # fmt: skip
DECODE = "--decode --decode-batches 1"
FULL = f"SRC G2 --data TEXT --context 128 --kl {DECODE} --decode-contexts 4,8 --decode-steps 2 --memory 1GB"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """What is said with nearly everything measured, and the directory of its report."""
    out = tmp_path_factory.mktemp("full") / "new" / "report"
    with pytest.MonkeyPatch.context() as patch:
        few_questions(patch)
        return run(*words(FULL), "--json", "-o", out, program="gqa-eval"), out


def test_json_has_these_keys(full: tuple[Result, Path]) -> None:
    """Whoever reads results.json relies on them: another schema is another number."""
    found = json.loads(full[0].out)
    assert found == json.loads((full[1] / "results.json").read_text())
    assert found["schema"] == 2
    first, second = found["models"]
    against = second["against_baseline"]
    for part, keys in (
        (found, {
            "schema", "argv", "created", "versions", "device", "threads", "ranks", "options", "models",
            "text", "memory", "recall",
        }),
        (found["versions"], {"python", "gqa", "torch", "transformers", "accelerate", "datasets", "numpy"}),
        (found["text"], {
            "data", "protocol", "context", "tokens", "documents", "bytes", "words", "windows", "cut"
        }),
        (found["memory"], {"bytes", "ranks", "context", "precision"}),
        (first, MODEL_KEYS),
        (second, MODEL_KEYS | {"against_baseline"}),
        (second["kv_cache"], {
                "bytes_per_token", "cross_bytes_per_token", "context", "bytes_at_context", "remark", "bits", "fits",
            }),
        (second["quality"], {
            "nats", "tokens", "token_perplexity", "token_perplexity_error", "word_perplexity", "byte_perplexity",
            "bits_per_byte", "nats_per_token",
        }),
        (against, {
            "log_ratio", "ratio", "log_ratio_error", "ratio_low", "ratio_high", "kl", "same_top", "same_top_error",
            "acceptance", "acceptance_error",
        }),
        (against["kl"], {"mean", "mean_error"}),
        (second["decode"], {"steps", "repeats", "points"}),
    ):  # fmt: skip
        assert set(part) == keys
    assert second["provenance"]["options"]["groups"] == 2
    assert found["options"]["decode_contexts"] == [4, 8]
    assert found["options"]["kl"] is True


def test_json_says_how_each_checkpoint_was_made(tmp_path: Path) -> None:
    """Under names that tell them apart."""
    for parent, training in (("a", '{"tokens": 512}'), ("b", "{")):
        copy = shutil.copytree(place() / "gqa2", tmp_path / parent / "m")
        (copy / "gqa_uptraining.json").write_text(training)
    found = results(f"SRC G2 {tmp_path}/a/m {tmp_path}/b/m SRC --memory 1GB")["models"]
    assert [model["name"] for model in found] == ["stdlib-mha", "gqa2", "a/m", "b/m", "stdlib-mha (2)"]
    assert [model["training"] for model in found] == [None, None, {"tokens": 512}, None, None]
    assert [model["provenance"] is None for model in found] == [True, False, False, False, True]
    assert all(model["provenance"]["options"]["groups"] == 2 for model in found[1:4])
    places = [("/", "x", "a", "m"), ("/", "y", "a", "m"), ("/", "n"), ("lab/m",)]
    assert distinct_names(places) == ["x/a/m", "y/a/m", "n", "lab/m"]
    assert distinct_names([("/", "x", "\x1b[31m\n")]) == [r"\x1b[31m\n"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    values = {"a": [math.nan, math.inf, -math.inf, 1.5], "b": (1, None, "NaN")}
    assert json.loads(as_json(values)) == {"a": [None, "inf", "-inf", 1.5], "b": [1, None, "NaN"]}
    broken = copy_source(tmp_path)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] *= 4096
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    quality = results(f"{broken} --data TEXT --context 64 --precision float32")["models"][0]["quality"]
    assert quality["token_perplexity"] == "inf"  # which float() reads
    assert quality["token_perplexity_error"] is None or isinstance(quality["token_perplexity_error"], str)


def test_report(full: tuple[Result, Path]) -> None:
    result, out = full
    pictures = ["recall", "decode"]
    names = ["results.json", "report.html", *(f"{name}.{suffix}" for name in pictures for suffix in ("svg", "png"))]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert result.err.startswith("2 of 8 heads: ")  # tables do not mix with JSON
    assert result.err.endswith(f"\nwritten to {out}: {', '.join(names)}\n")
    html = (out / "report.html").read_text()
    found = checked(html)
    assert found.pictures == [(out / f"{name}.svg").read_text() for name in pictures]
    for name in pictures:
        png = (out / f"{name}.png").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", png[16:24]) == (960, 600)
    recorded = json.loads(result.out)
    assert escape(shlex.join(["gqa-eval", *recorded["argv"]])) in html
    perplexity = f"{recorded['models'][1]['quality']['token_perplexity']:.5g}"
    assert [row[2] for row in found.tables[0]][2] == perplexity
    assert f'<p class="verdict">{escape(verdicts(recorded)[0])}</p>' in html


def test_a_report_replaces_its_predecessor_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done(f"SRC {DECODE} --decode-contexts 4 --decode-steps 1 --no-recall", "-o", out)
    (out / "notes.md").write_text("mine")
    assert (out / "decode.svg").is_file()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    said = refused("SRC --data TEXT --context 64", "-o", out)
    assert f"{out} holds an earlier report; give --overwrite to replace it, or another directory" in said
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    done("SRC --data TEXT --context 64 --overwrite", "-o", out)
    assert sorted(path.name for path in out.iterdir()) == [
        "notes.md", "report.html", "results.json"
    ]  # fmt: skip
    assert (out / "notes.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "text"), [("results.json", '{"acc": 1}'), ("report.html", "# Mine"), ("results.json", "{")]
)
def test_files_of_something_else_are_not_overwritten(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    said = refused("SRC --data TEXT", "-o", tmp_path)
    assert f"{tmp_path} holds {name} of something else; give another directory" in said
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: text}


def test_names_cannot_break_a_report(tmp_path: Path) -> None:
    name = r"a|b_*<img>`$\frac$"
    shutil.copytree(SOURCE, tmp_path / name)
    line = f"SRC --data TEXT --context 64 {DECODE} --decode-contexts 4 --decode-steps 1"
    done(line, tmp_path / name, "-o", tmp_path / "report")
    found = checked((tmp_path / "report" / "report.html").read_text())
    assert found.tables[0][2][0] == name
    assert "img" in found.tags


def test_a_report_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "gqa.eval.plots", raising=False)
    monkeypatch.delattr(gqa.eval, "plots", raising=False)
    shown = done("SRC --data TEXT --context 64", "-o", tmp_path / "report").out
    told = "no pictures, for which matplotlib is missing: pip install 'gqa[report]'\n"
    assert shown.endswith(f"results.json, report.html, {told}")
    assert told.strip() in unescape((tmp_path / "report" / "report.html").read_text())


def test_what_keeps_a_report_from_being_written_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "load", lambda *args: pytest.fail("a model was loaded"))
    file = place() / "text.txt"
    for path in (file, file / "sub"):
        told = refused("SRC --data TEXT", "-o", path, code=1)
        assert f"no report can be written to {path}: Not a directory" in told
    if sys.platform == "linux":
        assert "no report can be written to /proc/report" in refused("SRC --data TEXT", "-o", "/proc/report", code=1)


def test_two_runs_of_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused before it measures anything; what the first finishes meanwhile is not replaced."""
    out = tmp_path / "report"
    with report.reserved(out, overwrite=False):
        assert "another run writes a report to" in refused("SRC --memory 1GB", "-o", out)
    assert list(tmp_path.iterdir()) == []
    with report.reserved(tmp_path / "other", overwrite=False):
        done("SRC --memory 1GB", "-o", out)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    monkeypatch.setattr(report, "locked", lambda *given: nullcontext(out.rename(tmp_path / "late")))
    with pytest.raises(RefusedError, match="late holds an earlier report"), report.reserved(tmp_path / "late", False):
        pass


def test_a_full_disk_leaves_the_last_report_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        path.write_text(text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "report"
    done("SRC --data TEXT --context 64", "-o", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(report, "write_text", full)
    for target, left in ((out, before), (tmp_path / "other", None)):
        result = run(*words("G2 --data TEXT --context 64 -q --overwrite"), "-o", target, program="gqa-eval")
        assert (result.code, result.out) == (1, "")
        assert result.err == f"gqa-eval: no report was written to {target}: No space left on device\n"
        now = {path.name: path.read_bytes() for path in target.iterdir()} if target.exists() else None
        assert now == left
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def judged(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    cache = {"heads": {"kv": 8}, "kv_cache": {"bytes_per_token": 800, "bits": 16}}
    return verdicts({"models": [{"name": "a", **cache, **before}, {"name": "b", **cache, **after}]})


def test_a_verdict_says_what_is_saved_and_what_it_costs() -> None:
    fewer = {"heads": {"kv": 2}, "kv_cache": {"bytes_per_token": 200, "bits": 16}}
    ratio = {"ratio": 1.0903, "ratio_low": 1.0841, "ratio_high": 1.1}
    measured = {"quality": {}, "against_baseline": ratio}
    assert judged({}, fewer | measured) == ["2 of 8 heads: KV cache 4x smaller, perplexity x1.09 (95 %: 1.08-1.10)"]
    asked = [
        [{"kind": "samples", "accuracy": share, "answers": n} for share, n in lines]
        + [{"kind": "random", "accuracy": lines[0][0] / 2, "answers": 10}]
        for lines in (((0.9, 300), (0.8, 100)), ((0.5, 300), (0.1, 100)))
    ]  # fmt: skip
    told = judged({"recall": asked[0]}, fewer | {"recall": asked[1]})
    assert told == ["2 of 8 heads: KV cache 4x smaller, recall 88% -> 40% (random tokens 45% -> 25%)"]
    assert judged({}, {}) == ["8 of 8 heads: the same KV cache"]
    for bits, bytes_per_token, end in (
        (16, 1600, "KV cache 2x larger"), (32, 800, "the same KV cache (32 bits, not 16, as stored)"),
        (8, 400, "KV cache 2x smaller"),
    ):  # fmt: skip
        kept = {"bytes_per_token": bytes_per_token, "bits": bits}
        assert judged({}, {"heads": {"kv": 4}, "kv_cache": kept})[0].endswith(end)
    ratios = [{"quality": {}, "against_baseline": {"ratio": ratio}} for ratio in (12.34, 1234.5)]
    models = [{"name": "a"}, *({"name": name, **ratio} for name, ratio in zip("bc", ratios, strict=True))]
    assert verdicts({"models": models}) == ["b: perplexity x12.3", "c: perplexity x1,234"]
    assert verdicts({"models": models[:1]}) == []


def test_number() -> None:
    shown = [number(value) for value in (1.0, 9.99999, 58.51248, 109.44, 12345.6, 149182.7, math.inf, math.nan, 0.05)]
    assert shown == ["1.0000", "10.0000", "58.512", "109.44", "12,346", "1.492e+05", "inf", "nan", "0.05"]


def test_a_table_is_aligned_and_goes_on_below() -> None:
    """Long names lose their middle."""
    table = Table("T", ("a", "number"), (("x", "1"), ("long", "22")), "note")
    assert table.text() == "T\na     number\nx          1\nlong      22\nnote"
    names = [f"{'base/' * 20}{kind}" for kind in ("refined", "mean")]
    table = Table("T", ("model", *(f"number {n}" for n in range(9))), tuple((name, *"123456789") for name in names))
    lines = table.text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:5] for line in lines] == ["T", *(["model", "base/", "base/"] * ((len(lines) - 1) // 3))]
    assert [line.split()[0][-12:] for line in lines[2:4]] == ["base/refined", "se/base/mean"]
    assert [cell for line in lines[2::3] for cell in line.split()[1:]] == list("123456789")
    assert Table("T", table.header, table.rows, "n", short=2).brief().header == ("model", "number 0")
