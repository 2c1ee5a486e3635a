"""The text that heads are calibrated on: spread over a source, of which no more is tokenised than is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import check_refused, run
from documents import Counted
from embedded import SOURCE, bring_class, bring_tokenizer, copy_source, tokenizer
from test_calibration import Recorder
from torch import Tensor

import gqa.convert.merge.options as module
from gqa.checkpoint.console import SILENT
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.merge.budget import FITTED, MEASURED, _text
from gqa.convert.merge.options import CalibrationText, MapsOptions
from gqa.corpus.sources import parse_source
from gqa.corpus.tokens import Blocks, permutation, tokenise

LENGTH = 16


def written(place: Path, documents: int) -> str:
    """A file of that many documents, each with a number of its own in front of 200 characters."""
    lines = (f'{{"text": "document {number} ' + "says the same words " * 10 + '"}\n' for number in range(documents))
    file = place / "many.jsonl"
    file.write_text("".join(lines))
    return str(file)


def blocks(source: str, count: int, seed: int = 0, length: int = LENGTH, repeats: bool = False) -> Tensor:
    text = CalibrationText((source,), length * count, length, seed, repeats=repeats)
    return text.blocks(read_checkpoint(SOURCE), "cpu", lambda tokens: None)


def test_no_more_is_tokenised_than_is_needed(tmp_path: Path, counted: Counted) -> None:
    """4 blocks of 5,000 documents: the same for a seed, others for another. With repeats half of a text is changed."""
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


@pytest.mark.parametrize(("documents", "characters"), [(1, 256), (30, 256), (30, 1)])
def test_a_small_source_is_used_from_end_to_end(
    tmp_path: Path, documents: int, characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks at equal distances in the stream of all documents, in the order in which training reads them; also where
    so many characters a token are too few.
    """
    monkeypatch.setattr(module, "_CHARACTERS", characters)
    source = written(tmp_path, documents)
    text = tokenise([parse_source(source)], tokenizer())
    whole = Blocks(text, permutation(text.digests, 3), LENGTH)
    count = min(8, len(whole))
    expected = np.stack([whole[int(i)]["input_ids"] for i in np.linspace(0, len(whole) - 1, count)])
    assert np.array_equal(blocks(source, 8, seed=3).numpy(), expected)


def test_a_tokenizer_that_is_code_is_run_only_where_that_is_asked_for(tmp_path: Path) -> None:
    bring_tokenizer(model := copy_source(tmp_path))
    words = (model, "--groups", 2, "--method", "calibrated", "--data", written(tmp_path, 9), "--tokens", "64")
    words = (*words, "--context", "16", "-o", tmp_path / "out")
    assert "code that it brings; look at it, and give --trust-remote-code" in check_refused(run(*words), advice="")
    assert run(*words, "--trust-remote-code").code == 0


def test_a_model_that_is_code_writes_where_that_is_asked_for(tmp_path: Path) -> None:
    """Its own class, which writes but one token; without being trusted, it is read by transformers' class. What one
    wrote is not taken for what the other does.
    """
    bring_class(model := copy_source(tmp_path), "AutoModelForCausalLM", "LlamaForCausalLM", 7)
    for trusted in (True, False):
        text = CalibrationText(("self:plain",), 64, LENGTH, trust_remote_code=trusted)
        found = text.blocks(read_checkpoint(model), "cpu", SILENT)
        assert bool((found[:, 1:] == 7).all()) is trusted


def test_text_that_is_shorter_than_asked_for_is_told_of(tmp_path: Path) -> None:
    """In blocks, of one source or of several; enough is not."""
    source, recorder, pieces = written(tmp_path, 1), Recorder(), blocks(written(tmp_path, 1), 99)
    for sources, count in (((source,), 99), ((source, "self:plain"), 198), ((source,), len(pieces)), (("self",), 2)):
        text = CalibrationText(sources, count * LENGTH, LENGTH, repeats=False)
        found = text.inputs(read_checkpoint(SOURCE), "cpu", recorder)["input_ids"]
        assert len(found) == (len(pieces) + 99 if len(sources) > 1 else min(count, len(pieces)))
    asked = f"blocks of {LENGTH} tokens that are asked for; give more text"
    assert recorder.warnings == [
        f"{source}: {len(pieces)} of the 99 {asked}",
        f"{source}, self:plain: {len(pieces) + 99} of the 198 {asked}",
    ]


def test_a_share_that_is_less_than_a_block(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"many.jsonl gives less than a block of 16 tokens; give more calibration"):
        CalibrationText((written(tmp_path, 50), "self"), LENGTH, LENGTH).shares()


def measuring(length: int, *sources: str) -> tuple[Tensor, Tensor]:
    text = CalibrationText(sources, 3 * (FITTED + MEASURED), length, repeats=False)
    return _text(read_checkpoint(SOURCE), MapsOptions(text=text, device="cpu"), SILENT)


def test_layers_are_measured_on_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in proportion, also text that the model writes, whose own count does not lift the bound on all of it."""
    counts = list[int]()

    def write(load: object, device: str, checkpoint: object, length: int, count: int, *how: Any, **more: Any) -> Any:
        counts.append(count * length)
        return [{"input_ids": np.full(length, -1)}] * count

    monkeypatch.setattr("gqa.convert.merge.self_samples.sampled_blocks", write)
    source = written(tmp_path, 2000)
    fitted, measured = measuring(256, "self:184320", source)
    assert (len(fitted), len(measured)) == (FITTED // 256, MEASURED // 256)
    assert [int((blocks[:, 0] < 0).sum()) for blocks in (fitted, measured)] == [48, 12]
    alone = [measuring(256, spec) for spec in ("self:1M", source)]
    assert [(len(fitted), len(measured)) for fitted, measured in alone] == [(64, 16)] * 2
    assert counts == [60 * 256, 80 * 256]
    assert [len(blocks) for blocks in measuring(FITTED + MEASURED, source)] == [1, 1]
    with pytest.raises(RefusedError, match=r"has one block of 20480 tokens; .* smaller blocks"):
        measuring(FITTED + MEASURED, written(tmp_path, 600))
