"""alpha: what a smaller one reads, a larger one reads first, in all formats and ranks; held-out
text is never read.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.documents import documents_of, lines, open_data, texts_of, tokenized, write
from support.embedded import SOURCE

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.core.console import SILENT
from gqa.core.errors import TextError
from gqa.corpus.blocks import Blocks, pack
from gqa.corpus.encoders import Encoders, TextEncoder
from gqa.corpus.pairs import PairEncoder
from gqa.corpus.reading_order import HeldoutDocuments, hold_back, permutation, reading_order
from gqa.corpus.specs import parse_source
from gqa.corpus.tokens import Documents, tokenize
from gqa.study.options import AblateOptions
from gqa.uptrain.data_sources import validation_sources
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.pair_data import PairDataBuilder
from gqa.uptrain.run_length import count_blocks
from gqa.uptrain.text_data import TextDataBuilder

ALPHAS = (0.01, 0.05, 0.3, 1.0)
SIZE = 64


@pytest.fixture(scope="module")
def text(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Documents:
    return tokenized(tmp_path_factory.mktemp("text") / "a.jsonl", texts_of(1000), tokenizer)


def selected(
    text: Documents, heldout: HeldoutDocuments | None = None, **options: Any
) -> tuple[list[int], np.ndarray, int]:
    """All tokens to train on, the order of documents, and the tokens before any repeats."""
    lengths = (heldout or HeldoutDocuments()).lengths(text)
    data_tokens = int(lengths.sum())
    settled = UptrainOptions("model", context=SIZE, **options)
    n_blocks = count_blocks(settled, data_tokens)
    order = reading_order(text, lengths, n_blocks * SIZE, settled.seed)
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
    text = documents_of(
        [piece.tolist() for piece in np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])]
    )
    heldout = HeldoutDocuments(hold_back(text, 500))
    left = heldout.lengths(text)
    tokens = {int(t) for i in range(len(text)) for t in text.tokens(i)[: left[i]]}
    aside = set(range(sum(lengths))) - tokens
    assert len(aside) == 500
    assert {*selected(text, heldout, tokens=3 * sum(lengths))[0]} == tokens
    assert {*selected(text, tokens=3 * sum(lengths))[0]} & aside  # the control


def test_the_order_is_the_definition(text: Documents) -> None:
    """By SHA-256(SHA-256(text) || "seed:epoch:copy"), copies counted from 0; texts without white
    space around them.
    """
    texts, orders = texts_of(1000), []
    for seed, epoch in ((0, 0), (3, 0), (3, 2)):
        keys = []
        for i, one in enumerate(texts):
            key = (
                hashlib.sha256(one.strip().encode()).digest()
                + f"{seed}:{epoch}:{texts[:i].count(one)}".encode()
            )
            keys.append(hashlib.sha256(key).digest()[:8])
        orders.append(permutation(text.digests, seed, epoch).tolist())
        assert orders[-1] == sorted(range(len(texts)), key=keys.__getitem__)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_neither_the_order_nor_the_kind_of_files_matters(
    text: Documents, tokenizer: Any, tmp_path: Path
) -> None:
    shuffled = random.Random(1).sample(texts_of(1000), len(text))
    files = {"a.parquet": shuffled, "b.jsonl": shuffled[:300], "c.arrow": shuffled[300:]}
    a, b, c = (parse_source(str(write(tmp_path / name, texts))) for name, texts in files.items())
    for sources in ([a], [b, c]):
        assert (
            selected(tokenize(sources, Encoders(tokenizer)), alpha=1.0)[0]
            == selected(text, alpha=1.0)[0]
        )


def test_more_tokens_than_there_are(text: Documents) -> None:
    """Each epoch reads all documents in another order; a longer run continues a shorter one."""
    total, count = int(text.lengths.sum()), len(text)
    (once, *_), (twice, *_), (whole, order, _) = (
        selected(text, tokens=int(n * total)) for n in (1, 2, 2.5)
    )
    assert whole[: len(twice)] == twice
    assert twice[: len(once)] == once
    assert sorted(order[:count]) == sorted(order[count : 2 * count])
    assert order[:20].tolist() != order[count : count + 20].tolist()


def test_n_blocks_for() -> None:
    def count(total: int, size: int, **options: Any) -> int:
        return count_blocks(UptrainOptions("model", context=size, **options), total)

    # And not 28, which is 0.29 * 100 in binary, rounded down
    assert count(100, 1, alpha=0.29) == 29
    assert count(10**6, 10, alpha=0.05) == 5000
    assert count(1000, 10, tokens=2_005) == 200
    assert count(1000, 10, steps=7, batch_size=3) == 21
    assert count(2**60, 2**10, alpha=1e-9) == 2**60 // 10**9 // 2**10


# --------------------------------------------------------------------------------- what is held out


N = 12
Grams = set[tuple[int, ...]]


def random_texts(count: int, seed: int, words: int = 60) -> list[str]:
    """No 12 tokens stand in two of them, nor twice in one."""
    random = np.random.default_rng(seed)
    return [" ".join(map(str, random.integers(10**6, size=words))) for _ in range(count)]


def grams(blocks: Any) -> Grams:
    return {
        tuple(ids[at : at + N])
        for ids in (block["input_ids"].tolist() for block in blocks)
        for at in range(64 - N)
    }


def shares(loader: Dataloader) -> tuple[float, int]:
    """The share of the held-out 12-grams that are trained on, and how many blocks are held out."""
    trained = grams(
        loader.block(number) for number in range(loader.steps * loader.options.blocks_per_step)
    )
    held = grams(loader.validation_blocks)
    return len(trained & held) / len(held), len(loader.validation_blocks)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = random_texts(60, 0)
    write(Path("a.jsonl"), texts)
    write(Path("twice.jsonl"), [*texts, *reversed(texts)])
    write(Path("more.jsonl"), [*random_texts(60, 1), *texts[::2], *random_texts(10, 2)])
    write(Path("some.jsonl"), [*texts[5:12], *random_texts(5, 3)])
    write(Path("lines.jsonl"), [text + "\n" for text in texts[5:12]])
    Path("one.txt").write_text(random_texts(1, 4, 4000)[0])


STREAM = {"streaming": True}
CASES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("twice.jsonl",), {}),
    (("a.jsonl", "more.jsonl"), {"validation_fraction": 0.1}),
    (("one.txt",), {}),
    (("more.jsonl",), {"validation": "a.jsonl"}),
    (("a.jsonl",), {"validation": "lines.jsonl"}),
    (("a.jsonl",), STREAM | {"validation": "some.jsonl"}),
]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("data", "how"), CASES)
def test_no_validation_text_is_trained_on(
    tokenizer: Any, data: tuple[str, ...], how: dict[str, Any]
) -> None:
    """Three and more epochs of each."""
    options = UptrainOptions(
        "m",
        Path("o"),
        data=data,
        steps=300,
        batch_size=4,
        validation_tokens=512,
        repeats=False,
        **how,
    )
    leaked, held = shares(open_data(options, tokenizer, 64))
    assert leaked == 0
    assert 4 <= held <= 8


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("how", [{}, STREAM])
@pytest.mark.parametrize("data", ["a.jsonl", "one.txt"])
def test_all_that_is_named_is_held_out(tokenizer: Any, data: str, how: dict[str, Any]) -> None:
    options = UptrainOptions(
        "m", Path("o"), data=(data,), validation=data, steps=3, repeats=False, **how
    )
    with pytest.raises(
        TextError,
        match=r"none is left to train on; pass other|has no text to train on: it is empty",
    ):
        open_data(options, tokenizer, 64).block(0)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("how", [{"validation": "some.jsonl"}, {"validation_fraction": 0.1}])
def test_a_study_calibrates_on_no_validation_text(tokenizer: Any, how: dict[str, Any]) -> None:
    options = AblateOptions(
        Path("study"), "m", data=("twice.jsonl",), calibration_context=64, **how
    )
    text = replace(options.maps_options.text, repeats=False)
    reader = CalibrationReader(text, read_checkpoint(SOURCE), "cpu", SILENT)
    ids = reader.blocks_and_heldout()[0].numpy()
    [source] = validation_sources(options.training(None, Path("model"), Path("out")))
    tokens = [one.tokens for one in TextEncoder(tokenizer).encode([*source.texts()])]
    held = grams(block for block, _ in pack(tokens, 64))
    assert len(held) > 200
    assert not grams({"input_ids": block} for block in ids) & held


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("how", [{}, {"validation": "b.jsonl"}, {"validation_fraction": 0.1}])
def test_no_validation_pair_is_trained_on(tokenizer: Any, how: dict[str, Any]) -> None:
    rows = [{"text": text, "to": f"{number}"} for number, text in enumerate(random_texts(60, 0, 5))]
    lines(Path("a.jsonl"), *rows, *rows[::3])
    lines(Path("b.jsonl"), *rows[::4], {"text": "x", "to": "y"})
    config = type(
        "Config", (), {"is_encoder_decoder": True, "decoder_start_token_id": 1, "pad_token_id": 0}
    )()
    config.vocab_size, config.eos_token_id, config.get_text_config = 4096, 2, lambda decoder: config
    options = UptrainOptions(
        "m",
        Path("o"),
        data=("a.jsonl",),
        target_column="to",
        steps=50,
        batch_size=4,
        validation_tokens=400,
        **how,
    )
    encoder = PairEncoder(config, tokenizer, "m")
    loader = PairDataBuilder(TextDataBuilder(options, Encoders(tokenizer), 64), encoder).build()
    trained = {
        (*block["input_ids"], -1, *block["labels"]) for block in map(loader.block, range(200))
    }
    held = {(*block["input_ids"], -1, *block["labels"]) for block in loader.validation_blocks}
    assert held
    assert not trained & held
