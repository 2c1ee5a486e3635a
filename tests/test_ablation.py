"""`gqa-ablate`: cells are what the commands give one by one, and survive whatever stops a study."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from functools import cache, partial
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pandas
import pytest
import torch
from support import checkpoints
from support.checkpoints import Result, edit_json, run, snapshot
from support.documents import lines
from support.embedded import SOURCE
from support.evaluations import few_questions
from support.faults import kill_at, tear_the_next_row
from support.patches import forbid, forbid_training
from support.training import (
    BLOCK,
    Runs,
    expert_options,
    scratch,
    tiny_checkpoint,
    words_for,
    write_corpus,
)

from gqa.core.errors import DivergedError, NoMemoryError, OutputError, RefusedError
from gqa.core.run_directory import RunDirectory
from gqa.corpus.rows import row_digest
from gqa.study import ablation
from gqa.study import rows as study_rows
from gqa.study.directory import WORK_PURPOSE, StudyDirectory
from gqa.study.options import ADVICE, AblateOptions, Cell
from gqa.study.report import write_study_report

check_refused = partial(checkpoints.check_refused, program="gqa-ablate", advice="")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@cache
def place() -> Path:
    """A directory with model (4 heads), bitnet, headless, train.jsonl and heldout.jsonl."""
    torch.set_num_threads(1)  # sums in the same order
    directory = scratch()
    tiny_checkpoint(directory / "model", kv_heads=4)
    tiny_checkpoint(directory / "bitnet", "bitnet", kv_heads=2)
    headless = tiny_checkpoint(directory / "headless", kv_heads=4)
    edit_json(headless / "config.json", lambda config: config.update(architectures=["LlamaModel"]))
    write_corpus(directory / "train.jsonl", 10)
    write_corpus(heldout := directory / "heldout.jsonl", 3, first=10)
    # In the order in which a study reads documents
    lines = heldout.read_text().splitlines(keepends=True)
    heldout.write_text(
        "".join(sorted(lines, key=lambda line: row_digest(json.loads(line)["text"])))
    )
    return directory


def words(out: Path, model: Path | str = "model", **options: Any) -> list[str]:
    """The command of a small study; an option that is None is left out,
    one that is True is a flag.
    """
    defaults: dict[str, Any] = {
        "data": place() / "train.jsonl",
        "validation": place() / "heldout.jsonl",
        "batch_size": 4,
        "context": BLOCK,
        "methods": "mean,first",
        "groups": "1",
        "alphas": "0,0.1,0.3",
        "learning_rate": 3e-3,
        "skip": "kl",
        "teacher": "none",
        "train": "all",
    }
    options = defaults | options
    return words_for(
        place() / model if isinstance(model, str) else model, options.pop("data"), out, **options
    )


def ablate(out: Path, **options: Any) -> Result:
    with expert_options(options, AblateOptions) as rest:
        return gqa_ablate(*words(out, **rest))


def gqa_ablate(*words: object) -> Result:
    """`gqa-ablate WORDS` without pictures, which take longer than the measurements."""
    with pytest.MonkeyPatch.context() as patch:
        # As where matplotlib is not installed
        patch.setattr("gqa.study.report.find_spec", lambda name: None)
        return run(*words, program="gqa-ablate")


def measured(out: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of a study that must succeed."""
    result = ablate(out, **options)
    result.expect(err="")
    return rows(out)


def refused(out: Path, *messages: str, **options: Any) -> None:
    """A study that must be refused, with nothing written."""
    before = snapshot(out.parent)
    check_refused(ablate(out, **options), *messages)
    assert snapshot(out.parent) == before


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@cache
def study() -> Path:
    """A finished study: 2 methods, 1 and 4 heads, 3 alphas."""
    out = place() / "study"
    measured(out, groups="1,4")
    return out


def rows_of(method: str) -> list[dict[str, Any]]:
    """The rows of the study for the base model and one method."""
    base, *others = rows(study())
    return [base, *(row for row in others if row["method"] == method)]


def evaluated(*words: object, data: Path | None = None) -> list[dict[str, Any]]:
    """The models of gqa-eval on the held-out text."""
    done = run(
        *words, "--data", data or place() / "heldout.jsonl", "--json", "-q", program="gqa-eval"
    )
    assert done.code == 0, done
    return list(json.loads(done.out)["models"])


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what depends on the machine, the time or the command."""
    timed = (
        "seconds_converting",
        "seconds_training",
        "seconds_evaluating",
        "environment",
        "options",
    )
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def copied(directory: Path) -> Path:
    """A finished study that may be changed."""
    return Path(shutil.copytree(study(), directory / "study"))


def follow(row: dict[str, Any]) -> str:
    """The directory that the commands of a row write, under a name of its own."""
    out = ""
    for program, *arguments in map(shlex.split, row["commands"]):
        done = run(*arguments, "--overwrite", "-q", program=program)
        assert done.code == 0, done
        out = arguments[arguments.index("-o") + 1]
    return str(Path(out).rename(f"cell {len([*Path().iterdir()])}"))


def check_cells(found: list[dict[str, Any]], *words: object, data: Path | None = None) -> None:
    """Rows have the numbers that gqa-eval gives of what their commands write; the cells differ, as
    a control.
    """
    source, *converted = found
    model = source["environment"]["argv"][0]
    base, *models = evaluated(model, *map(follow, converted), *words, "--kl", data=data)
    assert source["loss"] == pytest.approx(base["quality"]["nats_per_token"], abs=1e-6)
    for row, model in zip(converted, models, strict=True):
        quality, against = model["quality"], model["against_baseline"]
        assert row["loss"] == pytest.approx(quality["nats_per_token"], abs=1e-6)
        assert row["bits_per_byte"] == pytest.approx(quality["bits_per_byte"], abs=1e-6)
        assert row["loss_increase"] == pytest.approx(against["log_ratio"], abs=1e-6)
        compared = (against["kl"]["mean"], against["acceptance"], against["top1_agreement"])
        assert [row[name] for name in ("kl", "acceptance", "top1_agreement")] == pytest.approx(
            compared, abs=1e-6
        )
        assert row["kv_bytes_per_token"] == model["kv_cache"]["bytes_per_token"]
        assert row.get("cross_bytes_per_token", 0) == model["kv_cache"]["cross_bytes_per_token"]
    assert min(abs(one["loss"] - other["loss"]) for one, other in combinations(found, 2)) > 1e-5


def test_commands_of_a_row_give_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the paths of the study; those of the recommended row are in its report."""
    monkeypatch.chdir(tmp_path)
    Path("my models").mkdir()
    (model := Path("my models", "it's")).symlink_to(place() / "model")
    grid = {"methods": "first,calibrated", "alphas": "0.1,0.3", "calibration_tokens": 640}
    found = measured(Path("study"), model=model, skip=None, teacher=None, train=None, **grid)
    report = gqa_ablate("-o", "study", "--max-loss-increase", 99).out
    commands = [line[12:] for line in report.splitlines() if line.startswith("command ")]
    assert commands in [row["commands"] for row in found]
    assert unescape(Path("study/report.html").read_text()).count(commands[1]) == 1
    taught = [("first", "all", "auto")] * 2 + [("calibrated", "attention", "auto")]
    assert [(row["method"], row["train"], row["teacher"]) for row in found[1:4]] == taught
    check_cells(found)


def test_cells_of_an_encoder_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrated, trained and measured on pairs, with the base model as teacher."""
    monkeypatch.chdir(tmp_path)
    model, pairs = (
        tiny_checkpoint(tmp_path / "t5", "gqa_t5", 4, pad_token_id=0, dropout_rate=0.0),
        [],
    )
    for name, numbers in (("train", range(12, 92)), ("heldout", range(8))):
        rows = (
            (f"def f{n}(x):" + " pass" * (5 * n % 7), f"return x + {n}" + " + 1" * (n % 5))
            for n in numbers
        )
        pairs.append(
            lines(
                tmp_path / f"{name}.jsonl",
                *({"source": one, "target": other} for one, other in rows),
            )
        )
    options = {
        "data": pairs[0],
        "validation": pairs[1],
        "text_column": "source",
        "target_column": "target",
        "model": model,
    }
    options |= {
        "methods": "mean,refined",
        "groups": "2",
        "alphas": "0,0.4",
        "calibration_tokens": 640,
    }
    found = measured(Path("study"), **options, refine_steps=3, teacher="auto", skip=None)
    check_cells(found[:4], "--text-column", "source", "--target-column", "target", data=pairs[1])
    page = " ".join(Path("study/report.html").read_text().split())
    assert "sources and targets have at most 64 tokens" in page
    assert (
        "recall was not measured: --recall works only with decoders, but t5 is an encoder-decoder"
    ) in page


def test_recall_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the base model and of a conversion, which recalls less."""
    few_questions(monkeypatch)
    monkeypatch.chdir(tmp_path)
    grid: dict[str, Any] = {
        "methods": "mean",
        "groups": "4",
        "alphas": "0",
        "batch_size": None,
        "context": 128,
    }
    rows = measured(Path("study"), model=SOURCE, **grid)
    models = evaluated(SOURCE, follow(rows[1]), "--context", 128, "--recall")
    for row, model in zip(rows, models, strict=True):
        for one, other in zip(row["recall_by_distance"], model["recall"], strict=True):
            assert one == pytest.approx(other, abs=1e-6)
            if one["kind"] in ("text", "random"):  # at one distance each
                assert row[f"recall_{one['kind']}"] == pytest.approx(other["accuracy"])
        assert row["greedy_tokens"] == pytest.approx(model["greedy"]["tokens"])
        assert {"recall_generated", "recall_values", "recall_passkeys"} <= row.keys()
    assert rows[1]["recall_text"] < rows[0]["recall_text"] - 0.1
    assert f"{rows[1]['recall_text']:.1%}" in Path("study/report.html").read_text()


@pytest.mark.parametrize(
    ("heads", "alphas", "teacher", "groups"),
    [
        (8, (0, 0.1), "none", {1, 2, 4, 8}),
        (8, (0, 0.1), "auto", {1, 2, 4}),
        (8, (0,), "none", {1, 2, 4}),
        (32, (0.1,), "none", {1, 8, 16, 32}),
        (3, (0, 1), "auto", {1}),
        (1, (0.1,), "auto", {1}),
    ],
)
def test_the_default_numbers_of_heads(
    heads: int, alphas: tuple[float, ...], teacher: Any, groups: set[int]
) -> None:
    """With the control of training where there is no teacher."""
    cells = AblateOptions(
        Path("study"), "model", methods=("mean",), alphas=alphas, teacher=teacher
    ).cells(heads)
    assert {cell.groups for cell in cells} == groups | {heads}
    assert any(cell.groups == heads and cell.alpha for cell in cells) == (
        heads in groups and any(alphas)
    )


def test_measured_cells_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more methods only the new cells are measured. pandas reads the rows."""
    out, before = copied(tmp_path), rows(study())
    # As many heads as the base model has are one conversion
    cells = [Cell.of(row) for row in before]
    assert [cell.method for cell in cells] == ["none", *["first"] * 3, *["mean"] * 3, *["none"] * 2]
    assert before[0]["loss_increase"] == 0
    assert before[0]["kv_bytes_per_token"] == 4 * before[1]["kv_bytes_per_token"]
    frame = pandas.read_json(out / "results.jsonl", lines=True, precise_float=True)
    assert [*frame["loss"]] == [row["loss"] for row in before]
    with monkeypatch.context() as patch:
        forbid(patch, "gqa.study.ablation._Measurement._train_and_measure", "it measures again")
        assert measured(out, groups="1,4") == before
    grown = measured(out, methods="mean,random", groups="1", alphas="0")
    assert grown[:9] == before
    assert [row["method"] for row in grown[9:]] == ["random"]


TORN = '{"method": "first", "gro'


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)]
)
def test_a_stopped_study_continues_to_identical_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs, number: int, code: int
) -> None:
    """In the middle of a training, with half a line of the next row written: after SIGTERM the
    training continues from its state, after SIGKILL it starts anew. A report of what is there
    changes no rows.
    """
    out, trainings = tmp_path / "study", Mock(side_effect=ablation.uptrain)
    tear = partial(tear_the_next_row, TORN)
    stop = partial(kill_at, 3, int(number))
    stopped = runs.run(*words(out, methods="mean"), program="ablate", before=[tear, stop])
    assert stopped.code == code
    said = r"gqa-ablate: stopped; step 3 is saved in \S+; the same command continues\n"
    if number == signal.SIGTERM:
        assert re.fullmatch(said, stopped.err)
    else:  # as where it hits while the first state is saved
        (states,) = out.glob(".work/*/*-state")
        (states / "step-00000003.partial").mkdir()
    text = (out / "results.jsonl").read_text()
    *before, torn = text.splitlines()
    assert torn.startswith(TORN)
    report = gqa_ablate("-o", out, "--max-loss-increase", 100).out
    assert re.search(r"^recommended \S+: mean, 1 of 4", report, re.MULTILINE)
    results = gqa_ablate("-q", "-o", out, "--max-loss-increase", 0).out
    assert results.startswith("Study of ")
    assert "\nrecommended nothing: none of" in results
    assert "written to" not in results
    assert (out / "results.jsonl").read_text() == text

    # Notes what each training starts from
    monkeypatch.setattr(ablation, "uptrain", trainings)
    # Not measured again: the seconds are the same too.
    assert [json.loads(line) for line in before] == measured(out, methods="mean")[: len(before)]
    assert (trainings.call_args_list[0].args[0].continues_from is not None) == (
        number == signal.SIGTERM
    )
    assert untimed(rows(out)) == untimed(rows_of("mean"))
    assert not (out / ".work").exists()


def test_a_failed_cell_is_a_row_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # One method fails and one training diverges, which no tiny model does on demand
        patch.setattr(ablation, "convert_checkpoint", failing)
        patch.setattr(ablation, "uptrain", diverging)
        result = ablate(out)
    result.expect(1, err_lines=1, says="4 of 6 combinations failed")
    assert methods == ["first", "mean"]  # once for all cells
    errors = [row["error"] for row in rows(out)]
    assert errors == [
        None,
        None,
        None,
        "loss was not finite; lower --learning-rate in another study (another directory with -o)",
        *["RuntimeError: the disk is on fire"] * 3,
    ]
    assert "the disk is on fire" in (out / "report.html").read_text()
    assert ablate(out, methods="first", alphas="0").code == 0  # the failed ones are not asked for
    successes, again = [row for row in rows(out) if not row["error"]], measured(out)
    assert [row for row in again if row in successes] == successes
    latest = {Cell.of(row): row for row in untimed(again)}
    assert [*latest.values()] == untimed(rows(study()))[:7]


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were written stay, and the study continues when there is space."""
    out, full = tmp_path / "study", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        # A disk that is full when the third row is written
        patch.setattr(
            study_rows, "os", Mock(fsync=Mock(side_effect=[None, None, full]), path=os.path)
        )
        check_refused(ablate(out, alphas="0"), "No space left", code=1, advice=ADVICE)
    before = rows(out)
    assert [row["method"] for row in before[:2]] == ["none", "first"]
    assert measured(out, alphas="0")[: len(before)] == before


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a method that the model cannot have": (
        {"model": "bitnet", "methods": None},
        ["aligned", "first, mean or refined"],
    ),
    "groups that do not divide": (
        {"groups": "1,3"},
        ["--kv-heads 3 does not divide", "pass 1 or 2"],
    ),
    "more groups than heads": (
        {"model": "bitnet", "groups": "1,4"},
        ["--kv-heads 4 is more than the 2 KV heads of bitnet; pass divisors of 2"],
    ),
    "alpha of less than a step": ({"alphas": "0.0001"}, ["alpha 0.0001 is", "less than one block"]),
    "no data": ({"data": None}, ["no data was passed", "--data"]),
    "no text but samples": ({"data": "self:1M"}, ["generated text has no documents to hold out"]),
    "no validation text": (
        {"validation": None},
        ["there is no validation text", "--validation-fraction"],
    ),
    "two held-out texts": (
        {"validation_fraction": 0.1, "alphas": "0"},
        ["--validation and --validation-fraction cannot be combined"],
    ),
    "no head": ({"model": "headless"}, ["headless is a LlamaModel, which does not predict"]),
    "context beyond the model's": (
        {"context": 4096},
        ["--context 4096 is more than the 64 positions"],
    ),
    "a device that is not there": ({"device": "cuda:99"}, ["cuda:99"]),
    "calibration text of less than a block": (
        {"methods": "mean,calibrated", "calibration_tokens": 100},
        ["--calibration-tokens 100 is less than one block of 256 tokens; pass at least 256"],
    ),
    "targets of a decoder": (
        {"target_column": "text"},
        ["--target-column works only with encoder-decoders, but model is not one"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    options, messages = REFUSED[name]
    refused(tmp_path / "study", *messages, **options)


def test_too_little_validation_text_is_refused_by_the_name_of_its_option(tmp_path: Path) -> None:
    text = lines(tmp_path / "short.jsonl", {"text": "import os"})
    says = "less than --eval-tokens 50; pass more text, or a smaller --eval-tokens"
    refused(tmp_path / "study", says, validation=text, eval_tokens=50)


def test_another_study_is_refused_by_the_names_that_users_type(tmp_path: Path) -> None:
    out = copied(tmp_path)
    other = tiny_checkpoint(tmp_path / "other" / "model", kv_heads=2)
    refused(out, "holds another study (--learning-rate: 0.003 -> 0.001); ", learning_rate=1e-3)
    renamed = shutil.copytree(place() / "model", tmp_path / "renamed")
    refused(out, "holds another study (MODEL: model -> renamed); ", model=str(renamed))
    refused(out, "content of MODEL: ", model=other, groups="1")
    refused(out, "content of --data: ", data=write_corpus(tmp_path / "text.jsonl", 11))


def test_a_directory_with_something_else(tmp_path: Path) -> None:
    out = copied(tmp_path)
    text = write_corpus(tmp_path / "text.jsonl", 3, first=20)
    refused(out, "content of the validation text: ", "--overwrite", validation=text)
    for name, file, content, says in (
        ("thesis", "chapter.md", "one", "holds no study"),
        ("rows", "results.jsonl", '{"name": "no cell"}\n', "line 1 of "),
        ("torn", "results.jsonl", '{"name": 1}', "is not a row of a study (it has no 'method')"),
        ("empty", "results.jsonl", "", "holds no study"),
        ("report", "report.html", "mine", "holds no study"),
        ("work", ".work/precious/thesis.txt", "mine", "holds no study"),
    ):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text(content)
        for overwrite in (False, True):
            refused(tmp_path / name, says, overwrite=overwrite)
    check_refused(gqa_ablate("-o", tmp_path / "rows"), "is not a row of a study")
    check_refused(gqa_ablate("-o", tmp_path / "none"), "has no measured study")
    check_refused(
        gqa_ablate("-o", tmp_path, "--kv-heads", 2), "--kv-heads has no effect without MODEL"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            b"{oops",
            "line 2 of {} is not a row of a study (it is not JSON in UTF-8); remove it, or ",
        ),
        (
            b"[1, 2]",
            "line 2 of {} is not a row of a study (it is not a JSON object); remove it, or ",
        ),
        (
            b'{"method": "mean", "groups": "two"}',
            "line 2 of {} is not a row of a study (its 'groups' is 'two'); remove it, or ",
        ),
        (b"\xff", "{} is not UTF-8 text, so it is not the results file of a study; "),
    ],
)
def test_a_damaged_row_is_named_by_its_line(tmp_path: Path, line: bytes, reason: str) -> None:
    out = copied(tmp_path)
    before = (out / "results.jsonl").read_bytes().splitlines()
    (out / "results.jsonl").write_bytes(b"\n".join([before[0], line, *before[2:], b""]))
    message = reason.format(out / "results.jsonl") + "choose another directory with -o"
    check_refused(gqa_ablate("-o", out), message)


def test_intermediate_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    """In a study too, and with --overwrite.

    Next to those of a study that was stopped they stay as well.
    """
    out = copied(tmp_path)
    thesis = out / ".work" / "precious" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("mine")
    for overwrite in (False, True):
        refused(out, ".work was not made by gqa-ablate; move it away", overwrite=overwrite)

    RunDirectory(out / ".work", WORK_PURPOSE).mark()
    measured(out, methods="mean", alphas="0", overwrite=True)
    assert [path.name for path in (out / ".work").iterdir() if path.is_dir()] == ["precious"]
    assert thesis.read_text() == "mine"


@pytest.mark.parametrize("fails", ["the row", "the result"])
def test_what_was_trained_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A row that cannot be written ends the study, a trained checkpoint that cannot is a failed
    cell. The next run neither converts nor trains again.
    """
    expected = next(
        row for row in untimed(rows(study())) if (row["method"], row["alpha"]) == ("mean", 0.3)
    )
    out, full = tmp_path / "study", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    grid = {"methods": "mean", "alphas": "0.3"}
    with monkeypatch.context() as patch:
        if fails == "the row":
            # A disk that is full when the second row is written
            patch.setattr(
                study_rows, "os", Mock(fsync=Mock(side_effect=[None, full]), path=os.path)
            )
        else:
            # A disk that is full when the result of the training is checked
            patch.setattr("gqa.uptrain.export.TrainedCheckpoint.verify", Mock(side_effect=full))
        assert ablate(out, **grid).code == 1
    if fails == "the row":  # it was written, but may be gone after a power cut
        lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
        (out / "results.jsonl").write_text(lines[0])
    assert (out / ".work" / "mean-g1" / "converted").is_dir()

    forbid_training(monkeypatch)
    forbid(monkeypatch, "gqa.study.ablation.convert_checkpoint", "it converts")
    again = {row["alpha"]: row for row in untimed(measured(out, **grid)) if not row["error"]}
    assert again[0.3] == expected
    assert not (out / ".work").exists()


def test_a_conversion_is_kept_if_there_was_too_little_memory_to_train_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run may have more; what is refused or diverges would fail in the same way again."""
    out, grid = tmp_path / "study", {"methods": "mean", "alphas": "0.3"}
    for error, is_kept in ((NoMemoryError("out of memory"), True), (RefusedError("no"), False)):
        with monkeypatch.context() as patch:
            # An error that depends on the machine
            patch.setattr(ablation, "uptrain", Mock(side_effect=error))
            assert ablate(out, **grid).code == 1
        assert (out / ".work" / "mean-g1" / "converted").is_dir() is is_kept


MEMORY = "stop other programs on the device, and repeat the command without --overwrite"
ANOTHER = "in another study (another directory with -o)"


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        (
            "uptrain",
            DivergedError("the loss was not finite; what was saved is kept. Repeat the command "),
            f"the loss was not finite; lower --learning-rate {ANOTHER}",
        ),
        (
            "uptrain",
            OutputError("the adapter of q is not finite, so nothing was written; repeat the "),
            "the adapter of q is not finite, so nothing was written; lower --learning-rate "
            f"{ANOTHER}",
        ),
        (
            "uptrain",
            NoMemoryError("out of memory while training; lower --micro-batch"),
            f"out of memory while training; {MEMORY}, or lower --batch-size or --context {ANOTHER}",
        ),
        (
            "convert_checkpoint",
            NoMemoryError("out of memory on cpu; lower --context"),
            f"out of memory on cpu; {MEMORY}",
        ),
        (
            "convert_checkpoint",
            torch.OutOfMemoryError("no memory"),
            f"OutOfMemoryError: no memory; {MEMORY}",
        ),
        ("convert_checkpoint", RefusedError("no; use --method mean"), "no"),
    ],
)
def test_rows_advise_what_a_study_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, said: str
) -> None:
    """Not what other commands can: there --overwrite removes no study."""
    # Errors that depend on the machine
    monkeypatch.setattr(ablation, where, Mock(side_effect=error))
    assert ablate(tmp_path / "study", methods="mean", alphas="0.3").code == 1
    assert [row["error"] for row in rows(tmp_path / "study")] == [None, said]


def test_overwrite_starts_over(tmp_path: Path) -> None:
    """Also over rows of another version.

    What no study has written stays, and all of it if the new study is refused.
    """
    out, grid = copied(tmp_path), {"overwrite": True, "alphas": "0", "methods": "mean"}
    (out / "notes.txt").write_text("mine")
    older = {
        "method": "median",
        "groups": 1,
        "alpha": 0.0,
        "bits": 4,
        "error": None,
        "options": {"bits": 4},
    }
    (out / "results.jsonl").write_text(f"{json.dumps(older)}\n" * 2)
    refused(out, "holds another study (", "bits: 4 -> None", methods="mean")
    assert [
        row["options"]["learning_rate"] for row in measured(out, **grid, learning_rate=1e-4)
    ] == [1e-4] * 2
    assert (out / "notes.txt").read_text() == "mine"
    for name in ("results.jsonl", "report.html"):
        (out / name).unlink()  # a conversion may be one of other options, which the rows had
    RunDirectory(out / ".work", WORK_PURPOSE).claim()
    StudyDirectory(out).conversion("mean-g1").claim()
    ablation.convert_checkpoint(
        place() / "model", 1, out / ".work" / "mean-g1" / "converted", method="first"
    )
    assert untimed(measured(out, methods="mean", alphas="0")) == untimed(rows_of("mean"))[:2]
    refused(out, "--kv-heads 3 does not divide", **grid, groups="3")
    for directory, options in ((out, grid), (tmp_path / "new", {"alphas": "0"})):
        with StudyDirectory(directory).held():
            refused(directory, "another run is working on", **options)


def test_every_part_uses_the_device_of_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another default than any machine has
    monkeypatch.setattr("gqa.core.devices.default_device", lambda: "the default")
    study = AblateOptions(Path("study"), "model", device="cpu")
    parts = study.training(0.1, Path("model"), Path("place")), study.maps_options, study.evaluation
    assert {part.device for part in parts} == {"cpu"}
    monkeypatch.chdir(SOURCE)
    (line,) = AblateOptions(Path("study"), ".").commands(Cell("mean", 1, 0.0))
    assert shlex.split(line)[-1] == f"{SOURCE}-gqa1-mean"


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_commands_train_in_the_precision_of_the_study(precision: str | None) -> None:
    """Whatever is fast on the device on which they are repeated."""
    study = AblateOptions(Path("study"), "model", precision=precision)
    _, training = study.commands(Cell("mean", 1, 0.1))
    expected = study.training(0.1, Path("model"), Path("out")).precision
    assert f"--precision {expected}" in training
    assert expected == (precision or "float32")


@pytest.mark.parametrize(("context", "words"), [(256, []), (64, ["--context", "64"])])
def test_a_command_has_the_length_of_the_calibration_blocks(context: int, words: list[str]) -> None:
    """Not the study's own --context, which is that of training; 256 is the default."""
    study = AblateOptions(Path("study"), "model", context=512, calibration_context=context)
    (line,) = study.commands(Cell("calibrated", 1, 0.0))
    assert line.split("--tokens 65536")[1].split() == words


def test_the_page_of_a_study(tmp_path: Path) -> None:
    out, environment = copied(tmp_path), rows(study())[0]["environment"]
    assert {"torch", "transformers", "gqa"} <= set(environment["versions"])
    assert write_study_report(out, 0.1)[-1] == [
        "report.html",
        "alphas.svg",
        "tradeoff.svg",
        "results.jsonl",
    ]
    html = (out / "report.html").read_text()
    assert unescape(html).count(shlex.join(["gqa-ablate", *environment["argv"]])) == 1
    assert "recall was not measured: recall needs a context of at least 128 tokens" in html
    positions = [
        html.index(text) for text in ("Recommended: ", "data:image", "Study of model", "Commands")
    ]
    assert positions == sorted(positions)
    assert html.count("data:image/svg+xml;base64,") == 2
    assert not re.search("https?:", html.replace("http://www.w3.org", ""))
    for name in ("tradeoff", "alphas"):
        assert (
            ElementTree.parse(out / f"{name}.svg").getroot().tag
            == "{http://www.w3.org/2000/svg}svg"
        )


def test_a_report_leaves_no_pictures_of_an_earlier_one(tmp_path: Path) -> None:
    """Nor says that it has written them."""
    out = copied(tmp_path)
    write_study_report(out, 0.1)
    assert (out / "alphas.svg").exists()
    shown = gqa_ablate("-o", out).out
    assert f"\nwritten to {out}: report.html, results.jsonl\n" in shown
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "results.jsonl"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the report in")
def test_the_report_sorts_in_a_browser(tmp_path: Path) -> None:
    """Its scripts write nothing to the console; a broken one, as a control, does."""
    click = (
        'document.querySelectorAll("table")[0].querySelectorAll("th button")[3].click(); '
        "nothing.here();"
    )
    html = (
        (study() / "report.html").read_text().replace("</body>", f"<script>{click}</script></body>")
    )
    (tmp_path / "sorted.html").write_text(html)
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    words += ["--enable-logging=stderr", "--dump-dom", (tmp_path / "sorted.html").as_uri()]
    done = subprocess.run(
        [str(BROWSER), *words], capture_output=True, text=True, timeout=120, check=True
    )
    (broken,) = (line for line in done.stderr.splitlines() if "CONSOLE" in line)
    assert "nothing is not defined" in broken
    body = done.stdout.partition("<tbody>")[2].partition("</tbody>")[0]
    losses = [
        float(line.split("<td")[4].partition(">")[2].partition("<")[0])
        for line in body.split("<tr>")[1:]
    ]
    assert len(losses) == 3
    assert losses == sorted(losses)
