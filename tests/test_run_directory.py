"""The directory of a run's unfinished work: whose it is, what is left alone, what differs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gqa.core import shelves
from gqa.core.errors import RefusedError
from gqa.core.run_directory import (
    MARK,
    RunDirectory,
    differences,
    fingerprint,
    read_mark,
    refuse_another,
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "below" / "work", "tests", "a run")


def test_a_claimed_directory_is_ours_and_says_for_which_run(directory: RunDirectory) -> None:
    assert not directory.is_ours()
    directory.claim()
    assert directory.is_ours()
    assert read_mark(directory.path) == {"tool": "gqa", "purpose": "tests", "run": "a run"}


def test_another_run_of_the_same_purpose_takes_a_directory_over(directory: RunDirectory) -> None:
    directory.claim()
    (directory.path / "work.txt").write_text("of the first")
    RunDirectory(directory.path, "tests", "another run").claim()
    mark = read_mark(directory.path)
    assert mark is not None
    assert mark["run"] == "another run"
    assert (directory.path / "work.txt").exists()


@pytest.mark.parametrize("made_by", ["somebody", "another purpose"])
def test_a_directory_that_is_not_ours_is_refused_and_left_alone(
    directory: RunDirectory, made_by: str
) -> None:
    if made_by == "another purpose":
        RunDirectory(directory.path, "something else").claim()
    else:
        directory.path.mkdir(parents=True)
    (directory.path / "thesis.txt").write_text("mine")

    with pytest.raises(
        RefusedError, match=r"contains thesis\.txt, which no run of gqa has written"
    ):
        directory.claim()
    with pytest.raises(RefusedError, match="was not left by a run of gqa; move it away"):
        directory.refuse_foreign()
    with pytest.raises(RefusedError, match="was not created by gqa"):
        directory.remove()
    assert (directory.path / "thesis.txt").read_text() == "mine"


def test_only_names_of_ours_matter_in_a_shared_directory(directory: RunDirectory) -> None:
    shared = RunDirectory(directory.path, "tests", ours=("step-*",))
    shared.path.mkdir(parents=True)
    (shared.path / "thesis.txt").write_text("mine")
    with shared.held("busy"):
        (shared.path / "step-1").mkdir()
        assert [path.name for path in shared.contents()] == ["step-1"]
        (shared.path / "step-1").rmdir()
    assert [path.name for path in shared.path.iterdir()] == ["thesis.txt"]

    (shared.path / "step-2").write_text("mine")
    with pytest.raises(RefusedError, match="contains step-2"):
        shared.claim()


@pytest.mark.parametrize("left", [False, True])
def test_a_directory_goes_with_the_last_of_its_work(directory: RunDirectory, left: bool) -> None:
    with directory.held("busy"):
        (directory.path / "work.txt").write_text("half")
        if not left:
            (directory.path / "work.txt").unlink()
    assert directory.path.exists() == left
    assert directory.is_ours() == left


def test_a_run_that_fails_leaves_its_work(directory: RunDirectory) -> None:
    def fail() -> None:
        with directory.held("busy"):
            (directory.path / "work.txt").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert directory.is_ours()
    directory.remove()
    assert not directory.path.exists()


def test_two_runs_cannot_hold_the_same_directory(directory: RunDirectory) -> None:
    other = RunDirectory(directory.path, "tests", "a run")
    with (
        directory.held("busy"),
        pytest.raises(RefusedError, match="somebody works there"),
        other.held("somebody works there"),
    ):
        pytest.fail("it is held twice")


@pytest.mark.parametrize("mark", ["", '{"tool": "gq'])
def test_what_a_run_leaves_that_is_killed_while_it_marks_is_ours(
    directory: RunDirectory, mark: str
) -> None:
    directory.path.mkdir(parents=True)
    (directory.path / MARK).write_text(mark)
    assert directory.is_ours()
    (directory.path / "thesis.txt").write_text("mine")
    assert not directory.is_ours()


def test_the_same_mark_is_not_written_again(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would empty the file; the disk says so when it is told to write."""
    directory.claim()
    directory.mark(place="here")
    before = read_mark(directory.path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    directory.mark(place="here")
    assert read_mark(directory.path) == before
    with pytest.raises(OSError, match="No space left"):
        directory.mark(place="there")


def test_another_run_is_refused_with_what_differs(directory: RunDirectory) -> None:
    changed = differences({"seed": 1}, {"seed": 0}, {"seed": "--seed"})
    with pytest.raises(RefusedError) as refusal:
        refuse_another(directory.path, "layers", changed, "start over with --overwrite")
    says = f"{directory.path} holds layers (--seed: 0 -> 1); start over with --overwrite"
    assert str(refusal.value) == says


def test_differences_are_named_as_options_and_written_as_they_are_typed() -> None:
    digest = "0123456789ab" + 52 * "c"
    before = {"text": {"sources": ["a", "b"], "seed": 0}, "model": digest, "same": 1, "gone": 2}
    now = {"text": {"sources": ["a"], "seed": 3}, "model": "other", "same": 1}
    assert differences(now, before, {"text sources": "--data"}) == [
        "--data: a,b -> a",
        "gone: 2 -> None",
        "model: 0123456789ab -> other",
        "text seed: 0 -> 3",
    ]
    assert differences(before, before) == []


def test_a_difference_behind_the_shown_digits_is_one() -> None:
    now, before = ("0" * 63 + digit for digit in "12")
    assert differences({"model": now}, {"model": before})
    assert fingerprint({"model": now}) != fingerprint({"model": before})


@pytest.mark.usefixtures("alone")
def test_the_directory_of_a_run_is_found_by_what_the_run_is(tmp_path: Path) -> None:
    """Until its entry is removed; others are not found."""
    run, other = fingerprint({"test": str(tmp_path)}), fingerprint({"other": str(tmp_path)})
    entry = shelves.register(run, tmp_path / "out-state")
    assert entry is not None
    assert shelves.entries(run) == [entry]
    assert shelves.directory_of(entry) == tmp_path / "out-state"
    assert shelves.entries(other) == []
    shelves.remove_entry(entry)
    assert shelves.entries(run) == []
    assert shelves.register("", tmp_path) is None
