"""A KV cache of few bits: what attention reads of it, the bytes that it takes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluations import results
from test_families import write_checkpoint
from tiny_models import QUERY_HEADS, TINY, build
from torch import Tensor
from transformers import DynamicCache

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import cache_name, load_model
from gqa.convert import convert_checkpoint
from gqa.convert.heads.config import CachedLayer, KVCache, groups_per_head
from gqa.eval.cache_bits import quantise_cache, rounded

IDS = torch.arange(10, 40)[None]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
def test_numbers_on_the_grid_stay_and_others_move_by_half_a_step(bits: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    parts = groups_per_head(dim)
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
    assert rounded(torch.full((2, dim), 0.5), bits).equal(torch.full((2, dim), 0.5))


def test_bytes_are_those_of_codes_and_scales() -> None:
    layer = CachedLayer(2, 64, 80, None)
    cache = KVCache((layer, CachedLayer(1, 32, 32, 4)), 2, None)
    assert cache.bytes_per_token == 2 * 144 * 2 + 64 * 2
    four = replace(cache, bits=4)
    assert four.bytes_per_token == 2 * (32 + 4 + 40 + 2 * 4) + (16 + 4) * 2
    assert four.bytes_at(10) == 10 * 2 * 84 + 4 * 40
    assert replace(cache, bits=3).bytes_per_token == 2 * (24 + 4 + 30 + 8) + (12 + 4) * 2


class RoundedCache(DynamicCache):
    """transformers' cache, whose numbers are of few bits."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(keys, 3), rounded(values, 3), *args, **kwargs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gqa_gpt2", "by layer"])
def test_attention_reads_what_a_cache_of_these_bits_gives_back(name: str, tmp_path: Path) -> None:
    """As transformers computes it with such a cache, token for token; a whole cache, as a control, does not."""
    path = write_checkpoint(build(TINY["llama" if name == "by layer" else name], QUERY_HEADS), tmp_path / "model")
    if name == "by layer":
        path = convert_checkpoint(path, (1, 4), tmp_path / "out", method="mean").out
    model = load_model(str(path), dtype="float32")
    with torch.no_grad():
        plain, cache = model(input_ids=IDS).logits, {cache_name(model): RoundedCache()}
        expected = torch.cat([model(input_ids=ids, **cache).logits for ids in IDS.split(1, dim=1)], 1)
        quantise_cache(model, 3, 2, "m")
        logits = model(input_ids=IDS, use_cache=False).logits
    assert (logits - expected).abs().max() < 2e-3 * expected.abs().max()  # a product's rounding may move it by a step
    assert (logits - expected).abs().mean() < 0.01 * (plain - expected).abs().mean()


def test_a_class_with_attention_code_of_its_own() -> None:
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
