"""alpha: what a smaller one reads, a larger one reads first, on every machine, from every format, for all ranks."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import documents_of, texts_of, tokenised, write

from gqa.checkpoint.errors import CorpusError
from gqa.corpus.alpha import Heldout, Selection, hold_back_of_each, n_blocks_for, permutation, select
from gqa.corpus.sources import parse_source, row_digest
from gqa.corpus.tokens import Documents, tokenise

ALPHAS = (0.01, 0.05, 0.3, 1.0)


@pytest.fixture(scope="module")
def text(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Documents:
    return tokenised(tmp_path_factory.mktemp("text") / "a.jsonl", texts_of(1000), tokenizer)


def ids(blocks: Any) -> list[int]:
    """All tokens of the blocks, in their order."""
    return [int(token) for block in blocks for token in block["input_ids"]]


def selected(text: Documents, **options: Any) -> Selection:
    return select(text, **({"block_size": 64, "heldout": Heldout()} | options))


def check_prefixes(read: list[list[int]]) -> None:
    """What a smaller one reads, each larger one reads first."""
    for smaller, larger in pairwise(read):
        assert 0 < len(smaller) < len(larger)
        assert larger[: len(smaller)] == smaller


@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"heldout": Heldout(fraction=0.1)}, {"weights": [1]}])
def test_each_alpha_is_a_prefix_of_any_larger(text: Documents, options: dict[str, Any]) -> None:
    read = [ids(selected(text, alpha=alpha, **options).blocks) for alpha in ALPHAS]
    check_prefixes(read)
    total = selected(text, alpha=1.0, **options).data_tokens
    for alpha, tokens in zip(ALPHAS, read, strict=True):
        assert alpha * total - 64 < len(tokens) <= alpha * total


@pytest.mark.parametrize(
    ("lengths", "sizes"), [([10_000], (1,)), ([7] * 1200, (1200,)), ([5000, 1, 300, 9, 4000, 700], (2, 4))]
)
def test_what_is_set_aside_is_never_read(lengths: list[int], sizes: tuple[int, ...]) -> None:
    """Not in any epoch, also where all is one document; and of each source it is the same share."""
    text = documents_of([piece.tolist() for piece in np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])], sizes)
    held = Heldout(hold_back_of_each(text, 500))
    left = held.lengths(text)
    tokens = {int(t) for i in range(len(text)) for t in text.tokens(i)[: left[i]]}
    aside = set(range(sum(lengths))) - tokens
    assert 500 <= len(aside) < 500 + len(sizes)
    epochs = [1] * len(sizes) if len(sizes) > 1 else None
    read = {*ids(selected(text, heldout=held, tokens=3 * sum(lengths), weights=epochs).blocks)}
    assert read == tokens
    assert {*ids(selected(text, tokens=3 * sum(lengths), weights=epochs).blocks)} & aside
    for first, end in pairwise(np.cumsum([0, *sizes])):
        of_source = sum(lengths[first:end])
        assert (of_source - left[first:end].sum()) == pytest.approx(500 * of_source / sum(lengths), abs=1)


def test_the_order_is_the_definition(text: Documents) -> None:
    """Documents by SHA-256(SHA-256(text) || "seed:epoch:copy"), copies counted from 0, and nothing else; of a text
    without the white space around it.
    """
    texts, orders = texts_of(1000), []
    for seed, epoch in ((0, 0), (3, 0), (3, 2)):
        keys = []
        for i, one in enumerate(texts):
            key = hashlib.sha256(one.strip().encode()).digest() + f"{seed}:{epoch}:{texts[:i].count(one)}".encode()
            keys.append(hashlib.sha256(key).digest()[:8])
        orders.append(permutation(text.digests, seed, epoch).tolist())
        assert orders[-1] == sorted(range(len(texts)), key=keys.__getitem__)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_neither_the_order_nor_the_kind_of_files_matters(text: Documents, tokenizer: Any, tmp_path: Path) -> None:
    texts = texts_of(1000)
    shuffled = random.Random(1).sample(texts, len(texts))
    files = {"a.jsonl": shuffled, "b.parquet": shuffled[::-1], "c.arrow": texts}
    files |= {"d.jsonl": shuffled[:300], "e.arrow": shuffled[300:]}
    a, b, c, d, e = (parse_source(str(write(tmp_path / name, these))) for name, these in files.items())
    for alpha in (0.05, 1.0):
        wanted = ids(selected(text, alpha=alpha).blocks)
        for sources in ([a], [b], [c], [d, e]):
            assert ids(selected(tokenise(sources, tokenizer), alpha=alpha).blocks) == wanted


def test_heldout_documents_are_in_no_alpha(tokenizer: Any, tmp_path: Path) -> None:
    source = parse_source(str(write(tmp_path / "b.jsonl", texts_of(1000))))
    heldout = {row_digest(text) for text in source.part(0.1).texts()}
    made = tokenise([source], tokenizer)
    assert 60 < len(heldout) < 150
    for seed in range(4):
        for length in ({"alpha": 0.05}, {"alpha": 1.0}, {"tokens": 3 * int(made.lengths.sum())}):
            chosen = selected(made, seed=seed, heldout=Heldout(fraction=0.1), **length)
            assert heldout.isdisjoint(made.digests[i].tobytes() for i in chosen.blocks.order)
    copies = sum(digest.tobytes() in heldout for digest in made.digests)
    assert chosen.heldout_documents == copies > len(heldout)
    with pytest.raises(CorpusError, match="all documents are held out and none of a source is left to train on"):
        selected(made, alpha=1.0, heldout=Heldout(fraction=1.0))


def test_more_tokens_than_there_are(text: Documents) -> None:
    total = int(text.lengths.sum())
    chosen = selected(text, tokens=int(2.5 * total))
    once, twice = (ids(selected(text, tokens=n * total).blocks) for n in (1, 2))
    whole = ids(chosen.blocks)
    assert whole[: len(twice)] == twice
    assert twice[: len(once)] == once
    assert sorted(chosen.blocks.order[: len(text)]) == sorted(chosen.blocks.order[len(text) : 2 * len(text)])
    assert chosen.blocks.order[:20].tolist() != chosen.blocks.order[len(text) : len(text) + 20].tolist()
    assert chosen.summary() == (
        f"{len(whole) // 64:,} blocks of 64: {len(whole):,} of {total:,} tokens, "
        "which are read 2.50 times, each time in another order"
    )
    assert selected(text, alpha=1.0).summary() == (
        f"{total // 64:,} blocks of 64: {total - total % 64:,} of {total:,} tokens"
    )


def test_weights_are_shares_of_the_tokens(tokenizer: Any, tmp_path: Path) -> None:
    sources = [parse_source(str(write(tmp_path / f"{n}.jsonl", texts_of(n, n)))) for n in (1000, 400, 700)]
    text, parts = tokenise(sources, tokenizer), [tokenise([source], tokenizer) for source in sources]
    owner = np.repeat(np.arange(3), text.sizes)
    weights = [6, 1, 3]
    sizes = [int(part.lengths.sum()) for part in parts]
    for alpha in (0.2, 1.0):
        chosen = selected(text, alpha=alpha, weights=weights)
        shares = np.bincount(owner[chosen.blocks.order], text.lengths[chosen.blocks.order])
        assert shares / shares.sum() == pytest.approx([0.6, 0.1, 0.3], abs=text.lengths.max() / shares.sum())
        assert len(set(chosen.blocks.order.tolist())) == len(chosen.blocks.order)  # none twice
    assert chosen.data_tokens == min(int(size * 10 / weight) for size, weight in zip(sizes, weights, strict=True))
    read = [ids(selected(text, weights=weights, **length).blocks) for length in
            ({"alpha": 0.01}, {"alpha": 0.3}, {"alpha": 1.0}, {"tokens": 2 * chosen.data_tokens})]  # fmt: skip
    check_prefixes(read)
    # Each source is read in the order that it has alone.
    alone = permutation(parts[2].digests, 0) + sum(text.sizes[:2])
    mixed = [int(i) for i in chosen.blocks.order if owner[i] == 2]
    assert mixed == alone[: len(mixed)].tolist()


def test_n_blocks_for() -> None:
    assert n_blocks_for(100, 1, alpha=0.29) == 29  # and not 28, which is 0.29 * 100 in binary, rounded down
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
        ({"alpha": 1, "block_size": 1000}, "the data has 999 tokens, less than one block of 1000; use smaller blocks"),
    ],
)
def test_lengths_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CorpusError) as refused:
        n_blocks_for(999, **({"block_size": 64} | options))
    assert str(refused.value) == said
