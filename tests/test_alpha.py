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
from gqa.corpus.alpha import Heldout, hold_back, in_hash_order, n_blocks_for, reading_order
from gqa.corpus.sources import parse_source
from gqa.corpus.tokens import Blocks, Documents, permutation, tokenise

ALPHAS = (0.01, 0.05, 0.3, 1.0)
SIZE = 64


@pytest.fixture(scope="module")
def text(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Documents:
    return tokenised(tmp_path_factory.mktemp("text") / "a.jsonl", texts_of(1000), tokenizer)


def selected(text: Documents, heldout: Heldout | None = None, **options: Any) -> tuple[list[int], np.ndarray, int]:
    """All tokens to train on, the order of documents, and the tokens before any repeats."""
    lengths = (heldout or Heldout()).lengths(text)
    order, n_blocks, data_tokens = reading_order(text, lengths, block_size=SIZE, **options)
    blocks = Blocks(text, order, SIZE, n_blocks, lengths)
    return [int(token) for block in blocks for token in block["input_ids"]], order, data_tokens


@pytest.mark.parametrize("options", [{}, {"seed": 7}])
def test_each_alpha_is_a_prefix_of_any_larger(text: Documents, options: dict[str, Any]) -> None:
    read = [selected(text, alpha=alpha, **options) for alpha in ALPHAS]
    for (smaller, *_), (larger, *_) in pairwise(read):
        assert 0 < len(smaller) < len(larger)
        assert larger[: len(smaller)] == smaller
    for alpha, (tokens, _, total) in zip(ALPHAS, read, strict=True):
        assert alpha * total - SIZE < len(tokens) <= alpha * total


@pytest.mark.parametrize("lengths", [[10_000], [7] * 1200, [5000, 1, 300, 9, 4000, 700]])
def test_what_is_set_aside_is_never_read(lengths: list[int]) -> None:
    """Not in any epoch, also where all is one document."""
    text = documents_of([piece.tolist() for piece in np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])])
    heldout = Heldout(hold_back(in_hash_order(text), 500))
    left = heldout.lengths(text)
    tokens = {int(t) for i in range(len(text)) for t in text.tokens(i)[: left[i]]}
    aside = set(range(sum(lengths))) - tokens
    assert len(aside) == 500
    assert {*selected(text, heldout, tokens=3 * sum(lengths))[0]} == tokens
    assert {*selected(text, tokens=3 * sum(lengths))[0]} & aside  # the control


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
    shuffled = random.Random(1).sample(texts_of(1000), len(text))
    files = {"a.parquet": shuffled, "b.jsonl": shuffled[:300], "c.arrow": shuffled[300:]}
    a, b, c = (parse_source(str(write(tmp_path / name, texts))) for name, texts in files.items())
    for sources in ([a], [b, c]):
        assert selected(tokenise(sources, tokenizer), alpha=1.0)[0] == selected(text, alpha=1.0)[0]


def test_more_tokens_than_there_are(text: Documents) -> None:
    """Each epoch reads all documents in another order; a longer run continues a shorter one."""
    total, count = int(text.lengths.sum()), len(text)
    (once, *_), (twice, *_), (whole, order, _) = (selected(text, tokens=int(n * total)) for n in (1, 2, 2.5))
    assert whole[: len(twice)] == twice
    assert twice[: len(once)] == once
    assert sorted(order[:count]) == sorted(order[count : 2 * count])
    assert order[:20].tolist() != order[count : count + 20].tolist()


def test_n_blocks_for() -> None:
    assert n_blocks_for(100, 1, alpha=0.29) == 29  # and not 28, which is 0.29 * 100 in binary, rounded down
    assert n_blocks_for(10**6, 10, alpha=0.05) == 5000
    assert n_blocks_for(1000, 10, tokens=2_005) == 200
    assert n_blocks_for(1000, 10, steps=7, blocks_per_step=3) == 21
    assert n_blocks_for(2**60, 2**10, alpha=1e-9) == 2**60 // 10**9 // 2**10
    refused: list[tuple[int, dict[str, Any], str]] = [
        (64, {"alpha": 0.01}, "alpha 0.01 is 9 tokens, less than one block of 64; give more, or use smaller blocks"),
        (64, {"tokens": -1}, "tokens is -1, less than one block of 64; give more, or use smaller blocks"),
        (1000, {"alpha": 1}, "the data has 999 tokens, less than one block of 1000; use smaller blocks"),
    ]
    for size, options, message in refused:
        with pytest.raises(CorpusError, match=f"^{message}$"):
            n_blocks_for(999, size, **options)
