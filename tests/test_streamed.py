"""Streams of several files: processes read their own, and a run that is continued reads on from where it was."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import lines
from hub_server import Hub
from training import Runs, losses, words_for

from gqa.checkpoint.errors import CorpusError
from gqa.corpus import sources
from gqa.uptrain.dataloader import Dataloader, open_dataloader
from gqa.uptrain.options import TrainOptions

STEPS, BATCH = 40, 4
Open = Callable[..., Dataloader]


def write_files(directory: Path, files: int, seed: int = 0) -> None:
    """Each of 70 documents, about 20 blocks of 64 tokens."""
    directory.mkdir()
    random = np.random.default_rng(seed)
    for file in range(files):
        lines(directory / f"{file:02}.jsonl", *({"text": str(random.integers(10**9, size=2))} for _ in range(70)))


@pytest.fixture
def stream(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens runs of four blocks a step, behind three blocks that are held out."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "many", 16)

    def opened(**given: Any) -> Dataloader:
        options = {"data": ("many",), "steps": STEPS, "batch_size": BATCH, "heldout_tokens": 192} | given
        return open_dataloader(TrainOptions("model", Path("out"), streaming=True, **options), tokenizer, 64)

    return opened


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are opened, as they are."""
    names: list[str] = []
    read_file = sources.read_file

    def told(path: Path, *how: Any) -> Any:
        names.append(f"{path.parent.name}/{path.stem}")
        return read_file(path, *how)

    monkeypatch.setattr(sources, "read_file", told)
    return names


def steps(loader: Dataloader, begin: int, end: int, rank: int = 0, ranks: int = 1) -> np.ndarray:
    """(steps, blocks, 64) of one process."""
    batches = replace(loader, steps=end).batches(begin, rank, ranks, 1)
    return np.array([[micro["input_ids"][0].numpy() for micro in step] for step in batches])


def shared(loaders: list[Dataloader], begin: int, end: int) -> np.ndarray:
    """(steps, 4, 64) of all processes together, each of which has its loader."""
    parts = [steps(loader, begin, end, rank, len(loaders)) for rank, loader in enumerate(loaders)]
    return np.stack(parts, 2).reshape(end - begin, -1, 64)


@pytest.mark.parametrize(("ranks", "repeats"), [(2, None), (4, True)])
def test_each_process_reads_its_own_files(stream: Open, read: list[str], ranks: int, repeats: bool | None) -> None:
    loader = stream(repeats=repeats)
    alone = steps(loader, 0, STEPS)
    found = np.concatenate([alone.reshape(-1, 64), [block["input_ids"] for block in loader.heldout]])
    assert len(np.unique(found, axis=0)) == STEPS * BATCH + 3  # nothing is read twice, and nothing is held out in vain
    for rank in range(ranks):
        loader = stream(repeats=repeats)
        assert read[-1] == "many/00"  # of which the first blocks are held out
        read.clear()
        assert np.array_equal(steps(loader, 0, STEPS, rank, ranks), alone[:, rank::ranks])
        assert {int(name[5:]) % ranks for name in read} == {rank}
        assert len(set(read)) >= 8 // ranks
    one_lane = stream(batch_size=1, steps=STEPS * BATCH)
    read.clear()
    steps(one_lane, 0, STEPS * BATCH, 0, 1)
    assert {int(name[5:]) % ranks for name in read} == {*range(ranks)}  # the control: one file after the other


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"mask_documents": True, "heldout_fraction": 0.1},
    "repeats": {"repeats": True},
    "mixture": {"data": ("many@3", "one@1")},  # one of them has a single file: one lane
    "mixture of lanes": {"data": ("many@3", "more@1")},
    "read twice": {"steps": 3 * STEPS},
}


@pytest.mark.parametrize("name", CASES)
def test_a_state_is_read_on_from(stream: Open, read: list[str], name: str) -> None:
    """By any number of processes: the same blocks, and none of the files that were at their end."""
    write_files(Path("one"), 1, 1)
    write_files(Path("more"), 4, 2)
    given, begin, places = CASES[name], 0, list[Any]()
    end: int = given.get("steps", STEPS)
    lanes = 1 if name == "mixture" else 4
    alone = steps(stream(**given), 0, end)
    for ranks, upto in ((4, 2 * end // 3), (2, end - 2), (1, end)):
        loaders = [stream(**given) for _ in range(ranks)]
        for loader in loaders:
            loader.seek(json.loads(json.dumps(places)))
        read.clear()
        assert np.array_equal(shared(loaders, begin, upto), alone[begin:upto]), (ranks, begin)
        for lane, (number, _, at) in {lane: place for lane, *place in sorted(places)}.items():
            behind = loaders[0].first * (lane == 0) + begin * BATCH // lanes
            assert number == behind - 7 * (name == "repeats")
            for source, (shard, *_) in zip(("many", "one" if lanes == 1 else "more"), at, strict=False):
                names = [file for file in read if re.fullmatch(rf"{source}/\d+", file)]
                assert next(n for n in names if int(n.split("/")[1]) % lanes == lane) == f"{source}/{shard:02}"
        begin, places = upto, [place for loader in loaders for place in loader.places]
    assert min(at[0][0] for *_, at in places) >= 4  # past the first file of each lane
    last, from_the_start = stream(**given), stream(**given)
    last.seek(places[:-1])  # one lane has none
    for loader in (last, from_the_start):
        read.clear()
        assert np.array_equal(steps(loader, end - 2, end), alone[end - 2 :])
    assert "many/01" in read


def test_what_a_stream_depends_on(stream: Open) -> None:
    """Its files, of which another number is another run's, and the lanes in which they are read."""
    before = stream()
    assert before.summary == "a stream of many (16 files, 4 at a time)"
    write_files(Path("more"), 1, 1)
    Path("more/00.jsonl").rename("many/16.jsonl")
    assert stream().fingerprint != before.fingerprint
    assert stream(batch_size=64).summary == "a stream of many (17 files, 16 at a time)"
    for number in (1, 5, 9, 13):
        Path(f"many/{number:02}.jsonl").write_text("")
    with pytest.raises(
        CorpusError, match=r"many \(every 4th file from file 2 on\) holds no text: it is empty or blank"
    ):
        steps(stream(), 0, 1)


@pytest.fixture
def served(hub: Hub, tmp_path: Path) -> list[int]:
    """`lab/data` on a hub: 16 files of 20 blocks. Their sizes."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    data, random = tmp_path / "data", np.random.default_rng(0)
    data.mkdir()
    for number in range(16):
        rows = {"text": [str(random.integers(10**9, size=1)) for _ in range(120)]}
        pyarrow.parquet.write_table(pyarrow.table(rows), data / f"{number:02}.parquet")
    # Columns that are not told are looked up in the first file, of which that is all where it is as small as here.
    (data / "README.md").write_text("---\ndataset_info:\n  features:\n  - {name: text, dtype: string}\n---\n")
    hub.repo("lab/data", data)
    return [file.stat().st_size for file in sorted(data.glob("*.parquet"))]


def fetched(hub: Hub, name: str) -> dict[int, int]:
    """What a process was sent: numbers of files and bytes of each."""
    found: dict[int, int] = {}
    for request in hub.requests:
        if request.token == name and request.path.endswith(".parquet"):
            number = int(request.path[-10:-8])
            found[number] = found.get(number, 0) + request.sent
    return found


RANKS = [pytest.param((2, 1), 0.6), pytest.param((4, 2, 1), 0.35, marks=pytest.mark.scale)]


@pytest.mark.parametrize(("chain", "most"), RANKS)
def test_what_is_fetched(
    hub: Hub, served: list[int], runs: Runs, tmp_path: Path, chain: tuple[int, ...], most: float
) -> None:
    """Of 16 files in 8 lanes each process fetches its share, and the first for what is held out. Killed and continued
    on fewer processes, a run has the same losses, and fetches one file of a lane again.
    """
    words = {"streaming": True, "steps": 28, "heldout_tokens": 192, "save_every": 8, "keep_state": True}

    def run(out: str, ranks: int, name: str, *more: str, then: str = "") -> int:
        where = f"at_hub({hub.endpoint!r}, {str(tmp_path / 'home')!r}, {name!r}); {then}"
        given = [*words_for(runs.directory / "model", Path("lab/data"), tmp_path / out, **words), *more]
        return runs.run(*given, ranks=ranks, before=where).code

    assert run("straight", chain[0], "straight") == 0
    for rank in range(chain[0]):
        found = fetched(hub, f"straight-{rank}")
        assert {number % chain[0] for number in found if number} <= {rank}
        assert 0.9 / chain[0] <= sum(found.values()) / sum(served) <= most
    before: set[int] = set()
    for number, ranks in enumerate(chain):
        killed = (9, 25, 0)[number - len(chain)] if number + 1 < len(chain) else 0
        code = run("out", ranks, f"run{number}", *["--resume"] * (number > 0), then=f"kill_at({killed})" * (killed > 0))
        assert code == (-signal.SIGKILL if killed else 0)
        found = [fetched(hub, f"run{number}-{rank}") for rank in range(ranks)]
        again = sum(size for files in found for file, size in files.items() if file in before and file)
        if number:
            assert 0 < again <= 8 * max(served)
        before |= {file for files in found for file in files}
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "straight"), rel=1e-5)
    assert fetched(hub, f"run{len(chain) - 1}-0").keys() == {0, *range(8, 16)}
