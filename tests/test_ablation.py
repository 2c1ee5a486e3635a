"""`gqa-ablate`: cells are what the commands give one by one, and survive whatever stops a study."""

from __future__ import annotations

import json
import signal
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas
import pytest
from checkpoints import run, snapshot
from datasets import load_dataset
from embedded import SOURCE
from evaluations import few_questions
from studies import PLAINLY, SAME, ablate, copied, measured, place, rows, study, untimed, words
from training import Runs, tiny_checkpoint, words_for

from gqa.eval.study import ablation
from gqa.eval.study.study import AblateOptions, Cell, Grid


def command(program: str, *given: object) -> str:
    result = run(*given, program=program)
    assert (result.code, result.err) == (0, ""), result
    return result.out


def evaluated(*given: object) -> list[dict[str, Any]]:
    """What gqa-eval says of models on the held-out text."""
    options = ("--data", place() / "heldout.jsonl", "--json", "-q")
    found: list[dict[str, Any]] = json.loads(command("gqa-eval", *given, *options))["models"]
    return found


def by_cell(out: Path) -> dict[Cell, dict[str, Any]]:
    return {Cell.of(row): row for row in rows(out)}


# -------------------------------------------------------------------------------------------------------- oracle


def test_cells_are_what_the_commands_give(tmp_path: Path) -> None:
    """The base model, a conversion, and this one in the middle of a training that goes on, with whole caches and those
    of few bits, each with its bytes. Another alpha and other bits, as controls, give something else.
    """
    model, converted, trained = place() / "model", tmp_path / "converted", tmp_path / "trained"
    command("gqa-convert", "-q", "--groups", 1, "--method", "first", "-o", converted, model)
    given = words_for(converted, place() / "train.jsonl", trained, alpha=0.1, batch_size=4, context=64, **PLAINLY)
    command("gqa-uptrain", *given, "--heldout", place() / "heldout.jsonl")
    models = iter(evaluated(model, converted, trained, "--kl", "--cache-bits", "4,2"))
    measured(tmp_path / "study", methods="first", cache_bits="4,2", skip="decode")
    found, losses = by_cell(tmp_path / "study"), []
    for bits in (None, 4, 2):
        for method, groups, alpha in (("none", 4, 0.0), ("first", 1, 0.0), ("first", 1, 0.1)):
            expected, cell = next(models), Cell(method, groups, 0, "all", "none", alpha, bits)
            if cell.is_source and not bits:  # with which others are compared
                assert found.pop(cell)["loss"] == pytest.approx(expected["quality"]["nats_per_token"], abs=1e-6)
                continue
            row, quality, against = found.pop(cell), expected["quality"], expected["against_baseline"]
            losses += [row["loss"]]
            assert row["loss"] == pytest.approx(quality["nats_per_token"], abs=1e-6)
            assert row["bits_per_byte"] == pytest.approx(quality["bits_per_byte"], abs=1e-6)
            assert row["loss_increase"] == pytest.approx(against["log_ratio"], abs=1e-6)
            compared = (against["kl"]["mean"], against["acceptance"], against["same_top"])
            assert [row[name] for name in ("kl", "acceptance", "top1_agreement")] == pytest.approx(compared, abs=1e-6)
            assert row["kv_bytes_per_token"] == expected["kv_cache"]["bytes_per_token"]
            assert "decode_tokens_per_second" not in row
    assert {cell[:2] + cell[5:7] for cell in found} == {("first", 1, 0.3, bits) for bits in (None, 4, 2)}
    losses += [row["loss"] for row in found.values()]
    assert min(abs(one - other) for one, other in combinations(losses, 2)) > 1e-5


def test_what_is_trained_is_what_the_command_makes_of_it(tmp_path: Path) -> None:
    """With the defaults of both: the base model teaches, the rate falls and the best state counts, each alpha for
    itself. A rate that destroys gives back what came.
    """
    usual = {"teachers": None, "train": None, "methods": "mean"}
    converted = tmp_path / "converted"
    command("gqa-convert", "-q", "--groups", 1, "--method", "mean", "-o", converted, place() / "model")
    for rate in (3e-3, 30.0):
        trained, how = tmp_path / f"trained-{rate:g}", {"batch_size": 4, "context": 64, "learning_rate": rate}
        plain, early, late = measured(tmp_path / f"study-{rate:g}", learning_rate=rate, **usual)[1:]
        told = {(row["train"], row["teacher"], row["options"]["schedule"]) for row in (plain, early, late)}
        assert told == {("all", "source", "linear")}
        given = words_for(converted, place() / "train.jsonl", trained, alpha=0.1, **how)
        command("gqa-uptrain", *given, "--heldout", place() / "heldout.jsonl")
        assert early["loss"] == pytest.approx(evaluated(trained)[0]["quality"]["nats_per_token"], abs=1e-6)
        assert 0 == plain["train_tokens"] < early["train_tokens"] < late["train_tokens"]
        assert (early["loss"] == pytest.approx(plain["loss"], abs=1e-6)) == (rate == 30.0)
        assert (early["loss"] == late["loss"]) == (rate == 30.0)


def test_ways_to_train_share_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrated on the study's own data, once; what is untrained is the same for all, what is trained is not."""
    convert, made = ablation.convert_checkpoint, []

    def noting(*given: Any, **options: Any) -> Any:
        made.append(options["method"])
        return convert(*given, **options)

    monkeypatch.setattr(ablation, "convert_checkpoint", noting)
    _, *found = measured(
        tmp_path / "study", methods="calibrated", alphas="0,0.5", train="all,kv", teachers="none,source",
        calibration_tokens=640, calibration_context=64, learning_rate=1e-4,
    )  # fmt: skip
    assert made == ["calibrated"]
    plain, trained = ([row["loss"] for row in found if bool(row["alpha"]) == further] for further in (False, True))
    assert len(plain) == len(trained) == 4
    assert len(set(plain)) == 1
    assert len({*plain, *trained}) == 5
    command(
        "gqa-convert", "-q", "--groups", 1, "--method", "calibrated", "--data", place() / "train.jsonl",
        "--tokens", 640, "--context", 64, "-o", tmp_path / "converted", place() / "model",
    )  # fmt: skip
    expected = evaluated(tmp_path / "converted")[0]["quality"]["nats_per_token"]
    assert plain[0] == pytest.approx(expected, abs=1e-6)


def test_rows_of_the_grid() -> None:
    """As many heads as the source has are one conversion. pandas and datasets read rows as docs say."""
    found = by_cell(study())
    assert [cell.method for cell in found] == ["none", *["mean"] * 3, *["first"] * 3, *["none"] * 2]
    unmerged = found[Cell("none", 4, 0, "all", "none", 0.0)]
    assert unmerged["loss_increase"] == 0
    assert unmerged["kv_bytes_per_token"] == 4 * found[Cell("mean", 1, 0, "all", "none", 0.0)]["kv_bytes_per_token"]
    assert unmerged["decode_tokens_per_second"] > 0
    tokens = [row["train_tokens"] for row in rows(study())[1:4]]
    assert tokens[0] == 0 < tokens[1] < tokens[2]
    frame = pandas.read_json(study() / "results.jsonl", lines=True, precise_float=True)
    dataset = load_dataset("json", data_files=str(study() / "results.jsonl"), split="train")
    for line, (_, read), also in zip(rows(study()), frame.iterrows(), dataset, strict=True):
        there = {name: value for name, value in line.items() if isinstance(value, int | float | str)}
        assert there == {name: read[name] for name in there} == {name: also[name] for name in there}


def test_recall_is_what_the_command_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the source and of a conversion, which finds less; nothing else is asked of either."""
    few_questions(monkeypatch)
    out, converted = tmp_path / "study", tmp_path / "converted"
    how: dict[str, Any] = {"batch_size": None, "context": 128, "alphas": "0"}
    source, found = measured(out, model=SOURCE, methods="mean", groups="4", **how)
    command("gqa-convert", "-q", "--groups", 4, "--method", "mean", "-o", converted, SOURCE)
    expected = evaluated(SOURCE, converted, "--context", 128, "--recall")
    for own, model in zip((source, found), expected, strict=True):
        for one, other in zip(own["recall_by_distance"], model["recall"], strict=True):
            assert one.pop("by_depth") == pytest.approx(other.pop("by_depth"))
            assert one == pytest.approx(other, abs=1e-6)
            if one["kind"] in ("text", "random"):  # at one distance each
                assert own[f"recall_{one['kind']}"] == pytest.approx(other["accuracy"])
        assert own["greedy_tokens"] == pytest.approx(model["greedy"]["tokens"])
        assert own["samples"] == model["samples"]
        assert {"recall_text", "recall_samples", "recall_random", "recall_look_up", "recall_passkey"} <= own.keys()
    assert found["recall_text"] < source["recall_text"] - 0.1
    assert 0 < source["recall_first_reading"] < source["recall_text"]
    html = (out / "report.html").read_text()
    assert "Recall: second copies of the text" in html
    assert f"{found['recall_text']:.1%}" in html
    assert "What the models write" in html
    assert html.count("<h3>mean, 4 KV heads, untrained</h3>") == html.count("<h3>base model</h3>") == 4


# ----------------------------------------------------------------------------------------------------------- grid


def listed(out: Path, says: str = "", **options: Any) -> list[list[str]]:
    """The cells that a dry run lists, as words of a line each; it writes nothing."""
    before = snapshot(out.parent)
    result = ablate(out, **options, dry_run=True)
    assert (result.code, says in result.out + result.err) == (0, True), result
    assert snapshot(out.parent) == before
    lines = [line.split() for line in result.out.splitlines()[2:]]
    return [line for line in lines if line[4:5] in (["source"], ["none"])]


def test_the_grid_that_a_study_has_by_itself(tmp_path: Path) -> None:
    """Methods to choose between and the paper's; a half, a quarter and one of the heads."""
    usual: dict[str, Any] = dict.fromkeys(("methods", "groups", "alphas", "teachers", "train"))
    source, *cells = listed(tmp_path / "study", **usual, batch_size=1)
    assert source[:2] == ["none", "4"]
    assert [(cell[0], cell[1], cell[5]) for cell in cells] == [
        (method, groups, alpha) for groups in ("1", "2")
        for method in ("mean", "first", "aligned", "calibrated", "refined") for alpha in ("0", "0.05")
    ]  # fmt: skip
    assert {(cell[0], cell[3]) for cell in cells} >= {("mean", "all"), ("refined", "attention")}
    assert {cell[4] for cell in cells} == {"source"}


def test_methods_that_a_model_cannot_have(tmp_path: Path) -> None:
    """Are left out of the usual ones, with the reason; those that are asked for are refused."""
    model = tiny_checkpoint(tmp_path / "model", "bitnet", kv_heads=4)
    cells = listed(tmp_path / "study", "without aligned: ", model=model, methods=None, quiet=None)
    assert {cell[0] for cell in cells} == {"none", "mean", "first", "refined"}
    result = ablate(tmp_path / "study", model=model, methods="mean,aligned", dry_run=True)
    assert (result.code, "aligned" in result.err) == (2, True)


@pytest.mark.parametrize(("heads", "alphas", "groups"), [
    (8, (0, 0.1), (1, 2, 4, 8)), (8, (0,), (1, 2, 4)), (32, (0.1,), (1, 8, 16, 32)), (3, (0, 1), (1, 3)),
    (9, (0,), (1, 3)), (1, (0,), (1,)),
])  # fmt: skip
def test_the_usual_numbers_of_heads(heads: int, alphas: tuple[float, ...], groups: tuple[int, ...]) -> None:
    """With the control of training where there is one without a teacher."""
    assert Grid((), None, alphas, teachers=("source", "none")).settled(heads) == groups
    assert Grid((), None, alphas).settled(heads) == (tuple(count for count in groups if count < heads) or (1,))
    assert Grid((), (3, 5), alphas).settled(heads) == (3, 5)


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more methods only the new cells are measured; heads whose decoding was timed are not timed again."""
    assert len(listed(tmp_path / "study", "7 of 7 cells to measure")) == 7
    out = copied(tmp_path)
    before = snapshot(out)
    with monkeypatch.context() as patched:
        patched.setattr(ablation._Runner, "_measure", lambda *given: pytest.fail("measured again"))
        measured(out, **SAME)
        assert snapshot(out)["results.jsonl"] == before["results.jsonl"]
    more = SAME | {"methods": "mean,random", "groups": "1", "alphas": "0"}
    done = [cell[-1] == "done" for cell in listed(out, "1 of 3 cells to measure", **more)]
    assert done == [True, True, False]
    monkeypatch.setattr(ablation.evaluate, "time_decoding", lambda *given: pytest.fail("timed again"))
    grown = measured(out, **more | {"methods": "random", "seeds": 2})
    assert grown[:9] == rows(study())
    assert [(row["method"], row["seed"]) for row in grown[9:]] == [("random", 0), ("random", 1)]
    assert grown[9]["loss"] != grown[10]["loss"]
    assert grown[9]["decode_seconds_per_token"] == grown[1]["decode_seconds_per_token"]


# ------------------------------------------------------------------------------------------------ stop, continue

_ENDED = """
from gqa.eval.study.directory import Rows
add = Rows.add
def torn(self, row):
    add(self, row)
    with self._path.open("a") as stream:
        stream.write('{"method": "first", "gro')
Rows.add = torn
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)])
def test_a_study_that_is_ended_continues_to_identical_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs, number: int, code: int
) -> None:
    """In the middle of a training, with half a line of the next row written: where it is stopped the training goes on
    from its state, where it is killed it starts anew.
    """
    out, how, train, resumed = tmp_path / "study", {"methods": "mean"}, ablation.uptrain, []
    ended = runs.run(*words(out, **how), program="ablate", before=_ENDED + f"kill_at(3, {int(number)})")
    assert ended.code == code
    assert number == signal.SIGKILL or ended.err == "gqa-ablate: stopped; the same command continues\n"
    *before, torn = (out / "results.jsonl").read_text().splitlines()
    assert torn.startswith('{"method": "first", "gro')
    before = [json.loads(line) for line in before]

    def noting(setup: Any) -> Any:
        resumed.append(setup.options.resume)
        return train(setup)

    monkeypatch.setattr(ablation, "uptrain", noting)
    assert before == measured(out, **how)[: len(before)]  # not measured again: the seconds are the same too
    assert resumed[0] == (number == signal.SIGTERM)
    assert untimed(out) == untimed(study())[:4]
    assert not (out / ".work").exists()


# ---------------------------------------------------------------------------------------------------------- failures


def test_a_failed_cell_is_a_row_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert, train, tried = ablation.convert_checkpoint, ablation.uptrain, []

    def failing(*given: Any, **options: Any) -> Any:
        tried.append(options["method"])
        if options["method"] == "mean":
            raise RuntimeError("the disk\nis on fire")
        return convert(*given, **options)

    def diverging(setup: Any) -> Any:
        if setup.options.alpha == 0.3:
            raise ablation.DivergedError("loss was not finite")
        return train(setup)

    with monkeypatch.context() as patched:
        patched.setattr(ablation, "convert_checkpoint", failing)
        patched.setattr(ablation, "uptrain", diverging)
        result = ablate(tmp_path / "study")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "4 of 7 cells failed" in result.err
    assert tried == ["mean", "first"]  # once for all cells
    told = [row["error"] for row in rows(tmp_path / "study")]
    assert told == [None, *["RuntimeError: the disk is on fire"] * 3, None, None, "loss was not finite"]
    assert "the disk is on fire" in (tmp_path / "study" / "report.html").read_text()
    kept = [row for row in rows(tmp_path / "study") if not row["error"]]
    again = measured(tmp_path / "study", device="cpu")
    assert [row for row in again if row in kept] == kept
    latest = {str(Cell.of(row)): row for row in untimed(tmp_path / "study")}
    assert [*latest.values()] == [row for row in untimed(study()) if str(Cell.of(row)) in latest]


def test_training_is_where_the_rest_of_a_study_is() -> None:
    for device in ("cpu", None):
        options = AblateOptions(Path("study"), "model", device=device)
        cell = Cell("mean", 1, 0, "all", "none", 0.1)
        assert options.training_of(cell, Path("place")).device == device
        assert options.maps_of(cell).device == "cpu"
