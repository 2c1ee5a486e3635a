"""`general`: what is in it, and how much of it calibration reads by default."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.embedded import SOURCE, copy_source, tokenizer

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.core.console import SILENT
from gqa.core.errors import TextError
from gqa.corpus.general import general_texts
from gqa.corpus.specs import parse_source
from gqa.corpus.stdlib import stdlib_texts

MOST = 12_288  # tokens that calibration reads of it beside other text


def test_the_documents_are_of_many_kinds() -> None:
    texts = list(general_texts())
    assert len(texts) == len(set(texts)) > 70
    for part in ("lighthouse keeper", "Falco tinnunculus", "Lentil soup", "Bahnhof", "struct node"):
        assert any(part in text for text in texts), part


def test_they_are_long_enough_for_what_calibration_reads() -> None:
    ids = [tokenizer()(text)["input_ids"] for text in general_texts()]
    assert sum(map(len, ids)) > 1.1 * MOST


def test_no_line_of_code_is_from_a_module_that_is_held_out() -> None:
    """They measure quality."""
    heldout = {line for text in stdlib_texts("heldout") for line in text.splitlines()}
    train = {line for text in stdlib_texts("train") for line in text.splitlines()}
    code = {line for text in list(general_texts())[-16:] for line in text.splitlines()[:-1]}
    assert code <= train
    assert not {line for line in code & heldout if len(line) > 60}


def test_python_need_not_have_its_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = list(general_texts())
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    without = list(general_texts())
    assert 0 < len(everything) - len(without) < 20
    assert set(without) < set(everything)


def test_it_is_a_source_like_any_other() -> None:
    source = parse_source("general")
    assert list(source.texts()) == list(general_texts())
    assert source.identify() == parse_source("general").identify()
    with pytest.raises(TextError, match="general is plain text and has no column 'meant'"):
        parse_source("general", target_column="meant")


@pytest.mark.parametrize(
    ("sources", "tokens", "expected"),
    [
        (("self", "general"), 65_536, [("self", 65_536 - MOST), ("general", MOST)]),
        (("self", "general"), 4096, [("self", 3072), ("general", 1024)]),
        # Less than a block
        (("self", "general"), 1000, [("self", 1000)]),
        (("general", "self"), 4096, [("self", 3072), ("general", 1024)]),
        (("self", "x.txt", "general"), 4096, [("self", 1536), ("x.txt", 1536), ("general", 1024)]),
        # Only the others have a block each
        (("self", "a", "b", "c", "general"), 1024, [(name, 256) for name in ("self", *"abc")]),
        (("self:9000", "general"), 65_536, [("self:9000", 9000), ("general", MOST)]),
        (("general",), 4096, [("general", 4096)]),
        (("self",), 4096, [("self", 4096)]),
    ],
)
def test_its_share_of_the_tokens(
    sources: tuple[str, ...], tokens: int, expected: list[tuple[str, int]]
) -> None:
    assert CalibrationText(sources, tokens).tokens_by_source() == expected


def calibration(source: Path, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Blocks, and those that are held out, of 16 blocks of text."""
    text = CalibrationText(tokens=16 * 64, length=64, **options)
    reader = CalibrationReader(text, read_checkpoint(source), "cpu", SILENT)
    blocks, heldout = reader.blocks_and_heldout(heldout_tokens=128)
    return blocks.tolist(), heldout.tolist()


def test_the_default_is_generated_text_and_a_quarter_of_general() -> None:
    """Of 16 blocks four are general, and two of the 12 others are held out."""
    blocks, heldout = calibration(SOURCE)
    generated, _ = calibration(SOURCE, sources=("self",))
    assert blocks[:10] == generated[:10]
    general = blocks[10:]
    assert len(general) == 4
    assert not any(block in generated for block in general)
    assert len(heldout) == 2


def test_a_model_without_tokenizer_is_calibrated_on_what_it_writes(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    for file in source.glob("*token*"):
        file.unlink()
    assert calibration(source) == calibration(SOURCE, sources=("self",))
