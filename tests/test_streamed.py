"""Streams: blocks as of stored text, processes that read their own files, and runs that are continued read on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import Counted, lines, texts_of, tokenised, write

from gqa.checkpoint.errors import CorpusError
from gqa.corpus.alpha import Heldout
from gqa.corpus.sources import parse_source
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import Blocks, Encoder
from gqa.uptrain.dataloader import Dataloader, open_dataloader
from gqa.uptrain.options import TrainOptions

STEPS, BATCH = 40, 4
Open = Callable[..., Dataloader]


def write_files(directory: Path, files: int, seed: int = 0) -> None:
    """Each of 70 documents, about 20 blocks of 64 tokens, that begin with the number of the file."""
    directory.mkdir()
    random = np.random.default_rng(seed)
    for file in range(files):
        rows = ({"text": f"{file} {random.integers(10**9, size=2)}"} for _ in range(70))
        lines(directory / f"{file:02}.jsonl", *rows)


@pytest.fixture
def stream(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens runs of four blocks a step; three blocks are held out."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "many", 16)

    def opened(**given: Any) -> Dataloader:
        options = {"data": ("many",), "steps": STEPS, "batch_size": BATCH} | given
        return open_dataloader(TrainOptions("model", Path("out"), streaming=True, **options), tokenizer, 64)

    return opened


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The file of each document that is tokenised."""
    numbers: list[int] = []
    tokens = Encoder.tokens

    def recorded(encoder: Encoder, texts: list[str]) -> list[list[int]]:
        numbers.extend(int(text.split()[0]) for text in texts)
        return tokens(encoder, texts)

    monkeypatch.setattr(Encoder, "tokens", recorded)
    return numbers


def steps(loader: Dataloader, begin: int, end: int, rank: int = 0, ranks: int = 1) -> np.ndarray:
    """(steps, blocks, 64) of one process."""
    batches = replace(loader, steps=end).batches(begin, rank, ranks, 1)
    return np.array([[micro["input_ids"][0].numpy() for micro in step] for step in batches])


def shared(loaders: list[Dataloader], begin: int, end: int) -> np.ndarray:
    """(steps, 4, 64) of all processes together, each of which has its loader."""
    parts = [steps(loader, begin, end, rank, len(loaders)) for rank, loader in enumerate(loaders)]
    return np.stack(parts, 2).reshape(end - begin, -1, 64)


def test_each_process_reads_its_own_files(stream: Open, read: list[int]) -> None:
    ranks, loader = 4, stream(repeats=True)
    alone = steps(loader, 0, STEPS)
    assert len(np.unique(alone.reshape(-1, 64), axis=0)) == STEPS * BATCH  # nothing is read twice
    for rank in range(ranks):
        loader = stream(repeats=True)
        read.clear()
        assert np.array_equal(steps(loader, 0, STEPS, rank, ranks), alone[:, rank::ranks])
        assert {file % ranks for file in read} == {rank}
        assert len(set(read)) >= 8 // ranks
    one_lane = stream(batch_size=1, steps=STEPS * BATCH)
    read.clear()
    steps(one_lane, 0, STEPS * BATCH)
    assert {file % ranks for file in read} == {*range(ranks)}  # the control: one file after the other


CASES: dict[str, dict[str, Any]] = {
    "one lane": {"data": ("one",)},
    "read twice": {"steps": 3 * STEPS, "repeats": True},
    "long documents": {"data": ("long",)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_state_is_read_on_from(stream: Open, counted: Counted, name: str) -> None:
    """By any number of processes: the same blocks, and little is tokenised again."""
    write_files(Path("one"), 1, 1)
    Path("long").mkdir()
    for file in range(4):
        write(Path(f"long/{file}.jsonl"), [f"{file} {' '.join(map(str, range(n, n + 900)))}" for n in range(9)])
    given, begin, positions = CASES[name], 0, list[Any]()
    end: int = given.get("steps", STEPS)
    alone = steps(stream(**given), 0, end)
    for ranks, upto in ((4, 2 * end // 3), (2, end - 2), (1, end)):
        loaders = [stream(**given) for _ in range(ranks)]
        for loader in loaders:
            loader.blocks.seek(json.loads(json.dumps(positions)))
        assert np.array_equal(shared(loaders, begin, upto), alone[begin:upto]), (ranks, begin)
        begin, positions = upto, [position for loader in loaders for position in loader.blocks.positions]
    last, from_the_start = stream(**given), stream(**given)
    last.blocks.seek(positions)
    counted.taken()
    assert len(steps(last, end, end + 1)) == 1
    after = counted.taken()
    assert np.array_equal(steps(from_the_start, end - 2, end), alone[end - 2 :])
    assert after < counted.taken()


def test_what_a_stream_depends_on(stream: Open) -> None:
    """Its files, of which another number is another run's, and the lanes in which they are read."""
    before = stream()
    assert before.summary == "a stream of many (16 files, 4 at a time)"
    write_files(Path("more"), 1, 1)
    Path("more/00.jsonl").rename("many/16.jsonl")
    assert stream().fingerprint != before.fingerprint
    assert stream(batch_size=64).summary == "a stream of many (17 files, 16 at a time)"
    for number in (1, 5, 9, 13):
        lines(Path(f"many/{number:02}.jsonl"), {"text": " "})
    with pytest.raises(CorpusError, match=r"many has nothing to train on: it is empty, blank"):
        steps(stream(), 0, 1)


def test_the_stream_is_packed_as_blocks_are(tokenizer: Any, tmp_path: Path, counted: Counted) -> None:
    """Document after document, and then again from the first; no more is tokenised than is read."""
    texts, path = texts_of(300), tmp_path / "a.jsonl"
    text = tokenised(path, texts, tokenizer)
    stored = Blocks(text, np.tile(np.arange(len(texts)), 3), 64)
    counted.taken()
    blocks = StreamedBlocks(parse_source(str(path)), tokenizer, block_size=64, heldout=Heldout())
    for number in [*range(len(stored)), 3]:
        assert np.array_equal(blocks[number]["input_ids"], stored[number]["input_ids"])
        assert number or 0 < counted.taken() < 200
