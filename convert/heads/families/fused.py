"""Queries, keys and values in one tensor."""

from __future__ import annotations

from typing import Any

from gqa.convert.heads.family import Edits, Family
from gqa.convert.heads.layout import Fused, LayerHeads, Rule, Separate
from gqa.convert.heads.symmetries import Symmetry, no_layer, unless_alibi

FALCON = Symmetry(
    unless_alibi,
    query=None,
    output=Rule("dense", Separate("output", axis=1)),
    norms=("ln_attn", "input_layernorm"),
    places="alibi",
)
BIGCODE = Symmetry(no_layer, query=None, output=Rule("c_proj", Separate("output", axis=1)), norms=("ln_1",))


def _falcon_heads(config: Any, layer: int) -> LayerHeads:
    query, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.new_decoder_architecture:
        return LayerHeads(query, config.num_kv_heads, dim, dim)
    return LayerHeads(query, 1 if config.multi_query else query, dim, dim)


def _falcon_old_edits(groups: int, heads: LayerHeads, config: Any) -> Edits | None:
    if groups in (1, heads.query):
        return {"multi_query": groups == 1, "num_kv_heads": groups}
    if not config.parallel_attn:
        return None
    return {"new_decoder_architecture": True, "num_kv_heads": groups, "num_ln_in_parallel_attn": 1}


def _bigcode_heads(config: Any, layer: int) -> LayerHeads:
    query, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    return LayerHeads(query, 1 if config.multi_query else query, dim, dim)


def _bigcode_edits(groups: int, heads: LayerHeads, config: Any) -> Edits | None:
    return {"multi_query": groups == 1} if groups in (1, heads.query) else None


def _dbrx_heads(config: Any, layer: int) -> LayerHeads:
    query, dim = config.n_heads, config.d_model // config.n_heads
    return LayerHeads(query, config.attn_config.kv_n_heads, dim, dim)


FAMILIES: tuple[Family, ...] = (
    Family(
        "fused [Q | K | V]",
        dict.fromkeys(("phi3", "phi4_multimodal"), Symmetry(query=None)),
        rules=(Rule("qkv_proj", Fused("stacked")),),
    ),
    Family(
        "fused [Q | K | V], k norm over all heads",
        {
            "molmo2_text": Symmetry(
                query=None,
                output=Rule("attn_out", Separate("output", axis=1)),
                norms=("attn_norm",),
                keys=False,
                per_query=(Rule("q_norm", Separate("query"), projection=False, when=("qk_norm_type", "olmo")),),
            )
        },
        note="the k norm is over all heads or per head, as qk_norm_type says",
        rules=(
            Rule("att_proj", Fused("stacked")),
            Rule("k_norm", Separate("key"), projection=False, when=("qk_norm_type", "olmo")),
        ),
        unchanged=("attn_out",),
    ),
    Family(
        "fused [Q | K | V], nested config",
        {"dbrx": "its values are clipped one dimension at a time (clip_qkv)"},
        attention=("norm_attn_norm.attn",),
        rules=(Rule("Wqkv", Fused("stacked")),),
        kv_fields=("attn_config.kv_n_heads", "num_key_value_heads"),
        heads=_dbrx_heads,
    ),
    Family(
        "Falcon, new architecture",
        {"falcon": FALCON},
        note="transformers' cache holds all H heads; other engines keep G",
        when={"new_decoder_architecture": True},
        attention=("self_attention",),
        rules=(Rule("query_key_value", Fused("grouped")),),
        kv_fields=("num_kv_heads",),
        heads=_falcon_heads,
        caches_all_heads=True,
    ),
    Family(
        "Falcon, old multi-query",
        {"falcon": FALCON},
        note="already G = 1; up to H, or to 1 < G < H in the new architecture where attention is parallel",
        when={"new_decoder_architecture": False, "multi_query": True},
        attention=("self_attention",),
        rules=(Rule("query_key_value", Fused("stacked", by_count=True)),),
        heads=_falcon_heads,
        edits=_falcon_old_edits,
    ),
    Family(
        "Falcon, old multi-head",
        {"falcon": FALCON},
        note="G = 1, or 1 < G < H in the new architecture where attention is parallel (its cache holds H heads)",
        when={"new_decoder_architecture": False, "multi_query": False},
        attention=("self_attention",),
        rules=(Rule("query_key_value", Fused("grouped", by_count=True)),),
        heads=_falcon_heads,
        edits=_falcon_old_edits,
    ),
    Family(
        "GPTBigCode, multi-head",
        {"gpt_bigcode": BIGCODE},
        note="G = 1 only",
        when={"multi_query": False},
        attention=("attn",),
        rules=(Rule("c_attn", Fused("grouped", by_count=True)),),
        unchanged=("c_proj",),
        heads=_bigcode_heads,
        edits=_bigcode_edits,
    ),
    Family(
        "GPTBigCode, multi-query",
        {"gpt_bigcode": BIGCODE},
        note="already G = 1; up to H",
        when={"multi_query": True},
        attention=("attn",),
        rules=(Rule("c_attn", Fused("stacked", by_count=True)),),
        unchanged=("c_proj",),
        heads=_bigcode_heads,
        edits=_bigcode_edits,
    ),
)
