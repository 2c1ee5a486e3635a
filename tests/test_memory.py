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

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.read import Checkpoint, read_checkpoint
from gqa.convert.heads.config import CachedLayer, KVCache, kv_cache, read_config
from gqa.convert.recast.targets import checkpoint_cache
from gqa.eval.memory import rank_cache, what_fits

LAYERS, DIM = 6, 32  # of stdlib-mha, which has 8 heads
WINDOW = 5  # of the tiny models

LLAMA_2_7B = KVCache((CachedLayer(32, 128, 128, None),) * 32, 2, 4096)
LLAMA_2_7B_WEIGHTS = 2 * 6_738_415_616
GB = 10**9


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


def test_no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    path = converted(4)  # which may be made only now
    monkeypatch.setattr(Checkpoint, "read", read)
    assert stored(path).bytes_per_token == LAYERS * 4 * 2 * DIM * 2


# Falcon's new architecture; windows in all layers and in some; attention in some layers; shared keys and values; layers
# that read an image.
@pytest.mark.parametrize(
    "name", ["falcon", "mistral", "gemma3_text", "jamba", "gemma3n_text", "mimo_v2_flash", "mllama"]
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
    grouped = rank_cache(LLAMA_2_7B, 4)  # what a rank of 4 holds is what 8 heads take
    for heads, cache in ((32, LLAMA_2_7B), (8, grouped)):
        raw = config.to_dict() | {"num_key_value_heads": heads}
        assert kv_cache(read_config(raw, "llama"), range(32), "BF16") == cache
    assert LLAMA_2_7B.bytes_per_token == 524_288
    # 80 GB less 13,476,831,232 bytes of weights are 66,523,168,768: 30.98 x 4096 x 524,288, and 126,882.87 x 524,288.
    assert what_fits(LLAMA_2_7B, LLAMA_2_7B_WEIGHTS, 80 * GB, 4096) == (30, 126_882)
    assert what_fits(grouped, LLAMA_2_7B_WEIGHTS, 80 * GB, 4096) == (123, 507_531)
    # Two ranks hold 6,738,415,616 bytes of weights and 262,144 a token each: 24 GB less weights are 17,261,584,384.
    assert what_fits(LLAMA_2_7B, LLAMA_2_7B_WEIGHTS, 24 * GB, 4096, ranks=2) == (16, 65_847)


def test_heads_are_split_or_replicated() -> None:
    cache = replace(LLAMA_2_7B, layers=(CachedLayer(8, 128, 128, None), CachedLayer(16, 128, 128, 64)))
    heads = {ranks: [layer.heads for layer in rank_cache(cache, ranks).layers] for ranks in (1, 2, 4, 8, 16, 32)}
    assert heads == {1: [8, 16], 2: [4, 8], 4: [2, 4], 8: [1, 2], 16: [1, 1], 32: [1, 1]}
    assert [layer.window for layer in rank_cache(cache, 8).layers] == [None, 64]
    for ranks in (3, 12, 0, -8):
        with pytest.raises(RefusedError, match=f"^{ranks} ranks are not possible for 32 key/value heads"):
            what_fits(LLAMA_2_7B, 0, GB, 8, ranks)


_sizes = st.integers(1, 9)
layers = st.builds(CachedLayer, st.sampled_from([1, 2, 4, 8]), _sizes, _sizes, st.none() | st.integers(1, 30))
caches = st.builds(lambda found: KVCache(tuple(found), 2, None), st.lists(layers, min_size=1, max_size=4))


@settings(max_examples=60, deadline=None)
@given(caches, st.integers(0, 500), st.integers(0, 9000), st.integers(1, 60), st.sampled_from([1, 2, 8, 16]))
def test_the_largest_fits_and_one_more_does_not(
    kv: KVCache, weights: int, memory: int, context: int, ranks: int
) -> None:
    def fits(batch: int, tokens: int) -> bool:
        heads = [max(layer.heads // ranks, 1) for layer in kv.layers]
        held = [
            h * (n.key_dim + n.value_dim) * min(tokens, n.window or tokens) * 2
            for h, n in zip(heads, kv.layers, strict=True)
        ]
        return ranks * (memory - batch * sum(held)) >= weights

    batch, longest = what_fits(kv, weights, memory, context, ranks)
    assert fits(batch, context) or batch == 0
    assert not fits(batch + 1, context)
    if longest is None:
        assert fits(1, 10**9)
    else:
        assert fits(1, longest) or longest == 0
        assert not fits(1, longest + 1)
