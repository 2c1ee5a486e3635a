"""Custom modelling code against the classes of transformers that it extends.

A tiny random model of each source is converted by the rewriter at every G, and read by the class that was written
beside it. Tolerances are relative to the largest logit, float32.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_families import CONTROL, all_tensors, error, left_padded, load, planned, tiled_heads, write_checkpoint
from tiny_custom import COPIES, CUSTOM, SOURCES
from tiny_models import QUERY_HEADS, Tiny, build, inputs, logits
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from gqa.checkpoint.loading import cache_name
from gqa.convert import convert_checkpoint, plan_conversion
from gqa.convert.recast import targets

TOLERANCE = 1e-5
OURS = {tiny.name.removeprefix("gqa_"): tiny for tiny in CUSTOM}
THEIRS = {tiny.name: tiny for tiny in SOURCES}
ENCODER_DECODERS = [name for name, tiny in THEIRS.items() if "decoder_input_ids" in tiny.token_inputs]


@pytest.fixture(autouse=True)
def _no_native_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 becomes GPTBigCode where that holds the heads."""
    monkeypatch.setattr(targets, "RECASTINGS", tuple(entry for entry in targets.RECASTINGS if not entry.architecture))


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one model type of transformers."""
    model = build(THEIRS[request.param], QUERY_HEADS)
    return write_checkpoint(model, tmp_path_factory.mktemp(request.param) / "model")


families = pytest.mark.parametrize("source", THEIRS, indirect=True, ids=str)
# Without those whose code is another one's with other names.
ORIGINALS = [name for name in THEIRS if name not in COPIES]
originals = pytest.mark.parametrize("source", ORIGINALS, indirect=True, ids=str)
encoder_decoders = pytest.mark.parametrize(
    "source", [name for name in ENCODER_DECODERS if name in ORIGINALS], indirect=True, ids=str
)


def read_type(directory: Path) -> str:
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    assert isinstance(model_type, str)
    return model_type


def theirs(directory: Path) -> Tiny:
    """Of a checkpoint of the source."""
    return THEIRS[read_type(directory)]


def ours(directory: Path) -> Tiny:
    """Of a checkpoint of the source or of ours: the tiny model in our class."""
    return OURS[read_type(directory).removeprefix("gqa_")]


@dataclass(frozen=True)
class Pair:
    """A source, and its conversion to some heads, each of which is repeated in the source's class."""

    source: Path
    ours: Path

    def load(self, attention: str = "eager") -> tuple[PreTrainedModel, PreTrainedModel]:
        """The conversion and the source's class, which compute the same."""
        back = planned(theirs(self.source), plan_conversion(self.ours, QUERY_HEADS), attention)
        return load(ours(self.source), self.ours, attention), back


@pytest.fixture(scope="module")
def pair(source: Path) -> Pair:
    merged = convert_checkpoint(source, 2, source.with_name("two"), method="mean").out
    return Pair(source, merged)


@families
def test_as_many_heads_as_before(source: Path, tmp_path: Path) -> None:
    """The class itself: the same tensors, the same logits, whichever attention function computes them."""
    out = convert_checkpoint(source, QUERY_HEADS, tmp_path / "out").out
    before, after = all_tensors(source), all_tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    given = inputs(theirs(source))
    for attention in theirs(source).attention:
        expected = logits(theirs(source), load(theirs(source), source, attention), given)
        assert error(logits(ours(source), load(ours(source), out, attention), given), expected) < TOLERANCE


@families
def test_expand_back_in_the_source_class(pair: Pair) -> None:
    """Each merged head repeated gives the same logits in the class of transformers; repeated in tiles, it does not."""
    tiny, given = theirs(pair.source), inputs(theirs(pair.source))
    model, back = pair.load()
    expected = logits(ours(pair.source), model, given)
    assert error(expected, logits(tiny, load(tiny, pair.source), given)) > TOLERANCE * 10
    assert error(logits(tiny, back, given), expected) < TOLERANCE
    with tiled_heads():
        wrong = pair.load()[1]
    assert error(logits(tiny, wrong, given), expected) > TOLERANCE * CONTROL


@encoder_decoders
def test_the_encoder_stays(source: Path, tmp_path: Path) -> None:
    """Also with one head."""
    expand_back(source, 1, tmp_path / "one")
    out, before = expand_back(source, 2, tmp_path / "out"), all_tensors(source)
    changed = {name for name, tensor in all_tensors(out).items() if not torch.equal(tensor, before[name])}
    assert {kind_of(name) for name in changed} == {"decoder-self", "cross"}
    assert cached_heads(out) == ({2}, {2})


def kind_of(tensor: str) -> str:
    """Of the attention that a tensor of an encoder-decoder belongs to."""
    if "encoder." in tensor:
        return "encoder"
    return "cross" if "ncoder_attn" in tensor or "EncDec" in tensor else "decoder-self"


def expand_back(source: Path, groups: int, out: Path) -> Path:
    """The conversion, which computes what the source's class does with each of its heads repeated."""
    merged = convert_checkpoint(source, groups, out, method="mean").out
    (model, back), given = Pair(source, merged).load(), inputs(theirs(source))
    assert error(logits(ours(source), model, given), logits(theirs(source), back, given)) < TOLERANCE
    return merged


@originals
def test_attention_functions_agree(pair: Pair) -> None:
    """Also with padding on the left; the weights that eager attention gives are those of all query heads."""
    tiny = ours(pair.source)
    models = [load(tiny, pair.ours, attention) for attention in tiny.attention]
    given, kept = inputs(tiny), torch.ones(2, 12, dtype=torch.bool)
    if "input_ids" in given:
        given = left_padded(given, 3)
        kept = kept if "decoder_input_ids" in given else given["attention_mask"].bool()
    found = [logits(tiny, model, given)[kept] for model in models]
    assert all(error(other, found[0]) < TOLERANCE for other in found)
    with torch.no_grad():
        output = models[0](**given, output_attentions=True)
    weights = output["decoder_attentions" if models[0].config.is_encoder_decoder else "attentions"]
    assert all(layer.shape[1] == QUERY_HEADS for layer in weights)


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
def test_generation(pair: Pair) -> None:
    """Prompts of several lengths, padded on the left: the tokens that the source's class writes, in every way, and the
    same with and without a cache.
    """
    given = prompts(ours(pair.source))
    model, back = pair.load(ours(pair.source).attention[-1])
    found: dict[str, Tensor] = {}
    for way, options in WAYS.items():
        if way == "static" and not model._can_compile_fullgraph:
            continue
        wanted = {"max_new_tokens": 5, "max_length": None, "do_sample": False, "eos_token_id": None, **options}
        found[way] = model.generate(**given, **wanted)
        assert torch.equal(found[way], back.generate(**given, **wanted)), way
    for way in ("without a cache", "static"):
        assert torch.equal(found.get(way, found["greedy"]), found["greedy"]), way


@originals
def test_the_cache_holds_fewer_heads(pair: Pair) -> None:
    assert cached_heads(pair.ours) == ({2}, {2} if theirs(pair.source).name in ENCODER_DECODERS else set())


def cached_heads(directory: Path) -> tuple[set[int], set[int]]:
    """Heads of the keys and values of self- and of cross-attention that transformers' cache holds."""
    with torch.no_grad():
        model = load(ours(directory), directory)
        cache = model(**inputs(ours(directory)), use_cache=True)[cache_name(model)]
    both = isinstance(cache, EncoderDecoderCache)
    layers = (cache.self_attention_cache.layers, cache.cross_attention_cache.layers) if both else (cache.layers, ())
    own, cross = ({part.shape[1] for layer in kind for part in (layer.keys, layer.values)} for kind in layers)
    return own, cross


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
    tiny = OURS["t5"]
    model, given = build(tiny, 2, attention="eager"), inputs(tiny)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert error(compiled(**given, use_cache=False).logits, logits(tiny, model, given)) < TOLERANCE
