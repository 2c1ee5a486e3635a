"""Every supported architecture, as data: the only file that a new one touches.

A family says which modules are attention, which stored tensors below them hold key/value heads (and how they lie),
and where the config counts heads. What it does not name inside an attention module is an error, not a guess.
Layouts verified against transformers 5.23, one tiny model per model type, by the tests.
"""

from __future__ import annotations

from typing import Any

from gqa.convert.heads.custom_families import CUSTOM_FAMILIES
from gqa.convert.heads.family import FULL_WIDTH_K_NORM, PER_HEAD_K_NORM, SEPARATE, Edits, Family, Rule, uniform_heads
from gqa.convert.heads.layout import Fused, LayerHeads, Numbered, ReadsValues, Role, Separate


def _mimo_heads(config: Any, layer: int) -> LayerHeads:
    heads = uniform_heads(config)
    sliding = layer < len(config.layer_types) and config.layer_types[layer] == "sliding_attention"
    return LayerHeads(heads.query, heads.kv * (2 if sliding else 1), heads.key_dim, config.v_head_dim)


def _laguna_heads(config: Any, layer: int) -> LayerHeads:
    heads, per_layer = uniform_heads(config), getattr(config, "num_attention_heads_per_layer", None)
    query = per_layer[layer] if per_layer and layer < len(per_layer) else heads.query
    return LayerHeads(query, heads.kv, heads.key_dim, heads.value_dim)


def _inkling_heads(config: Any, layer: int) -> LayerHeads:
    if layer < len(config.layer_types) and "sliding" in config.layer_types[layer]:
        dim = config.swa_head_dim
        return LayerHeads(config.swa_num_attention_heads, config.swa_num_key_value_heads, dim, dim)
    return uniform_heads(config)


def _falcon_heads(config: Any, layer: int) -> LayerHeads:
    query, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.new_decoder_architecture:
        return LayerHeads(query, config.num_kv_heads, dim, dim)
    return LayerHeads(query, 1 if config.multi_query else query, dim, dim)


def _falcon_old_allows(groups: int, heads: LayerHeads, config: Any) -> bool:
    return groups in (1, heads.query) or bool(config.parallel_attn)


def _falcon_old_edits(groups: int, heads: LayerHeads) -> Edits:
    if groups in (1, heads.query):
        return {"multi_query": groups == 1, "num_kv_heads": groups}
    return {"new_decoder_architecture": True, "num_kv_heads": groups, "num_ln_in_parallel_attn": 1}


def _bigcode_heads(config: Any, layer: int) -> LayerHeads:
    query, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    return LayerHeads(query, 1 if config.multi_query else query, dim, dim)


def _dbrx_heads(config: Any, layer: int) -> LayerHeads:
    query, dim = config.n_heads, config.d_model // config.n_heads
    return LayerHeads(query, config.attn_config.kv_n_heads, dim, dim)


def _all_query_heads(heads: LayerHeads) -> int:
    return heads.query


def _one_or_all(groups: int, heads: LayerHeads, config: Any) -> bool:
    return groups in (1, heads.query)


def _even(groups: int, heads: LayerHeads, config: Any) -> bool:
    return groups % 2 == 0


def _gemma4_keys_only(config: Any, layer: int) -> bool:
    return getattr(config, "attention_k_eq_v", True) and config.layer_types[layer] != "sliding_attention"


def _zamba2_refusal(config: Any) -> str | None:
    if getattr(config, "use_shared_attention_adapter", False):
        return "its shared attention adapters keep full-size keys and values, which transformers cannot run with fewer"
    return None


_INKLING2_UNCHANGED = (
    "wq_du", "wr_du", "wo_ud", "attn_sink_proj", "gate_attn", "q_l2_clip.scale", "rel_l2_clip.scale",
    "rel_logits_proj.proj",
)  # fmt: skip
_INKLING2_CONVOLUTIONS: tuple[tuple[str, Role], ...] = (("k_sconv", "key"), ("v_sconv", "value"))

_SEPARATE = (
    "afmoe", "apertus", "arcee", "aria_text", "bamba", "cohere_compass_text", "cosmos3_edge_text", "cwm",
    "deepseek_ocr2_text", "dots1", "emu3_text_model", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "eurobert",
    "exaone4", "exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4", "glm4_moe",
    "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text", "gpt_oss", "granite", "granite4_vision_text",
    "granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "helium", "higgs_audio_v2", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "jamba", "kolibri1", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text",
    "mellum", "minimax", "ministral", "ministral3", "mistral", "mixtral", "muse_glimmer_text", "muse_spark_text",
    "nanochat", "nemotron", "olmo", "openai_privacy_filter", "paddleocr_vl_text", "phi", "phimoe", "qwen2",
    "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "step3p5", "beam", "ultrabert", "vaultgemma", "voxtral_realtime_text", "csm", "evolla",
    "unlimited_ocr_text",
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    Family(
        "separate k_proj and v_proj",
        _SEPARATE,
        kv_fields=("num_key_value_heads", "num_attention_groups"),
    ),
    Family(
        "separate, with tensors of their own beside",
        ("bitnet", "flint", "minimax_m3_vl_text", "qwen4_exp_text"),
        note="attn_sub_norm, softmax_offset and the sparse indexer do not depend on KV heads",
        unchanged=("attn_sub_norm", "softmax_offset", "indexer.*"),
    ),
    Family(
        "k norm per head",
        ("cohere", "cohere2", "cohere2_moe", "chameleon"),
        note="k_norm (H, d) is merged with the heads",
        rules=(*SEPARATE, PER_HEAD_K_NORM),
    ),
    Family(
        "k norm over all heads",
        ("olmo2", "olmo3", "flex_olmo", "olmoe", "olmo_hybrid", "minimax_m2"),
        note="k_norm (H * d) is merged with the heads; its RMS is taken over all of them",
        rules=(*SEPARATE, FULL_WIDTH_K_NORM),
    ),
    Family(
        "numbered k norms",
        ("stablelm",),
        note="k_layernorm.norms.0 ... H-1 become 0 ... G-1",
        rules=(*SEPARATE, Rule("k_layernorm.norms.{head}", Numbered("key"), projection=False)),
        unchanged=("q_layernorm.norms.*",),
    ),
    Family(
        "fused [Q | K | V]",
        ("phi3", "phi4_multimodal"),
        rules=(Rule("qkv_proj", Fused("stacked")),),
    ),
    Family(
        "fused [Q | K | V], k norm over all heads",
        ("molmo2_text",),
        note="the k norm is over all heads or per head, as qk_norm_type says",
        rules=(
            Rule("att_proj", Fused("stacked")),
            Rule("k_norm", Separate("key"), projection=False, when=("qk_norm_type", "olmo")),
        ),
        unchanged=("attn_out",),
    ),
    Family(
        "fused [Q | K | V], nested config",
        ("dbrx",),
        attention=("norm_attn_norm.attn",),
        rules=(Rule("Wqkv", Fused("stacked")),),
        kv_fields=("attn_config.kv_n_heads", "num_key_value_heads"),
        heads=_dbrx_heads,
    ),
    Family(
        "Falcon, new architecture",
        ("falcon",),
        note="transformers' cache holds all H heads; other engines keep G",
        when={"new_decoder_architecture": True},
        rules=(Rule("query_key_value", Fused("grouped")),),
        kv_fields=("num_kv_heads",),
        cached_heads=_all_query_heads,
        attention=("self_attention",),
        heads=_falcon_heads,
    ),
    Family(
        "Falcon, old multi-query",
        ("falcon",),
        note="already G = 1; up to H, or to 1 < G < H in the new architecture where attention is parallel",
        when={"new_decoder_architecture": False, "multi_query": True},
        rules=(Rule("query_key_value", Fused("stacked", by_count=True)),),
        kv_fields=("num_kv_heads",),
        allows=_falcon_old_allows,
        edits=_falcon_old_edits,
        attention=("self_attention",),
        heads=_falcon_heads,
    ),
    Family(
        "Falcon, old multi-head",
        ("falcon",),
        note="G = 1, or 1 < G < H in the new architecture where attention is parallel (its cache holds H heads)",
        when={"new_decoder_architecture": False, "multi_query": False},
        rules=(Rule("query_key_value", Fused("grouped", by_count=True)),),
        kv_fields=("num_kv_heads",),
        allows=_falcon_old_allows,
        edits=_falcon_old_edits,
        attention=("self_attention",),
        heads=_falcon_heads,
    ),
    Family(
        "GPTBigCode, multi-head",
        ("gpt_bigcode",),
        note="G = 1 only",
        when={"multi_query": False},
        rules=(Rule("c_attn", Fused("grouped", by_count=True)),),
        unchanged=("c_proj",),
        edits=lambda groups, heads: {"multi_query": groups == 1},
        attention=("attn",),
        heads=_bigcode_heads,
        allows=_one_or_all,
    ),
    Family(
        "GPTBigCode, multi-query",
        ("gpt_bigcode",),
        note="already G = 1; up to H",
        when={"multi_query": True},
        rules=(Rule("c_attn", Fused("stacked", by_count=True)),),
        unchanged=("c_proj",),
        edits=lambda groups, heads: {"multi_query": groups == 1},
        attention=("attn",),
        heads=_bigcode_heads,
        allows=_one_or_all,
    ),
    Family(
        "dynamic mask per KV head",
        ("doge",),
        note="A is merged, dt_proj's rows too, its columns are summed",
        rules=(
            *SEPARATE,
            Rule("A", Separate("key", width="one"), projection=False),
            Rule("dt_proj", ReadsValues(), projection=False),
        ),
    ),
    Family(
        "differential heads",
        ("diffllama",),
        note="G must be even: value heads are paired with those half the heads away",
        unchanged=("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "groupnorm"),
        allows=_even,
    ),
    Family(
        "depthwise convolution of keys and values",
        ("inkling_text",),
        rules=(
            *SEPARATE,
            Rule("k_sconv.conv1d", Separate("key"), projection=False),
            Rule("v_sconv.conv1d", Separate("value"), projection=False),
        ),
        unchanged=("r_proj", "rel_logits_proj.proj"),
        kv_fields=("num_key_value_heads", "swa_num_key_value_heads"),
        heads=_inkling_heads,
    ),
    Family(
        "dynamic convolution of keys and values",
        ("inkling2_text",),
        attention=("attn",),
        rules=(
            Rule("wk_dv", Separate("key")),
            Rule("wv_dv", Separate("value")),
            *(
                rule
                for conv, role in _INKLING2_CONVOLUTIONS
                for rule in (
                    Rule(conv, Separate(role), projection=False),
                    Rule(f"{conv}.static_w", Separate(role, axis=1), projection=False),
                    Rule(f"{conv}.weight_proj", Separate(role, width="any"), projection=False),
                )
            ),
        ),
        unchanged=_INKLING2_UNCHANGED,
        kv_fields=("num_key_value_heads", "swa_num_key_value_heads"),
        heads=_inkling_heads,
    ),
    Family(
        "sliding layers with twice the KV heads",
        ("mimo_v2_flash",),
        note="G is that of the full-attention layers",
        unchanged=("attention_sink_bias",),
        heads=_mimo_heads,
    ),
    Family(
        "query heads per layer",
        ("laguna",),
        heads=_laguna_heads,
    ),
    Family(
        "KV heads and head dimension per layer",
        ("gemma4_text", "gemma4_unified_text", "embedding_gemma2_text", "diffusion_gemma_text"),
        note="G is that of the sliding layers; K = V layers have keys only",
        kv_fields=("num_key_value_heads", "num_global_key_value_heads"),
        keys_only=_gemma4_keys_only,
    ),
    Family(
        "other names for self_attn",
        ("nemotron_h", "recurrent_gemma", "zamba"),
        attention=("mixer", "temporal_block", "shared_transf.self_attn"),
    ),
    Family(
        "shared transformer blocks",
        ("zamba2",),
        attention=("shared_transformer.self_attn",),
        refusal=_zamba2_refusal,
    ),
    Family(
        "k_proj.linear and v_proj.linear",
        ("moshi", "kyutai_speech_to_text"),
        rules=(Rule("k_proj.linear", Separate("key")), Rule("v_proj.linear", Separate("value"))),
        unchanged=("q_proj.linear", "o_proj.linear"),
    ),
    Family(
        "key_net and value_net",
        ("cohere_asr",),
        note="self- and cross-attention of the decoder",
        attention=("first_sub_layer",),
        cross_attention=("second_sub_layer",),
        rules=(Rule("key_net", Separate("key")), Rule("value_net", Separate("value"))),
        unchanged=("query_net", "out_projection"),
    ),
    Family(
        "decoder self-attention",
        ("dia_decoder",),
        note="cross-attention counts its heads apart and is left alone",
        attention=("self_attention",),
    ),
    Family(
        "self- and cross-attention",
        ("mllama_text_model", "t5_gemma_module", "t5gemma2_decoder", "canary_decoder"),
        note="of the decoder; encoders stay as they are",
        cross_attention=("cross_attn", "encoder_attn"),
    ),
    Family(
        "global transformer of a byte model",
        ("blt_global_transformer",),
        note="the local encoder, decoder and patcher stay as they are",
    ),
    *CUSTOM_FAMILIES,
)

# Models whose text part is one of the above: where in config.json it is described.
_TEXT = ("text_config",)
NESTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("aria", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2",
         "deepseek_vl", "deepseek_vl_hybrid", "diffusion_gemma",
         "emu3", "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "gemma3",
         "gemma3n", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "got_ocr2",
         "granite4_vision", "granite_docling", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3",
         "inkling2", "inkling_mm_model", "internvl", "janus", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava",
         "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7",
         "minimax_m3_vl", "mistral3", "mllama", "molmo2", "muse_glimmer", "muse_spark", "nemotron_h_omni", "ovis2",
         "paddleocr_vl", "paligemma", "perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_vl", "qwen2_vl",
         "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp",
         "shieldgemma2", "smolvlm", "step3p7", "unlimited_ocr",
         "video_llama_3", "video_llava", "vipllava", "fun_asr_nano", "glmasr", "granite_speech", "granite_speech_plus",
         "moss_transcribe_diarize", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral", "audioflamingo3",
         "musicflamingo", "gemma4_unified_assistant"),
        _TEXT,
    ),
    "qwen2_5_omni": ("thinker_config", "text_config"),
    "qwen2_5_omni_thinker": _TEXT,
    "qwen3_omni_moe": ("thinker_config", "text_config"),
    "qwen3_omni_moe_thinker": _TEXT,
    "blt": ("global_config",),
    "canary": ("decoder_config",),
    "dia": ("decoder_config",),
    "t5gemma": ("decoder",),
    "t5gemma2": ("decoder",),
}  # fmt: skip


def find_family(model_type: str, config: Any) -> Family | None:
    """The family of a text config of transformers, by its model type and the flags a family names."""
    return next((family for family in FAMILIES if family.matches(model_type, config)), None)
