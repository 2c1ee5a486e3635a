"""alpha: what a smaller one reads, a larger one reads first, on every machine, from every format, for all ranks."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gqa.checkpoint.errors import CorpusError
from gqa.corpus.alpha import Selection, StreamedBlocks, heldout_mask, n_blocks_for, permutation, select
from gqa.corpus.sources import Source, parse_source, parse_sources, text_digest
from gqa.corpus.tokens import Blocks, Encoder, TokenisedText, concatenate, tokenise

ALPHAS = (0.01, 0.05, 0.3, 1.0)


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Texts of 4 to some 400 tokens, a tenth of them twice."""
    draw = random.Random(seed)
    texts = [f"{seed} {i} " + "import os\n" * (int(draw.paretovariate(0.8)) % 200) for i in range(count)]
    return [*texts, *texts[: count // 10]]


def write(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, pa.schema([("text", pa.string())])) as writer:
            writer.write_table(pa.table({"text": texts}), max_chunksize=7)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


class Cache:
    """Tokenises into a directory of the test."""

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self.directory, self.tokenizer = directory, tokenizer

    def tokens(self, texts: list[str], name: str = "a.jsonl") -> TokenisedText:
        return self.of(parse_source(str(write(self.directory / name, texts))))

    def of(self, source: Source) -> TokenisedText:
        return tokenise(source, self.tokenizer)


@pytest.fixture
def cache(tmp_path: Path, tokenizer: Any) -> Cache:
    return Cache(tmp_path, tokenizer)


@pytest.fixture(scope="module")
def text(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> TokenisedText:
    return Cache(tmp_path_factory.mktemp("text"), tokenizer).tokens(texts_of(1000))


def ids(blocks: Any) -> list[int]:
    """All tokens of the blocks, in their order."""
    taken = [blocks[b] for b in range(len(blocks))] if isinstance(blocks, Blocks) else list(blocks)
    return [int(token) for block in taken for token in block["input_ids"]]


def selected(text: TokenisedText, **options: Any) -> Selection:
    return select(text, **({"block_size": 64} | options))


def documents_of(selection: Selection) -> list[bytes]:
    """Digests of the documents of which a selection reads anything."""
    digests = selection.blocks.text.digests
    return [digests[i].tobytes() for i in selection.blocks.order]


@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"heldout_fraction": 0.1}, {"weights": [1]}])
def test_each_alpha_is_a_prefix_of_any_larger(text: TokenisedText, options: dict[str, Any]) -> None:
    read = [ids(selected(text, alpha=alpha, **options).blocks) for alpha in ALPHAS]
    for smaller, larger in pairwise(read):
        assert 0 < len(smaller) < len(larger)
        assert larger[: len(smaller)] == smaller
    total = selected(text, alpha=1.0, **options).data_tokens
    for alpha, tokens in zip(ALPHAS, read, strict=True):
        assert alpha * total - 64 < len(tokens) <= alpha * total


def test_the_order_is_the_definition(text: TokenisedText) -> None:
    """Documents by SHA-256(SHA-256(text) || "seed:epoch:copy"), copies counted from 0, and nothing else."""
    texts = texts_of(1000)
    for seed, epoch in ((0, 0), (3, 0), (3, 2)):
        keys = []
        for i, one in enumerate(texts):
            key = hashlib.sha256(one.encode()).digest() + f"{seed}:{epoch}:{texts[:i].count(one)}".encode()
            keys.append(hashlib.sha256(key).digest()[:8])
        assert permutation(text.digests, seed, epoch).tolist() == sorted(range(len(texts)), key=keys.__getitem__)


def test_the_order_is_the_same_everywhere() -> None:
    """Written down once: another machine, Python or numpy has to come to the same."""
    digests = np.array([list(text_digest(f"text {i % 6}")) for i in range(8)], np.uint8)
    assert permutation(digests, 0).tolist() == [6, 7, 2, 5, 3, 1, 0, 4]
    assert permutation(digests, 1, 1).tolist() == [0, 1, 2, 6, 3, 5, 4, 7]


def test_neither_the_order_nor_the_kind_of_files_matters(cache: Cache, text: TokenisedText) -> None:
    texts = texts_of(1000)
    wanted = {alpha: ids(selected(text, alpha=alpha).blocks) for alpha in (0.05, 1.0)}
    shuffled = random.Random(1).sample(texts, len(texts))
    for name, these in {"a.jsonl": shuffled, "b.parquet": shuffled[::-1], "c.arrow": texts}.items():
        made = cache.tokens(these, name)
        assert {alpha: ids(selected(made, alpha=alpha).blocks) for alpha in wanted} == wanted
    parts = concatenate([cache.tokens(shuffled[:300], "d.jsonl"), cache.tokens(shuffled[300:], "e.arrow")])
    assert {alpha: ids(selected(parts, alpha=alpha).blocks) for alpha in wanted} == wanted


def test_seeds_and_epochs_are_other_orders(text: TokenisedText) -> None:
    orders = {tuple(permutation(text.digests, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(len(text))) for order in orders)


def test_copies_are_spread_out(cache: Cache) -> None:
    """A text that is there a hundred times is not read a hundred times in a row."""
    made = cache.tokens([*(["the same"] * 100), *(f"text {i}" for i in range(100))])
    same = [int(i) < 100 for i in permutation(made.digests, 0)]
    assert 30 < sum(a != b for a, b in pairwise(same)) < 170


def test_heldout_documents_are_in_no_alpha(cache: Cache) -> None:
    texts = texts_of(1000)
    source = parse_source(str(write(cache.directory / "b.jsonl", texts)))
    heldout = {text_digest(found.text) for found in source.part("heldout", 0.1).documents()}
    made = cache.of(source)
    assert 60 < len(heldout) < 150
    for seed in range(4):
        for length in ({"alpha": 0.05}, {"alpha": 1.0}, {"tokens": 3 * int(made.lengths.sum())}):
            chosen = selected(made, seed=seed, heldout_fraction=0.1, **length)
            assert heldout.isdisjoint(documents_of(chosen))
    assert {made.digests[i].tobytes() for i in np.flatnonzero(heldout_mask(made.digests, 0.1))} == heldout
    assert chosen.heldout_documents == heldout_mask(made.digests, 0.1).sum() > len(heldout)
    rest = cache.of(source.part("train", 0.1))
    assert ids(selected(rest, alpha=1.0).blocks) == ids(selected(made, alpha=1.0, heldout_fraction=0.1).blocks)
    assert heldout_mask(made.digests, 1.0).all()
    assert not heldout_mask(made.digests, 0.0).any()


def test_more_tokens_than_there_are(text: TokenisedText) -> None:
    total = int(text.lengths.sum())
    chosen = selected(text, tokens=int(2.5 * total))
    once, twice = (ids(selected(text, tokens=n * total).blocks) for n in (1, 2))
    whole = ids(chosen.blocks)
    assert whole[: len(twice)] == twice
    assert twice[: len(once)] == once
    assert sorted(chosen.blocks.order[: len(text)]) == sorted(chosen.blocks.order[len(text) : 2 * len(text)])
    assert chosen.blocks.order[:20].tolist() != chosen.blocks.order[len(text) : len(text) + 20].tolist()
    assert chosen.epochs == pytest.approx(2.5, abs=0.01)
    assert chosen.summary() == (
        f"{len(whole) // 64:,} blocks of 64: {len(whole):,} of {total:,} tokens, "
        "which are read 2.50 times, each time in another order"
    )
    assert selected(text, alpha=1.0).summary() == (
        f"{total // 64:,} blocks of 64: {total - total % 64:,} of {total:,} tokens"
    )


def test_weights_are_shares_of_the_tokens(cache: Cache) -> None:
    parts = [cache.tokens(texts_of(n, n), f"{n}.jsonl") for n in (1000, 400, 700)]
    text = concatenate(parts)
    owner = np.repeat(np.arange(3), text.sizes)
    weights = [6, 1, 3]
    sizes = [int(part.lengths.sum()) for part in parts]
    for alpha in (0.2, 1.0):
        chosen = selected(text, alpha=alpha, weights=weights)
        shares = np.bincount(owner[chosen.blocks.order], text.lengths[chosen.blocks.order])
        assert shares / shares.sum() == pytest.approx([0.6, 0.1, 0.3], abs=400 / shares.sum())
        assert len(set(chosen.blocks.order.tolist())) == len(chosen.blocks.order)  # none twice
    assert chosen.data_tokens == min(int(size * 10 / weight) for size, weight in zip(sizes, weights, strict=True))
    read = [ids(selected(text, weights=weights, **length).blocks) for length in
            ({"alpha": 0.01}, {"alpha": 0.3}, {"alpha": 1.0}, {"tokens": 2 * chosen.data_tokens})]  # fmt: skip
    for smaller, larger in pairwise(read):
        assert larger[: len(smaller)] == smaller
    # Each source is read in the order that it has alone.
    alone = permutation(parts[2].digests, 0) + sum(text.sizes[:2])
    mixed = [int(i) for i in chosen.blocks.order if owner[i] == 2]
    assert mixed == alone[: len(mixed)].tolist()
    with pytest.raises(CorpusError, match="2 weights are given for 3 sources"):
        selected(text, alpha=1.0, weights=[1, 2])


def test_n_blocks_for() -> None:
    assert n_blocks_for(100, 1, alpha=0.29) == 29  # and not 28, which is 0.29 * 100 in binary, rounded down
    assert n_blocks_for(1000, 10, alpha=0.05) == 5
    assert n_blocks_for(1009, 10, alpha=1.0) == 100
    assert n_blocks_for(1000, 10, alpha=0.05, pretraining_tokens=10**6) == 5000
    assert n_blocks_for(1000, 10, tokens=2_005) == 200
    assert n_blocks_for(1000, 10, steps=7, blocks_per_step=3) == 21
    assert n_blocks_for(2**60, 2**10, alpha=1e-9) == 2**60 // 10**9 // 2**10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 0.01}, "alpha 0.01 is 9 tokens, less than one block of 64; give more, or use smaller blocks"),
        ({"tokens": 63}, "tokens is 63, less than one block of 64; give more, or use smaller blocks"),
        ({"tokens": -1}, "tokens is -1, less than one block of 64; give more, or use smaller blocks"),
        ({"steps": 0}, "steps is 0; give a number above 0"),
        ({"alpha": 0.5, "pretraining_tokens": 0}, "pretraining_tokens is 0; give a number above 0"),
        (
            {"alpha": 1.0, "block_size": 1000},
            "the data has 999 tokens, less than one block of 1000; use smaller blocks",
        ),
    ],
)
def test_lengths_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CorpusError) as refused:
        n_blocks_for(999, **({"block_size": 64} | options))
    assert str(refused.value) == said


def test_all_held_out(text: TokenisedText) -> None:
    with pytest.raises(CorpusError, match="all documents are held out and none is left to train on"):
        selected(text, alpha=1.0, heldout_fraction=1.0)


class TestStreams:
    def source(self, cache: Cache, texts: list[str], name: str = "s.jsonl") -> Source:
        return parse_source(str(write(cache.directory / name, texts)), streaming=True)

    def test_the_stream_is_packed_as_blocks_are(self, cache: Cache) -> None:
        texts = texts_of(100)
        made = cache.tokens(texts)
        kept = Blocks(made, np.arange(len(texts)), 64, boundaries=True)
        streamed = StreamedBlocks([self.source(cache, texts)], cache.tokenizer, block_size=64, boundaries=True)
        for ours, theirs in zip(streamed, [kept[b] for b in range(len(kept))], strict=True):
            assert {name: values.tolist() for name, values in ours.items()} == {
                name: values.tolist() for name, values in theirs.items()
            }
        assert len(list(streamed.blocks(start=3))) == len(kept) - 3
        assert next(streamed.blocks(start=3))["input_ids"].tolist() == kept[3]["input_ids"].tolist()

    def test_streams_hold_out_what_selections_hold_out(self, cache: Cache) -> None:
        texts = texts_of(200)
        source = self.source(cache, texts)
        stream = StreamedBlocks([source], cache.tokenizer, block_size=64, heldout_fraction=0.2)
        train = StreamedBlocks([source.part("train", 0.2)], cache.tokenizer, block_size=64)
        assert ids(stream) == ids(train)
        assert len(ids(train)) < len(ids(StreamedBlocks([source], cache.tokenizer, block_size=64))) - 64

    def test_streams_end_or_begin_again(self, cache: Cache) -> None:
        source = self.source(cache, texts_of(10))
        once = StreamedBlocks([source], cache.tokenizer, block_size=16)
        count = len(list(once))
        again = StreamedBlocks([source], cache.tokenizer, block_size=16, n_blocks=3 * count)
        assert ids(again)[: 16 * count] == ids(once)
        assert len(list(again)) == 3 * count
        nothing = StreamedBlocks([source], cache.tokenizer, block_size=16, n_blocks=5, heldout_fraction=1.0)
        with pytest.raises(CorpusError, match=r"\(train part, 1 held out\) holds no text"):
            list(nothing)

    def test_mixed_streams(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mixed as a selection mixes; the stream ends with the first source that does."""
        monkeypatch.chdir(cache.directory)
        write(Path("x.jsonl"), texts_of(300, 1))
        write(Path("y.jsonl"), texts_of(300, 2))
        stream = StreamedBlocks(parse_sources(["x.jsonl@3", "y.jsonl@1"]), cache.tokenizer, block_size=64)
        parts = [cache.of(parse_source(name)) for name in ("x.jsonl", "y.jsonl")]
        due = [
            (np.cumsum(part.lengths) - part.lengths) / share for part, share in zip(parts, (0.75, 0.25), strict=True)
        ]
        order = np.argsort(np.concatenate(due), kind="stable")
        wanted = ids(Blocks(concatenate(parts), order, 64))
        read = ids(stream)
        assert read == wanted[: len(read)]
        assert len(read) > 0.9 * min(int(parts[0].lengths.sum()) / 0.75, int(parts[1].lengths.sum()) / 0.25)
        with pytest.raises(
            CorpusError, match=r"several streams need weights \(SPEC@WEIGHT\): their sizes are not known"
        ):
            StreamedBlocks(parse_sources(["x.jsonl", "y.jsonl"]), cache.tokenizer, block_size=64)

    def test_a_stream_is_tokenised_on_the_way(self, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
        """One block of an endless stream needs no more than a batch of documents."""
        taken = 0
        encode = Encoder.encode

        def counting(encoder: Encoder, documents: Any) -> Any:
            nonlocal taken
            for pair in encode(encoder, documents):
                taken += 1
                yield pair

        monkeypatch.setattr(Encoder, "encode", counting)
        stream = StreamedBlocks([self.source(cache, texts_of(3000))], cache.tokenizer, block_size=64, n_blocks=10**9)
        next(iter(stream))
        assert taken < 200
