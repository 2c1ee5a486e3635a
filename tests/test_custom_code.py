"""Custom modelling code against the classes of transformers that it extends.

A tiny random model of each source is converted by the rewriter at every G, and read by the class that was written
beside it. Tolerances are relative to the largest logit, float32.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_families import (
    CONTROL,
    all_tensors,
    check_same_tensors,
    error,
    left_padded,
    load,
    planned,
    tiled_heads,
    write_checkpoint,
)
from tiny_configs import COPIES, CUSTOM, SOURCES
from tiny_models import QUERY_HEADS, Tiny, build, inputs, logits
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from gqa.checkpoint.loading import cache_name
from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.convert.recast import targets

TOLERANCE = 1e-5
OURS = {tiny.name.removeprefix("gqa_"): tiny for tiny in CUSTOM}
THEIRS = {tiny.name: tiny for tiny in SOURCES}


@pytest.fixture(autouse=True)
def _no_native_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 becomes GPTBigCode where that holds the heads."""
    monkeypatch.setattr(targets, "RECASTINGS", tuple(entry for entry in targets.RECASTINGS if not entry.architecture))


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one model type of transformers."""
    model = build(THEIRS[request.param], QUERY_HEADS)
    return write_checkpoint(model, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def merged(source: Path) -> Path:
    """Its conversion to two heads."""
    return convert_checkpoint(source, 2, source.with_name("two"), method="mean").out


families = pytest.mark.parametrize("source", THEIRS, indirect=True, ids=str)
# Without those whose code is another one's with other names.
ORIGINALS = [name for name in THEIRS if name not in COPIES]
originals = pytest.mark.parametrize("source", ORIGINALS, indirect=True, ids=str)


def tiny_of(directory: Path) -> Tiny:
    """Of a checkpoint, of the source or of ours."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    return OURS[model_type.removeprefix("gqa_")] if model_type.startswith("gqa_") else THEIRS[model_type]


def both(source: Path, merged: Path, attention: str = "eager") -> tuple[PreTrainedModel, PreTrainedModel]:
    """The conversion, and the source's class with each of its heads repeated, which compute the same."""
    back = planned(tiny_of(source), plan_conversion(merged, QUERY_HEADS), attention)
    return load(tiny_of(merged), merged, attention), back


@families
def test_as_many_heads_as_before(source: Path, tmp_path: Path) -> None:
    """The class itself: the same tensors, the same logits, whichever attention function computes them."""
    out = convert_checkpoint(source, QUERY_HEADS, tmp_path / "out").out
    check_same_tensors(out, source)
    given = inputs(tiny_of(source))
    for attention in tiny_of(source).attention:
        expected = logits(tiny_of(source), load(tiny_of(source), source, attention), given)
        assert error(logits(tiny_of(out), load(tiny_of(out), out, attention), given), expected) < TOLERANCE


@families
def test_expand_back_in_the_source_class(source: Path, merged: Path) -> None:
    """Each merged head repeated gives the same logits in the class of transformers; repeated in tiles, it does not."""
    tiny, given = tiny_of(source), inputs(tiny_of(source))
    model, back = both(source, merged)
    expected = logits(tiny_of(merged), model, given)
    assert error(logits(tiny, back, given), expected) < TOLERANCE
    assert error(expected, logits(tiny, load(tiny, source), given)) > TOLERANCE * 10
    with tiled_heads():
        wrong = both(source, merged)[1]
    assert error(logits(tiny, wrong, given), expected) > TOLERANCE * CONTROL


def prompts(tiny: Tiny) -> dict[str, Tensor]:
    """What `generate` is given: an encoder-decoder's source, or a prompt of which one row begins later."""
    given = {name: value for name, value in inputs(tiny, length=8).items() if name != "decoder_input_ids"}
    return left_padded(given, 3)


WAYS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@originals
def test_generation(source: Path, merged: Path) -> None:
    """Prompts of several lengths, padded on the left: the tokens that the source's class writes, in every way, and the
    same with and without a cache.
    """
    given = prompts(tiny_of(merged))
    model, back = both(source, merged, tiny_of(merged).attention[-1])
    written: dict[str, Tensor] = {}
    for way, options in WAYS.items():
        if way == "static" and not model._can_compile_fullgraph:
            continue
        settings = {"max_new_tokens": 5, "max_length": None, "do_sample": False, "eos_token_id": None, **options}
        written[way] = model.generate(**given, **settings)
        assert torch.equal(written[way], back.generate(**given, **settings)), way
        assert torch.equal(written[way], written["greedy"]), way


@originals
def test_the_cache_holds_fewer_heads_and_the_encoder_stays(source: Path, merged: Path) -> None:
    """Keys and values of self- and of cross-attention; no tensor of an encoder has changed."""
    with torch.no_grad():
        model = load(tiny_of(merged), merged)
        cache = model(**inputs(tiny_of(merged)), use_cache=True)[cache_name(model)]
    caches = (cache.self_attention_cache, cache.cross_attention_cache) if isinstance(cache, EncoderDecoderCache) else ()
    layers = [layer for part in caches or (cache,) for layer in part.layers]
    assert {part.shape[1] for layer in layers for part in (layer.keys, layer.values)} == {2}
    before = all_tensors(source)
    changed = [name for name, tensor in all_tensors(merged).items() if not torch.equal(tensor, before[name])]
    assert not any("encoder." in name for name in changed)
    assert any("ncoder_attn" in name or "EncDec" in name for name in changed) == bool(caches)


def test_old_checkpoints(tmp_path: Path) -> None:
    """Names without the base model's prefix, and the masks that were once stored: the result has no masks."""
    directory = tmp_path / "source"
    build(THEIRS["gpt2"], QUERY_HEADS).save_pretrained(directory)
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in all_tensors(directory).items()}
    names = (f"h.{layer}.attn.{part}" for layer in (0, 1) for part in ("bias", "masked_bias"))
    masks = {mask: torch.ones(1, 1, 4, 4) for mask in names}
    save_file(tensors | masks, directory / "model.safetensors", metadata={"format": "pt"})
    out = convert_checkpoint(directory, 2, tmp_path / "out", method="mean").out
    assert all_tensors(out).keys() == tensors.keys()


@pytest.mark.parametrize("name", ORIGINALS)
def test_heads_that_do_not_divide(name: str) -> None:
    with pytest.raises(ValueError, match="num_key_value_heads 3 does not divide the 4 attention heads"):
        build(OURS[name], 3)


def test_compiled() -> None:
    """torch.compile takes the whole model, also where attention is eager, and computes the same."""
    one_layer = {"num_layers": 1, "num_decoder_layers": 1}
    tiny = replace(OURS["t5"], options={**OURS["t5"].options, **one_layer})
    model, given = build(tiny, 2, attention="eager"), inputs(tiny)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert error(compiled(**given, use_cache=False).logits, logits(tiny, model, given)) < TOLERANCE
