"""Tokens and blocks: nothing is lost, added or moved, nothing is tokenized twice; what repeats
itself stands where it should; of streams, which processes share and runs continue, the same blocks.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import Counted, documents_of, lines, open_data, texts_of, tokenized, write
from support.patches import use_data_cache
from transformers import AutoTokenizer, CTRLTokenizer, PreTrainedTokenizerFast

from gqa.checkpoint.read import Checkpoint
from gqa.core.errors import RefusedError, TextError
from gqa.corpus.blocks import Blocks, pack, with_repeats
from gqa.corpus.encoders import Encoded, Encoders, TextEncoder
from gqa.corpus.reading_order import HeldoutDocuments
from gqa.corpus.sources import Source
from gqa.corpus.specs import parse_source
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import Documents, tokenize
from gqa.models.tokenizer import load_tokenizer
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.options import UptrainOptions

MODEL = Path(__file__).parent.parent / "examples/stdlib-mha"
BOS, EOS = 1, 2


def variant(**changes: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"), **changes)


def read(path: Path, **options: str) -> Source:
    return parse_source(str(path), **options)


@pytest.fixture(scope="module")
def text(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """2200 documents, so that they are in several record batches."""
    return tokenized(tmp_path_factory.mktemp("text") / "a.jsonl", texts_of(2000), tokenizer)


def test_documents_are_what_the_tokenizer_makes_of_them(text: Documents, tokenizer: Any) -> None:
    texts = texts_of(2000)
    assert len(text) == len(texts) == 2200
    for i in range(0, 2200, 37):
        alone = tokenizer(texts[i], add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        assert text.tokens(i).tolist() == [BOS, *alone, EOS]
        assert {BOS, EOS}.isdisjoint(alone)
        assert tokenizer.decode(alone) == texts[i]
    assert len(np.unique(text.digests, axis=0)) == 2000
    with pytest.raises(ValueError, match="read-only"):
        text.tokens(0)[0] = 5


def test_bos_is_put_where_the_tokenizer_puts_it(tokenizer: Any) -> None:
    x = tokenizer("x", add_special_tokens=False)["input_ids"]
    silent = variant(eos_token="</s>", bos_token="<s>", add_bos_token=False)
    # One token for both, as GPT-2 and Qwen have it
    both = variant(eos_token="</s>", bos_token="</s>")
    for other in (silent, both):
        other.backend_tokenizer.post_processor = None
    for encoder, adds, expected in (
        (tokenizer, True, [BOS, *x, EOS]),
        (silent, False, [*x, EOS]),
        (both, False, None),
    ):
        assert TextEncoder(encoder).starts_documents is adds
        assert TextEncoder(encoder).encode(["x"]) == [Encoded("x", expected or [*x, EOS])]
    with pytest.raises(
        TextError, match="has no EOS token, which is put between documents; set its eos_token"
    ):
        TextEncoder(variant())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.randoms())
def test_blocks_are_the_documents_one_after_the_other(
    lengths: list[int], size: int, draw: random.Random
) -> None:
    numbers = iter(range(sum(lengths)))
    text = documents_of([[next(numbers) for _ in range(length)] for length in lengths])
    order = np.array(draw.sample(range(len(lengths)), len(lengths)))
    tokens = np.concatenate([text.tokens(i) for i in order])
    blocks = Blocks(text, order, size)
    assert len(blocks) == len(tokens) // size
    assert len(Blocks(text, order, size, n_blocks=1)) == 1
    cut = tokens[: len(blocks) * size].reshape(-1, size)
    assert [block["input_ids"].tolist() for block in blocks] == cut.tolist()
    packed = pack((text.tokens(i) for i in order), size)
    assert [block["input_ids"].tolist() for block, _ in packed] == cut.tolist()
    assert all(block["input_ids"].dtype == np.int64 for block in blocks)


def test_nothing_is_tokenized_twice(tokenizer: Any, tmp_path: Path, counted: Counted) -> None:
    path = write(tmp_path / "a.jsonl", texts_of(30))

    def again(source: Source, tokenizer: Any = tokenizer) -> tuple[str, int]:
        return tokenize([source], Encoders(tokenizer)).fingerprint, counted.taken()

    first, fresh = again(read(path))
    assert fresh == 33
    path = path.rename(tmp_path / "b.jsonl")
    padded, larger = (AutoTokenizer.from_pretrained(MODEL) for _ in range(2))
    padded.pad_token = "</s>"
    # Which is kept in the backend
    padded(["a", "a b"], padding=True, truncation=True, max_length=1)
    assert json.loads(padded.backend_tokenizer.to_str())["truncation"] is not None
    assert again(read(path), padded) == (first, 0)
    larger.add_tokens(["import os"])
    silent = variant(eos_token="</s>", bos_token="<s>")
    silent.backend_tokenizer.post_processor = None
    changed = [
        again(read(path), silent),
        again(read(path), larger),
        again(read(write(path, ["z", *texts_of(30)[1:]]))),
        again(read(path).heldout_part(0.5)),
    ]
    assert all(0 < count <= 33 for _, count in changed)
    assert len({first, *(fingerprint for fingerprint, _ in changed)}) == 5


def test_a_tokenizer_in_python_is_known_by_its_content(tmp_path: Path) -> None:
    """Not by where it lies; but by its vocabulary, merges, special tokens, and whatever else
    changes what it gives.
    """
    words, merges = ["<unk>", "a", "b", "ab", "c</w>", "bc</w>"], ["a b", "b c</w>"]

    def identity(
        place: str, words: list[str] = words, merges: list[str] = merges, **changes: Any
    ) -> str:
        (tmp_path / place).mkdir(exist_ok=True)
        files = tmp_path / place / "vocab.json", tmp_path / place / "merges.txt"
        files[0].write_text(json.dumps({word: number for number, word in enumerate(words)}))
        files[1].write_text("\n".join(["#version", *merges, ""]))
        made: Any = CTRLTokenizer(*map(str, files), **{"eos_token": "<unk>"} | changes)
        made.save_pretrained(tmp_path / place)
        return TextEncoder(CTRLTokenizer.from_pretrained(tmp_path / place)).identify()

    assert identity("one") == identity("two") == identity("one", padding_side="left")
    others = [
        identity("one", [*words, "c"]),
        identity("one", merges=merges[::-1]),
        identity("one", eos_token="a"),
    ]
    assert len({identity("one"), *others, identity("one", lowercase=True)}) == 5


def test_the_network_is_not_asked(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local files are found, read, tokenized and kept without a single connection, though nothing
    says offline.
    """
    asked: list[Any] = []
    # Notes every address that is asked for
    monkeypatch.setattr("socket.socket.connect", lambda socket, address: asked.append(address))
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **how: asked.append(address))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    write(tmp_path / "a.jsonl", ["a"])
    assert len(tokenize([read(tmp_path)], Encoders(tokenizer))) == 1
    assert asked == []
    with pytest.raises(TextError):
        next(parse_source("lab/none").texts())
    assert asked != []  # which is how it would be seen


def test_what_fails_is_not_kept(
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    use_data_cache(monkeypatch, tmp_path / "cache")
    path = tmp_path / "a.jsonl"
    lines(path, {"text": 4}, {"text": 5})
    for _ in range(2):
        with pytest.raises(
            TextError, match=r"a\.jsonl: column 'text' has type int; pass a column of text"
        ):
            tokenize([read(path)], Encoders(tokenizer))
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert len(tokenized(path, ["a", "b"], tokenizer)) == 2
    (stored,) = (tmp_path / "cache").rglob("*.arrow")
    for rest in (b"", stored.read_bytes()[:-300]):
        stored.unlink()  # it is mapped
        stored.write_bytes(rest)
        with pytest.raises(
            TextError, match=r"stored tokens cannot be read: .*; delete "
        ) as damaged:
            tokenize([read(path)], Encoders(tokenizer))
    shutil.rmtree(str(damaged.value).partition("; delete ")[2])
    assert len(tokenize([read(path)], Encoders(tokenizer))) == 2
    assert capfd.readouterr() == ("", "")


def test_special_tokens_alone_are_no_tokenizer(tmp_path: Path) -> None:
    """Of some classes transformers makes a tokenizer of them that knows no text."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "added_tokens.json").write_text('{"<x>": 0}')
    with pytest.raises(
        RefusedError, match=f"^m has no tokenizer; copy .* into {tmp_path}, or use none$"
    ):
        load_tokenizer(
            Checkpoint("m", tmp_path, {"model_type": "gpt2"}, {}, ()), instead="use none"
        )


LENGTH = 256
BLOCKS = np.random.default_rng(0).integers(1000, 2000, (64, LENGTH))


def mix(count: int = 64, seed: int = 0, length: int = LENGTH, lead: int = 1) -> np.ndarray:
    starts = BLOCKS[:, 0] if lead else [0] * count
    return np.stack(
        [
            with_repeats(lambda n: BLOCKS[n, :length], index, seed, starts[index])
            for index in range(count)
        ]
    )


@pytest.mark.parametrize("length", [2, 32, 33, 256])
def test_blocks_keep_their_length_and_beginning(length: int) -> None:
    blocks = mix(length=length)
    assert blocks.shape == (64, length)
    assert (blocks[:, 0] == BLOCKS[:, 0]).all()
    assert np.isin(blocks, BLOCKS).all()
    assert (length <= 32) == (blocks == BLOCKS[:, :length]).all()


@pytest.mark.parametrize("lead", [1, 0])
def test_any_run_of_blocks_has_its_shares(lead: int) -> None:
    """A block does not depend on how many there are.

    Its first token is repeated unless it is the start token.
    """
    blocks = mix(lead=lead)
    assert (mix(20, lead=lead) == blocks[:20]).all()
    assert (mix(20) != mix(20, seed=1)).any()
    plain, repeated = (
        (blocks == BLOCKS).all(axis=1),
        (blocks[:, 1:32] == BLOCKS[:, 1:32]).all(axis=1),
    )
    lags = np.arange(LENGTH // 8, LENGTH // 2 + 1) - lead
    for block in blocks[repeated & ~plain, lead:]:  # the beginning comes again and again
        assert any((block == np.resize(block[:lag], LENGTH - lead)).all() for lag in lags)
    for start in (0, 7):
        assert 18 <= plain[start : start + 40].sum() <= 22
        # The others are of random tokens
        assert 8 <= (repeated & ~plain)[start : start + 40].sum() <= 12


# ------------------------------------------------------------------------------------------ streams


STEPS, BATCH = 40, 4
Open = Callable[..., Dataloader]


def write_files(directory: Path, files: int, seed: int = 0) -> None:
    """Each of 70 documents, about 20 blocks of 64 tokens, that begin with the number of the
    file.
    """
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
        return open_data(
            UptrainOptions("model", Path("out"), streaming=True, **options), tokenizer, 64
        )

    return opened


def steps(loader: Dataloader, begin: int, end: int, rank: int = 0, ranks: int = 1) -> np.ndarray:
    """(steps, blocks, 64) of one process."""
    batches = replace(loader, steps=end).batches(begin, rank, ranks, 1)
    return np.array([[micro["input_ids"][0].numpy() for micro in step] for step in batches])


def shared(loaders: list[Dataloader], begin: int, end: int) -> np.ndarray:
    """(steps, 4, 64) of all processes together, each of which has its loader."""
    parts = [steps(loader, begin, end, rank, len(loaders)) for rank, loader in enumerate(loaders)]
    return np.stack(parts, 2).reshape(end - begin, -1, 64)


def test_each_process_reads_its_own_files(stream: Open, counted: Counted) -> None:
    ranks, loader = 4, stream(repeats=True)

    def files_read() -> set[int]:
        files = {int(text.split()[0]) for text in counted.texts}
        return files if counted.taken() else set()

    alone = steps(loader, 0, STEPS)
    assert len(np.unique(alone.reshape(-1, 64), axis=0)) == STEPS * BATCH  # nothing is read twice
    for rank in range(ranks):
        loader = stream(repeats=True)
        counted.taken()
        assert np.array_equal(steps(loader, 0, STEPS, rank, ranks), alone[:, rank::ranks])
        files = files_read()
        assert {file % ranks for file in files} == {rank}
        assert len(files) >= 8 // ranks
    steps(stream(batch_size=1, steps=STEPS * BATCH), 0, STEPS * BATCH)
    # The control: one file after the other
    assert {file % ranks for file in files_read()} == {*range(ranks)}


STREAMS: dict[str, dict[str, Any]] = {
    "one lane": {"data": ("one",)},
    "read twice": {"steps": 3 * STEPS, "repeats": True},
    "long documents": {"data": ("long",)},
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_state_is_read_on_from(stream: Open, counted: Counted, name: str) -> None:
    """By any number of processes: the same blocks, and little is tokenized again."""
    write_files(Path("one"), 1, 1)
    Path("long").mkdir()
    for file in range(4):
        write(
            Path(f"long/{file}.jsonl"),
            [f"{file} {' '.join(map(str, range(n, n + 900)))}" for n in range(9)],
        )
    given, begin, positions = STREAMS[name], 0, list[Any]()
    end: int = given.get("steps", STEPS)
    alone = steps(stream(**given), 0, end)
    for ranks, upto in ((4, 2 * end // 3), (2, end - 2), (1, end)):
        loaders = [stream(**given) for _ in range(ranks)]
        for loader in loaders:
            loader.blocks.seek(json.loads(json.dumps(positions)))
        assert np.array_equal(shared(loaders, begin, upto), alone[begin:upto]), (ranks, begin)
        begin, positions = (
            upto,
            [position for loader in loaders for position in loader.blocks.bookmark().saved_lanes],
        )
    last, from_the_start = stream(**given), stream(**given)
    last.blocks.seek(positions)
    counted.taken()
    assert len(steps(last, end, end + 1)) == 1
    after = counted.taken()
    assert np.array_equal(steps(from_the_start, end - 2, end), alone[end - 2 :])
    assert after < counted.taken()


@pytest.mark.parametrize("files", [3, 17])
def test_a_state_is_refused_if_the_number_of_files_is_another(stream: Open, files: int) -> None:
    """Its lanes would read other files, and text twice or not at all; or would not exist."""
    before = stream()
    steps(before, 0, 2)
    write_files(Path("other"), files)
    blocks = stream(data=("other",)).blocks
    says = f"^other has {files} files, but had 16 when the run was saved; start over with --overw"
    with pytest.raises(RefusedError, match=says):
        blocks.seek(json.loads(json.dumps(before.blocks.bookmark().saved_lanes)))
    assert blocks.bookmark().saved_lanes == []


def test_a_state_without_the_number_of_files_is_read_on_from(stream: Open) -> None:
    before = stream()
    steps(before, 0, 3)
    positions = before.blocks.bookmark().saved_lanes
    of_an_earlier_version = json.loads(json.dumps(positions))
    for _, _, state in of_an_earlier_version:
        del state["files"]

    continued = stream()
    continued.blocks.seek(of_an_earlier_version)
    assert continued.blocks.bookmark().saved_lanes == positions
    assert np.array_equal(steps(continued, 3, 4), steps(before, 3, 4))


def test_a_stream_without_text_is_refused_after_a_stop_too(stream: Open) -> None:
    before = stream()
    steps(before, 0, 2)
    for file in Path("many").iterdir():
        lines(file, {"text": " "})
    continued = stream()
    continued.blocks.seek(json.loads(json.dumps(before.blocks.bookmark().saved_lanes)))

    with pytest.raises(TextError, match=r"no text to train on: it is empty, blank, or all held"):
        steps(continued, 2, STEPS)


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
    with pytest.raises(
        TextError,
        match=r"number 2 and each 4 later\) has no text to train on: it is empty, blank",
    ):
        steps(stream(), 0, 1)


def test_the_stream_is_packed_as_blocks_are(
    tokenizer: Any, tmp_path: Path, counted: Counted
) -> None:
    """Document after document, and then again from the first; no more is tokenized than is read."""
    texts, path = texts_of(300), tmp_path / "a.jsonl"
    text = tokenized(path, texts, tokenizer)
    stored = Blocks(text, np.tile(np.arange(len(texts)), 3), 64)
    counted.taken()
    source, encoder = parse_source(str(path)), TextEncoder(tokenizer)
    blocks = StreamedBlocks(source, encoder, block_size=64, heldout=HeldoutDocuments())
    for number in [*range(len(stored)), 3]:
        assert np.array_equal(blocks[number]["input_ids"], stored[number]["input_ids"])
        if number == 0:
            assert 0 < counted.taken() < 200
