"""The text that heads are calibrated on: spread over a source, of which no more is tokenized than
is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceTrainer
from support.calibrations import pairs
from support.checkpoints import Recorder, check_refused, edit_json, run
from support.documents import Counted
from support.embedded import (
    SOURCE,
    bring_class,
    bring_tokenizer,
    copy_source,
    tokenizer,
    without_bos,
)
from support.families import write_checkpoint
from support.tiny_models import TINY, build
from support.training import PAIRS
from torch import Tensor
from transformers import M2M100Tokenizer

import gqa.convert.merge.calibration_blocks as module
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import plan_conversion
from gqa.convert.generate import text_pairs
from gqa.convert.heads.config import transformers_config
from gqa.convert.merge import budget
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import MapsOptions
from gqa.convert.merge.quality import CHECKED_TOKENS
from gqa.convert.merge.workload import calibration_workload
from gqa.core.console import SILENT, Watcher
from gqa.core.errors import RefusedError, TextError
from gqa.corpus.blocks import Blocks
from gqa.corpus.encoders import Encoders
from gqa.corpus.pairs import PairEncoder, corrupt_spans
from gqa.corpus.reading_order import permutation
from gqa.corpus.specs import parse_source
from gqa.corpus.tokens import tokenize
from gqa.models.tokenizer import load_tokenizer

LENGTH = 16


def written(place: Path, documents: int) -> str:
    """A file of that many documents, each with a number of its own in front of 200 characters."""
    lines = (
        f'{{"text": "document {number} ' + "says the same words " * 10 + '"}\n'
        for number in range(documents)
    )
    file = place / "many.jsonl"
    file.write_text("".join(lines))
    return str(file)


def reader(
    text: CalibrationText, model: Path = SOURCE, watcher: Watcher = SILENT
) -> CalibrationReader:
    return CalibrationReader(text, read_checkpoint(model), "cpu", watcher)


def blocks(
    source: str, count: int, seed: int = 0, length: int = LENGTH, repeats: bool = False
) -> Tensor:
    text = CalibrationText((source,), length * count, length, seed, repeats=repeats)
    return reader(text).blocks_and_heldout()[0]


def test_no_more_is_tokenized_than_is_needed(tmp_path: Path, counted: Counted) -> None:
    """4 blocks of 5,000 documents: the same for a seed, others for another.

    With repeats half of a text is changed.
    """
    source = written(tmp_path, 5_000)
    pieces = blocks(source, 4)
    assert 4 <= counted.taken() < 200
    assert pieces.shape == (4, LENGTH)
    assert pieces.dtype == torch.int64
    assert torch.equal(blocks(source, 4), pieces)
    assert not torch.equal(blocks(source, 4, seed=1), pieces)
    plain, mixed = (blocks(source, 16, length=64, repeats=repeats) for repeats in (False, True))
    assert 7 <= int((plain == mixed).all(dim=1).sum()) <= 9
    assert torch.isin(mixed, plain).all()


@pytest.mark.parametrize(("numbers", "held"), [(9000, 4), (110, None), (0, 2)])
def test_held_out_blocks_are_others(
    tmp_path: Path, alone: None, numbers: int, held: int | None
) -> None:
    """Of a long text what is left, so that what is fitted to is the same; else an eighth."""
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(numbers))))
    spec = str(tmp_path / "text.txt") if numbers else "self"
    text = CalibrationText((spec,), LENGTH * 16, LENGTH, repeats=False)
    fitted, others = reader(text).blocks_and_heldout(LENGTH * 4)
    whole, _ = reader(text).blocks_and_heldout()
    assert len(others) == (held or (len(fitted) + len(others)) // 8) > 0
    rows = [{tuple(row) for row in part.tolist()} for part in (fitted, others, whole)]
    assert not rows[0] & rows[1]
    assert (rows[0] | rows[1] == rows[2]) == (held != 4)
    assert torch.equal(fitted, whole) == (held == 4)


@pytest.mark.parametrize(("documents", "characters"), [(1, 256), (30, 256), (30, 1)])
def test_a_small_source_is_used_from_end_to_end(
    tmp_path: Path, documents: int, characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evenly spaced in the stream of all documents, in the order of training; also with too few
    characters a token.
    """
    # How many characters a token is taken to have
    monkeypatch.setattr(module, "_CHARACTERS_READ_PER_TOKEN", characters)
    source = written(tmp_path, documents)
    text = tokenize([parse_source(source)], Encoders(tokenizer()))
    whole = Blocks(text, permutation(text.digests, 3), LENGTH)
    count = min(8, len(whole))
    expected = np.stack([whole[int(i)]["input_ids"] for i in np.linspace(0, len(whole) - 1, count)])
    assert np.array_equal(blocks(source, 8, seed=3).numpy(), expected)


@pytest.mark.parametrize("repeats", [False, True])
def test_some_blocks_begin_with_bos_even_if_the_tokenizer_adds_none(
    tmp_path: Path, repeats: bool
) -> None:
    """One of four; also among those that the result is compared on.

    An encoder-decoder's blocks are no whole texts.
    """
    source, model = written(tmp_path, 500), without_bos(tmp_path)
    checkpoint, data = read_checkpoint(model), parse_source(source)
    settings = {"tokens": LENGTH * 40, "length": LENGTH, "seed": 0}
    for part in module.read_blocks(
        checkpoint, data, repeats=repeats, heldout_count=LENGTH * 8, **settings
    ):
        assert (part[:, 0] == 1).tolist() == [False, False, False, True] * (len(part) // 4)
    edit_json(model / "config.json", lambda config: config.update(is_encoder_decoder=True))
    found, _ = module.read_blocks(
        read_checkpoint(model), parse_source(source), repeats=False, **settings
    )
    assert not (found == 1).any()


def test_a_tokenizer_that_is_code_is_run_only_where_that_is_asked_for(tmp_path: Path) -> None:
    bring_tokenizer(model := copy_source(tmp_path))
    words = (
        model,
        "--kv-heads",
        2,
        "--method",
        "calibrated",
        "--data",
        written(tmp_path, 9),
        "--tokens",
        "64",
    )
    words = (*words, "--context", "16", "-o", tmp_path / "out")
    assert "code in the checkpoint; read it, then pass --trust-remote-code" in check_refused(
        run(*words), advice=""
    )
    assert run(*words, "--trust-remote-code").code == 0


def test_a_model_that_is_code_writes_where_that_is_asked_for(tmp_path: Path) -> None:
    """Its own class, which writes but one token; without being trusted, it is read by transformers'
    class. What one wrote is not taken for what the other does.
    """
    bring_class(model := copy_source(tmp_path))
    for trusted in (True, False):
        text = CalibrationText(("self:plain",), 64, LENGTH, trust_remote_code=trusted)
        found, _ = reader(text, model).blocks_and_heldout()
        assert bool((found[:, 1:] == 7).all()) is trusted


def test_text_that_is_shorter_than_asked_for_is_told_of(tmp_path: Path) -> None:
    """In blocks, of each source by itself; enough is not."""
    source, recorder, pieces = written(tmp_path, 1), Recorder(), blocks(written(tmp_path, 1), 99)
    for sources, count in (
        ((source,), 99),
        ((source, "self:plain"), 198),
        ((source,), len(pieces)),
        (("self",), 2),
    ):
        text = CalibrationText(sources, count * LENGTH, LENGTH, repeats=False)
        found = reader(text, watcher=recorder).inputs()[0]["input_ids"]
        assert len(found) == (len(pieces) + 99 if len(sources) > 1 else min(count, len(pieces)))
    asked = f"blocks of {LENGTH} tokens that calibration asks for; pass more text with --data"
    assert recorder.warnings == [
        f"{source} has only {len(pieces)} of the 99 {asked}",
        f"{source} has only {len(pieces)} of the 99 {asked}",
    ]


def test_generated_text_is_rounded_down_to_whole_blocks() -> None:
    text = CalibrationText((f"self:plain:{3 * LENGTH - 1}",), length=LENGTH)
    found, _ = reader(text).blocks_and_heldout()
    assert found.shape == (2, LENGTH)


def test_the_estimate_is_of_the_blocks_that_are_generated() -> None:
    plan = plan_conversion(SOURCE, 2, method="calibrated")

    def cache_bytes(tokens: int) -> float:
        text = CalibrationText((f"self:{tokens}",), length=LENGTH)
        return calibration_workload(plan, MapsOptions(text=text)).cache_bytes

    assert cache_bytes(3 * LENGTH - 1) == cache_bytes(2 * LENGTH)


def test_the_estimate_is_of_the_pairs_that_are_generated(tmp_path: Path) -> None:
    """By default an encoder-decoder writes all of its text, each pair in two sequences."""
    model = write_checkpoint(build(TINY["gqa_t5"], 4), tmp_path / "t5")
    plan = plan_conversion(model, 1, method="calibrated")

    def cache_bytes(text: CalibrationText) -> float:
        return calibration_workload(plan, MapsOptions(text=text)).cache_bytes

    text = CalibrationText(tokens=64 * LENGTH, length=LENGTH)
    sequences = 2 * 64
    read = plan.cache_before.bytes_per_token * LENGTH / 2  # by each token, on average
    assert cache_bytes(text) == sequences * LENGTH * read


def test_short_text_of_which_some_is_held_out_is_told_as_too_short(tmp_path: Path) -> None:
    """It has as many blocks as calibration asks for, but an eighth of them measure the result."""
    recorder = Recorder()
    file = tmp_path / "text.txt"
    file.write_text(" ".join(map(str, range(9000))))
    all_text = CalibrationText((str(file),), 10**6, LENGTH, repeats=False)
    n_blocks = len(reader(all_text).blocks_and_heldout()[0])
    text = CalibrationText((str(file),), n_blocks * LENGTH, LENGTH, repeats=False)

    found, held_out = reader(text, watcher=recorder).blocks_and_heldout(10 * LENGTH)

    assert len(held_out) == 10
    (warning,) = recorder.warnings
    assert f"has only {len(found):,} of the {n_blocks:,} blocks" in warning
    assert "besides 10 blocks that measure the quality" in warning


def test_held_out_blocks_of_one_source_do_not_hide_that_another_is_short(tmp_path: Path) -> None:
    recorder = Recorder()
    (tmp_path / "long.txt").write_text(" ".join(map(str, range(9000))))
    (tmp_path / "short.txt").write_text(" ".join("abcdefghijklmnopqrstuvwxyz"))
    sources = (str(tmp_path / "long.txt"), str(tmp_path / "short.txt"))
    text = CalibrationText(sources, 2 * 16 * LENGTH, LENGTH, repeats=False)

    reader(text, watcher=recorder).blocks_and_heldout(16 * LENGTH)

    (warning,) = recorder.warnings
    assert warning.startswith(f"{sources[1]} has only ")
    assert " of the 16 blocks " in warning


def test_a_file_of_separators_is_refused_before_a_conversion_starts(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("%%%\n%%%\n")
    text = CalibrationText((str(file),), separator="%%%")
    with pytest.raises(TextError, match="has no text left"):
        text.check_sources(read_checkpoint(SOURCE))


def test_layers_are_measured_on_text_that_the_verdict_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither fitted to nor measured on what the result is compared on later; four fifths, of each
    source its share.
    """
    # Little text, and no measurement: what is measured on is the matter
    monkeypatch.setattr(budget, "SAMPLED_TOKENS", 20 * LENGTH)
    calls = list[tuple[Tensor, Tensor]]()
    monkeypatch.setattr(
        budget, "losses_alone", lambda plan, *parts: calls.append(parts[:2]) or [0.0] * 6
    )
    source = str(tmp_path / "text.txt")
    Path(source).write_text(" ".join(map(str, range(3000))))
    for sources, count in (((source, "self:plain"), 40), ((source,), 200), ((source,), 3)):
        text = CalibrationText(sources, count * LENGTH, LENGTH, repeats=False)
        options = MapsOptions(text=text, device="cpu", check=True)
        budget.heads_within(read_checkpoint(SOURCE), 0.5, options)
        fitted, measured = calls[-1]
        _, scored = reader(text).blocks_and_heldout(CHECKED_TOKENS)
        rows = [{tuple(row) for row in part.tolist()} for part in (fitted, measured, scored)]
        is_short = count == 3
        assert len(fitted) == (2 if is_short else 16)
        assert len(measured) == (1 if is_short else 4)
        assert len(scored) > 0
        assert len(rows[0] | rows[1] | rows[2]) == sum(map(len, rows))
    numbers = torch.arange(40)[:, None].expand(-1, LENGTH)
    numbered = Mock(blocks_and_heldout=Mock(return_value=(numbers, None)))
    with monkeypatch.context() as patch:
        patch.setattr(budget, "CalibrationReader", Mock(return_value=numbered))
        budget.heads_within(read_checkpoint(SOURCE), 0.5, MapsOptions(device="cpu"))
    assert [int((part[:, 0] < 20).sum()) for part in calls[-1]] == [8, 2]
    options = MapsOptions(text=CalibrationText((source,), 4096, 4096), device="cpu")
    with pytest.raises(
        RefusedError, match=r"text.txt gives only one block of 4096 tokens, .* a smaller --context"
    ):
        budget.heads_within(read_checkpoint(SOURCE), 0.5, options)


# ---------------------------------------------------------------------- pairs, for encoder-decoders


START, END = 1, 2  # of the tiny models


def pair_inputs(
    pair_models: Path, name: str, source: str, count: int = 12, **how: Any
) -> dict[str, Tensor]:
    text = CalibrationText(
        (str(pair_models / source) if "." in source else source,), 24 * count, 24, **how
    )
    return reader(text, pair_models / name).inputs()[0]


def rows_of(given: dict[str, Tensor], prefix: str = "") -> list[list[int]]:
    """Ids without their padding, which is at the end."""
    masks = given[f"{prefix}attention_mask"].bool()
    assert bool((masks[:, :-1] >= masks[:, 1:]).all())
    return [
        ids[mask].tolist() for ids, mask in zip(given[f"{prefix}input_ids"], masks, strict=True)
    ]


def test_columns_of_a_data_set(pair_models: Path) -> None:
    """Each target behind its source, chosen by the seed; the decoder is given it shifted by one."""
    pairs, plain = (
        pair_inputs(pair_models, "t5", "pairs.jsonl", text_column="said", target_column="meant"),
        tokenizer(),
    )
    # Its tokenizer puts the decoder's first token before a text.
    known = {
        tuple(plain(row["said"])["input_ids"][:24]): plain(row["meant"])["input_ids"][1:]
        for row in PAIRS
    }
    assert len(rows_of(pairs)) == 12
    for source, target in zip(rows_of(pairs), rows_of(pairs, "decoder_"), strict=True):
        assert target == [START, *known[tuple(source)]]
    again = pair_inputs(pair_models, "t5", "pairs.jsonl", text_column="said", target_column="meant")
    assert torch.equal(again["input_ids"], pairs["input_ids"])


def test_spans_are_left_out_and_asked_for() -> None:
    """15 % in spans of 3: source and target together are the text, in its order."""
    ids, marks = np.arange(100, 300), list(range(10, 60))
    source, target = corrupt_spans(ids, marks, np.random.default_rng(0))
    spans: dict[int, list[int]] = {}
    for token in target:
        spans.setdefault(token, []) if token in marks else spans[list(spans)[-1]].append(token)
    assert list(spans) == marks[:10]
    assert sum(map(len, spans.values())) == 30
    assert len({len(span) for span in spans.values()}) > 1
    back = [token for one in source for token in spans.get(one, [one])]
    assert back == ids.tolist()
    masked, whole = corrupt_spans(ids, [5], np.random.default_rng(0))
    assert masked.count(5) == 10
    assert whole == ids.tolist()


@pytest.mark.parametrize(("name", "mark"), [("t5", "<extra_id_0>"), ("bart", "<mask>")])
def test_plain_text_makes_pairs(pair_models: Path, name: str, mark: str) -> None:
    """No side is longer than its text: what the tokenizer puts before it and the end of the target
    have their room.
    """
    pairs, checkpoint = (
        pair_inputs(pair_models, name, "text.jsonl"),
        read_checkpoint(pair_models / name),
    )
    own = load_tokenizer(checkpoint)
    token = own.convert_tokens_to_ids(mark)
    assert len(rows_of(pairs)) == len(rows_of(pairs, "decoder_")) > 0
    assert all(token in row for row in rows_of(pairs))
    assert all((token in row) == (name == "t5") for row in rows_of(pairs, "decoder_"))
    assert all(row[0] == START for row in rows_of(pairs, "decoder_"))
    encoder = PairEncoder(transformers_config(checkpoint.config), own, name)
    for length in (8, 24):
        source, target = encoder.corrupt(np.arange(10, 10 + length), np.random.default_rng(0))
        assert source[0] == own.bos_token_id
        assert target[-1] == END
        assert max(len(source), len(target)) <= length
        assert len(encoder.add_special_tokens(source * 9, target * 9, length)[1]) == length


def test_targets_of_m2m_100_without_a_language(pair_models: Path, tmp_path: Path) -> None:
    """They begin with that of sources; the tokenizer alone encodes no target."""
    texts = iter([row["said"] for row in PAIRS])
    SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=f"{tmp_path}/m", vocab_size=24, minloglevel=2
    )
    (tmp_path / "vocab.json").write_text('{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4}')
    own = M2M100Tokenizer(str(tmp_path / "vocab.json"), f"{tmp_path}/m.model")
    with pytest.raises(KeyError):
        own(text_target="a")
    encoder = PairEncoder(
        transformers_config(read_checkpoint(pair_models / "bart").config), own, "m2m"
    )
    assert encoder.add_special_tokens([4], [4], 9) == ([own.get_lang_id("en"), 4, 2],) * 2


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_the_decoder_writes(pair_models: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same each time, other texts where it stands twice; a target ends where the decoder ends
    it; all are drawn with random numbers of their own.
    """
    # Notes how texts are drawn
    draws = Mock(wraps=text_pairs.sample_sequences)
    monkeypatch.setattr(text_pairs, "sample_sequences", draws)
    once = pair_inputs(pair_models, name, "self", 4)
    text = CalibrationText(("self", "self"), 24 * 8, 24)
    twice, _ = reader(text, pair_models / name).inputs()
    assert len({tuple(call.kwargs["seeds"]) for call in draws.call_args_list}) == 4
    assert rows_of(twice)[:4] == rows_of(once)
    assert rows_of(twice, "decoder_")[:4] == rows_of(once, "decoder_")
    assert len({tuple(row) for row in rows_of(twice)}) == 8
    assert all(END not in row[:-1] for row in rows_of(once))
    assert all(END not in row for row in rows_of(once, "decoder_"))


def test_the_command(pair_models: Path, tmp_path: Path) -> None:
    words = ("--kv-heads", 1, "--method", "refined", "--refine-steps", 4, "--tokens", 960)
    words = (*words, "--text-column", "said", "--target-column", "meant")
    done = run(
        pair_models / "t5",
        *words,
        "--context",
        24,
        "--data",
        pair_models / "pairs.jsonl",
        "-o",
        tmp_path / "out",
        "-q",
    )
    done.expect(err_lines=1)
    told = json.loads((tmp_path / "out" / "gqa_conversion.json").read_text())
    assert told["maps"]["text"]["target_column"] == "meant"
    assert told["options"]["seed"] == 0


REFUSED_PAIRS = [
    (
        "marian",
        "--data text.jsonl --context 24",
        "neither sentinels nor a mask token, so plain text makes no pairs",
    ),
    (
        "t5",
        "--data pairs.jsonl --text-column said --target-column nothing",
        "has no column 'nothing'; it has 'meant'",
    ),
    (
        "t5",
        "--data pairs.jsonl --text-column said --target-column said",
        "are the same column; pass two",
    ),
    (
        "llama",
        "--data self:512",
        "--tokens has no effect if all sources of --data are self:TOKENS, which state their own "
        "number; remove --tokens, or pass --data self",
    ),
    (
        "bart",
        "--data text.jsonl --context 65",
        "--context 65 is more than the 64 positions of bart-base; pass at most 64",
    ),
    (
        "t5",
        "--target-column meant",
        "--target-column is a column of --data, but self has no columns; pass other data, or",
    ),
    (
        "t5",
        "--data text.jsonl --data text.jsonl --context 24",
        "text.jsonl 2 times; pass every file and dataset once",
    ),
    (
        "llama",
        "--data pairs.jsonl --text-column said --target-column meant",
        "--target-column works only with encoder-decoders",
    ),
]


@pytest.mark.parametrize(("name", "words", "says"), REFUSED_PAIRS)
def test_refused_pairs(pair_models: Path, tmp_path: Path, name: str, words: str, says: str) -> None:
    model = SOURCE if name == "llama" else pair_models / f"{name}-base"
    named = [str(pair_models / word) if "." in word else word for word in words.split()]
    done = run(
        model,
        "--kv-heads",
        2,
        "--method",
        "calibrated",
        "--tokens",
        960,
        *named,
        "-o",
        tmp_path / "out",
    )
    assert says.format(pair_models=pair_models) in check_refused(done, advice="")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_padding_in_some_batches_only(pair_models: Path, name: str) -> None:
    """Whichever batch comes first, the text is the same."""
    plan = plan_conversion(pair_models / name, 1, method="calibrated")
    given, errors = pairs(100), []
    for mask in (given["attention_mask"], given["decoder_attention_mask"]):
        mask[16:, mask.shape[1] // 2 :] = 0
    for pair_inputs in (given, {key: part.flip(0) for key, part in given.items()}):
        calibrator = Calibrator(plan, pair_inputs, MapsOptions(most_blocks=8, device="cpu"))
        errors.append(
            [
                result.error
                for layer in range(calibrator.n_layers)
                for result in calibrator.run(layer)
            ]
        )
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_a_context_beyond_the_positions_of_a_decoder_is_refused(tmp_path: Path) -> None:
    """Rotary positions go on beyond those of the training, so nothing else would say it."""
    words = [SOURCE, "--kv-heads", 2, "--tokens", 4096, "--dry-run"]
    done = run(*words, "--context", 2048)
    assert "--context 2048 is more than the 1024 positions of stdlib-mha" in check_refused(
        done, advice=""
    )
    assert run(*words, "--context", 1024).code == 0
