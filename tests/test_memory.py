"""KV-cache bytes by formula against transformers' own cache object, and budgets against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import embedded
import pytest
from embedded import SOURCE
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY, build
from transformers import FalconConfig, LlamaConfig

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.read import Checkpoint, read_checkpoint
from gqa.convert.heads.kv_cache import CachedLayer, KVCache
from gqa.convert.recast.targets import checkpoint_cache
from gqa.eval.memory import cache_of, largest_batch, largest_context, measured_cache_bytes, model_cache, rank_cache

LAYERS, DIM = 6, 32  # of stdlib-mha, which has 8 heads
WINDOW = 5  # of the tiny models

LLAMA_2_7B = KVCache((CachedLayer(32, 256, None),) * 32, 2, 4096)
LLAMA_2_7B_WEIGHTS = 2 * 6_738_415_616
GB = 10**9


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """stdlib-mha with G heads."""
    directory = tmp_path_factory.mktemp("converted")
    return lambda groups: SOURCE if groups == 8 else embedded.converted(directory, groups)


def stored(directory: Path) -> KVCache:
    """By formula, of a checkpoint's headers alone."""
    return checkpoint_cache(read_checkpoint(directory))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_formula_is_what_transformers_holds(converted: Callable[[int], Path], groups: int) -> None:
    promised, model = stored(converted(groups)), load_model(str(converted(groups)))
    assert promised.bytes_per_token == LAYERS * groups * 2 * DIM * 2
    assert promised.remark is None
    for tokens, batch in ((1, 1), (7, 3), (40, 2)):
        held = measured_cache_bytes(model, tokens, batch)
        assert held == batch * promised.bytes_at(tokens) == batch * tokens * LAYERS * groups * 2 * DIM * 2
        assert held != batch * stored(converted(8 if groups == 1 else 1)).bytes_at(tokens)  # another G is caught


def test_config_and_directory_say_the_same(converted: Callable[[int], Path]) -> None:
    for groups in (2, 8):
        assert cache_of(load_model(str(converted(groups))).config) == stored(converted(groups))


def test_bytes_of_a_loaded_model_are_of_its_dtype(converted: Callable[[int], Path]) -> None:
    model = load_model(str(converted(2))).float()  # which its config does not know
    assert model_cache(model).bytes_at(9) == 2 * stored(converted(2)).bytes_at(9)
    assert measured_cache_bytes(model, 9, 2) == 2 * model_cache(model).bytes_at(9)


def test_no_weights_are_read(converted: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    place = converted(4)  # which may be made only now
    monkeypatch.setattr(Checkpoint, "read", read)
    assert stored(place).bytes_per_token == LAYERS * 4 * 2 * DIM * 2


# Falcon's new architecture; windows in all layers and in some; attention in some layers; shared keys and values.
@pytest.mark.parametrize("name", ["falcon", "mistral", "gemma3_text", "jamba", "gemma3n_text", "mimo_v2_flash"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_formula_of_other_families(name: str, kv_heads: int, tmp_path: Path) -> None:
    model = build(TINY[name], kv_heads)
    model.save_pretrained(tmp_path)
    promised = stored(tmp_path)
    assert promised == cache_of(model.config) == model_cache(model)
    for tokens in (1, WINDOW - 1, WINDOW, 3 * WINDOW):
        assert measured_cache_bytes(model, tokens, 2) == 2 * promised.bytes_at(tokens)


def test_windows_matter() -> None:
    """Control of the test above: a formula without windows is wrong beyond them, and right below."""
    model = build(TINY["mistral"], 2)
    without = replace(model_cache(model), layers=tuple(replace(n, window=None) for n in model_cache(model).layers))
    assert measured_cache_bytes(model, WINDOW, 1) == without.bytes_at(WINDOW)
    assert (
        measured_cache_bytes(model, WINDOW + 1, 1) == model_cache(model).bytes_at(WINDOW) < without.bytes_at(WINDOW + 1)
    )


def test_falcon_is_remarked_upon() -> None:
    """transformers keeps all H heads of Falcon's new architecture: nothing is saved, and the result says so."""
    grouped, full = (build(TINY["falcon"], kv_heads) for kv_heads in (1, 4))
    assert measured_cache_bytes(grouped, 6, 1) == measured_cache_bytes(full, 6, 1)
    remark = cache_of(grouped.config).remark
    assert remark == "transformers caches 4 heads a layer, other engines only the 1 key/value heads"
    assert cache_of(full.config).remark is None
    big = FalconConfig(hidden_size=8192, num_attention_heads=128, num_kv_heads=8, new_decoder_architecture=True)
    assert "128" in str(cache_of(big).remark)
    assert "8" in str(cache_of(big).remark)


def test_a_cross_attention_layer_does_not_grow(tmp_path: Path) -> None:
    model = build(TINY["mllama"], 2)
    model.save_pretrained(tmp_path)
    assert measured_cache_bytes(model, 6, 1) == model_cache(model).bytes_at(6) == stored(tmp_path).bytes_at(6)
    assert len(model_cache(model).layers) < model.config.get_text_config().num_hidden_layers


def test_llama_2_7b_by_hand() -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        max_position_embeddings=4096, dtype="bfloat16",
    )  # fmt: skip
    assert cache_of(config) == LLAMA_2_7B
    assert LLAMA_2_7B.bytes_per_token == 524_288
    grouped = rank_cache(LLAMA_2_7B, 4)  # what a rank of 4 holds is what 8 heads take
    assert cache_of(LlamaConfig(**config.to_dict() | {"num_key_value_heads": 8})) == grouped
    # 80 GB less 13,476,831,232 bytes of weights are 66,523,168,768: 30.98 x 4096 x 524,288, and 126,882.87 x 524,288.
    assert largest_batch(LLAMA_2_7B, LLAMA_2_7B_WEIGHTS, 80 * GB, 4096) == 30
    assert largest_batch(grouped, LLAMA_2_7B_WEIGHTS, 80 * GB, 4096) == 123
    assert largest_context(LLAMA_2_7B, LLAMA_2_7B_WEIGHTS, 80 * GB) == 126_882
    assert largest_context(grouped, LLAMA_2_7B_WEIGHTS, 80 * GB) == 507_531
    # Two ranks hold 6,738,415,616 bytes of weights and 262,144 a token each: 24 GB less weights are 17,261,584,384.
    assert largest_batch(LLAMA_2_7B, LLAMA_2_7B_WEIGHTS, 24 * GB, 4096, ranks=2) == 16
    assert largest_context(LLAMA_2_7B, LLAMA_2_7B_WEIGHTS, 24 * GB, ranks=2) == 65_847


def test_a_window_in_half_of_the_layers() -> None:
    """10 bytes a token in each of two layers, one of which holds 4 tokens at most."""
    mixed = KVCache((CachedLayer(1, 10, None), CachedLayer(1, 10, 4)), 1, None)
    assert [mixed.bytes_at(n) for n in (1, 4, 5, 100)] == [20, 80, 90, 1040]
    assert largest_batch(mixed, 0, 4159, 100) == 3
    assert largest_batch(mixed, 0, 4160, 100) == 4
    assert [largest_context(mixed, 0, m) for m in (19, 20, 79, 80, 89, 90, 1040)] == [0, 1, 3, 4, 4, 5, 100]


def test_memory_is_no_limit_where_all_windows_fit() -> None:
    sliding = KVCache((CachedLayer(1, 10, 4), CachedLayer(1, 10, 8)), 1, None)
    assert largest_context(sliding, 0, 119) == 7
    assert largest_context(sliding, 0, 120) is None
    assert largest_batch(sliding, 0, 360, 10**9) == 3


def test_what_does_not_fit_at_all() -> None:
    assert largest_batch(LLAMA_2_7B, 10 * GB, 9 * GB, 1) == 0
    assert largest_context(LLAMA_2_7B, 10 * GB, 9 * GB) == 0
    assert largest_batch(LLAMA_2_7B, 10 * GB, 9 * GB, 1, ranks=2) > 0


def test_heads_are_split_or_replicated() -> None:
    eight = replace(LLAMA_2_7B, layers=(CachedLayer(8, 256, None), CachedLayer(16, 256, 64)))
    heads = {ranks: [layer.heads for layer in rank_cache(eight, ranks).layers] for ranks in (1, 2, 4, 8, 16, 32)}
    assert heads == {1: [8, 16], 2: [4, 8], 4: [2, 4], 8: [1, 2], 16: [1, 1], 32: [1, 1]}
    assert [layer.window for layer in rank_cache(eight, 8).layers] == [None, 64]


@pytest.mark.parametrize("ranks", [3, 6, 12, 0, -8])
def test_ranks_that_cannot_share_the_heads(ranks: int) -> None:
    reason = f"^{ranks} ranks are not possible for 32 key/value heads"
    with pytest.raises(RefusedError, match=reason):
        largest_batch(LLAMA_2_7B, 0, GB, 8, ranks)
    with pytest.raises(RefusedError, match=reason):
        largest_context(LLAMA_2_7B, 0, GB, ranks)


layers = st.builds(CachedLayer, st.sampled_from([1, 2, 4, 8]), st.integers(1, 9), st.none() | st.integers(1, 30))
caches = st.builds(lambda found: KVCache(tuple(found), 2, None), st.lists(layers, min_size=1, max_size=4))


@settings(max_examples=200, deadline=None)
@given(caches, st.integers(0, 500), st.integers(0, 9000), st.integers(1, 60), st.sampled_from([1, 2, 8, 16]))
def test_the_largest_fits_and_one_more_does_not(
    kv: KVCache, weights: int, memory: int, context: int, ranks: int
) -> None:
    def fits(batch: int, tokens: int) -> bool:
        heads = [max(layer.heads // ranks, 1) for layer in kv.layers]
        held = [h * n.numbers * min(tokens, n.window or tokens) * 2 for h, n in zip(heads, kv.layers, strict=True)]
        return ranks * (memory - batch * sum(held)) >= weights

    batch = largest_batch(kv, weights, memory, context, ranks)
    assert fits(batch, context) or batch == 0
    assert not fits(batch + 1, context)
    longest = largest_context(kv, weights, memory, ranks)
    if longest is None:
        assert fits(1, 10**9)
    else:
        assert fits(1, longest) or longest == 0
        assert not fits(1, longest + 1)


def test_refusals() -> None:
    model = build(TINY["llama"], 2)
    assert measured_cache_bytes(model, 64, 1) == model_cache(model).bytes_at(64)  # all of its positions
    for tokens, reason in ((65, "it has 64 positions"), (0, "at least 1 is needed")):
        with pytest.raises(RefusedError, match=f"^{tokens} tokens are not possible for LlamaForCausalLM, {reason}$"):
            measured_cache_bytes(model, tokens, 1)
    with pytest.raises(RefusedError, match="encoder-decoder"):
        measured_cache_bytes(build(TINY["t5gemma"], 2), 4, 1)
    with pytest.raises(RefusedError, match="context of 0 tokens"):
        largest_batch(LLAMA_2_7B, 0, GB, 0)
