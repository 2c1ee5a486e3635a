"""Models larger than the space beside their result, fetched file by file from a stand-in hub: the bytes,
the space, and what a kill, a full disk or a missing package does to that.
"""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import MERGED, check_refused, llama, weights
from hub_server import Hub, Machine
from test_hub import same_weights
from training import Runs

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.remote import Remote
from gqa.convert import convert_checkpoint

NAME = "lab/tiny-llama"
OUT = "tiny-llama-gqa2-mean"
SHARDS = 8


def in_order(directory: Path, **changes: Any) -> Path:
    """A checkpoint in 8 files of which neighbours have neighbouring layers, as large ones have."""
    made = weights(width=256, layers=8, **changes)
    whole = llama(directory.with_name(directory.name + "-whole"), shards=1, tensors=made, **SIZE)
    convert_checkpoint(whole, 4, directory, method="mean", max_shard_bytes=sum(t.nbytes for t in made.values()) // 7)
    assert len(list(directory.glob("*.safetensors"))) == SHARDS
    return directory


SIZE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 8}


def used(*places: Path) -> int:
    found = 0
    for path in (path for place in places for path in place.rglob("*")):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # deleted meanwhile
            continue
    return found


class Disk:
    """Simulated free space: `room` bytes for what is in the working directory and in the cache; `most` was there."""

    def __init__(self, machine: Machine, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places, self.room, self.most = (machine.work, machine.home), room, 0
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=self.room - self.look()))

    def look(self) -> int:
        now = used(*self.places)
        self.most = max(self.most, now)
        return now


def sizes(source: Path) -> list[int]:
    return sorted(path.stat().st_size for path in source.glob("*.safetensors"))


def beside(source: Path) -> int:
    """Bytes of what is no weights, twice: where it is fetched to, and in the result; and of records."""
    return 2 * sum(p.stat().st_size for p in source.iterdir() if p.suffix != ".safetensors") + 60_000


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """What a conversion of the same model here gives; the model is at `source`."""
    return convert_checkpoint(in_order(tmp_path / "source"), 2, tmp_path / "local", method="mean", checksums=True).out


@pytest.mark.parametrize(("held", "jobs"), [(2, 2), (1, 2), (1, 1), (0.9, 1)])
def test_space_for_the_result_and_two_files(
    tmp_path: Path, hub: Hub, machine: Machine, local: Path, monkeypatch: pytest.MonkeyPatch, held: float, jobs: int
) -> None:
    """The same bytes, each file fetched once, never more on the disk than is said; with less it is refused at once."""
    source = tmp_path / "source"
    hub.repo(NAME, source)
    room = used(local) + int(held * sizes(source)[-1]) + beside(source)
    room -= 0 if held >= 1 else beside(source)
    disk = Disk(machine, room, monkeypatch)
    served = hub.watch(disk.look)
    result = machine.run(*MERGED, "--jobs", jobs, "--checksums", NAME)
    if held < 1:
        said = check_refused(result, "no space left: the result takes", "what is fetched at a time", code=1)
        assert f"{sizes(source)[-1]:,}" in said
        assert hub.sent(".safetensors") < SHARDS * 2**17  # headers alone
        assert list(machine.work.iterdir()) == []
        return
    assert (result.code, result.err) == (0, ""), result
    assert [path.name for path in machine.work.iterdir()] == [OUT]
    assert same_weights(machine.work / OUT, local)
    files = {path.name: path.read_bytes() for path in local.iterdir() if path.is_file()}
    made = {path.name: path.read_bytes() for path in (machine.work / OUT).iterdir() if path.is_file()}
    assert {name for name in files | made if files.get(name) != made.get(name)} == {"gqa_conversion.json", "README.md"}
    told, theirs = (json.loads((at / "gqa_conversion.json").read_text()) for at in (machine.work / OUT, local))
    assert told["sha256"] == theirs["sha256"]
    assert len(served) >= SHARDS
    whole = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    assert all(size <= hub.sent(name) <= size + 2 * 2**16 for name, size in whole.items())
    assert disk.most <= room
    assert not list(machine.home.rglob("*.safetensors"))


def test_methods_that_look_at_the_whole_model_say_so(
    hub: Hub, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = in_order(tmp_path / "source")
    hub.repo(NAME, source)
    plan = machine.run("--groups", 2, "--method", "aligned", "--dry-run", NAME).said
    assert "all of it first: method aligned looks at the whole model" in plan
    assert "at a time where there is no space for all" in machine.run(*MERGED, "--dry-run", NAME).said
    told = json.loads(machine.run(*MERGED, "--dry-run", "--json", NAME).out)["fetched"]
    assert told == {"bytes": sum(sizes(source)), "whole_model_first": False, "bytes_at_once": sizes(source)[-1]}
    Disk(machine, 3 * sum(sizes(source)) // 2, monkeypatch)
    said = check_refused(machine.run("--groups", 2, "--method", "aligned", NAME), "no space left", code=1)
    assert "method aligned looks at the whole model" in said
    assert said.endswith("or fetch file by file with --method mean or first\n")
    assert hub.sent(".safetensors") < SHARDS * 2**19  # headers of four commands


@pytest.mark.parametrize(
    "served", [pytest.param(3, marks=pytest.mark.scale), 6, pytest.param(8, marks=pytest.mark.scale)]
)
def test_killed_midway(hub: Hub, machine: Machine, runs: Runs, tmp_path: Path, local: Path, served: int) -> None:
    """SIGKILL while a file is fetched: the same command fetches at most two files again, and gives the same bytes."""
    source = tmp_path / "source"
    hub.repo(NAME, source)
    free = used(local) + 2 * sizes(source)[-1] + beside(source)
    there = f"os.chdir({str(machine.work)!r}); at_hub({hub.endpoint!r}, {str(machine.home)!r}, 'me'); "
    there += f"shutil.disk_usage = lambda path: type('Usage', (), {{'free': {free}}})"
    started = partial(runs.begin, *MERGED, "--checksums", NAME, before=there, HF_HUB_DISABLE_XET="1")
    pids = list[int]()

    def kill() -> None:
        if len(set(seen)) == served and pids:
            os.kill(pids.pop(), signal.SIGKILL)

    seen = hub.watch(kill)
    running = started()
    pids.append(running.pid)
    assert running.wait() == -signal.SIGKILL, running.said()
    assert not (machine.work / OUT).exists()
    again = started()
    assert again.wait() == 0, again.said()
    assert [path.name for path in machine.work.iterdir()] == [OUT]
    assert same_weights(machine.work / OUT, local)
    told, theirs = (json.loads((at / "gqa_conversion.json").read_text()) for at in (machine.work / OUT, local))
    assert told["sha256"] == theirs["sha256"]
    twice = [path for path in set(seen) if seen.count(path) > 1]
    assert 1 <= len(twice) <= 2, twice


def failing_from(hub: Hub, number: int) -> None:
    """Once so many whole files were begun, the hub gives no other."""

    armed = [True]

    def fail() -> None:
        if armed and len(set(seen)) == number:
            hub.failing["/lfs/"] = 403
            armed.clear()

    seen = hub.watch(fail)


def test_a_file_that_is_not_served(hub: Hub, machine: Machine, tmp_path: Path, local: Path, monkeypatch: Any) -> None:
    """One line; what is finished is kept, and another model or another run of that time disturbs nothing."""
    source = tmp_path / "source"
    hub.repo(NAME, source)
    Disk(machine, used(local) + 2 * sizes(source)[-1] + beside(source), monkeypatch)
    failing_from(hub, 5)
    first = machine.run(*MERGED, "--jobs", 1, NAME)  # else a sixth may be asked for while the fifth is
    assert (first.code, first.out) == (2, ""), first
    assert first.err.count("\n") == 1
    assert "403" in first.err
    kept = sorted(path.name for path in (machine.work / f".{OUT}.gqa-partial").glob("*.safetensors"))
    assert kept[:3] == sorted(path.name for path in local.glob("*.safetensors"))[:3]
    hub.failing.clear()
    served = hub.watch(lambda: None)
    assert machine.run(*MERGED, NAME).code == 0
    assert len(served) == 3
    assert same_weights(machine.work / OUT, local)
    assert [path.name for path in machine.work.iterdir()] == [OUT]


def test_kept_files_of_another_run_are_not_taken(
    hub: Hub, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Path
) -> None:
    """The control of going on: what was kept for --dtype or another model is not of this result."""
    source, other = tmp_path / "source", in_order(tmp_path / "other", seed=1)
    hub.repo(NAME, other)
    Disk(machine, used(local) + 2 * sizes(source)[-1] + beside(source) + 9_000_000, monkeypatch)
    kept = machine.work / f".{OUT}.gqa-partial"
    for words in ((*MERGED, "--dtype", "float64"), MERGED):
        failing_from(hub, 5)
        assert machine.run(*words, NAME).code == 2
        assert (kept / ".finished.json").exists()
        hub.failing.clear()
    hub.repos[NAME].add("main", source)
    assert machine.run(*MERGED, NAME).code == 0
    assert same_weights(machine.work / OUT, local)


def test_a_fetch_that_fails_lets_go_of_its_place(tmp_path: Path) -> None:
    """Also while somebody holds the error; a fetch that goes on keeps it. What was fetched stays for the next run,
    unless the result is wrong.
    """
    with pytest.raises(ZeroDivisionError) as held:
        Remote("a model", lambda file, to: 1 / 0).open(tmp_path / "place", ["config.json"])
    with Remote("a model", lambda file, to: (to / file).touch()) as again:
        assert (again.open(tmp_path / "place", ["config.json"]) / "config.json").exists()
        with pytest.raises(RefusedError, match="another conversion is fetching to"):
            Remote("a model", lambda file, to: None).open(tmp_path / "place", [])
    assert list(tmp_path.iterdir()) == []
    del held
    for kind, left in ((RefusedError, True), (OutputError, False)):
        stopped = Remote("a model", lambda file, to: (to / file).touch())
        stopped.open(tmp_path / "place", ["config.json"])
        stopped.__exit__(kind, None, None)
        assert (tmp_path / "place/files/config.json").exists() == left
