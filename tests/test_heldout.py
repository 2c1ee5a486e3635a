"""What is held out is never trained on: in whatever source, copy and epoch it comes again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import lines, write
from embedded import SOURCE

from gqa.checkpoint.console import SILENT
from gqa.checkpoint.errors import CorpusError
from gqa.checkpoint.read import read_checkpoint
from gqa.corpus.pairs import PairEncoder
from gqa.corpus.tokens import Encoder, pack
from gqa.eval.study.options import AblateOptions
from gqa.uptrain.dataloader import Dataloader, heldout_sources, open_dataloader, open_pairs
from gqa.uptrain.options import TrainOptions

N = 12
Grams = set[tuple[int, ...]]


def random_texts(count: int, seed: int, words: int = 60) -> list[str]:
    """No 12 tokens stand in two of them, nor twice in one."""
    random = np.random.default_rng(seed)
    return [" ".join(map(str, random.integers(10**6, size=words))) for _ in range(count)]


def grams(blocks: Any) -> Grams:
    return {
        tuple(ids[at : at + N]) for ids in (block["input_ids"].tolist() for block in blocks) for at in range(64 - N)
    }


def shares(loader: Dataloader) -> tuple[float, int]:
    """The share of the held-out 12-grams that are trained on, and how many blocks are held out."""
    trained = grams(loader.block(number) for number in range(loader.steps * loader.options.blocks_per_step))
    held = grams(loader.heldout)
    return len(trained & held) / len(held), len(loader.heldout)


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
    (("a.jsonl", "more.jsonl"), {"heldout_fraction": 0.1}),
    (("one.txt",), {}),
    (("more.jsonl",), {"heldout": "a.jsonl"}),
    (("a.jsonl",), {"heldout": "lines.jsonl"}),
    (("a.jsonl",), STREAM | {"heldout": "some.jsonl"}),
]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("data", "how"), CASES)
def test_no_heldout_text_is_trained_on(tokenizer: Any, data: tuple[str, ...], how: dict[str, Any]) -> None:
    """Three and more epochs of each."""
    options = TrainOptions("m", Path("o"), data=data, steps=300, batch_size=4, heldout_tokens=512, repeats=False, **how)
    leaked, held = shares(open_dataloader(options, tokenizer, 64))
    assert leaked == 0
    assert 4 <= held <= 8


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("how", [{}, STREAM])
@pytest.mark.parametrize("data", ["a.jsonl", "one.txt"])
def test_all_that_is_named_is_held_out(tokenizer: Any, data: str, how: dict[str, Any]) -> None:
    options = TrainOptions("m", Path("o"), data=(data,), heldout=data, steps=3, repeats=False, **how)
    with pytest.raises(
        CorpusError, match=r"none is left to train on; hold|has nothing to train on: it is empty, blank or"
    ):
        open_dataloader(options, tokenizer, 64).block(0)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("how", [{"heldout": "some.jsonl"}, {"heldout_fraction": 0.1}])
def test_a_study_calibrates_on_no_heldout_text(tokenizer: Any, how: dict[str, Any]) -> None:
    options = AblateOptions(Path("study"), "m", data=("twice.jsonl",), calibration_context=64, **how)
    text = replace(options.maps.text, repeats=False)
    ids = text.blocks(read_checkpoint(SOURCE), "cpu", SILENT).numpy()
    [source] = heldout_sources(options.training(None, Path("model"), Path("out")))
    held = grams(block for block, _ in pack((ids for _, ids in Encoder(tokenizer).encode(source.texts())), 64))
    assert len(held) > 200
    assert not grams({"input_ids": block} for block in ids) & held


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("how", [{}, {"heldout": "b.jsonl"}, {"heldout_fraction": 0.1}])
def test_no_heldout_pair_is_trained_on(tokenizer: Any, how: dict[str, Any]) -> None:
    rows = [{"text": text, "to": f"{number}"} for number, text in enumerate(random_texts(60, 0, 5))]
    lines(Path("a.jsonl"), *rows, *rows[::3])
    lines(Path("b.jsonl"), *rows[::4], {"text": "x", "to": "y"})
    config = type("Config", (), {"is_encoder_decoder": True, "decoder_start_token_id": 1, "pad_token_id": 0})()
    config.vocab_size, config.eos_token_id, config.get_text_config = 4096, 2, lambda decoder: config
    options = TrainOptions(
        "m", Path("o"), data=("a.jsonl",), target_field="to", steps=50, batch_size=4, heldout_tokens=400, **how
    )
    loader = open_pairs(options, PairEncoder(config, tokenizer, "m"), tokenizer, 64, 1, None)
    trained = {(*block["input_ids"], -1, *block["labels"]) for block in map(loader.block, range(200))}
    held = {(*block["input_ids"], -1, *block["labels"]) for block in loader.heldout}
    assert held
    assert not trained & held
