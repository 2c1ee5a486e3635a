"""Families with custom modeling code: of `models/modeling`, named after the class of
transformers that they extend.
"""

from dataclasses import replace

from gqa.convert.heads.family import Family, Symmetry
from gqa.convert.heads.layouts import Fused, Rule, Separate, Transposed

_BART = Symmetry(rotates=False, output="out_proj", norms=())
_NORMS = ("self_attn_layer_norm",)
_UNNORMED = "with do_layer_norm_before=false, no known norm precedes attention"
_OPT = replace(
    _BART,
    norms=_NORMS,
    impossible_if=(_UNNORMED, lambda config: not config.do_layer_norm_before),
)
_T5 = Symmetry(
    rotates=False,
    query="q",
    output="o",
    norms=("layer.0.layer_norm",),
    reorders_heads=False,
)


FAMILIES: tuple[Family, ...] = (
    Family(
        "Conv1D [Q | K | V], custom modeling code",
        {
            "gqa_gpt2": Symmetry(
                rotates=False, query=None, output="c_proj", stores_transposed=True, norms=("ln_1",)
            )
        },
        attention=("attn",),
        rules=(Rule("c_attn", Transposed(Fused("stacked"))),),
    ),
    Family("separate k_proj and v_proj, custom modeling code", {"gqa_opt": _OPT}),
    Family(
        "encoder-decoder, custom modeling code",
        {
            **dict.fromkeys(("gqa_bart", "gqa_marian"), _BART),
            **dict.fromkeys(
                ("gqa_m2m_100", "gqa_mbart", "gqa_pegasus"), replace(_BART, norms=_NORMS)
            ),
        },
        note="self- and cross-attention of the decoder",
        cross_attention=("encoder_attn",),
        layers_field="decoder_layers",
    ),
    Family(
        "encoder-decoder with relative positions, custom modeling code",
        dict.fromkeys(("gqa_mt5", "gqa_t5"), _T5),
        note="self- and cross-attention of the decoder; positions stay with the query heads",
        attention=("layer.0.SelfAttention",),
        cross_attention=("layer.1.EncDecAttention",),
        rules=(Rule("k", Separate("key")), Rule("v", Separate("value"))),
        unchanged_patterns=("relative_attention_bias",),
        layers_field="num_decoder_layers",
    ),
)
