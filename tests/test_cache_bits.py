"""A KV cache of few bits: what attention reads of it, the bytes that it takes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluations import refused, results
from test_families import write_checkpoint
from tiny_models import QUERY_HEADS, TINY, build
from torch import Tensor
from transformers import DynamicCache, QuantizedCache

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import cache_name, load_model
from gqa.convert import convert_checkpoint
from gqa.convert.heads.kv_cache import CachedLayer, KVCache, parts_of
from gqa.convert.merge.cache_bits import quantise_cache, rounded

IDS = torch.arange(10, 40)[None]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_numbers_on_the_grid_stay_and_others_move_by_half_a_step(bits: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    parts = parts_of(dim)
    codes = torch.randint(0, 2**bits, (3, 5, parts, dim // parts), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 2**bits - 1
    heads = (codes * 0.25 - 3).flatten(-2)
    assert rounded(heads, bits).equal(heads)
    drawn = torch.randn(3, 5, dim, generator=generator)
    cut = drawn.unflatten(-1, (parts, -1))
    step = (cut.amax(-1) - cut.amin(-1)) / (2**bits - 1)
    away = (rounded(drawn, bits) - drawn).unflatten(-1, (parts, -1)).abs().amax(-1)
    assert (away <= 0.5 * step + 4e-3 * cut.abs().amax(-1)).all()  # edges are kept in 16 bits
    assert (away > 0.2 * step).all()


def test_a_part_of_equal_numbers_stays() -> None:
    assert rounded(torch.full((2, 64), 0.5), 4).equal(torch.full((2, 64), 0.5))


def kept(backend: str, bits: int, heads: Tensor, axis: int) -> Tensor:
    """What transformers' quantised cache gives back of keys (1, n, T, 64); its parts are single tokens of a head."""
    groups = {"q_group_size": 64, "axis_key": axis, "axis_value": axis}
    config = build(TINY["llama"], QUERY_HEADS).config
    cache = QuantizedCache(backend, config, nbits=bits, **groups)
    cache.update(heads, heads, 0)  # gives back what it was given, and keeps it quantised
    found = cache.update(heads[:, :, :1], heads[:, :, :1], 0)
    assert found[0].equal(found[1])
    return found[0][:, :, :-1]


@pytest.mark.parametrize("bits", [2, 4])
def test_quanto_rounds_as_we_do(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number for number, but for edges, which it keeps in 32 bits."""
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed; it is no dependency")
    from optimum.quanto.library.extensions.cpp import ext

    def unpack(packed: Tensor, bits: int) -> Tensor:
        return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])

    monkeypatch.setattr(ext, "_lib", SimpleNamespace(unpack=unpack))  # its own is compiled here, which takes minutes
    heads = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(bits))
    step = (heads.amax(-1, keepdim=True) - heads.amin(-1, keepdim=True)) / (2**bits - 1)
    away = (kept("quanto", bits, heads, 0) - rounded(heads, bits)).abs() / step
    assert (away < 0.02).float().mean() > 0.99  # a number half-way may be rounded to the other side
    assert away.max() < 1.02
    other = (kept("quanto", bits, heads, 0) - rounded(heads, 6 - bits)).abs() / step
    assert (other < 0.02).float().mean() < 0.5


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_hqq_is_about_as_near(bits: int) -> None:
    """It has the same parts and moves their edges afterwards, so that other numbers come out."""
    pytest.importorskip("hqq", reason="hqq is not installed; it is no dependency")
    heads = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(bits))
    lost, ours = ((found - heads).abs().mean() for found in (kept("hqq", bits, heads, 1), rounded(heads, bits)))
    assert 0.7 * ours < lost < 1.3 * ours
    assert not 0.7 * ours < (rounded(heads, bits - 1) - heads).abs().mean() < 1.3 * ours


def test_bytes_are_those_of_codes_and_scales() -> None:
    layer = CachedLayer(2, 64, 80, None)
    cache = KVCache((layer, CachedLayer(1, 32, 32, 4)), 2, None)
    assert cache.bytes_per_token == 2 * 144 * 2 + 64 * 2
    four = cache.quantised(4)
    assert four.bytes_per_token == 2 * (32 + 4 + 40 + 2 * 4) + (16 + 4) * 2
    assert four.bytes_at(10) == 10 * 2 * 84 + 4 * 40
    assert cache.quantised(3).bytes_per_token == 2 * (24 + 4 + 30 + 8) + (12 + 4) * 2


class RoundedCache(DynamicCache):
    """transformers' cache, whose numbers are of few bits."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(keys, 3), rounded(values, 3), *args, **kwargs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gqa_gpt2", "by layer"])
def test_attention_reads_what_a_cache_of_these_bits_gives_back(name: str, tmp_path: Path) -> None:
    """As transformers computes it with such a cache, token for token; a whole cache, as a control, does not."""
    place = write_checkpoint(build(TINY["llama" if name == "by layer" else name], QUERY_HEADS), tmp_path / "model")
    if name == "by layer":
        place = convert_checkpoint(place, (1, 4), tmp_path / "out", method="mean").out
    model = load_model(str(place), dtype="float32")
    with torch.no_grad():
        plain, cache = model(input_ids=IDS).logits, RoundedCache()
        given = {cache_name(model): cache}
        expected = [model(input_ids=IDS[:, at : at + 1], **given).logits for at in range(IDS.shape[1])]
        quantise_cache(model, 3, 2, "m")
        found = model(input_ids=IDS, use_cache=False).logits
    one = torch.cat(expected, 1)
    assert (found - one).abs().max() < 2e-3 * one.abs().max()  # rounding of a product may move a number by a step
    assert (found - one).abs().mean() < 0.01 * (plain - one).abs().mean()


def test_a_class_whose_attention_is_its_own(tmp_path: Path) -> None:
    model = build(TINY["falcon"], QUERY_HEADS)
    with pytest.raises(RefusedError, match="0 of 2 layers of m call"):
        quantise_cache(model, 4, 2, "m")


def test_every_checkpoint_is_measured_with_it() -> None:
    base, merged, *others = results("SRC G2 --data TEXT --tokens 500 --kl --cache-bits 8,2")["models"]
    assert [one["name"] for one in others] == ["stdlib-mha (int8)", "gqa2 (int8)", "stdlib-mha (int2)", "gqa2 (int2)"]
    eight, two = others[0], others[2]
    assert eight["against_baseline"]["kl"]["mean"] < 1e-3 < two["against_baseline"]["kl"]["mean"]
    assert eight["kv_cache"]["bytes_per_token"] == base["kv_cache"]["bytes_per_token"] * (32 + 4) / 64
    assert others[1]["quality"]["nats_per_token"] == pytest.approx(merged["quality"]["nats_per_token"], abs=1e-2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("SRC --data TEXT --cache-bits 4 --decode", "--cache-bits is about quality and bytes"),
        ("SRC --data TEXT --cache-bits 1", "'1' is not a whole number from 2 to 8"),
        ("SRC --data TEXT --cache-bits ,", "names nothing"),
        ("T5 --data TEXT --target-field other --cache-bits 4", "--cache-bits is for decoders with key/value heads"),
    ],
)
def test_refused(line: str, says: str) -> None:
    assert says in refused(line)
