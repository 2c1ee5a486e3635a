"""KV-cache bytes by formula against transformers' own cache object, and budgets against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from embedded import SOURCE
from evaluations import cache_bytes, model_directory
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY, build
from transformers import LlamaConfig

from gqa.checkpoint.loading import load_model
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.heads.config import CachedLayer, KVCache, kv_cache, read_config
from gqa.convert.recast.targets import checkpoint_cache
from gqa.eval.subjects import what_fits

LAYERS, DIM = 6, 32  # of stdlib-mha, which has 8 heads
WINDOW = 5  # of the tiny models


def converted(groups: int) -> Path:
    """stdlib-mha with G heads."""
    return SOURCE if groups == 8 else model_directory() / f"gqa{groups}"


def stored(directory: Path) -> KVCache:
    """By formula, of a checkpoint's headers alone."""
    return checkpoint_cache(read_checkpoint(directory))


@pytest.mark.parametrize("groups", [2, 8])
def test_formula_is_what_transformers_holds(groups: int) -> None:
    promised, model = stored(converted(groups)), load_model(str(converted(groups)))
    assert promised.bytes_per_token == LAYERS * groups * 2 * DIM * 2
    assert promised.remark is None
    for tokens, batch in ((1, 1), (7, 3), (40, 2)):
        (held,) = cache_bytes(model, tokens, batch)
        assert held == batch * promised.bytes_at(tokens) == batch * tokens * LAYERS * groups * 2 * DIM * 2
        assert held != batch * stored(converted(10 - groups)).bytes_at(tokens)  # another G is caught
    assert cache_bytes(model.float(), 9, 2) == [2 * replace(promised, bytes_per_number=4).bytes_at(9)]


# Falcon's new architecture; windows in all layers and in some; attention in some layers; shared keys and values; layers
# that read an image; an encoder.
@pytest.mark.parametrize(
    "name", ["falcon", "mistral", "gemma3_text", "jamba", "gemma3n_text", "mimo_v2_flash", "mllama", "gqa_t5"]
)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_formula_of_other_families(name: str, kv_heads: int, tmp_path: Path) -> None:
    model = build(TINY[name], kv_heads)
    model.save_pretrained(tmp_path)
    promised = stored(tmp_path)
    for tokens in (1, WINDOW - 1, WINDOW, 3 * WINDOW):
        assert sum(cache_bytes(model, tokens, 2)) == 2 * promised.bytes_at(tokens)
    if name == "mistral":  # control: a formula without windows is wrong beyond them
        without = replace(promised, layers=tuple(replace(layer, window=None) for layer in promised.layers))
        assert without.bytes_at(WINDOW) == promised.bytes_at(WINDOW) == promised.bytes_at(WINDOW + 1)
        assert sum(cache_bytes(model, WINDOW + 1, 1)) < without.bytes_at(WINDOW + 1)
    # transformers keeps all H heads of Falcon's new architecture: nothing is saved, and the result says so
    told = "transformers caches 4 heads a layer, other engines only the 1 key/value heads"
    assert promised.remark == (told if (name, kv_heads) == ("falcon", 1) else None)


def test_llama_2_7b_by_hand() -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        max_position_embeddings=4096, dtype="bfloat16",
    )  # fmt: skip
    cache, grouped = (
        kv_cache(read_config(config.to_dict() | {"num_key_value_heads": heads}, "llama"), range(32), "BF16")
        for heads in (32, 8)
    )
    assert cache == KVCache((CachedLayer(32, 128, 128, None),) * 32, 2, 4096)
    assert (cache.bytes_per_token, grouped.bytes_per_token) == (524_288, 131_072)
    weights = 2 * 6_738_415_616
    # 80 GB less 13,476,831,232 bytes of weights are 66,523,168,768: 30.98 x 4096 x 524,288, and 126,882.87 x 524,288.
    assert what_fits(cache, weights, 80 * 10**9, 4096) == (30, 126_882)
    assert what_fits(grouped, weights, 80 * 10**9, 4096) == (123, 507_531)


_sizes = st.integers(1, 9)
layers = st.builds(CachedLayer, st.sampled_from([1, 2, 4, 8]), _sizes, _sizes, st.none() | st.integers(1, 30))
caches = st.builds(lambda found: KVCache(tuple(found), 2, None), st.lists(layers, min_size=1, max_size=4))


@settings(max_examples=60, deadline=None)
@given(caches, st.integers(0, 500), st.integers(0, 9000), st.integers(1, 60))
def test_the_largest_fits_and_one_more_does_not(kv: KVCache, weights: int, memory: int, context: int) -> None:
    def fits(batch: int, tokens: int) -> bool:
        held = [n.heads * (n.key_dim + n.value_dim) * min(tokens, n.window or tokens) * 2 for n in kv.layers]
        return memory - batch * sum(held) >= weights

    batch, longest = what_fits(kv, weights, memory, context)
    assert fits(batch, context) or batch == 0
    assert not fits(batch + 1, context)
    if longest is None:
        assert fits(1, 10**9)
    else:
        assert fits(1, longest) or longest == 0
        assert not fits(1, longest + 1)
