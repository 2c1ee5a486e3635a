"""Held-out text in other documents of the data: it is found, left out, and said, however documents
are cut.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chats import CHATML, with_template, write_chats
from support.documents import lines, open_data, write
from support.embedded import SOURCE
from support.patches import forbid, use_data_cache

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.merge.calibration_blocks import COPY_TOKENS, without_copies
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.core.console import SILENT, Watcher
from gqa.corpus.encoders import Encoders
from gqa.corpus.exclusion import Exclusion
from gqa.corpus.passages import LENGTH, Passages, letters_of
from gqa.corpus.specs import parse_source
from gqa.corpus.tokens import tokenize
from gqa.study.options import AblateOptions
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.overlap import Overlap
from gqa.uptrain.text_data import TextDataBuilder

SHOWN = 40  # letters in a row that are looked for, by another way than the one that is tested


def sentences(count: int, seed: int, words: int = 40) -> list[str]:
    """Texts in which no SHOWN letters are in two of them."""
    random = np.random.default_rng(seed)
    return [" ".join(map(str, random.integers(10**6, size=words))) for _ in range(count)]


def runs_of(text: str) -> set[str]:
    letters = "".join(character for character in text.lower() if character.isalnum())
    return {letters[at : at + SHOWN] for at in range(len(letters) - SHOWN + 1)}


# ----------------------------------------------------------------------------------------- passages


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text,
        lambda text: text.replace(" ", "  \n"),
        lambda text: text.upper(),
        lambda text: text.replace(" ", ", "),
    ],
    ids=["equal", "white space", "case", "symbols"],
)
def test_a_passage_is_cut_out_of_a_longer_text(change: Any) -> None:
    before, middle, after = (f"{text} straße" for text in sentences(3, 0))
    pieces = Passages.of([middle]).remove_from(f"{before} | {change(middle)} | {after}")
    assert [letters_of(piece) for piece in pieces] == [letters_of(before), letters_of(after)]


def test_text_without_a_passage_stays_as_it_is() -> None:
    text, other = sentences(2, 0)
    passages = Passages.of([other])
    assert passages.remove_from(text) == [text]
    shorter = text + letters_of(other)[: LENGTH - 1]
    assert passages.remove_from(shorter) == [shorter], "one letter less than a passage"
    longer = text + "x" + letters_of(other)[:LENGTH]
    assert passages.remove_from(longer) == [text + "x"]


def test_text_without_spaces_between_words_has_passages() -> None:
    characters = np.random.default_rng(0).integers(0x4E00, 0x9FA5, (2, 200))
    one, other = ("".join(map(chr, row)) for row in characters)
    assert Passages.of([one[50:150]]).remove_from(one) == [one[:50], one[150:]]
    assert Passages.of([one]).remove_from(other) == [other]


def test_a_short_text_is_found_as_a_whole_document_only() -> None:
    passages = Passages.of(["A short one."])
    assert passages.remove_from(" a  SHORT one") == []
    longer = "a short one, and more"
    assert passages.remove_from(longer) == [longer]


def test_long_texts_are_searched_in_pieces_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small pieces, of which even this text has several
    monkeypatch.setattr("gqa.corpus.passages._CHUNK", 64)
    before, middle, after = sentences(3, 1)
    passages = Passages.of([middle])
    assert len(passages.hashes) == len(letters_of(middle)) - LENGTH + 1
    assert len(passages.remove_from(before + "-" + middle + "-" + after)) == 2


def test_memory_has_a_bound_and_what_was_not_searched_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A small bound, which these sentences go over
    monkeypatch.setattr("gqa.corpus.passages.MOST", 100)
    passages = Passages.of(sentences(3, 1))
    assert len(passages.hashes) == 100
    assert passages.has_all_text is False


# ----------------------------------------------------------------------------------------- training

DOCUMENTS, HELD = sentences(40, 0), sentences(40, 0)[:8]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("data.jsonl"), DOCUMENTS)
    Path("data.txt").write_text("\n\n".join(DOCUMENTS))
    write(Path("spaces.jsonl"), [*DOCUMENTS[8:], *(text.replace(" ", "  ") for text in HELD)])
    Path("twice.txt").write_text("\n\n".join([*DOCUMENTS, *DOCUMENTS]))
    write(Path("held.jsonl"), HELD)
    Path("held.txt").write_text("\n\n".join(HELD))
    write(Path("other.jsonl"), sentences(8, 9))


def opened(tokenizer: Any, **options: Any) -> Dataloader:
    given = {"steps": 40, "batch_size": 2, "validation_tokens": 2048, "repeats": False} | options
    return open_data(UptrainOptions("m", Path("o"), **given), tokenizer, 64)


def shared(loader: Dataloader, tokenizer: Any) -> int:
    """How many runs of letters in held-out blocks are trained on, too."""
    blocks = range(loader.steps * loader.options.blocks_per_step)
    trained = tokenizer.decode(
        np.concatenate([loader.block(number)["input_ids"] for number in blocks])
    )
    held = [tokenizer.decode(block["input_ids"]) for block in loader.validation_blocks]
    assert held
    return len(set.union(*map(runs_of, held)) & runs_of(trained))


CASES: list[dict[str, Any]] = [
    {"data": "data.jsonl", "validation": "held.txt"},
    {"data": "data.txt", "validation": "held.jsonl"},
    {"data": "spaces.jsonl", "validation": "held.jsonl"},
    {"data": "twice.txt", "steps": 100},
    {"data": "data.txt", "validation": "held.jsonl", "streaming": True},
]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_validation_text_in_other_documents_is_not_trained_on(
    tokenizer: Any, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = opened(tokenizer, **case | {"data": (case["data"],)})
    assert shared(loader, tokenizer) == 0
    if case.get("streaming"):
        assert "without passages of the validation text" in loader.summary
    else:
        assert loader.overlap
        assert loader.overlap.share > 0.7
        assert "of the validation text is also in" in str(loader.overlap)

    # The control: without the search the same text is trained on.
    # Neither rows nor passages are searched
    monkeypatch.setattr(Exclusion, "remainder", lambda exclusion, row: [row])
    monkeypatch.setattr(
        "gqa.corpus.passages.Passages.found_in", lambda passages, text: np.zeros(0, int)
    )
    use_data_cache(monkeypatch, Path("other-cache").absolute())
    assert shared(opened(tokenizer, **case | {"data": (case["data"],)}), tokenizer) > 100


@pytest.mark.usefixtures("files")
def test_data_without_validation_text_is_trained_on_as_it_is(tokenizer: Any) -> None:
    """Exact copies of held-out documents are left out as ever, and are no overlap."""
    loader = opened(tokenizer, data=("data.jsonl",), validation="other.jsonl")
    assert loader.overlap
    assert loader.overlap.documents == 0
    assert loader.overlap.share == 0.0
    assert loader.data_tokens == sum(len(tokenizer(text)["input_ids"]) + 1 for text in DOCUMENTS)
    assert (
        opened(tokenizer, data=("data.jsonl",), validation="held.jsonl").overlap == loader.overlap
    )


@pytest.fixture
def chats_of_one_beginning(tmp_path: Path) -> tuple[Path, Path]:
    """Two files: a chat, which is to be held out, and 20 others that begin as it does and go on in
    their own ways.
    """
    beginning = "Answer the question below in the style of a pirate, and give your reasons: "
    texts = sentences(42, 3)
    chats = [
        [
            {"role": "user", "content": beginning + question},
            {"role": "assistant", "content": answer},
        ]
        for question, answer in zip(texts[::2], texts[1::2], strict=True)
    ]
    return (
        write_chats(tmp_path / "heldout.jsonl", chats[0]),
        write_chats(tmp_path / "data.jsonl", *chats[1:]),
    )


def of_chats(files: tuple[Path, Path]) -> Dataloader:
    """Training on the second file, with the first one held out."""
    heldout, data = files
    options = UptrainOptions(
        "m",
        Path("o"),
        data=(str(data),),
        validation=str(heldout),
        steps=2,
        batch_size=1,
        repeats=False,
    )
    return TextDataBuilder(options, Encoders(with_template(CHATML)), 64).build()


def test_chats_that_share_little_with_validation_text_are_said_to_be_trained_on_whole(
    chats_of_one_beginning: tuple[Path, Path],
) -> None:
    overlap = of_chats(chats_of_one_beginning).overlap
    assert overlap
    assert (overlap.documents, overlap.share) == (0, 0.0)
    assert overlap.kept_whole == 20
    assert str(overlap) == (
        "nothing; trained on whole: 20 documents with little of the validation text, less than "
        "half of each"
    )


def test_chats_that_are_trained_on_whole_are_encoded_once(
    chats_of_one_beginning: tuple[Path, Path],
) -> None:
    _, data = chats_of_one_beginning
    loader = of_chats(chats_of_one_beginning)
    alone = tokenize([parse_source(str(data))], Encoders(with_template(CHATML)))
    assert loader.fingerprint == alone.fingerprint


def test_documents_that_are_cut_are_told_from_those_that_are_trained_on_whole() -> None:
    assert str(Overlap(1, 0.25, kept_whole=2)) == (
        "25% of the validation text is also in 1 other document of the data, and is not trained on "
        "there; trained on whole: 2 documents with little of the validation text, less than half "
        "of each"
    )


@pytest.mark.usefixtures("files")
def test_documents_are_searched_for_validation_text_once_for_all_runs(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tokenizer, data=("twice.txt",), steps=100)
    forbid(monkeypatch, "gqa.corpus.sources.Source.rows", "documents were read again")
    again = opened(tokenizer, data=("twice.txt",), steps=100)
    assert first.overlap
    assert again.overlap == first.overlap
    assert again.fingerprint == first.fingerprint


def test_pairs_of_which_half_is_held_out_are_left_out(tmp_path: Path) -> None:
    one, other, third = sentences(3, 0)
    file = lines(tmp_path / "pairs.jsonl", {"text": one, "to": other}, {"text": other, "to": third})
    source = parse_source(str(file), target_column="to")
    assert len([*source.excluding(Exclusion(Passages.of([f"{one} {other.upper()}"]))).rows()]) == 1


# -------------------------------------------------------------------------------------- calibration


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", [{"validation": "held.jsonl"}, {"validation_fraction": 0.2}])
def test_a_study_calibrates_on_no_validation_text_in_other_documents(
    tokenizer: Any, case: dict[str, Any]
) -> None:
    data = write(
        Path("mixed.jsonl"), [*DOCUMENTS, *(text.replace(" ", "  ") for text in DOCUMENTS)]
    )
    options = AblateOptions(Path("study"), "m", data=(str(data),), calibration_context=64, **case)
    text = replace(options.maps_options.text, repeats=False)
    reader = CalibrationReader(text, read_checkpoint(SOURCE), "cpu", SILENT)
    ids = reader.blocks_and_heldout()[0].numpy()
    trained = runs_of(tokenizer.decode(ids.flatten()))
    part = parse_source(str(data)).heldout_part(0.2)
    held = HELD if "validation" in case else [*part.texts()]
    assert held
    assert not set.union(*map(runs_of, held)) & trained


class Remembering(Watcher):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_the_quality_check_leaves_out_blocks_that_are_calibration_text() -> None:
    random, watcher = np.random.default_rng(0), Remembering()
    blocks, other = random.integers(0, 1000, (2, 6, 64))
    # Most of it, at another place
    moved = np.concatenate([other[0, :20], blocks.flatten()[7:51]])[None]
    little = np.concatenate([other[1, :44], blocks[2, :20]])[None]
    checked = without_copies(
        np.concatenate([other, blocks[:2], moved, little]), blocks, "data.txt", watcher
    )
    assert checked.tolist() == [*other.tolist(), *little.tolist()]
    assert watcher.warnings == [
        "3 of 10 blocks of data.txt that are meant to measure quality also occur in the "
        "calibration text; they are left out"
    ]
    assert len(without_copies(other[:, : COPY_TOKENS - 1], blocks, "x", watcher)) == 6


def test_held_out_blocks_are_no_calibration_text_of_another_source(tmp_path: Path) -> None:
    """A file that is also a part of another one."""
    watcher = Remembering()
    numbers = " ".join(map(str, range(4000)))
    words = "as before and after it " * 100
    small = tmp_path / "small.txt"
    whole = tmp_path / "whole.txt"
    small.write_text(numbers)
    whole.write_text(f"{words}{numbers} {words}")
    checkpoint = read_checkpoint(SOURCE)

    def heldout(*paths: Path) -> int:
        sources = tuple(map(str, paths))
        text = CalibrationText(sources, 64 * 1000 * len(paths), 64, repeats=False)
        reader = CalibrationReader(text, checkpoint, "cpu", watcher)
        return len(reader.blocks_and_heldout(64 * 4)[1])

    assert heldout(small) > 0
    watcher.warnings.clear()
    assert heldout(small, whole) == 0
    copied = [text for text in watcher.warnings if "also occur in the calibration text" in text]
    assert len(copied) == 2
