"""Families with keys and values in separate tensors: Llama's k_proj and v_proj, or other names."""

import math
from dataclasses import replace
from typing import Any

from gqa.convert.heads.family import SEPARATE, Edits, Family, Symmetry, layer_heads, uniform_heads
from gqa.convert.heads.layouts import LayerHeads, Rule, Separate
from gqa.convert.heads.rotary import at_layer

# Symmetries that several model types share.
LLAMA = Symmetry()
QWEN3 = Symmetry(aligns_keys=False)  # query and key norms: only values can be transformed
ONE_PLUS = Symmetry(one_plus=True)
GEMMA = replace(ONE_PLUS, embedding_factor=lambda config: math.sqrt(config.hidden_size))
GLM = Symmetry(pairing="interleaved")
OLMO2 = Symmetry(
    norms=(),
    aligns_keys=False,
    per_query=(Rule("q_norm", Separate("query"), projection=False),),
)
LFM2 = Symmetry(norms=("operator_norm",), aligns_keys=False, output="out_proj")
# Why some configs have no symmetry (`impossible_if`).
CLIPPED = (
    "with clip_qkv, values are clipped elementwise",
    lambda config: bool(config.clip_qkv),
)
# Why some model types have none.
GATED = "a gate scales each dimension of the heads' output"
GATED_IF = (
    f"unless gating is per head, {GATED}",
    lambda config: config.gating not in (True, "per-head"),
)
VALUE_NORM = "its value norm commutes with rotations only"

# Why models cannot be run layer by layer on text; `_SHARED` is also why they have no symmetry.
LAYER_EMBEDDINGS = "each layer adds its own token embeddings"
_AUDIO = "its encoder takes audio and contains convolutions"
_SHARED = (
    "several layers share one block, which reads their hidden states concatenated with the "
    "embeddings"
)


def per_head(*tensors: str) -> tuple[Rule, ...]:
    """Rules for tensors of these names with one row per query head."""
    return tuple(
        Rule(tensor, Separate("query", width="one"), projection=False) for tensor in tensors
    )


def _rotates_by_list(config: Any, layer: int) -> bool:
    """Whether the layer uses RoPE: `no_rope_layers` is 1 for layers that do."""
    flags = getattr(config, "no_rope_layers", None)
    return not flags or bool(at_layer(flags, layer))


def _slides(config: Any, layer: int) -> bool:
    """Whether the layer has a sliding window."""
    return bool(at_layer(config.layer_types, layer) == "sliding_attention")


def _mimo_heads(config: Any, layer: int) -> LayerHeads:
    """Heads of MiMo: sliding layers have twice the KV heads."""
    heads = uniform_heads(config)
    kv = heads.kv * 2 if _slides(config, layer) else heads.kv
    return LayerHeads(heads.query, kv, heads.key_dim, config.v_head_dim)


def _paired_head_edits(groups: int, heads: LayerHeads, config: Any) -> Edits | None:
    """Edits of differential heads, which are paired, so their number is even."""
    if groups % 2 == 0:
        return {"num_key_value_heads": groups}
    return None


def _gemma4_heads(config: Any, layer: int) -> LayerHeads:
    """Heads of Gemma 4: in layers without a window, values may be the keys."""
    may_share = getattr(config, "attention_k_eq_v", True)
    shared = may_share and config.layer_types[layer] != "sliding_attention"
    return replace(layer_heads(config, layer), keys_only=shared)


FAMILIES: tuple[Family, ...] = (
    Family(
        "separate k_proj and v_proj",
        {
            **dict.fromkeys(
                (
                    "arcee",
                    "aria_text",
                    "bamba",
                    "cohere_compass_text",
                    "cosmos3_edge_text",
                    "csm",
                    "cwm",
                    "deepseek_ocr2_text",
                    "emu3_text_model",
                    "eurobert",
                    "evolla",
                    "falcon_h1",
                    "glm4v_moe_text",
                    "glm_image_text",
                    "granite",
                    "granite4_vision_text",
                    "granite_docling_text",
                    "granitemoe",
                    "granitemoeshared",
                    "higgs_audio_v2",
                    "hyperclovax",
                    "internlm3",
                    "iquestcoder",
                    "jais2",
                    "llama",
                    "minimax",
                    "ministral",
                    "ministral3",
                    "mistral",
                    "mixtral",
                    "paddleocr_vl_text",
                    "phimoe",
                    "qwen2",
                    "qwen2_5_omni_text",
                    "qwen2_5_vl_text",
                    "qwen2_moe",
                    "qwen2_vl_text",
                    "seed_oss",
                    "solar_open",
                    "starcoder2",
                    "ultrabert",
                    "unlimited_ocr_text",
                    "voxtral_realtime_text",
                ),
                LLAMA,
            ),
            **dict.fromkeys(
                (
                    "dots1",
                    "exaone_moe",
                    "hunyuan_v1_dense",
                    "hunyuan_v1_moe",
                    "hunyuan_vl_text",
                    "hy_v3",
                    "kolibri1",
                    "mellum",
                    "nanochat",
                    "qwen3",
                    "qwen3_moe",
                    "qwen3_omni_moe_text",
                    "qwen3_vl_moe_text",
                    "qwen3_vl_text",
                ),
                QWEN3,
            ),
            **dict.fromkeys(
                (
                    "blt_global_transformer",
                    "ernie4_5",
                    "ernie4_5_moe",
                    "ernie4_5_vl_moe_text",
                    "glm",
                    "glm4",
                    "glm4v_text",
                    "glm_ocr_text",
                    "helium",
                ),
                GLM,
            ),
            **dict.fromkeys(("gemma", "gemma2", "vaultgemma"), GEMMA),
            "nemotron": ONE_PLUS,
            **dict.fromkeys(
                ("gpt_oss", "granite_swa", "granitemoe_swa"), Symmetry(per_query=per_head("sinks"))
            ),
            **dict.fromkeys(("lfm2", "lfm2_moe"), LFM2),
            **dict.fromkeys(
                (
                    "afmoe",
                    "beam",
                    "muse_glimmer_text",
                    "muse_spark_text",
                    "qwen3_5_moe_text",
                    "qwen3_5_text",
                    "qwen3_next",
                    "qwen4_exp_text",
                ),
                GATED,
            ),
            "apertus": Symmetry(norms=("attention_layernorm",), aligns_keys=False),
            "bitnet": "a norm over all heads, with gains, precedes W_O",
            "exaone4": Symmetry(norms=(), aligns_keys=False),
            "flint": replace(QWEN3, per_query=per_head("softmax_offset", "sinks")),
            "gemma3_text": replace(GEMMA, aligns_keys=False),
            "gemma3n_text": VALUE_NORM,
            "glm4_moe": Symmetry(aligns_keys="use_qk_norm"),
            "granitemoehybrid": Symmetry(
                lambda config, layer: config.position_embedding_type == "rope"
            ),
            "jamba": Symmetry(rotates=False),
            "laguna": replace(QWEN3, per_query=per_head("g_proj"), impossible_if=GATED_IF),
            "lfm3": Symmetry(
                norms=("operator_norm",),
                aligns_keys=False,
                per_query=per_head("gate_proj", "g_proj"),
            ),
            "llama4_text": replace(GLM, rotates=_rotates_by_list, aligns_keys="use_qk_norm"),
            "minimax_m3_vl_text": replace(ONE_PLUS, aligns_keys=False),
            "olmo": Symmetry(impossible_if=CLIPPED),
            "openai_privacy_filter": replace(GLM, per_query=per_head("sinks")),
            "phi": Symmetry(output="dense", aligns_keys="qk_layernorm"),
            "stablelm": LLAMA,
            "smollm3": Symmetry(_rotates_by_list),
            "step3p5": replace(
                ONE_PLUS,
                aligns_keys=False,
                per_query=per_head("g_proj"),
                impossible_if=GATED_IF,
            ),
        },
        unchanged_patterns=("attn_sub_norm", "indexer.*"),
        kv_fields=("num_key_value_heads", "num_attention_groups"),
        not_layerwise={
            "blt_global_transformer": "its inputs are byte patches computed by other models",
            "csm": "its backbone takes the embeddings of several codebooks",
            "gemma3n_text": LAYER_EMBEDDINGS,
            "qwen4_exp_text": "its layers carry several residual streams, mixed after the last "
            "layer",
            "voxtral_realtime_text": "transformers has no class for it alone, and the whole model "
            "takes audio",
        },
    ),
    Family(
        "k norm per head",
        {
            "cohere": replace(GLM, aligns_keys="use_qk_norm", per_query=per_head("q_norm")),
            **dict.fromkeys(("cohere2", "cohere2_moe"), replace(GLM, rotates=_slides)),
            "chameleon": replace(QWEN3, per_query=per_head("q_norm")),
        },
        note="k_norm (H, d) is merged with the heads",
        rules=(*SEPARATE, Rule("k_norm", Separate("key", width="one"), projection=False)),
    ),
    Family(
        "k norm over all heads",
        {
            **dict.fromkeys(("flex_olmo", "olmo2", "olmo3", "olmo_hybrid"), OLMO2),
            "olmoe": replace(OLMO2, norms=LLAMA.norms, impossible_if=CLIPPED),
            "minimax_m2": replace(OLMO2, norms=LLAMA.norms),
        },
        note="k_norm (H * d) is merged with the heads; its RMS is taken over all of them",
        rules=(*SEPARATE, Rule("k_norm", Separate("key"), projection=False)),
    ),
    Family(
        "differential heads",
        {
            "diffllama": "its value heads are twice as wide, shared by two key heads each, and "
            "normed"
        },
        note="G must be even: value head i is paired with head i + G / 2",
        unchanged_patterns=("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "groupnorm"),
        edits=_paired_head_edits,
    ),
    Family(
        "sliding layers with twice the KV heads",
        {"mimo_v2_flash": Symmetry(per_query=per_head("attention_sink_bias", "sinks"))},
        note="G is that of the full-attention layers",
        heads=_mimo_heads,
    ),
    Family(
        "KV heads and head dimension per layer",
        dict.fromkeys(
            ("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text", "diffusion_gemma_text"),
            VALUE_NORM,
        ),
        note="G is that of the sliding layers; K = V layers have keys only",
        kv_fields=("num_key_value_heads", "num_global_key_value_heads"),
        heads=_gemma4_heads,
        not_layerwise={"embedding_gemma2_text": LAYER_EMBEDDINGS},
    ),
    Family(
        "other names for self_attn",
        {
            "dia_decoder": Symmetry(norms=("pre_sa_norm",)),
            "nemotron_h": Symmetry(rotates=False, norms=("norm",)),
            "recurrent_gemma": Symmetry(norms=("temporal_pre_norm",), one_plus=True),
            **dict.fromkeys(("zamba", "zamba2"), _SHARED),
        },
        note="cross-attention of dia_decoder has its own head count and is left unchanged",
        attention=(
            "mixer",
            "self_attention",
            "shared_transf.self_attn",
            "shared_transformer.self_attn",
            "temporal_block",
        ),
        not_layerwise=dict.fromkeys(("zamba", "zamba2"), _SHARED),
    ),
    Family(
        "k_proj.linear and v_proj.linear",
        dict.fromkeys(
            ("moshi", "kyutai_speech_to_text"),
            Symmetry(query="q_proj.linear", output="o_proj.linear"),
        ),
        rules=(Rule("k_proj.linear", Separate("key")), Rule("v_proj.linear", Separate("value"))),
        not_layerwise={"kyutai_speech_to_text": "its tokens come from several codebooks"},
    ),
    Family(
        "key_net and value_net",
        {
            "cohere_asr": Symmetry(
                rotates=False, query="query_net", output="out_projection", norms=("layer_norm_1",)
            )
        },
        note="self- and cross-attention of the decoder",
        attention=("first_sub_layer",),
        cross_attention=("second_sub_layer",),
        not_layerwise={"cohere_asr": _AUDIO},
        rules=(Rule("key_net", Separate("key")), Rule("value_net", Separate("value"))),
    ),
    Family(
        "self- and cross-attention",
        {
            "mllama_text_model": Symmetry(
                lambda config, layer: layer not in config.cross_attention_layers, aligns_keys=False
            ),
            "t5_gemma_module": Symmetry(norms=("pre_self_attn_layernorm",), one_plus=True),
            "t5gemma2_decoder": Symmetry(
                norms=("pre_self_attn_layernorm",), one_plus=True, aligns_keys=False
            ),
            "canary_decoder": Symmetry(rotates=False),
        },
        note="of the decoder; encoders are left unchanged",
        cross_attention=("cross_attn", "encoder_attn"),
        not_layerwise={
            "mllama_text_model": "some of its layers read an image",
            "canary_decoder": _AUDIO,
        },
    ),
)
