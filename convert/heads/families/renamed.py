"""Modules and tensors under other names, and text parts that exist only inside a larger model."""

from gqa.convert.heads.family import Family
from gqa.convert.heads.layout import Rule, Separate
from gqa.convert.heads.symmetries import Symmetry, no_layer

_ADAPTERS = "its shared attention adapters keep full-size keys and values, which transformers cannot run with fewer"
_HEARS = "its encoder is given sound, and convolutions are part of its layers"
_SHARED = "several layers share one block, which reads their streams side by side with the embeddings"


FAMILIES: tuple[Family, ...] = (
    Family(
        "other names for self_attn",
        {
            "nemotron_h": Symmetry(no_layer, norms=("norm",)),
            "recurrent_gemma": Symmetry(norms=("temporal_pre_norm",), one_plus=True),
            "zamba": _SHARED,
        },
        attention=("mixer", "temporal_block", "shared_transf.self_attn"),
        not_layerwise={"zamba": _SHARED},
    ),
    Family(
        "shared transformer blocks",
        {"zamba2": _SHARED},
        attention=("shared_transformer.self_attn",),
        not_layerwise={"zamba2": _SHARED},
        refusal=lambda config: _ADAPTERS if getattr(config, "use_shared_attention_adapter", False) else None,
    ),
    Family(
        "k_proj.linear and v_proj.linear",
        dict.fromkeys(
            ("moshi", "kyutai_speech_to_text"),
            Symmetry(query="q_proj.linear", output="o_proj.linear"),
        ),
        rules=(Rule("k_proj.linear", Separate("key")), Rule("v_proj.linear", Separate("value"))),
        not_layerwise={"kyutai_speech_to_text": "its tokens are those of several codebooks"},
    ),
    Family(
        "key_net and value_net",
        {"cohere_asr": Symmetry(no_layer, query="query_net", output="out_projection", norms=("layer_norm_1",))},
        note="self- and cross-attention of the decoder",
        attention=("first_sub_layer",),
        cross_attention=("second_sub_layer",),
        not_layerwise={"cohere_asr": _HEARS},
        rules=(Rule("key_net", Separate("key")), Rule("value_net", Separate("value"))),
    ),
    Family(
        "decoder self-attention",
        {"dia_decoder": Symmetry(norms=("pre_sa_norm",))},
        note="cross-attention counts its heads apart and is left alone",
        attention=("self_attention",),
    ),
    Family(
        "self- and cross-attention",
        {
            "mllama_text_model": Symmetry(
                lambda config, layer, dim: 0 if layer in config.cross_attention_layers else dim, keys=False
            ),
            "t5_gemma_module": Symmetry(norms=("pre_self_attn_layernorm",), one_plus=True),
            "t5gemma2_decoder": Symmetry(norms=("pre_self_attn_layernorm",), one_plus=True, keys=False),
            "canary_decoder": Symmetry(no_layer),
        },
        note="of the decoder; encoders stay as they are",
        cross_attention=("cross_attn", "encoder_attn"),
        not_layerwise={
            "mllama_text_model": "some of its layers read an image",
            "canary_decoder": _HEARS,
        },
    ),
    Family(
        "global transformer of a byte model",
        {"blt_global_transformer": Symmetry(pairing="interleaved")},
        note="the local encoder, decoder and patcher stay as they are",
        not_layerwise={"blt_global_transformer": "it is given patches of bytes, which other models make"},
    ),
)
