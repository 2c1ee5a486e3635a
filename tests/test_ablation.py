"""`gqa-ablate`: cells are what the commands give one by one, and survive whatever stops a study."""

from __future__ import annotations

import atexit
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from functools import cache
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas
import pytest
import torch
from checkpoints import Result, check_refused, edit_json, run, snapshot
from embedded import SOURCE
from evaluations import few_questions
from matplotlib.figure import Figure
from training import BLOCK, Runs, expert_options, tiny_checkpoint, words_for, write_corpus

from gqa.corpus.sources import row_digest
from gqa.eval.study import ablation, plots
from gqa.eval.study import rows as study_rows
from gqa.eval.study.options import AblateOptions, Cell
from gqa.eval.study.plots import draw_study
from gqa.eval.study.report import recommend, write_study_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@cache
def place() -> Path:
    """A directory with model (4 heads), train.jsonl and heldout.jsonl."""
    torch.set_num_threads(1)  # sums in the same order
    directory = Path(tempfile.mkdtemp(prefix="gqa-ablate-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    tiny_checkpoint(directory / "model", kv_heads=4)
    write_corpus(directory / "train.jsonl", 10)
    write_corpus(heldout := directory / "heldout.jsonl", 3, first=10)
    lines = heldout.read_text().splitlines(keepends=True)  # in the order in which a study reads documents
    heldout.write_text("".join(sorted(lines, key=lambda line: row_digest(json.loads(line)["text"]))))
    return directory


def words(out: Path, **options: Any) -> list[str]:
    """The command of a small study; an option that is None is left out, one that is True is a flag."""
    defaults: dict[str, Any] = {
        "model": place() / "model", "data": place() / "train.jsonl", "heldout": place() / "heldout.jsonl",
        "methods": "mean,first", "groups": "1", "alphas": "0,0.1,0.3", "batch_size": 4, "context": BLOCK,
        "learning_rate": 3e-3, "skip": "kl", "teacher": "none", "train": "all",
    }  # fmt: skip
    options = defaults | options
    return words_for(options.pop("model"), options.pop("data"), out, **options)


def ablate(out: Path, **options: Any) -> Result:
    with expert_options(options, AblateOptions) as rest:
        return gqa_ablate(*words(out, **rest))


def gqa_ablate(*words: object) -> Result:
    """`gqa-ablate WORDS` without pictures, which take longer than the measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gqa.eval.study.report.find_spec", lambda name: None)
        return run(*words, program="gqa-ablate")


def measured(out: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of a study that must succeed."""
    result = ablate(out, **options)
    assert (result.code, result.err) == (0, ""), result
    return rows(out)


def refused(out: Path, *messages: str, **options: Any) -> None:
    """A study that must be refused, with nothing written."""
    before = snapshot(out.parent)
    check_refused(ablate(out, **options), *messages, program="gqa-ablate", advice="")
    assert snapshot(out.parent) == before


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@cache
def study() -> Path:
    """A finished study: 2 methods, 1 and 4 heads, 3 alphas."""
    out = place() / "study"
    measured(out, groups="1,4")
    return out


def convert(out: Path, method: str, *options: object, model: Path | None = None, groups: int = 1) -> Path:
    done = run("-q", "-g", groups, "--method", method, "-o", out, *options, model or place() / "model")
    assert done.code == 0, done
    return out


def uptrain(model: Path, out: Path, **options: Any) -> Path:
    defaults = {"data": place() / "train.jsonl", "heldout": place() / "heldout.jsonl", "learning_rate": 3e-3}
    options = {**defaults, "batch_size": 4, "context": 64, "alpha": 0.1, **options}
    done = run(*words_for(model, options.pop("data"), out, **options), program="gqa-uptrain")
    assert done.code == 0, done
    return out


def evaluated(*words: object, data: Path | None = None) -> list[dict[str, Any]]:
    """The models of gqa-eval on the held-out text."""
    done = run(*words, "--data", data or place() / "heldout.jsonl", "--json", "-q", program="gqa-eval")
    assert done.code == 0, done
    return list(json.loads(done.out)["models"])


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what depends on the machine, the time or the command."""
    timed = ("seconds_converting", "seconds_training", "seconds_evaluating", "environment", "options")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def copied(directory: Path) -> Path:
    """A finished study that may be changed."""
    return Path(shutil.copytree(study(), directory / "study"))


# -------------------------------------------------------------------------------------------------------- oracle


def check_cells(found: list[dict[str, Any]], models: list[dict[str, Any]]) -> None:
    """Rows of converted models have the numbers of gqa-eval; another alpha, as a control, has another loss."""
    for row, model in zip(found, models, strict=False):
        quality, against = model["quality"], model["against_baseline"]
        assert row["loss"] == pytest.approx(quality["nats_per_token"], abs=1e-6)
        assert row["bits_per_byte"] == pytest.approx(quality["bits_per_byte"], abs=1e-6)
        assert row["loss_increase"] == pytest.approx(against["log_ratio"], abs=1e-6)
        compared = (against["kl"]["mean"], against["acceptance"], against["same_top"])
        assert [row[name] for name in ("kl", "acceptance", "top1_agreement")] == pytest.approx(compared, abs=1e-6)
        assert row["kv_bytes_per_token"] == model["kv_cache"]["bytes_per_token"]
        assert row.get("cross_bytes_per_token", 0) == model["kv_cache"]["cross_bytes_per_token"]
    assert min(abs(one["loss"] - other["loss"]) for one, other in combinations(found, 2)) > 1e-5


def test_recommended_commands_give_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths of the study, also after a report alone."""
    monkeypatch.chdir(tmp_path)
    Path("my models").mkdir()
    (model := Path("my models", "it's")).symlink_to(place() / "model")
    source, *found = measured(Path("study"), model=model, methods="first", alphas="0.1,0.3", skip=None)
    report = gqa_ablate("-o", "study", "--max-loss-increase", 99).out
    commands = [shlex.split(line[12:]) for line in report.splitlines() if line.startswith("command ")]
    for program, *arguments in commands:
        assert run(*arguments, "-q", program=program).code == 0
    assert [program for program, *_ in commands] == ["gqa-convert", "gqa-uptrain"]
    outputs = [words[words.index("-o") + 1] for words in commands]
    base, *models = evaluated(model, *outputs[1:], "--kl")
    assert source["loss"] == pytest.approx(base["quality"]["nats_per_token"], abs=1e-6)
    assert [(row["alpha"], row["train"]) for row in found] == [(0.1, "all"), (0.3, "all")]
    check_cells(found, models)
    assert unescape(Path("study/report.html").read_text()).count(shlex.join(commands[1])) == 1


def test_cells_of_an_encoder_decoder(tmp_path: Path) -> None:
    """Calibrated, trained and measured on pairs, with the base model as teacher."""
    model, pairs = tiny_checkpoint(tmp_path / "t5", "gqa_t5", 4, pad_token_id=0, dropout_rate=0.0), []
    for name, numbers in (("train", range(12, 92)), ("heldout", range(8))):
        texts = [(f"def f{n}(x):" + " pass" * (5 * n % 7), f"return x + {n}" + " + 1" * (n % 5)) for n in numbers]
        pairs.append(tmp_path / f"{name}.jsonl")
        pairs[-1].write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in texts))
    options: dict[str, Any] = {"field": "source", "target_field": "target", "train": "all"}
    text, fields = {"data": pairs[0], "heldout": pairs[1]}, ("--field", "source", "--target-field", "target")
    calibration = ("--data", pairs[0], *fields, "--tokens", 640, "--context", 64, "--refine-steps", 3)
    mean = convert(tmp_path / "mean", "mean", model=model, groups=2)
    refined = convert(tmp_path / "refined", "refined", *calibration, model=model, groups=2)
    trained = uptrain(mean, tmp_path / "trained", **text, teacher=model, alpha=0.4, **options)
    _, *models = evaluated(model, mean, trained, refined, "--kl", *fields, data=pairs[1])
    options |= {"teacher": "source", "groups": "2", "methods": "mean,refined", "skip": None, "model": model}
    options |= {"calibration_tokens": 640, "calibration_context": 64, "refine_steps": 3}
    _, *found = measured(tmp_path / "study", **options, **text, alphas="0,0.4")
    check_cells(found[:3], models)
    page = " ".join((tmp_path / "study" / "report.html").read_text().split())
    assert "sources and targets have at most 64 tokens" in page
    assert "recall is not measured: --recall is for decoders, and t5 is an encoder-decoder" in page
    options |= {"methods": "refined", "alphas": "0", "data": pairs[0], "heldout": None}
    share = measured(tmp_path / "share", **options, heldout_fraction=0.3)
    assert 0 < share[0]["text"]["documents"] < 80


def test_a_training_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the defaults of both: the base model teaches and the best state counts. A learning rate that destroys the
    model gives back the conversion, which is calibrated on the study's own data, once.
    """
    convert_checkpoint, methods = ablation.convert_checkpoint, []

    def noting(*args: Any, **options: Any) -> Any:
        methods.append(options["method"])
        return convert_checkpoint(*args, **options)

    monkeypatch.setattr(ablation, "convert_checkpoint", noting)
    grid = {"methods": "calibrated", "teacher": None, "train": None, "learning_rate": 30.0}
    plain, early, late = measured(tmp_path / "study", **grid, calibration_tokens=640, calibration_context=64)[1:]
    data = ("--data", place() / "train.jsonl", "--tokens", 640, "--context", 64)
    converted = convert(tmp_path / "converted", "calibrated", *data)
    trained = uptrain(converted, tmp_path / "trained", learning_rate=30.0)
    losses = [model["quality"]["nats_per_token"] for model in evaluated(converted, trained)]
    assert [plain["loss"], early["loss"]] == pytest.approx(losses, abs=1e-6)
    assert (early["train"], early["teacher"]) == ("attention", "source")
    assert 0 == plain["train_tokens"] < early["train_tokens"] < late["train_tokens"]
    assert plain["loss"] == pytest.approx(early["loss"], abs=1e-6) == late["loss"]
    assert methods == ["calibrated"]


def test_recall_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the base model and of a conversion, which recalls less."""
    few_questions(monkeypatch)
    grid: dict[str, Any] = {"methods": "mean", "groups": "4", "alphas": "0", "batch_size": None, "context": 128}
    rows = measured(tmp_path / "study", model=SOURCE, **grid)
    converted = convert(tmp_path / "converted", "mean", model=SOURCE, groups=4)
    models = evaluated(SOURCE, converted, "--context", 128, "--recall")
    for row, model in zip(rows, models, strict=True):
        for one, other in zip(row["recall_by_distance"], model["recall"], strict=True):
            assert one == pytest.approx(other, abs=1e-6)
            if one["kind"] in ("text", "random"):  # at one distance each
                assert row[f"recall_{one['kind']}"] == pytest.approx(other["accuracy"])
        assert row["greedy_tokens"] == pytest.approx(model["greedy"]["tokens"])
        assert {"recall_samples", "recall_look_up", "recall_passkey"} <= row.keys()
    assert rows[1]["recall_text"] < rows[0]["recall_text"] - 0.1
    assert f"{rows[1]['recall_text']:.1%}" in (tmp_path / "study" / "report.html").read_text()


# ----------------------------------------------------------------------------------------------------------- grid


def test_rows_of_the_grid() -> None:
    """As many heads as the base model has are one conversion. pandas reads the rows."""
    found = {Cell.of(row): row for row in rows(study())}
    assert [cell.method for cell in found] == ["none", *["mean"] * 3, *["first"] * 3, *["none"] * 2]
    base = found[Cell("none", 4, 0.0)]
    assert base["loss_increase"] == 0
    assert base["kv_bytes_per_token"] == 4 * found[Cell("mean", 1, 0.0)]["kv_bytes_per_token"]
    frame = pandas.read_json(study() / "results.jsonl", lines=True, precise_float=True)
    assert [*frame["loss"]] == [row["loss"] for row in found.values()]


@pytest.mark.parametrize(("heads", "alphas", "groups"), [
    (8, (0, 0.1), {1, 2, 4, 8}), (8, (0,), {1, 2, 4}), (32, (0.1,), {1, 8, 16, 32}), (3, (0, 1), {1, 3}),
    (1, (0,), {1}),
])  # fmt: skip
def test_the_default_numbers_of_heads(heads: int, alphas: tuple[float, ...], groups: set[int]) -> None:
    """With the control of training where there is no teacher."""
    for teacher, expected in (("none", groups), ("source", {count for count in groups if count < heads} or {1})):
        options = AblateOptions(Path("study"), "model", methods=("mean",), alphas=alphas, teacher=teacher)
        assert {cell.groups for cell in options.cells(heads)} == expected | {heads}
        trained = [cell for cell in options.cells(heads) if cell.groups == heads and cell.alpha]
        assert bool(trained) == (heads in expected and any(alphas))


def test_measured_cells_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more methods only the new cells are measured."""
    out, before = copied(tmp_path), snapshot(study())["results.jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(ablation.Ablation, "_measure_cell", lambda *args: pytest.fail("measured again"))
        measured(out, groups="1,4")
    assert snapshot(out)["results.jsonl"] == before
    more: dict[str, Any] = {"methods": "mean,random", "groups": "1", "alphas": "0"}
    grown = measured(out, **more)
    assert (grown[:9], [row["method"] for row in grown[9:]]) == (rows(study()), ["random"])


# ------------------------------------------------------------------------------------------------ stop, continue

_TORN = """
from gqa.eval.study import rows
append_row = rows.append_row
def torn(directory, row):
    append_row(directory, row)
    with (directory / "results.jsonl").open("a") as stream:
        stream.write('{"method": "first", "gro')
rows.append_row = torn
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)])
def test_a_stopped_study_continues_to_identical_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs, number: int, code: int
) -> None:
    """In the middle of a training, with half a line of the next row written: after SIGTERM the training continues from
    its state, after SIGKILL it starts anew. A report of what is there changes no rows.
    """
    out, train, resumed = tmp_path / "study", ablation.uptrain, []
    stopped = runs.run(*words(out, methods="mean"), program="ablate", before=_TORN + f"kill_at(3, {int(number)})")
    assert stopped.code == code
    said = r"gqa-ablate: stopped; step 3 is saved in \S+; the same command continues\n"
    assert number == signal.SIGKILL or re.fullmatch(said, stopped.err)
    if number == signal.SIGKILL:  # as where it hits while the first state is saved
        (states,) = out.glob(".work/*/*-state")
        (states / "step-00000003.partial").mkdir()
    text = (out / "results.jsonl").read_text()
    *before, torn = text.splitlines()
    assert torn.startswith('{"method": "first", "gro')
    assert "recommended mean, 1 of 4" in gqa_ablate("-o", out, "--max-loss-increase", 100).out
    assert "recommended nothing: of" in gqa_ablate("-o", out, "--max-loss-increase", 0).out
    assert (out / "results.jsonl").read_text() == text

    def noting(setup: Any) -> Any:
        resumed.append(setup.start is not None)
        return train(setup)

    monkeypatch.setattr(ablation, "uptrain", noting)
    # Not measured again: the seconds are the same too.
    assert [json.loads(line) for line in before] == measured(out, methods="mean")[: len(before)]
    assert resumed[0] == (number == signal.SIGTERM)
    assert untimed(rows(out)) == untimed(rows(study()))[:4]
    assert not (out / ".work").exists()


def test_a_failed_cell_is_a_row_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_checkpoint, train, methods = ablation.convert_checkpoint, ablation.uptrain, []

    def failing(*args: Any, **options: Any) -> Any:
        methods.append(options["method"])
        if options["method"] == "mean":
            raise RuntimeError("the disk\nis on fire")
        return convert_checkpoint(*args, **options)

    def diverging(setup: Any) -> Any:
        if setup.options.alpha == 0.3:
            raise ablation.DivergedError("loss was not finite")
        return train(setup)

    out = tmp_path / "study"
    with monkeypatch.context() as patch:
        patch.setattr(ablation, "convert_checkpoint", failing)
        patch.setattr(ablation, "uptrain", diverging)
        result = ablate(out)
    assert (result.code, result.err.count("\n"), "4 of 7 cells failed" in result.err) == (1, 1, True)
    assert methods == ["mean", "first"]  # once for all cells
    errors = [row["error"] for row in rows(out)]
    assert errors == [None, *["RuntimeError: the disk is on fire"] * 3, None, None, "loss was not finite"]
    assert "the disk is on fire" in (out / "report.html").read_text()
    successes = [row for row in rows(out) if not row["error"]]
    again = measured(out)
    assert [row for row in again if row in successes] == successes
    latest = {Cell.of(row): row for row in untimed(again)}
    assert [*latest.values()] == [row for row in untimed(rows(study())) if Cell.of(row) in latest]


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were written stay, and the study continues when there is space."""
    fsync, failing, out = os.fsync, [False, False, True], tmp_path / "study"

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("results.jsonl") and failing.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        result = ablate(out, alphas="0")
    assert (result.code, result.err.count("\n"), "No space left" in result.err) == (1, 1, True)
    assert "measured rows are kept; repeat the command to continue" in result.err
    before = rows(out)
    assert [row["method"] for row in before[:2]] == ["none", "mean"]
    assert measured(out, alphas="0")[: len(before)] == before


# -------------------------------------------------------------------------------------------------------- refusals


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown method": ({"methods": "mean,median"}, ["'--methods': 'median' is not one of 'mean'", "calibrated"]),
    "no method": ({"methods": ","}, ["'--methods': ',' names nothing"]),
    "a method that the model cannot have": ({"model": "bitnet", "methods": None}, ["aligned", "first or refined"]),
    "groups that do not divide": ({"groups": "1,3"}, ["--groups 3 is not possible", "choose 1, 2 or 4"]),
    "more groups than heads": ({"model": "bitnet", "groups": "1,4"}, ["--groups 4 is more than the 2 key/value heads"]),
    "alpha above 1": ({"alphas": "0,1.5"}, ["'--alphas': '1.5' is not a number from 0 to 1"]),
    "alpha of less than a step": ({"alphas": "0.0001"}, ["alpha 0.0001 is", "less than one block"]),
    "no data": ({"data": None}, ["no data is named", "--data"]),
    "no text but samples": ({"data": "self:1M"}, ["--data self is no text"]),
    "nothing held out": ({"heldout": None}, ["there is no held-out text", "--heldout-fraction"]),
    "a share of no document": ({"heldout": None, "heldout_fraction": 1e-9}, ["holds out no"]),
    "two held-out texts": ({"heldout_fraction": 0.1, "alphas": "0"}, ["--heldout-fraction both name held-out text"]),
    "no model": ({"model": "nowhere"}, ["nowhere"]),
    "no head": ({"model": "headless"}, ["headless is a LlamaModel, which does not predict"]),
    "context beyond the model's": ({"context": 4096}, ["--context 4096 is more than the 64 positions"]),
    "a device that is not there": ({"device": "cuda:99"}, ["cuda:99"]),
    "targets of a decoder": ({"target_field": "text"}, ["--target-field is for encoder-decoders, model is not one"]),
    "no targets": ({"model": "t5"}, ["t5 is an encoder-decoder: name the text to predict with --target-field"]),
    "no such column": ({"model": "t5", "target_field": "none"}, ["has no field 'none'; it has 'text'"]),
    "one column twice": ({"model": "t5", "target_field": "text"}, ["are the same text"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that cannot have every study."""
    directory = tmp_path_factory.mktemp("models")
    tiny_checkpoint(directory / "bitnet", "bitnet", kv_heads=2)
    tiny_checkpoint(directory / "t5", "gqa_t5", 4)
    headless = tiny_checkpoint(directory / "headless", kv_heads=4)
    edit_json(headless / "config.json", lambda config: config.update(architectures=["LlamaModel"]))
    return directory


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str, tmp_path: Path, models: Path) -> None:
    options, messages = REFUSED[name]
    if "model" in options:
        options = options | {"model": models / options["model"]}
    refused(tmp_path / "study", *messages, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_else(tmp_path: Path) -> None:
    out, other = copied(tmp_path), tiny_checkpoint(tmp_path / "other" / "model", kv_heads=2)
    text = write_corpus(tmp_path / "text.jsonl", 3, first=20)
    refused(out, "holds another study: learning_rate: 0.003 -> 0.001", learning_rate=1e-3)
    refused(out, "content of the held-out text: ", "--overwrite", heldout=text)
    refused(out, "fingerprint: ", model=other, groups="1")
    for name, file, content in (("thesis", "chapter.md", "one"), ("rows", "results.jsonl", '{"name": "no cell"}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
    for overwrite in (False, True):
        refused(tmp_path / "thesis", "holds no study", overwrite=overwrite)
        refused(tmp_path / "rows", "holds no rows of a study", overwrite=overwrite)
    for name, message in (("rows", "holds no rows of a study"), ("none", "has no measured study")):
        check_refused(gqa_ablate("-o", tmp_path / name), message, program="gqa-ablate", advice="")
    result = gqa_ablate("-o", tmp_path, "--groups", 2)
    check_refused(result, "--groups means nothing without MODEL", program="gqa-ablate", advice="")


def test_overwrite_starts_over(tmp_path: Path) -> None:
    """Also over rows of another version. It removes nothing that no study has written, nor anything if the new study is
    refused.
    """
    out, grid = copied(tmp_path), {"overwrite": True, "alphas": "0", "methods": "mean"}
    (out / "notes.txt").write_text("mine")
    older = {"method": "median", "groups": 1, "alpha": 0.0, "bits": 4, "error": None, "options": {"bits": 4}}
    (out / "results.jsonl").write_text(f"{json.dumps(older)}\n" * 2)
    refused(out, "holds another study: ", "bits: 4 -> None", methods="mean")
    assert [row["options"]["learning_rate"] for row in measured(out, **grid, learning_rate=1e-4)] == [1e-4] * 2
    assert (out / "notes.txt").read_text() == "mine"
    refused(out, "--groups 3 is not possible", **grid, groups="3")
    for directory, options in ((out, grid), (tmp_path / "new", {"alphas": "0"})):
        with study_rows.locked_work(directory):
            refused(directory, "another run is working on", **options)


def test_every_part_uses_the_device_of_the_study() -> None:
    for device in ("cpu", None):
        options = AblateOptions(Path("study"), "model", device=device)
        assert options.training(0.1, Path("model"), Path("place")).device == device
        assert options.maps.device == options.evaluation.device == "cpu"


# ---------------------------------------------------------------------------------------------------------- report


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
    assert "recall is not measured: recall needs a context of at least 128 tokens" in html
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
