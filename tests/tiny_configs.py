"""The table behind `tiny_models`: for every family the options that a tiny model needs besides the common sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

# Sizes and ids that every config takes where its class has the field.
COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 5, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_k": 2, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "first_k_dense_replace": 1,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_intermediate_size": 16,
}  # fmt: skip

SLIDING, FULL = "sliding_attention", "full_attention"
KV = "num_key_value_heads"
LENGTH = -1  # in a shape: the number of tokens
Options = Mapping[str, Any]


def _plain_kv(kv_heads: int) -> dict[str, Any]:
    return {KV: kv_heads}


@dataclass(frozen=True)
class Tiny:
    """One tiny model: which classes, which options, how its config states the number of key/value heads."""

    name: str
    model_type: str
    model_class: str
    options: Options = field(default_factory=dict)
    kv: Callable[[int], dict[str, Any]] = _plain_kv  # KV heads -> config keys (dotted for a sub-config) and values
    owners: tuple[str, ...] = ("",)  # sub-configs that take the common sizes
    kv_counts: tuple[int, ...] = (4, 2, 1)  # what the class supports of 4, 2, 1
    attention: tuple[str, ...] = ("eager", "sdpa")
    has_cache: bool = True
    contiguous: bool = True  # query head h reads KV head h // (H // G); False: another rule, so not convertible
    tokens: int = 96  # plain token ids end here
    token_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"input_ids": ()})
    float_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shape after batch
    # Constants, with their shape after batch: masks and types without which sdpa and eager see different tokens.
    fixed_inputs: Mapping[str, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    part: str | None = None  # the submodule to run, where the whole has no forward pass


FIELDS = {item.name for item in fields(Tiny)} - {"name", "model_type", "model_class", "options"}


def _family(model_type: str, model_class: str, /, **options: Any) -> Tiny:
    """A family under its own name; keywords that are fields of Tiny go there, all others are config options."""
    known = {name: options.pop(name) for name in set(options) & FIELDS}
    return Tiny(model_type, model_type, model_class, options, **known)


def _variant(base: str, suffix: str, /, **options: Any) -> Tiny:
    """A family already in the table with other options."""
    tiny = next(tiny for tiny in FAMILIES if tiny.name == base)
    known = {name: options.pop(name) for name in set(options) & FIELDS}
    return replace(tiny, name=f"{base}+{suffix}", options={**tiny.options, **options}, **known)


MIXED = [SLIDING, FULL]
MAMBA_MIXED = ["linear_attention", FULL]
EAGER = ("eager",)  # attention sinks or softcapped scores: the class refuses sdpa
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
MROPE_HALF = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}


def _rope_by_type(**extra: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {SLIDING: rope, FULL: {**rope, "rope_theta": 50000.0, **extra}}


def _global_kv(kv_heads: int) -> dict[str, Any]:
    """Gemma 4: full-attention layers have their own head count and head size."""
    return {KV: kv_heads, "per_layer_config": {"1": {"head_dim": 16, KV: kv_heads}}}


def _fewer_global_kv(kv_heads: int) -> dict[str, Any]:
    return {KV: kv_heads, "per_layer_config": {"1": {"head_dim": 16, KV: kv_heads // 2}}}


def _swa_kv(kv_heads: int) -> dict[str, Any]:
    return {KV: kv_heads, "swa_num_key_value_heads": kv_heads}


def _jetmoe_kv(kv_heads: int) -> dict[str, Any]:
    """JetMoE has num_key_value_heads * num_experts_per_tok query heads."""
    return {KV: kv_heads, "num_experts_per_tok": 4 // kv_heads}


def _falcon_kv(kv_heads: int) -> dict[str, Any]:
    """The old architecture has one KV head or as many as query heads."""
    if kv_heads not in (1, 4):
        raise ValueError(f"one or all 4 key/value heads, not {kv_heads}")
    return {"multi_query": kv_heads == 1}


_INKLING: dict[str, Any] = {
    "layer_types": ["hybrid_sliding", "hybrid"], "swa_num_attention_heads": 4, "swa_head_dim": 8, "d_rel": 4,
    "rel_extent": 16, "unpadded_vocab_size": 96, "sliding_window_size": 5,
}  # fmt: skip

FAMILIES: tuple[Tiny, ...] = (
    _family("afmoe", "AfmoeForCausalLM", layer_types=MIXED),
    _family("apertus", "ApertusForCausalLM", rope_parameters=LLAMA3),
    _family("arcee", "ArceeForCausalLM"),
    _family("aria_text", "AriaTextForCausalLM"),
    _family("bamba", "BambaForCausalLM", attn_layer_indices=[1]),
    _family("beam", "BeamForCausalLM", **SPARSE, n_group=1, topk_group=1),
    _family("bitnet", "BitNetForCausalLM"),
    _family("chameleon", "ChameleonForConditionalGeneration", tokens=60, vq_config={
        "embed_dim": 4, "num_embeddings": 8, "latent_channels": 32, "resolution": 8, "base_channels": 32,
        "channel_multiplier": [1], "num_res_blocks": 1}, vocabulary_map={"<image>": 90, "IMGIMGAZ": 91}),
    _family("cohere", "CohereForCausalLM", logit_scale=1.0),
    _family("cohere2", "Cohere2ForCausalLM", logit_scale=1.0, layer_types=MIXED),
    _family("cohere2_moe", "Cohere2MoeForCausalLM", logit_scale=1.0, layer_types=MIXED, **SPARSE),
    _family("cohere_compass_text", "CohereCompassForCausalLM", layer_types=MIXED,
            rope_parameters={SLIDING: MROPE, FULL: None}),
    _family("cosmos3_edge_text", "Cosmos3EdgeTextModel", rope_parameters=MROPE),
    _family("cwm", "CwmForCausalLM", rope_parameters=LLAMA3),
    _family("dbrx", "DbrxForCausalLM", kv=lambda kv_heads: {"attn_config.kv_n_heads": kv_heads},
            attn_config={"clip_qkv": 3.0, "rope_theta": 10000.0},
            ffn_config={"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}),
    _family("deepseek_ocr2_text", "DeepseekOcr2TextModel", **SPARSE),
    _family("diffllama", "DiffLlamaForCausalLM", kv_counts=(4, 2)),
    _family("doge", "DogeForCausalLM"),
    _family("dots1", "Dots1ForCausalLM", layer_types=MIXED),
    _family("embedding_gemma2_text", "EmbeddingGemma2TextModel", kv=_global_kv, has_cache=False,
            hidden_size_per_layer_input=8, embedding_dim=8),
    _family("emu3_text_model", "Emu3ForCausalLM"),
    _family("ernie4_5", "Ernie4_5ForCausalLM"),
    _family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    _family("ernie4_5_vl_moe_text", "Ernie4_5_VLMoeTextModel", moe_intermediate_size=[16, 16], **SPARSE,
            rope_parameters={**MROPE, "mrope_section": [1, 1, 2]}),
    _family("eurobert", "EuroBertModel", has_cache=False),
    _family("exaone4", "Exaone4ForCausalLM", layer_types=MIXED),
    _family("exaone_moe", "ExaoneMoeForCausalLM", layer_types=MIXED),
    _family("falcon", "FalconForCausalLM", new_decoder_architecture=True,
            kv=lambda kv_heads: {"num_kv_heads": kv_heads}),
    _family("falcon_h1", "FalconH1ForCausalLM", key_multiplier=0.7, mamba_n_groups=1),
    _family("flex_olmo", "FlexOlmoForCausalLM"),
    _family("flint", "FlintForCausalLM", layer_types=MIXED, attention=EAGER),
    _family("gemma", "GemmaForCausalLM"),
    _family("gemma2", "Gemma2ForCausalLM", attention=EAGER, query_pre_attn_scalar=8),
    _family("gemma3_text", "Gemma3ForCausalLM", layer_types=MIXED, query_pre_attn_scalar=8),
    _family("gemma3n_text", "Gemma3nForCausalLM", layer_types=MIXED * 2, num_hidden_layers=4, num_kv_shared_layers=2,
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, laurel_rank=4, altup_num_inputs=2,
            intermediate_size=[64] * 4),
    _family("gemma4_text", "Gemma4ForCausalLM", kv=_global_kv, hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=96),
    _family("gemma4_unified_text", "Gemma4UnifiedForCausalLM", kv=_global_kv),
    _family("glm", "GlmForCausalLM"),
    _family("glm4", "Glm4ForCausalLM"),
    _family("glm4_moe", "Glm4MoeForCausalLM"),
    _family("glm4v_moe_text", "Glm4vMoeTextModel", rope_parameters=MROPE_HALF),
    _family("glm4v_text", "Glm4vTextModel", rope_parameters=MROPE_HALF),
    _family("glm_image_text", "GlmImageTextModel", rope_parameters=MROPE_HALF),
    _family("glm_ocr_text", "GlmOcrTextModel", rope_parameters=MROPE_HALF),
    _family("gpt_bigcode", "GPTBigCodeForCausalLM", kv=_falcon_kv, kv_counts=(4, 1)),
    _family("gpt_oss", "GptOssForCausalLM", attention=EAGER, rope_parameters=YARN),
    _family("granite", "GraniteForCausalLM", attention_multiplier=0.5, embedding_multiplier=2.0),
    _family("granite4_vision_text", "Granite4VisionTextModel", attention_multiplier=0.5, has_cache=False),
    _family("granite_docling_text", "GraniteDoclingTextModel", attention_multiplier=0.5, residual_multiplier=1.0,
            embedding_multiplier=1.0),
    _family("granite_swa", "GraniteSWAForCausalLM", attention_multiplier=0.5, attention=EAGER),
    _family("granitemoe", "GraniteMoeForCausalLM", attention_multiplier=0.5),
    _family("granitemoe_swa", "GraniteMoeSWAForCausalLM", attention_multiplier=0.5, attention=EAGER),
    _family("granitemoehybrid", "GraniteMoeHybridForCausalLM", attention_multiplier=0.5, layer_types=MAMBA_MIXED,
            position_embedding_type="rope"),
    _family("granitemoeshared", "GraniteMoeSharedForCausalLM", attention_multiplier=0.5),
    _family("helium", "HeliumForCausalLM"),
    _family("higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration", rope_parameters=LLAMA3, audio_token_id=3,
            audio_bos_token_id=4, audio_delay_token_id=5, num_codebooks=2, codebook_size=16, audio_stream_bos_id=14,
            audio_stream_eos_id=15),
    _family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    _family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    _family("hunyuan_vl_text", "HunYuanVLTextModel", rope_parameters={**MROPE, "mrope_section": [1, 1, 1, 1]}),
    _family("hy_v3", "HYV3ForCausalLM", **SPARSE),
    _family("hyperclovax", "HyperCLOVAXForCausalLM", attention_multiplier=0.5),
    _family("inkling2_text", "Inkling2ForCausalLM", kv=_swa_kv, attention=EAGER, moe_intermediate_size=16, **_INKLING),
    _family("inkling_text", "InklingForCausalLM", kv=_swa_kv, mlp_layer_types=["dense", "sparse"],
            logits_mup_width_multiplier=1.0, **_INKLING),
    _family("internlm3", "LlamaForCausalLM"),
    _family("iquestcoder", "LlamaForCausalLM"),
    _family("jais2", "Jais2ForCausalLM"),
    _family("jamba", "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    _family("jetmoe", "JetMoeForCausalLM", kv_channels=8, kv=_jetmoe_kv, contiguous=False),
    _family("kolibri1", "Kolibri1ForCausalLM", layer_types=MIXED),
    _family("laguna", "LagunaForCausalLM", layer_types=[FULL, SLIDING], num_attention_heads_per_layer=[4, 8]),
    _family("lfm2", "Lfm2ForCausalLM", layer_types=["conv", FULL]),
    _family("lfm2_moe", "Lfm2MoeForCausalLM", layer_types=["conv", FULL], num_dense_layers=1),
    _family("lfm3", "Lfm3ForCausalLM", layer_types=["conv", SLIDING, FULL], num_hidden_layers=3),
    _family("llama", "LlamaForCausalLM"),
    _family("llama4_text", "Llama4ForCausalLM", layer_types=["chunked_attention", FULL], no_rope_layers=[1, 0],
            moe_layers=[1], attention_chunk_size=8, intermediate_size_mlp=16, num_experts_per_tok=1),
    _family("mellum", "MellumForCausalLM", layer_types=MIXED, **SPARSE),
    # Sliding layers have twice the KV heads, hence more query heads than elsewhere.
    _family("mimo_v2_flash", "MiMoV2FlashForCausalLM", num_attention_heads=8, v_head_dim=4, attention=EAGER,
            n_group=1, topk_group=1),
    _family("minimax", "MiniMaxForCausalLM", block_size=4),
    _family("minimax_m2", "MiniMaxM2ForCausalLM"),
    _family("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", **SPARSE, dense_intermediate_size=64, rotary_dim=4),
    _family("ministral", "MinistralForCausalLM", layer_types=MIXED),
    _family("ministral3", "Ministral3ForCausalLM", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}),
    _family("mistral", "MistralForCausalLM"),
    _family("mixtral", "MixtralForCausalLM"),
    _family("mllama_text_model", "MllamaForCausalLM", num_hidden_layers=3, cross_attention_layers=[1],
            float_inputs={"cross_attention_states": (4, 32)},
            fixed_inputs={"cross_attention_mask": (0.0, (1, LENGTH, 4))}),
    _family("molmo2_text", "Molmo2TextModel", additional_vocab_size=8),
    _family("moshi", "MoshiForCausalLM", ffn_dim=64, num_codebooks=2, audio_vocab_size=16),
    _family("muse_glimmer_text", "MuseGlimmerTextModel"),
    _family("muse_spark_text", "MuseSparkTextModel", moe_hidden_size=32, **SPARSE),
    _family("nanochat", "NanoChatForCausalLM"),
    _family("nemotron", "NemotronForCausalLM"),
    _family("nemotron_h", "NemotronHForCausalLM", layers_block_type=["linear_attention", "moe", FULL, "mlp"],
            mamba_num_heads=4, mamba_head_dim=16, n_groups=1, ssm_state_size=8, chunk_size=8,
            moe_shared_expert_intermediate_size=16, use_mamba_kernels=False),
    _family("olmo", "OlmoForCausalLM", clip_qkv=3.0),
    _family("olmo2", "Olmo2ForCausalLM"),
    _family("olmo3", "Olmo3ForCausalLM", layer_types=MIXED),
    _family("olmo_hybrid", "OlmoHybridForCausalLM", layer_types=MAMBA_MIXED),
    _family("olmoe", "OlmoeForCausalLM", clip_qkv=3.0),
    _family("openai_privacy_filter", "OpenAIPrivacyFilterModel", attention=EAGER, has_cache=False,
            rope_parameters=YARN),
    _family("paddleocr_vl_text", "PaddleOCRTextModel", rope_parameters=MROPE),
    _family("phi", "PhiForCausalLM"),
    _family("phi3", "Phi3ForCausalLM"),
    _family("phimoe", "PhimoeForCausalLM"),
    _family("qwen2", "Qwen2ForCausalLM", use_sliding_window=True, layer_types=MIXED),
    _family("qwen2_5_omni_text", "Qwen2_5OmniThinkerTextModel", rope_parameters=MROPE, use_sliding_window=True),
    _family("qwen2_5_vl_text", "Qwen2_5_VLTextModel", rope_parameters=MROPE, use_sliding_window=True),
    _family("qwen2_moe", "Qwen2MoeForCausalLM", use_sliding_window=True, layer_types=MIXED),
    _family("qwen2_vl_text", "Qwen2VLTextModel", rope_parameters=MROPE, use_sliding_window=True),
    _family("qwen3", "Qwen3ForCausalLM", use_sliding_window=True, layer_types=MIXED),
    _family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", layer_types=MAMBA_MIXED),
    _family("qwen3_5_text", "Qwen3_5ForCausalLM", layer_types=MAMBA_MIXED),
    _family("qwen3_moe", "Qwen3MoeForCausalLM", use_sliding_window=True),
    _family("qwen3_next", "Qwen3NextForCausalLM", layer_types=MAMBA_MIXED),
    _family("qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextModel"),
    _family("qwen3_vl_moe_text", "Qwen3VLMoeTextModel"),
    _family("qwen3_vl_text", "Qwen3VLTextModel"),
    _family("recurrent_gemma", "RecurrentGemmaForCausalLM", block_types=["recurrent", "attention"], has_cache=False),
    _family("seed_oss", "SeedOssForCausalLM"),
    _family("smollm3", "SmolLM3ForCausalLM", use_sliding_window=True, layer_types=MIXED, no_rope_layers=[1, 0]),
    _family("solar_open", "SolarOpenForCausalLM"),
    _family("stablelm", "StableLmForCausalLM"),
    _family("starcoder2", "Starcoder2ForCausalLM"),
    _family("step3p5", "Step3p7TextModel", layer_types=[FULL, SLIDING], **SPARSE, rope_parameters=_rope_by_type(),
            num_sliding_attention_heads=8),
    _family("ultrabert", "UltrabertModel", has_cache=False, layer_types=MIXED),
    # Its eager attention does not repeat KV heads, so eager runs with 4 (and, by broadcasting, 1) only.
    _family("unlimited_ocr_text", "UnlimitedOcrTextModel", **SPARSE, attention=("sdpa",)),
    _family("vaultgemma", "VaultGemmaForCausalLM", attention=EAGER, query_pre_attn_scalar=8),
    _family("voxtral_realtime_text", "VoxtralRealtimeTextModel", float_inputs={"t_cond": (1, 32)}),
    _family("zaya", "ZayaForCausalLM", num_experts_per_tok=1, layer_types=["hybrid_sliding", "hybrid"],
            contiguous=False, router_hidden_size=8),
    _family("zamba", "ZambaForCausalLM", num_hidden_layers=3, n_mamba_heads=2, mamba_d_state=8,
            layers_block_type=["linear_attention", "hybrid", "hybrid"], head_dim=16, use_mamba_kernels=False),
    _family("zamba2", "Zamba2ForCausalLM", num_hidden_layers=4, n_mamba_heads=4, num_mem_blocks=2, chunk_size=8,
            layers_block_type=["linear_attention", "hybrid", "hybrid", "hybrid"], use_mamba_kernels=False,
            adapter_rank=4, mamba_d_state=8, head_dim=16),
)  # fmt: skip

BIAS: dict[str, Any] = {"attention_bias": True}
FALCON_OLD: dict[str, Any] = {"new_decoder_architecture": False, "kv": _falcon_kv, "kv_counts": (4, 1)}

VARIANTS: tuple[Tiny, ...] = (
    *(
        _variant(base, "bias", **BIAS)
        for base in (
            "apertus", "cohere", "cohere2", "diffllama", "doge", "flex_olmo", "gemma", "gemma3_text", "gemma4_text",
            "glm4_moe", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "mimo_v2_flash",
            "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phimoe", "qwen3", "qwen3_5_text", "qwen3_moe",
            "recurrent_gemma", "step3p5",
        )
    ),
    *(_variant(base, "bias", use_bias=True) for base in ("ernie4_5", "ernie4_5_moe", "paddleocr_vl_text")),
    *(_variant(base, "wide", head_dim=16) for base in ("llama", "mistral", "qwen3", "gemma", "gpt_oss")),
    *(_variant(base, "tied", tie_word_embeddings=True) for base in ("llama", "qwen2", "phi3", "granite")),
    _variant("cohere", "qk_norm", use_qk_norm=True),
    _variant("doge", "moe", is_moe=True),
    _variant("falcon", "new_bias", bias=True, num_ln_in_parallel_attn=1),
    _variant("falcon", "old", **FALCON_OLD, parallel_attn=True),
    # Eager adds the alibi slopes twice (transformers 5.23), so it differs from sdpa.
    _variant("falcon", "old_alibi", **FALCON_OLD, parallel_attn=True, alibi=True, bias=True),
    _variant("falcon", "rw", **FALCON_OLD, parallel_attn=False, alibi=True, bias=True),
    _variant("falcon", "rw_rotary", **FALCON_OLD, parallel_attn=False),
    _variant("gemma4_text", "global_kv", attention_k_eq_v=True, kv=_fewer_global_kv, kv_counts=(4, 2)),
    _variant("gemma4_text", "k_eq_v", attention_k_eq_v=True),
    _variant("gemma4_text", "kv_shared", num_hidden_layers=4, layer_types=MIXED * 2, num_kv_shared_layers=2,
             kv=lambda kv_heads: {KV: kv_heads, "per_layer_config": {
                 "1": {"head_dim": 16, KV: kv_heads}, "3": {"head_dim": 16, KV: kv_heads}}}),
    _variant("gemma4_text", "moe", enable_moe_block=True, top_k_experts=2),
    _variant("gemma4_unified_text", "k_eq_v", attention_k_eq_v=True),
    _variant("embedding_gemma2_text", "global_kv", kv=_fewer_global_kv, kv_counts=(4, 2)),
    _variant("internlm3", "bias", **BIAS, mlp_bias=True),
    _variant("glm4_moe", "qk_norm", use_qk_norm=True),
    _variant("gpt_oss", "no_bias", attention_bias=False),
    _variant("granitemoehybrid", "nope", position_embedding_type=None),
    _variant("minimax_m3_vl_text", "sparse", layer_types=[FULL, "minimax_m3_sparse"], index_n_heads=2,
             index_head_dim=8, index_block_size=4, index_topk_blocks=2),
    _variant("molmo2_text", "olmo_norm", qk_norm_type="olmo"),
    _variant("olmo", "unclipped", clip_qkv=None),
    _variant("phi", "qk_norm", qk_layernorm=True),
    _variant("qwen2_moe", "no_bias", qkv_bias=False),
    _variant("stablelm", "bias", use_qkv_bias=True),
    _variant("stablelm", "qk_norm", qk_layernorm=True),
    _variant("stablelm", "parallel", qk_layernorm=True, use_parallel_residual=True),
    _variant("starcoder2", "no_bias", use_bias=False),
    # The adapters of the shared blocks keep their width, so transformers runs it with all heads only.
    _variant("zamba2", "adapter", use_shared_attention_adapter=True, kv_counts=(4,)),
    _variant("zamba2", "rope", use_mem_rope=True),
)  # fmt: skip
