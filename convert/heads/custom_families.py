"""Families whose classes travel with the checkpoint, as data: of `checkpoint/modelling`, named after the class of
transformers that they extend.
"""

from __future__ import annotations

from typing import Any

from gqa.convert.heads.family import Family, Kind, Rule
from gqa.convert.heads.layout import Conv1D, Fused, LayerHeads, Separate

KINDS: tuple[Kind, ...] = ("decoder-self", "cross", "encoder")
DEFAULT_KINDS: tuple[Kind, ...] = ("decoder-self", "cross")  # as in arXiv 2305.13245, section 3.1


def query_heads(config: Any) -> int:
    """H of transformers' config of a source; of an encoder-decoder, of its decoder."""
    return int(getattr(config, "decoder_attention_heads", None) or config.num_attention_heads)


def _decoder_heads(config: Any, layer: int) -> LayerHeads:
    query, dim = query_heads(config), config.d_model // query_heads(config)
    return LayerHeads(query, config.num_key_value_heads, dim, dim)


def _decoder_layers(config: Any) -> int:
    return int(config.decoder_layers)


def _named(config: Any, kind: Kind) -> bool:
    return kind in config.grouped_attention


def _odd_kinds(config: Any) -> str | None:
    """Why what a config says of its kinds of attention cannot be converted."""
    if "decoder-self" not in config.grouped_attention or not all(kind in KINDS for kind in config.grouped_attention):
        return f"its grouped_attention is {config.grouped_attention}: decoder-self, and cross and encoder if wanted"
    encoder = getattr(config, "encoder_attention_heads", None)
    if encoder and "encoder" in config.grouped_attention and encoder != config.decoder_attention_heads:
        return f"its encoder has {encoder} attention heads, its decoder {config.decoder_attention_heads}"
    return None


_BART_LIKE = ("gqa_bart", "gqa_m2m_100", "gqa_marian", "gqa_mbart", "gqa_pegasus", "gqa_whisper")

CUSTOM_FAMILIES: tuple[Family, ...] = (
    Family(
        "Conv1D [Q | K | V], custom modelling code",
        ("gqa_gpt2",),
        attention=("attn",),
        rules=(Rule("c_attn", Conv1D(Fused("stacked"))),),
        unchanged=("c_proj",),
    ),
    Family(
        "separate k_proj and v_proj, custom modelling code",
        ("gqa_opt", "gqa_gpt_neo"),
        attention=("self_attn", "attn.attention"),
    ),
    Family(
        "queries, key and value per KV head, custom modelling code",
        ("gqa_bloom",),
        note="ALiBi's slopes stay with the query heads",
        attention=("self_attention",),
        rules=(Rule("query_key_value", Fused("grouped")),),
    ),
    Family(
        "fused [Q | K | V], custom modelling code",
        ("gqa_mpt",),
        note="ALiBi's slopes stay with the query heads",
        attention=("attn",),
        rules=(Rule("Wqkv", Fused("stacked")),),
    ),
    Family(
        "encoder-decoder, custom modelling code",
        _BART_LIKE,
        note="self- and cross-attention of the decoder, or as --attention says",
        cross_attention=("encoder_attn",),
        heads=_decoder_heads,
        layers=_decoder_layers,
        grouped=_named,
        refusal=_odd_kinds,
    ),
    Family(
        "encoder-decoder with relative positions, custom modelling code",
        ("gqa_mt5", "gqa_t5", "gqa_umt5"),
        note="self- and cross-attention of the decoder, or as --attention says; positions stay with the query heads",
        attention=("layer.0.SelfAttention",),
        cross_attention=("layer.1.EncDecAttention",),
        rules=(Rule("k", Separate("key")), Rule("v", Separate("value"))),
        unchanged=("q", "o", "relative_attention_bias"),
        layers=lambda config: int(config.num_decoder_layers),
        grouped=_named,
        refusal=_odd_kinds,
    ),
)
