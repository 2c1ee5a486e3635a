"""The oracles on a real encoder-decoder: Whisper tiny.en, whose decoder has 4 layers of self- and of cross-attention.

It hears sentences that espeak-ng speaks. The encoder stays, so what it makes of them is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published import load, published
from real_whisper import (
    END,
    HEARD,
    LONGEST,
    NO_TIMESTAMPS,
    ORIGINAL,
    SENTENCES,
    START,
    WHISPER,
    Heard,
    divergence,
    features,
    hear,
    logits,
    spoken,
    words_wrong,
    written,
)
from scrambled import relative
from tokenizers import Tokenizer
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from gqa.convert import convert_checkpoint
from gqa.convert.align.options import MapsOptions

pytestmark = pytest.mark.real

HEADS = 6


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    with published(WHISPER) as directory:
        yield directory


@pytest.fixture(scope="module")
def heard(source: Path) -> Heard:
    return hear(source)


@pytest.fixture(scope="module")
def texts(source: Path) -> Callable[[Tensor], list[str]]:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    return lambda ids: [tokenizer.decode(row.tolist()) for row in ids]


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """By G and method, each converted once; calibrated on sentences that nobody asks for."""
    directory = tmp_path_factory.mktemp("speech")
    how = MapsOptions(spoken(directory, HEARD))

    @cache
    def make(groups: int, method: str) -> Path:
        out = tmp_path_factory.mktemp("whisper") / f"{method}{groups}"
        return convert_checkpoint(source, groups, out, method=method, calibration=how).out

    return make


def test_it_understands(heard: Heard, texts: Callable[[Tensor], list[str]]) -> None:
    """The checkpoint is what it should be: it writes down what was said, and something else for another sentence."""
    said = texts(heard.ids)
    assert words_wrong(said, SENTENCES) < 0.25
    assert words_wrong(said, SENTENCES[::-1]) > 0.8


def test_as_ctranslate2_writes(heard: Heard, source: Path) -> None:
    """The same greedy tokens as CTranslate2 of the file in the wheel, of the same features; of others it has others."""
    of = pytest.importorskip("ctranslate2", reason="it needs ctranslate2, which the extra dev has")
    few = 8
    with published(ORIGINAL) as directory:
        model = of.models.Whisper(str(directory), compute_type="float32", intra_threads=1)
    given = of.StorageView.from_array(np.ascontiguousarray(features(source, SENTENCES[:few]).numpy()))
    plain = {"beam_size": 1, "suppress_tokens": [], "suppress_blank": False, "max_length": LONGEST}
    written = [found.sequences_ids[0] for found in model.generate(given, [[START, NO_TIMESTAMPS]] * few, **plain)]
    ours = [[token for token in row if token != END] for row in heard.ids[:few, 2:].tolist()]
    assert written == ours
    assert all(one != other for one, other in zip(written, ours[1:] + ours[:1], strict=True))


def test_identity(source: Path, converted: Callable[..., Path], heard: Heard) -> None:
    """With its own heads the same logits; with the heads of another layer not."""
    before = logits(load(source), heard)
    same = load(converted(HEADS, "mean"))
    assert relative(logits(same, heard), before) < 1e-6
    attention = same.model.decoder.layers[0].encoder_attn
    attention.k_proj.weight.data = attention.k_proj.weight.data.roll(64, 0)
    assert relative(logits(same, heard), before) > 1e-2


@pytest.mark.parametrize("groups", [3, 1])
def test_what_is_cached(groups: int, converted: Callable[..., Path], heard: Heard) -> None:
    """G heads of what was written and of what was heard; and what it says with a cache is what it says without."""
    model = load(converted(groups, "mean"))
    few = Heard(heard.hidden[:2], heard.ids[:2, :12])
    with torch.no_grad():
        given: dict[str, Any] = {"encoder_outputs": BaseModelOutput(few.hidden), "decoder_input_ids": few.ids[:, :-1]}
        past = model(**given, use_cache=True).past_key_values
    layer = past.self_attention_cache.layers[0], past.cross_attention_cache.layers[0]
    assert [tuple(part.keys.shape[1:3]) for part in layer] == [(groups, 11), (groups, 1500)]
    ids = written(model, few.hidden)
    plain = logits(model, Heard(few.hidden, ids)).argmax(-1)
    ended = (ids[:, 1:-1] == END).cumsum(1).bool()
    assert torch.equal(plain[:, 1:][~ended], ids[:, 2:][~ended])


def test_what_merging_costs(
    source: Path, converted: Callable[..., Path], heard: Heard, texts: Callable[[Tensor], list[str]]
) -> None:
    """With half of the heads `mean` says nothing that the original says; calibrated on other sentences it does."""
    before, said = logits(load(source), heard), texts(heard.ids)
    lost, wrong = {}, {}
    for method in ("mean", "auto", "calibrated"):
        model = load(converted(3, method))
        lost[method] = divergence(logits(model, heard), before, heard.ids)
        wrong[method] = words_wrong(texts(written(model, heard.hidden)), said)
    assert wrong["mean"] > 0.9
    assert lost["mean"] > 3
    assert lost["auto"] < lost["mean"] / 4
    assert lost["calibrated"] < lost["auto"] / 3
    assert wrong["calibrated"] < 0.2
