"""Tokens and blocks: nothing is lost, added or moved, nothing is tokenised twice; what repeats itself stands where it
should.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import Counted, documents_of, lines, texts_of, tokenised, write
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, CTRLTokenizer, PreTrainedTokenizerFast

from gqa.checkpoint.errors import CorpusError, RefusedError
from gqa.checkpoint.loading import load_tokenizer
from gqa.checkpoint.read import Checkpoint
from gqa.corpus.sources import Source, parse_source
from gqa.corpus.tokens import Blocks, Documents, Encoder, adds_bos, mixed, pack, tiled, tokenise

MODEL = Path(__file__).parent.parent / "examples/stdlib-mha"
BOS, EOS = 1, 2


def variant(**changes: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"), **changes)


def read(path: Path, **options: str) -> Source:
    return parse_source(str(path), **options)


@pytest.fixture(scope="module")
def text(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """2200 documents, so that they are in several record batches."""
    return tokenised(tmp_path_factory.mktemp("text") / "a.jsonl", texts_of(2000), tokenizer)


def test_documents_are_what_the_tokenizer_makes_of_them(text: Documents, tokenizer: Any) -> None:
    texts = texts_of(2000)
    assert len(text) == len(texts) == 2200
    for i in range(0, 2200, 37):
        alone = tokenizer(texts[i], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert text.tokens(i).tolist() == [BOS, *alone, EOS]
        assert {BOS, EOS}.isdisjoint(alone)
        assert tokenizer.decode(alone) == texts[i]
    assert len(np.unique(text.digests, axis=0)) == 2000
    with pytest.raises(ValueError, match="read-only"):
        text.tokens(0)[0] = 5


def test_bos_is_put_where_the_tokenizer_puts_it(tokenizer: Any) -> None:
    x = tokenizer("x", add_special_tokens=False)["input_ids"]
    silent = variant(eos_token="</s>", bos_token="<s>", add_bos_token=False)
    both = variant(eos_token="</s>", bos_token="</s>")  # one token for both, as GPT-2 and Qwen have it
    for other in (silent, both):
        other.backend_tokenizer.post_processor = None
    for encoder, adds, expected in ((tokenizer, True, [BOS, *x, EOS]), (silent, False, [*x, EOS]), (both, False, None)):
        assert adds_bos(encoder) is adds
        assert Encoder(encoder).tokens(["x"]) == [expected or [*x, EOS]]
    with pytest.raises(CorpusError, match="has no EOS token, which is put between documents; set its eos_token"):
        Encoder(variant())


def stream(text: Documents, order: Any) -> list[int]:
    return [token for i in order for token in text.tokens(int(i)).tolist()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 12), st.randoms())
def test_blocks_are_the_documents_one_after_the_other(lengths: list[int], size: int, draw: random.Random) -> None:
    numbers = iter(range(sum(lengths)))
    text = documents_of([[next(numbers) for _ in range(length)] for length in lengths])
    order = np.array(draw.sample(range(len(lengths)), len(lengths)))
    tokens = np.array(stream(text, order))
    blocks = Blocks(text, order, size)
    assert len(blocks) == len(tokens) // size
    assert len(Blocks(text, order, size, n_blocks=1)) == 1
    cut = tokens[: len(blocks) * size].reshape(-1, size)
    assert np.array_equal([block["input_ids"] for block in blocks], cut) or not len(blocks)
    documents = (text.tokens(i) for i in order)
    assert np.array_equal([block["input_ids"] for block, _ in pack(documents, size)], cut) or not len(blocks)
    assert all(block["input_ids"].dtype == np.int64 for block in blocks)


def test_nothing_is_tokenised_twice(tokenizer: Any, tmp_path: Path, counted: Counted) -> None:
    path = write(tmp_path / "a.jsonl", texts_of(30))

    def again(source: Source, tokenizer: Any = tokenizer) -> tuple[str, int]:
        return tokenise([source], tokenizer).fingerprint, counted.taken()

    first, fresh = again(read(path))
    assert fresh == 33
    path = path.rename(tmp_path / "b.jsonl")
    padded, larger = (AutoTokenizer.from_pretrained(MODEL) for _ in range(2))
    padded.pad_token = "</s>"
    padded(["a", "a b"], padding=True, truncation=True, max_length=1)  # which is kept in the backend
    assert json.loads(padded.backend_tokenizer.to_str())["truncation"] is not None
    assert again(read(path), padded) == (first, 0)
    larger.add_tokens(["import os"])
    silent = variant(eos_token="</s>", bos_token="<s>")
    silent.backend_tokenizer.post_processor = None
    changed = [
        again(read(path), silent),
        again(read(path), larger),
        again(read(write(path, ["z", *texts_of(30)[1:]]))),
        again(read(path).part(0.5)),
    ]
    assert all(0 < count <= 33 for _, count in changed)
    assert len({first, *(fingerprint for fingerprint, _ in changed)}) == 5


def test_merges_decide_tokens_as_well_as_the_vocabulary(tmp_path: Path) -> None:
    """Of tokenizers in Python, whose vocabularies may be equal."""
    identities = set()
    for name, merges in (("one", "a b\nb c</w>\n"), ("other", "b c</w>\na b\n"), ("again", "a b\nb c</w>\n")):
        (tmp_path / name).mkdir()
        words = ["<unk>", "a", "b", "ab", "c</w>", "bc</w>"]
        vocabulary = str(tmp_path / name / "vocab.json")
        Path(vocabulary).write_text(json.dumps({word: n for n, word in enumerate(words)}))
        (tmp_path / name / "merges.txt").write_text(f"#version\n{merges}")
        tokenizer: Any = CTRLTokenizer(vocabulary, str(tmp_path / name / "merges.txt"), eos_token="<unk>")
        identities.add(Encoder(tokenizer).identify())
    assert len(identities) == 2


def test_the_network_is_not_asked(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files are found, read, tokenised and kept without a single connection, though nothing says offline."""
    asked: list[Any] = []
    monkeypatch.setattr("socket.socket.connect", lambda socket, address: asked.append(address))
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **how: asked.append(address))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    write(tmp_path / "a.jsonl", ["a"])
    assert len(tokenise([read(tmp_path)], tokenizer)) == 1
    assert asked == []
    with pytest.raises(CorpusError):
        next(parse_source("lab/none").texts())
    assert asked != []  # which is how it would be seen


def test_what_fails_is_not_kept(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "a.jsonl"
    lines(path, {"text": 4}, {"text": 5})
    for _ in range(2):
        with pytest.raises(CorpusError, match=r"a\.jsonl: field 'text' is no text but int; name a field of text"):
            tokenise([read(path)], tokenizer)
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert len(tokenised(path, ["a", "b"], tokenizer)) == 2
    (stored,) = (tmp_path / "cache").rglob("*.arrow")
    for rest in (b"", stored.read_bytes()[:-300]):
        stored.unlink()  # it is mapped
        stored.write_bytes(rest)
        with pytest.raises(CorpusError, match=r"stored tokens cannot be read: .*; delete ") as damaged:
            tokenise([read(path)], tokenizer)
    shutil.rmtree(str(damaged.value).partition("; delete ")[2])
    assert len(tokenise([read(path)], tokenizer)) == 2
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_without_backend_is_known_by_its_content(tmp_path: Path) -> None:
    """Not by where it lies; but by its vocabulary, its special tokens and how it normalises text."""
    from transformers import BertTokenizerLegacy

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b"]

    def identity(place: str, words: list[str] = words, **changes: Any) -> str:
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "vocab.txt").write_text("\n".join(words))
        made = BertTokenizerLegacy(str(tmp_path / place / "vocab.txt"), **{"eos_token": "[SEP]"} | changes)
        made.save_pretrained(tmp_path / place)
        return Encoder(BertTokenizerLegacy.from_pretrained(tmp_path / place)).identify()

    assert identity("one") == identity("two") == identity("one", padding_side="left")
    others = [identity("one", [*words, "c"]), identity("one", do_lower_case=False), identity("one", eos_token="[MASK]")]
    assert len({identity("one"), *others}) == 4


def test_special_tokens_alone_are_no_tokenizer(tmp_path: Path) -> None:
    """Of some classes transformers makes a tokenizer of them that knows no text."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "added_tokens.json").write_text('{"<x>": 0}')
    with pytest.raises(RefusedError, match=f"^m has no tokenizer; copy .* into {tmp_path}, or use none$"):
        load_tokenizer(Checkpoint("m", tmp_path, {"model_type": "gpt2"}, {}, ()), instead="use none")


LENGTH = 256
BLOCK = np.arange(1000, 1000 + LENGTH)  # no token twice: what stands twice was copied


@pytest.mark.parametrize("seed", range(5))
def test_the_beginning_comes_again_and_again(seed: int) -> None:
    ids = tiled(BLOCK, np.random.default_rng(seed))
    lag = len(np.unique(ids))
    assert LENGTH // 8 <= lag <= LENGTH // 2
    assert np.array_equal(ids, BLOCK[np.arange(LENGTH) % lag])


BLOCKS = np.random.default_rng(0).integers(1000, 2000, (64, LENGTH))


def mix(count: int = 64, seed: int = 0, length: int = LENGTH) -> np.ndarray:
    return np.stack([mixed(lambda n: BLOCKS[n, :length], index, seed, 1) for index in range(count)])


@pytest.mark.parametrize("length", [2, 32, 33, 256])
def test_blocks_keep_their_length_and_beginning(length: int) -> None:
    blocks = mix(length=length)
    assert blocks.shape == (64, length)
    assert (blocks[:, 0] == BLOCKS[:, 0]).all()
    assert np.isin(blocks, BLOCKS).all()
    assert (length <= 32) == (blocks == BLOCKS[:, :length]).all()


def test_any_run_of_blocks_has_its_shares() -> None:
    """A block does not depend on how many there are."""
    blocks = mix()
    assert (mix(20) == blocks[:20]).all()
    assert (mix(20) != mix(20, seed=1)).any()
    plain, repeated = (blocks == BLOCKS).all(axis=1), (blocks[:, 1:32] == BLOCKS[:, 1:32]).all(axis=1)
    for start in (0, 7):
        assert 18 <= plain[start : start + 40].sum() <= 22
        assert 8 <= (repeated & ~plain)[start : start + 40].sum() <= 12  # the others are of random tokens
