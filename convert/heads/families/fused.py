"""Families with queries, keys and values in one tensor."""

from typing import Any

from gqa.convert.heads.family import Edits, Family, Symmetry, uniform_heads
from gqa.convert.heads.layouts import Fused, LayerHeads, Rule, Separate

_FALCON = Symmetry(
    lambda config, layer: not config.alibi,
    query=None,
    output="dense",
    norms=("ln_attn", "input_layernorm"),
    reorders_heads="alibi",
)
_CUSTOM_ATTENTION = {
    "falcon": "its class computes attention itself, on keys and values repeated for all query heads"
}


def _multi_query_heads(config: Any, layer: int) -> LayerHeads:
    """Heads of a config that counts 1 or all KV heads by `multi_query`."""
    kv = 1 if config.multi_query else config.num_attention_heads
    return uniform_heads(config, kv)


def _falcon_old_edits(groups: int, heads: LayerHeads, config: Any) -> Edits | None:
    """Edits of old Falcon, which only the new architecture can give between 1 and H heads."""
    if groups in (1, heads.query):
        return {"multi_query": groups == 1, "num_kv_heads": groups}
    if not config.parallel_attn:
        return None
    return {"new_decoder_architecture": True, "num_kv_heads": groups, "num_ln_in_parallel_attn": 1}


def _gpt_bigcode_edits(groups: int, heads: LayerHeads, config: Any) -> Edits | None:
    """Edits of GPTBigCode, which can only have 1 KV head or as many as query heads."""
    if groups in (1, heads.query):
        return {"multi_query": groups == 1}
    return None


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
                output="attn_out",
                norms=("attn_norm",),
                aligns_keys=False,
                per_query=(
                    Rule(
                        "q_norm",
                        Separate("query"),
                        projection=False,
                        only_if=("qk_norm_type", "olmo"),
                    ),
                ),
            )
        },
        note="the k norm is over all heads or per head, as qk_norm_type says",
        rules=(
            Rule("att_proj", Fused("stacked")),
            Rule("k_norm", Separate("key"), projection=False, only_if=("qk_norm_type", "olmo")),
        ),
    ),
    Family(
        "fused [Q | K | V], nested config",
        {"dbrx": "values are clipped elementwise (clip_qkv)"},
        attention=("norm_attn_norm.attn",),
        rules=(Rule("Wqkv", Fused("stacked")),),
        kv_fields=("attn_config.kv_n_heads", "num_key_value_heads"),
        heads=lambda config, layer: uniform_heads(config, config.attn_config.kv_n_heads),
    ),
    Family(
        "Falcon, new architecture",
        {"falcon": _FALCON},
        note="transformers' cache holds all H heads; other engines keep G",
        only_if={"new_decoder_architecture": True},
        attention=("self_attention",),
        rules=(Rule("query_key_value", Fused("grouped")),),
        not_layerwise=_CUSTOM_ATTENTION,
        kv_fields=("num_kv_heads",),
        heads=lambda config, layer: uniform_heads(config, config.num_kv_heads),
    ),
    Family(
        "Falcon, old architecture",
        {"falcon": _FALCON},
        note="G = 1 or H; with parallel attention also 1 < G < H, in the new architecture (its "
        "cache holds H heads)",
        only_if={"new_decoder_architecture": False},
        attention=("self_attention",),
        rules=(Rule("query_key_value", Fused("grouped")),),
        not_layerwise=_CUSTOM_ATTENTION,
        heads=_multi_query_heads,
        edits=_falcon_old_edits,
    ),
    Family(
        "GPTBigCode",
        {"gpt_bigcode": Symmetry(rotates=False, query=None, output="c_proj", norms=("ln_1",))},
        note="G = 1 or H",
        attention=("attn",),
        rules=(Rule("c_attn", Fused("grouped")),),
        heads=_multi_query_heads,
        edits=_gpt_bigcode_edits,
    ),
)
