"""Work that is done is never lost: whatever goes wrong after it,
the same command continues there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import edit_json, load, snapshot
from support.faults import (
    after,
    copy_after,
    fill_disk_after,
    kill_at,
    kill_save_after,
    make_file_after,
    save_at_every_step,
    train_nothing,
)
from support.patches import forbid_training
from support.processes import small_disk
from support.training import (
    Runs,
    difference,
    fresh_accelerator,
    metrics,
    options_for,
    trained,
)

from gqa.convert.api import convert_checkpoint
from gqa.core.errors import OutputError, RefusedError, StoppedError, UnfinishedError
from gqa.uptrain.log import Log
from gqa.uptrain.run import uptrain
from gqa.uptrain.setup import prepare
from gqa.uptrain.state import States

STEPS = 3


def weight_bytes(out: Path) -> dict[str, bytes]:
    """The contents of all files that have neither times nor the name of the output in them."""
    return {
        path.name: path.read_bytes()
        for path in sorted(out.iterdir())
        if not path.name.startswith(("gqa_", "READ"))
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a run that nothing disturbed."""
    from support.training import shared_runs

    out = tmp_path_factory.mktemp("straight") / "out"
    runs = shared_runs()
    runs.finish(*runs.words(out, steps=STEPS))
    return out


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of a run that was stopped before its last step."""
    from support.training import shared_runs

    out = tmp_path_factory.mktemp("stopped") / "out"
    runs = shared_runs()
    done = runs.run(
        *runs.words(out, steps=STEPS), before=[partial(kill_at, STEPS - 1, int(signal.SIGTERM))]
    )
    assert done.code == 143, done.err
    return out


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.scale)])
def test_killed_at_every_write_of_the_last_phase_ends_in_the_same_bytes(
    runs: Runs, tmp_path: Path, straight: Path, stopped: Path, stride: int
) -> None:
    """From the last step on, which is taken, to the end.

    Afterwards nothing is left but the result. Every ninth write, and every single one with `make
    test-scale`.
    """
    expected, trained_once = weight_bytes(straight), 0
    for change in range(1, 400, stride):
        place = tmp_path / str(change)
        place.mkdir()
        out = place / "out"
        shutil.copytree(f"{stopped}-state", f"{out}-state")
        words = runs.words(out, steps=STEPS)
        killed = runs.run(*words, before=[partial(kill_save_after, STEPS, change)])
        if killed.code == 0:
            break
        assert killed.code == -signal.SIGKILL, killed.err

        is_trained = Path(f"{out}-state", "trained").exists()
        trained_once += is_trained
        if not out.exists():
            runs.finish(*words, before=[train_nothing] if is_trained else [])
            assert sorted(path.name for path in place.iterdir()) == ["out"]
        assert weight_bytes(out) == expected
        shutil.rmtree(place)
    assert change > 20
    assert trained_once > 10 / stride


def test_a_result_whose_place_is_taken_is_written_elsewhere_without_training(
    runs: Runs, tmp_path: Path, straight: Path
) -> None:
    """The run is found by what it is. What took the place stays."""
    out, other = tmp_path / "out", tmp_path / "deep" / "other"
    make_file = partial(make_file_after, STEPS, str(out))
    done = runs.run(*runs.words(out, steps=STEPS), before=[make_file])
    state = tmp_path / "out-state"
    done.expect(1, err_lines=1)
    assert f"{out} exists and is not a directory" in done.err
    assert (
        f"nothing is lost: the trained weights are in {state}/trained; the same command, also with"
        in done.err
    )
    assert out.read_text() == "mine"

    again = runs.finish(*runs.words(other, steps=STEPS, quiet=False), before=[train_nothing])
    assert f"continues   training is done, in {state}" in again.out
    assert "\noutput      " in again.out
    assert weight_bytes(other) == weight_bytes(straight)
    assert metrics(other / "gqa_uptraining.jsonl") == metrics(straight / "gqa_uptraining.jsonl")
    record = json.loads((other / "gqa_uptraining.json").read_text())
    assert record["options"]["output"] == "other"
    assert not state.exists()
    # Of other options: begins anew
    runs.finish(*runs.words(tmp_path / "third", steps=STEPS, seed=1))
    assert difference(tmp_path / "third", other) > 0


def test_trained_weights_replace_what_is_at_the_output_without_training(
    runs: Runs, tmp_path: Path, straight: Path
) -> None:
    """As the failed run advises: --overwrite is then about OUT, not about the training."""
    out = tmp_path / "out"
    copy = partial(copy_after, STEPS, str(straight), str(out))
    done = runs.run(*runs.words(out, steps=STEPS), before=[copy])
    assert done.code == 1, done.err
    assert "or replace it with --overwrite" in done.err

    runs.finish(*runs.words(out, steps=STEPS, overwrite=True), before=[train_nothing])
    assert weight_bytes(out) == weight_bytes(straight)


def test_a_disk_that_is_full_when_training_ends(runs: Runs, tmp_path: Path, straight: Path) -> None:
    """The trained weights are then in the cache, and -o on another disk writes them without
    training.
    """
    with small_disk(tmp_path / "disk", "4m") as disk:
        words = runs.words(disk / "out", steps=STEPS)
        done = runs.run(*words, before=[partial(fill_disk_after, STEPS, str(disk))])
        assert done.code == 1, done.err
        assert "the result could not be written: " in done.err
        assert "No space left on device" in done.err
        assert "nothing is lost: the trained weights are in" in done.err
        assert not (disk / "out").exists()
    out = tmp_path / "out"
    runs.finish(*runs.words(out, steps=STEPS), before=[train_nothing])
    assert weight_bytes(out) == weight_bytes(straight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_space_for_the_trained_weights_is_needed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """Room for the result alone is not enough: what is trained is saved before it."""
    run = prepare(options_for(model_of(tmp_path), tmp_path / "out"))
    size = run.checkpoint.nbytes
    usage = shutil.disk_usage(tmp_path)
    # A disk that the result fits on, and nothing else
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size + 10))
    forbid_training(monkeypatch)
    with pytest.raises(OutputError, match="and the trained weights, which are saved before it"):
        uptrain(run)


def test_states_elsewhere_count_the_room_of_the_disk_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is found on a full disk writes its result to another one."""
    full = tmp_path / "full" / "out-state"
    roomy = tmp_path / "roomy"
    full.mkdir(parents=True)
    roomy.mkdir()
    stat = Path.stat

    def stat_of_two_disks(path: Path, **options: Any) -> Any:
        found = stat(path, **options)
        fields = {name: getattr(found, name) for name in ("st_mode", "st_uid", "st_size")}
        return SimpleNamespace(**fields, st_dev=int(path.is_relative_to(roomy)))

    def usage(path: Path) -> Any:
        return SimpleNamespace(free=1000 if Path(path).is_relative_to(roomy) else 20)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat_of_two_disks)
        patch.setattr(Path, "is_dir", lambda path: os.path.isdir(path))
        patch.setattr(shutil, "disk_usage", usage)
        States(full, roomy / "out").check_space(10, 900)
        with pytest.raises(OutputError, match="no space left"):
            States(full, tmp_path / "full" / "out").check_space(10, 900)


def model_of(tmp_path: Path) -> Path:
    from support.training import material

    return Path(shutil.copytree(material() / "model", tmp_path / "model"))


def test_a_damaged_file_of_a_stream_loses_no_step(runs: Runs, tmp_path: Path) -> None:
    """Once it is repaired, the run continues and is the same as if it had never been damaged."""
    text = tmp_path / "text"
    text.mkdir()
    rows = [
        json.dumps({"text": f"line {number} of a text that is read"}) + "\n"
        for number in range(300)
    ]
    (text / "a.jsonl").write_text("".join(rows[:200]))
    last = text / "b.jsonl"
    last.write_text("".join(rows[200:]))
    whole = last.read_text()
    last.write_text(whole.splitlines(keepends=True)[0] + '{"text": "cut off')
    options: dict[str, Any] = {"data": text, "streaming": True, "steps": 55, "batch_size": 1}
    out = tmp_path / "out"
    done = runs.run(*runs.words(out, **options))
    done.expect(1, err_lines=1)
    assert "line 2 of " in done.err
    assert "b.jsonl is not JSON (" in done.err
    assert (
        f"steps before it are not lost: they are saved in {out}-state, and the same command "
        "continues" in done.err
    )
    (state,) = Path(f"{out}-state").glob("step-*")
    before = metrics(state.parent / "metrics.jsonl")
    assert len(before) == int(state.name[-8:]) > 3

    last.write_text(whole)
    runs.finish(*runs.words(out, **options))
    runs.finish(*runs.words(tmp_path / "straight", **options))
    records = metrics(out / "gqa_uptraining.jsonl")
    assert records[: len(before)] == before
    assert records == metrics(tmp_path / "straight" / "gqa_uptraining.jsonl")
    assert weight_bytes(out) == weight_bytes(tmp_path / "straight")


def test_states_are_saved_by_time_where_nothing_else_is_asked_for(
    runs: Runs, tmp_path: Path, straight: Path
) -> None:
    """The last one stays while the run lasts, and none after it."""
    out = tmp_path / "out"
    words = runs.words(out, steps=STEPS)
    killed = runs.run(*words, before=[save_at_every_step, partial(kill_at, STEPS)])
    assert killed.code == -signal.SIGKILL
    assert [path.name for path in Path(f"{out}-state").glob("step-*")] == [f"step-{STEPS - 1:08d}"]
    done = runs.finish(*runs.words(out, steps=STEPS, quiet=False))
    assert f"continues   after step {STEPS - 1}" in done.out
    assert weight_bytes(out) == weight_bytes(straight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


RECORDS: dict[str, Any] = {
    "a NUL": {"path": "a\0b"},
    "half of a surrogate pair": {"path": "\ud800"},
    "a list": {"path": ["a"]},
    "a very long path": {"path": "a/" * 3000},
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.training import material

    return convert_checkpoint(
        material() / "teacher", 2, tmp_path_factory.mktemp("c") / "converted", method="mean"
    ).out


@pytest.mark.parametrize("name", [*RECORDS, "nested 520 deep"])
def test_a_conversion_record_that_names_no_path_stops_no_training(
    name: str, tmp_path: Path, converted: Path, alone: None
) -> None:
    model = Path(shutil.copytree(converted, tmp_path / "model"))
    path = model / "gqa_conversion.json"
    if name in RECORDS:
        edit_json(path, lambda record: record["source"].update(RECORDS[name]))
    else:
        deep = "[" * 520 + "]" * 520
        path.write_text(f'{path.read_text().rstrip()[:-1]}, "more": {deep}}}')
    trained(options_for(model, tmp_path / "out", teacher="none"))
    written = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())
    # Copied as they are
    if name not in ("nested 520 deep", "a very long path", "half of a surrogate pair"):
        assert written["source"]["path"] is None
    assert load(tmp_path / "out")


def test_a_user_without_a_home_directory(
    tmp_path: Path, converted: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    # As for a user without an entry in the password file
    monkeypatch.setattr(Path, "home", no_home)
    trained(options_for(converted, tmp_path / "out", teacher="none"))
    assert json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())["source"]["path"]


def test_what_a_card_cannot_carry_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """Whatever a library raises about it."""

    def fail(*given: Any, **options: Any) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    run = prepare(options_for(model_of(tmp_path), tmp_path / "out"))
    # A library that fails on a card in a way that is not ours to choose
    monkeypatch.setattr("gqa.uptrain.card.format_card", fail)
    forbid_training(monkeypatch)
    with pytest.raises(
        ValueError, match=r"cannot be carried into the result .*; remove gqa_conversion\.json"
    ):
        uptrain(run)


def test_a_mistake_of_ours_after_training_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    options = options_for(model_of(tmp_path), tmp_path / "out")
    run = prepare(options)
    with monkeypatch.context() as patch:
        # A mistake of ours, after training
        patch.setattr("gqa.uptrain.export.TrainedCheckpoint.verify", lambda *given: 1 / 0)
        with pytest.raises(
            UnfinishedError, match=r"division by zero\. But nothing is lost: the trained weights"
        ):
            uptrain(run)
    forbid_training(monkeypatch)
    uptrain(prepare(options))
    assert load(tmp_path / "out")


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM for this process when a step is recorded."""
    monkeypatch.setattr(Log, "step", Log.step)  # `after` replaces it, and this puts it back
    after(
        Log,
        "step",
        lambda log, progress, *numbers: (
            progress.step == step and os.kill(os.getpid(), signal.SIGTERM)
        ),
    )


def test_a_second_run_that_was_prepared_meanwhile_continues_what_the_first_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """It looked for states when there were none, and got the lock when there was one."""
    options = options_for(model_of(tmp_path), tmp_path / "out", steps=4)
    first = prepare(options)
    with fresh_accelerator():
        second = prepare(options)
        assert second.continues_from is None
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            with pytest.raises(StoppedError, match="step 2 is saved"):
                uptrain(first)
        (state,) = Path(tmp_path, "out-state").glob("step-*")
        steps = []
        with monkeypatch.context() as patch:
            # `after` replaces it, and this puts it back
            patch.setattr(Log, "step", Log.step)
            after(
                Log,
                "step",
                lambda log, progress, *numbers: steps.append((progress.step, state.exists())),
            )
            uptrain(second)
    assert steps == [(3, True), (4, True)]
    assert len(metrics(tmp_path / "out" / "gqa_uptraining.jsonl")) == 4


def test_an_output_that_another_run_has_written_meanwhile_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    options = options_for(model_of(tmp_path), tmp_path / "out")
    first = prepare(options)
    with fresh_accelerator():
        second = prepare(options)
        uptrain(first)
        forbid_training(monkeypatch)
        with pytest.raises(ValueError, match="out exists; choose another directory"):
            uptrain(second)


def test_a_model_that_is_gone_when_training_ends_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """Once it is back, the same command writes the result without training again."""
    model = model_of(tmp_path)
    away = tmp_path / "away"
    options = options_for(model, tmp_path / "out")
    run = prepare(options)
    with monkeypatch.context() as patch:
        # `after` replaces it, and this puts it back
        patch.setattr(Log, "step", Log.step)
        after(
            Log,
            "step",
            lambda log, progress, *numbers: progress.step == options.steps and model.rename(away),
        )
        with pytest.raises(UnfinishedError, match="But nothing is lost: the trained weights are"):
            uptrain(run)

    away.rename(model)
    forbid_training(monkeypatch)
    with fresh_accelerator():
        uptrain(prepare(options))
    assert difference(tmp_path / "out", model) > 0


def test_trained_weights_that_another_run_has_written_meanwhile_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """Its states stay with --keep-state, so that the run looks like one that was stopped."""
    options = options_for(model_of(tmp_path), tmp_path / "out", save_every=1, keep_state=True)
    with monkeypatch.context() as patch:
        # The result cannot be written
        patch.setattr("gqa.uptrain.export.TrainedCheckpoint.verify", lambda *given: 1 / 0)
        with pytest.raises(UnfinishedError):
            uptrain(prepare(options))

    forbid_training(monkeypatch)
    with fresh_accelerator():
        second = prepare(replace(options, output=tmp_path / "second"))
        uptrain(prepare(options))
        with pytest.raises(RefusedError, match="another run of the same command ended while"):
            uptrain(second)


@pytest.mark.parametrize(
    "name", ["step-00000001", "step-00000001.partial", "trained", "metrics.jsonl"]
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_states_of_somebody_else_are_left_alone(
    runs: Runs, tmp_path: Path, name: str, overwrite: bool
) -> None:
    """Also with --overwrite. Other names may be there."""
    foreign = tmp_path / "out-state" / name
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("mine")
    before = snapshot(tmp_path)
    done = runs.run(*runs.words(tmp_path / "out", steps=1, overwrite=overwrite))
    assert done.code == 2
    assert snapshot(tmp_path) == before
