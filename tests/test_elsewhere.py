"""Models larger than the space beside their result, fetched file by file from a stand-in hub or by fsspec: the bytes,
the space, and what a kill, a full disk or a missing package does to that.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from checkpoints import INDEX, MERGED, check_refused, llama, run, weights
from hub_server import Hub, Machine
from test_hub import same_weights
from training import Runs

from gqa import convert_model
from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.remote import Remote
from gqa.convert import convert_checkpoint
from gqa.convert.api import convert_plan, plan_conversion

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
    basis = (*MERGED, "--for-cache-bits")
    assert "all of it first: --for-cache-bits looks at the whole model" in machine.run(*basis, "--dry-run", NAME).said
    said = check_refused(machine.run(*basis, NAME), "no space left: --for-cache-bits looks at the whole", code=1)
    assert said.endswith("or fetch file by file without it\n")
    assert hub.sent(".safetensors") < SHARDS * 2**19  # headers of six commands


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


def copied(directory: Path, url: str) -> str:
    fs, root = fsspec.core.url_to_fs(url)
    for path in directory.rglob("*"):
        if path.is_file():
            target = f"{root}/{path.relative_to(directory).as_posix()}"
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), target)
    return url


@pytest.fixture(params=["memory", "file"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address with nothing below it; the working directory is empty too."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield "memory://bucket" if request.param == "memory" else f"file://{tmp_path}/bucket"
    fsspec.filesystem("memory").store.clear()


def below(url: str) -> dict[str, bytes]:
    fs, root = fsspec.core.url_to_fs(url)
    return {path[len(root) :].lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


WHOLE = ("calibrated", "--data", "data.jsonl", "--tokens", 256, "--context", 64, "--device", "cpu")


@pytest.mark.parametrize("how", [("mean",), ("aligned",), WHOLE], ids=lambda how: how[0])
def test_from_one_address_to_another(tmp_path: Path, bucket: str, place: Path, how: tuple[object, ...]) -> None:
    """Whether the method takes files one by one or looks at all of them first: the same bytes, nothing left here."""
    source = llama(tmp_path / "m", shards=2) if len(how) == 1 else place / "model"
    Path("data.jsonl").write_text(
        "".join(json.dumps({"text": f"def f{n}(x): return x + {n}"}) + "\n" for n in range(99))
    )
    words = ("--groups", 2, "--method", *how)
    assert run(*words, source, "-o", tmp_path / "local").code == 0
    result = run(*words, copied(source, f"{bucket}/tiny"), "-o", f"{bucket}/made/out")
    assert result.code == 0, result
    assert f"written {bucket}/made/out: " in " ".join(result.out.split())
    ours, theirs = below(f"{bucket}/made/out"), below(f"file://{tmp_path}/local")
    differ = {name for name in ours | theirs if ours.get(name) != theirs.get(name)}
    assert differ <= {"gqa_conversion.json", "README.md"}
    assert [path.name for path in Path.cwd().iterdir()] == ["data.jsonl"]
    assert b"bucket" not in ours["README.md"]


def test_what_is_at_the_address(tmp_path: Path, bucket: str) -> None:
    """Kept, unless --overwrite says otherwise: then nothing of it is left beside the new one."""
    source, out = in_order(tmp_path / "source"), f"{bucket}/out"
    assert run(*MERGED, llama(tmp_path / "other", shards=2), "-o", out).code == 0
    before = below(out)
    check_refused(run(*MERGED, source, "-o", out), f"{out} exists; choose another output with -o")
    assert run(*MERGED, source, "-o", out, "--dry-run").code == 0
    assert below(out) == before
    assert run(*MERGED, source, "-o", out, "--overwrite").code == 0
    assert sorted(name for name in below(out) if "safetensors" in name) == sorted(
        [INDEX, *(path.name for path in source.glob("*.safetensors"))]
    )
    mine = llama(Path("out"))
    there = below(f"file://{mine.absolute()}")
    check_refused(
        run(*MERGED, source, "-o", out, "--overwrite"), f"the result for {out} is made in out first, which exists"
    )
    assert below(f"file://{mine.absolute()}") == there
    for name in ("photos/cat.jpg", "photos/out/config.json", "photos/out/model.safetensors"):
        with fsspec.open(f"{bucket}/{name}", "wb") as stream:
            stream.write(b"mine")
    before = below(f"{bucket}/photos")
    refused = run(*MERGED, source, "-o", f"{bucket}/photos", "--overwrite")
    check_refused(refused, f"{bucket}/photos holds no checkpoint: --overwrite will not remove it")
    assert below(f"{bucket}/photos") == before
    # From there file by file, into a directory.
    served = run("--groups", 1, "--method", "mean", out, "-o", "again", "--checksums")
    assert served.code == 0, served
    assert run("--groups", 1, "--method", "mean", "../source", "-o", "direct").code == 0
    assert (Path("again") / "config.json").read_bytes() == (Path("direct") / "config.json").read_bytes()


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_forecast_leaves_nothing_behind(bucket: str, place: Path) -> None:
    """Of a model at an address; and what refuses it does so before anything is fetched."""
    url = copied(place / "model", f"{bucket}/tiny")
    words = ("--method", "calibrated", "--data", "stdlib:heldout", "--tokens", 256, "--context", 64, "--dry-run")
    told = run("--groups", 1, *words, "--forecast", url)
    assert (told.code, "forecast    perplexity" in told.out) == (0, True), told
    assert list(Path.cwd().iterdir()) == []
    check_refused(run("--groups", 2, *words, "--forecast", url), "--forecast is about merging heads")
    assert list(Path.cwd().iterdir()) == []


class Slow(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system whose package is not there."""

    protocol = "slow"

    def __init__(self, **options: Any) -> None:
        raise ImportError("Install slowfs to access this")


def test_addresses_that_cannot_be_used(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("slow", Slow, clobber=True)
    source = llama(tmp_path / "source", shards=2)
    missing = "slow:// needs a package that is not installed (Install slowfs to access this); pip install it"
    assert missing in run(*MERGED, "slow://bucket/tiny").err
    assert missing in run(*MERGED, source, "-o", "slow://bucket/tiny").err
    assert "nosuch" in check_refused(run(*MERGED, "nosuch://bucket/tiny"), "Protocol not known", advice="")
    check_refused(run(*MERGED, f"{bucket}/nothing"), f"{bucket}/nothing has no config.json; give")
    url = copied(source, f"{bucket}/tiny")
    check_refused(run("--kv-budget", 0.5, url), f"--kv-budget runs the layers of {url}; copy it to a directory")
    check_refused(run(*MERGED, "--revision", "main", url), "--revision is for hub ids")
    evaluated = run(url, "--data", "stdlib", program="gqa-eval")
    check_refused(evaluated, f"only gqa-convert reads {url}; copy it to a directory", program="gqa-eval")
    with pytest.raises(RefusedError, match=r"the plan is of the headers of tiny; make it with headers_only=False"):
        convert_plan(plan_conversion(url, 1, method="mean"), Path("x"))
    with pytest.raises(RefusedError, match="to which only gqa-convert -o writes"):
        convert_model(source, 2, "mean", out=f"{bucket}/x")
    assert list(Path.cwd().iterdir()) == []
    # A result that cannot be copied stays here.
    monkeypatch.setattr(type(fsspec.core.url_to_fs(bucket)[0]), "put_file", lambda *words, **how: 1 / 0)
    failed = run(*MERGED, source, "-o", f"{bucket}/out")
    assert f"out is complete, but copying it to {bucket}/out failed: ZeroDivisionError" in failed.err
    assert (Path("out") / "config.json").exists()
