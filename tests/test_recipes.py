"""`gqa run`: what a recipe says is done once, in order, checked before it starts; records are recipes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import Result, run
from test_families import all_tensors
from training import tiny_checkpoint, write_corpus

from gqa.checkpoint.provenance import asked
from gqa.convert.cli import command as convert
from gqa.recipe import make_steps, read_recipe

ROOT = Path(__file__).parent.parent
UPTRAIN = {"data": "text.jsonl", "steps": 2, "context": 32, "batch-size": 2, "heldout-fraction": 0.2}
STEPS: dict[str, dict[str, Any]] = {
    "convert": {"model": "model", "groups": 1, "method": "random", "seed": 3},
    "uptrain": UPTRAIN,
    "eval": {"data": "text.jsonl", "context": 32, "tokens": 200, "recall": False},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two key/value heads and some text, left as they are."""
    directory = tmp_path_factory.mktemp("recipes")
    tiny_checkpoint(directory / "model")
    write_corpus(directory / "text.jsonl", 6)
    return directory


@pytest.fixture(autouse=True)
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own that has both."""
    for name in ("model", "text.jsonl"):
        (tmp_path / name).symlink_to(place / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(steps: dict[str, Any] | str) -> str:
    Path("r.yaml").write_text(steps if isinstance(steps, str) else yaml.safe_dump(steps, sort_keys=False))
    return "r.yaml"


def done(*words: object) -> Result:
    result = run("run", *words, program="gqa")
    assert result.code == 0, result.err
    return result


def refused(*words: object) -> str:
    result = run("run", *words, program="gqa")
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1), result
    assert result.err.startswith("gqa run: ")
    return result.err


def same(one: Path, other: Path) -> bool:
    """To the bit."""
    first, second = all_tensors(one), all_tensors(other)
    return first.keys() == second.keys() and all(bool((first[name] == second[name]).all()) for name in first)


def test_steps_follow_each_other_and_are_done_once(here: Path) -> None:
    """As the commands one by one do it; a second run finds everything there."""
    told = done(write(STEPS)).err
    assert [line.split(":")[0] for line in told.splitlines() if line.startswith("recipe ")] == [
        f"recipe      {n} of 3" for n in (1, 2, 3)
    ]
    assert run("model", "-g", 1, "--method", "random", "--seed", 3, "-o", "by-hand").code == 0
    assert same(here / "r/converted", here / "by-hand")
    words = [f"--{name}={value}" for name, value in UPTRAIN.items()]
    assert run("by-hand", *words, "-q", "-o", "trained", program="gqa-uptrain").code == 0
    assert same(here / "r/uptrained", here / "trained")
    assert not same(here / "r/uptrained", here / "r/converted")
    results = json.loads((here / "r/report/results.json").read_text())
    assert [model["name"] for model in results["models"]] == ["model", "converted", "uptrained"]
    before = {path: path.stat().st_mtime_ns for path in (here / "r").rglob("*")}
    assert done("r.yaml").err.count("is there") == 3
    assert {path: path.stat().st_mtime_ns for path in (here / "r").rglob("*")} == before


def test_a_changed_step_is_refused_and_replaced_with_all_after_it(here: Path) -> None:
    steps = {name: dict(STEPS[name]) for name in ("convert", "uptrain")}
    done(write(steps))
    old = json.loads((here / "r/uptrained/gqa_uptraining.json").read_text())
    steps["convert"]["seed"] = 4
    said = refused(write(steps))
    assert "r/converted holds a result of another recipe (seed: 3 -> 4); give --overwrite to replace it" in said
    done("r.yaml", "--overwrite", "-q")
    assert json.loads((here / "r/uptrained/gqa_uptraining.json").read_text())["created"] >= old["created"]
    assert run("model", "-g", 1, "--method", "random", "--seed", 4, "-o", "by-hand").code == 0
    assert same(here / "r/converted", here / "by-hand")
    steps["uptrain"]["seed"] = 1
    assert "r/uptrained holds a result of another recipe (seed: None -> 1)" in refused(write(steps))


def test_records_are_recipes(here: Path) -> None:
    """Of a conversion that reads text, and of a training: run again they give the same to the bit."""
    words = ("--method", "calibrated", "--data", "self:256", "--context", 16, "--ridge", 0.123456789)
    assert run("model", "--kv-heads", 1, *words, "--dtype", "bfloat16", "-o", "made", "-q").code == 0
    record = json.loads((here / "made/gqa_conversion.json").read_text())
    assert record["recipe"] == {
        "convert": {
            "groups": 1, "method": "calibrated", "data": ["self:256"], "context": 16, "ridge": 0.123456789,
            "dtype": "bfloat16", "model": "model",
        }
    }  # fmt: skip
    done("made/gqa_conversion.json", "-o", "again", "-q")
    assert same(here / "made", here / "again/converted")
    words = [f"--{name}={value}" for name, value in UPTRAIN.items()]
    assert run(here / "made", *words, "--lr", "1e-3", "-q", "-o", "trained", program="gqa-uptrain").code == 0
    done("trained/gqa_uptraining.json", "-o", "again", "-q")
    assert same(here / "trained", here / "again/uptrained")
    assert not same(here / "trained", here / "made")
    for record in ("made/gqa_conversion.json", "trained/gqa_uptraining.json"):
        assert str(here) not in json.dumps(json.loads((here / record).read_text())["recipe"])


def test_a_conversion_from_python_names_no_command(here: Path) -> None:
    """Nor one inside of somebody else's command, whose options are theirs."""
    import click

    from gqa.convert import convert_checkpoint

    @click.command()
    @click.option("--password")
    def theirs(password: str) -> None:
        convert_checkpoint("model", 1, method="mean", out="made")

    theirs.main(["--password", "secret"], standalone_mode=False)
    assert json.loads((here / "made/gqa_conversion.json").read_text())["recipe"] == {}


def test_a_dry_run_checks_all_and_writes_nothing(here: Path) -> None:
    before = sorted(here.rglob("*"))
    result = done(write(STEPS), "--dry-run")
    assert "2 -> 1 key/value" in result.out
    assert "steps       2" in result.out
    assert "recipe      3 of 3: gqa eval" in result.err
    assert result.out.count("time        about") == 2
    assert re.fullmatch(r"recipe      all of it: about \d+ s here, \S+ \S+ of disk", result.err.splitlines()[-1])
    assert sorted(here.rglob("*")) == sorted([*before, here / "r.yaml"])


def test_a_dry_run_adds_up_what_the_steps_take(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe without evaluation takes less, and one whose first step is done too. The base model is the teacher."""
    for module in ("gqa.convert.estimate", "gqa.uptrain.summary", "gqa.eval.estimate"):
        monkeypatch.setattr(f"{module}.products_a_second", lambda device, width: 1e5)

    def seconds(steps: dict[str, Any]) -> float:
        told = done(write(steps), "--dry-run").err.splitlines()[-1].removeprefix("recipe      all of it: about ")
        number, unit = told.split(" here")[0].split()
        return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]

    slow = STEPS | {"convert": {"model": "model", "groups": 1, "method": "calibrated"}}
    whole = seconds(slow)
    parts = [seconds({"convert": slow["convert"]})]
    parts += [seconds({name: STEPS[name] | {"model": "model"}}) for name in ("uptrain",)]
    parts += [seconds({"eval": STEPS["eval"] | {"baseline": "model", "models": ["a", "b"]}})]
    assert min(parts) > 1
    assert sum(parts) < 1.3 * whole
    assert whole < 1.3 * sum(parts)
    uptrain = UPTRAIN | {"data": "self:1K", "heldout-fraction": 0}
    assert "teacher     model" in done(write(STEPS | {"uptrain": uptrain}), "--dry-run").out


def test_a_dry_run_looks_at_the_model_that_a_step_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the hub too; in place of what is not made yet, at what it is made of, whichever step made it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    named = STEPS | {"uptrain": UPTRAIN | {"model": "lab/other"}}
    told = run("run", write(named), "--dry-run", program="gqa")
    assert (told.code, "gqa run: there is no directory lab/other" in told.err) == (2, True), told
    recipe = {"eval": STEPS["eval"] | {"baseline": "model"}, "convert": STEPS["convert"], "uptrain": UPTRAIN}
    assert "steps       2" in done(write(recipe), "--dry-run").out


def test_a_training_that_was_stopped_is_continued(here: Path) -> None:
    """From its last state; one that was killed before it had any is begun again."""
    (here / "r/uptrained-state").mkdir(parents=True)
    (here / "r/uptrained-state/metrics.jsonl").write_text("{}\n")
    first = done(write({"uptrain": UPTRAIN | {"model": "model", "save-every": 1, "keep-state": True}}))
    assert "--resume" not in first.err
    shutil.rmtree(here / "r/uptrained")
    assert "--resume" in done("r.yaml").err
    assert (here / "r/uptrained/config.json").is_file()


def test_what_a_step_says_of_itself_counts(here: Path) -> None:
    """That it is quiet, and that it may replace what is there: its own result, not that of another step."""
    quiet = {name: STEPS[name] | {"quiet": True} for name in ("convert", "uptrain")}
    assert done(write(quiet)).out == ""
    assert done(write({"eval": STEPS["eval"] | {"baseline": "model", "quiet": True}}), "--dry-run").out == ""
    changed = STEPS["convert"] | {"seed": 4, "overwrite": True, "quiet": True}
    assert "r/uptrained holds a result of another recipe" in refused(write(quiet | {"convert": changed}))
    done(write({"convert": changed}))
    assert json.loads((here / "r/converted/gqa_conversion.json").read_text())["recipe"]["convert"]["seed"] == 4


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown step": ({"convrt": {}}, "there is no step convrt; did you mean convert?"),
    "far step": ({"serve": {}}, "there is no step serve; choose convert, uptrain, eval"),
    "unknown option": ({"convert": {"model": "model", "group": 2}}, "no option group; did you mean groups?"),
    "old name": ({"convert": {"model": "model", "kv-heads": 1}}, "convert has no option kv-heads"),
    "late": (STEPS | {"eval": {"dta": "x"}}, "eval has no option dta; did you mean data?"),
    "value": ({"convert": {"model": "model", "groups": "two"}}, "convert: Invalid value for '-g' / '--groups'"),
    "choice": (STEPS | {"convert": {"model": "model", "groups": 1, "method": "refind"}}, "did you mean refined?"),
    "flag": ({"convert": {"model": "model", "groups": 1, "checksums": 3}}, "3 is neither True nor False"),
    "no groups": ({"convert": {"model": "model"}}, "convert: give --groups G, or --kv-budget SHARE"),
    "no model": ({"uptrain": UPTRAIN}, "uptrain: Missing argument 'MODEL'"),
    "no options": ({"convert": 3}, "convert is 3; give options as NAME: VALUE"),
    "a list": ([1], "is no recipe; give steps (convert, uptrain, eval), each with its options"),
    "nothing": ({}, "is no recipe"),
    "option twice": ("convert: {groups: 1, groups: 2}", "groups is there twice"),
    "step twice": ("convert: {}\nconvert: {}", "convert is there twice"),
    "in itself": ("convert: &a {model: *a}", "'MODEL': {'model': {...}} are options, and a value is meant"),
    "options": ({"convert": {"model": "model", "groups": {"heads": 2}}}, "'--groups': {'heads': 2} are options, and a"),
    "deep": ("convert: " + "[" * 3000 + "]" * 3000, "r.yaml is nested too deeply; give options as"),
    "broken": ("convert: [", "cannot be read"),
    "binary": ("a: \x00", "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_before_anything_starts(here: Path, case: str) -> None:
    recipe, message = REFUSED[case]
    assert message in refused(write(recipe))
    assert not (here / "r").exists()


def test_records_of_heads_by_layer() -> None:
    words = ["model", "--groups", "1,2", "--method", "mean"]
    with convert.make_context("gqa-convert", words) as ctx:
        recipe = json.loads(json.dumps(asked(ctx)))
    assert recipe == {"convert": {"groups": [1, 2], "method": "mean", "model": "model"}}
    (step,) = make_steps(recipe, Path("r"), "r.json")
    assert "--groups=1,2" in step.words()


def test_what_is_trained_is_what_was_converted_last(here: Path) -> None:
    """Not the report of a step between; an output of nothing is none."""
    recipe = {"convert": STEPS["convert"] | {"output": None}, "eval": STEPS["eval"], "uptrain": UPTRAIN}
    _, report, trained = make_steps(recipe, Path("r"), "r.yaml")
    assert (report.options["baseline"], report.options["models"]) == ("model", ["r/converted"])
    assert (trained.options["model"], str(trained.out)) == ("r/converted", "r/uptrained")


def test_a_step_that_fails_stops_the_run(here: Path) -> None:
    result = run("run", write(STEPS | {"uptrain": UPTRAIN | {"context": 999}}), program="gqa")
    assert result.code == 2
    assert "gqa-uptrain: --context 999 is more than" in result.err
    assert (here / "r/converted").is_dir()
    assert not (here / "r/report").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples/recipes").iterdir()), ids=lambda path: path.name)
def test_recipes_that_come_along_are_understood(path: Path) -> None:
    steps = make_steps(read_recipe(path), Path("out"), path.name)
    assert [step.name for step in steps][-1] == "eval"
    assert steps[-1].options["models"][-1] == str(steps[-2].options["output"])
