"""The table behind `tiny_models`: for every family the options that a tiny model needs besides the
common sizes; those with custom modeling code, and the classes that those extend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Sizes and ids that every config takes where its class has the field.
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_intermediate_size": 16,
    "mlp_layer_types": ["dense", "sparse"],
    "n_group": 1,
    "topk_group": 1,
    "query_pre_attn_scalar": 8,
    "attention_multiplier": 0.5,
    "use_mamba_kernels": False,
    "chunk_size": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "num_codebooks": 2,
}

# The same for a part that encodes images or sounds, and for what holds it.
TOWERS = ("vision_config", "audio_config", "codec_config", "encoder_config")
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "spatial_merge_size": 1,
    "num_position_embeddings": 4,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "max_source_positions": 8,
    "n_window": 4,
    "output_dim": 32,
    "downsample_hidden_size": 8,
}
SPECIAL_IDS = {
    "image_token_id": 3,
    "image_token_index": 3,
    "video_token_id": 4,
    "video_token_index": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    "boi_token_id": 5,
    "eoi_token_id": 6,
    "boi_token_index": 5,
    "eoi_token_index": 6,
    "audio_token_id": 7,
    "audio_token_index": 7,
}

SLIDING, FULL = "sliding_attention", "full_attention"
KV = "num_key_value_heads"
LENGTH = -1  # in a shape: the number of tokens
Options = Mapping[str, Any]


def _plain_kv(kv_heads: int) -> dict[str, Any]:
    return {KV: kv_heads}


@dataclass(frozen=True)
class Tiny:
    """One tiny model: which classes, which options, how its config states the number of key/value
    heads.
    """

    name: str
    model_type: str
    model_class: str
    options: Options = field(default_factory=dict)
    # KV heads -> config keys (dotted for a sub-config) and values
    kv: Callable[[int], dict[str, Any]] = _plain_kv
    owners: tuple[str, ...] = ("",)  # sub-configs that take the common sizes
    kv_counts: tuple[int, ...] = (4, 2, 1)  # what the class supports of 4, 2, 1
    attention: tuple[str, ...] = ("eager", "sdpa")
    has_cache: bool = True
    tokens: int = 96  # plain token ids end here
    token_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"input_ids": ()})
    float_inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shape after batch
    # Constants, with their shape after batch: masks and types without which sdpa and eager see
    # different tokens.
    fixed_inputs: Mapping[str, tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    part: str | None = None  # the submodule to run, where the whole has no forward pass


FIELDS = {item.name for item in fields(Tiny)} - {"name", "model_type", "model_class", "options"}


def class_of(model_type: str) -> str:
    """The class that runs a model type on text: what transformers' tables say, or the bare model of
    its config.
    """
    tables = (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    named = next((table[model_type] for table in tables if model_type in table), None)
    if named is None and model_type in CONFIG_MAPPING:  # an older transformers has fewer
        named = CONFIG_MAPPING[model_type].__name__.replace("Config", "Model")
    return str(named)


def tiny_model(name: str, model_class: str = "", /, **options: Any) -> Tiny:
    """Of the model type before a plus; keywords that are fields of Tiny go there, others are
    options of the config.
    """
    known, model_type = (
        {key: options.pop(key) for key in set(options) & FIELDS},
        name.partition("+")[0],
    )
    return Tiny(name, model_type, model_class or class_of(model_type), options, **known)


def _alike(*model_types: str, **options: Any) -> tuple[Tiny, ...]:
    """Families that take the same options."""
    return tuple(tiny_model(model_type, **options) for model_type in model_types)


def _variant(base: str, suffix: str, /, **options: Any) -> Tiny:
    """A family already in the table with other options."""
    tiny = next(tiny for tiny in FAMILIES if tiny.name == base)
    known = {name: options.pop(name) for name in set(options) & FIELDS}
    return replace(tiny, name=f"{base}+{suffix}", options={**tiny.options, **options}, **known)


MIXED = [SLIDING, FULL]
MAMBA_MIXED = ["linear_attention", FULL]
EAGER = ("eager",)  # attention sinks or softcapped scores: the class refuses sdpa
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
MROPE = {**DEFAULT_ROPE, "mrope_section": [2, 1, 1]}
MROPE_HALF = {**DEFAULT_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}


def _global_kv(kv_heads: int) -> dict[str, Any]:
    """Gemma 4: full-attention layers have their own head count and head size."""
    return {KV: kv_heads, "per_layer_config": {"1": {"head_dim": 16, KV: kv_heads}}}


def _fewer_global_kv(kv_heads: int) -> dict[str, Any]:
    return {KV: kv_heads, "per_layer_config": {"1": {"head_dim": 16, KV: kv_heads // 2}}}


def _falcon_kv(kv_heads: int) -> dict[str, Any]:
    """The old architecture has one KV head or as many as query heads."""
    if kv_heads not in (1, 4):
        raise ValueError(f"one or all 4 key/value heads, not {kv_heads}")
    return {"multi_query": kv_heads == 1}


FAMILIES: tuple[Tiny, ...] = (
    *_alike(
        "arcee",
        "aria_text",
        "beam",
        "bitnet",
        "deepseek_ocr2_text",
        "ernie4_5",
        "ernie4_5_moe",
        "flex_olmo",
        "gemma",
        "glm",
        "glm4",
        "glm4_moe",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "llama",
        "minimax_m2",
        "mistral",
        "mixtral",
        "muse_glimmer_text",
        "nanochat",
        "nemotron",
        "olmo2",
        "phi",
        "phi3",
        "phimoe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "seed_oss",
        "solar_open",
        "stablelm",
        "starcoder2",
    ),
    *_alike("eurobert", "granite4_vision_text", has_cache=False),
    *_alike("gemma2", "granite_swa", "granitemoe_swa", "vaultgemma", attention=EAGER),
    *_alike(
        "afmoe",
        "dots1",
        "exaone4",
        "exaone_moe",
        "gemma3_text",
        "kolibri1",
        "mellum",
        "ministral",
        "olmo3",
        layer_types=MIXED,
    ),
    *_alike(
        "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", layer_types=MAMBA_MIXED
    ),
    *_alike("qwen2", "qwen2_moe", "qwen3", use_sliding_window=True, layer_types=MIXED),
    *_alike("apertus", "cwm", rope_parameters=LLAMA3),
    *_alike("cosmos3_edge_text", "paddleocr_vl_text", rope_parameters=MROPE),
    *_alike("qwen2_5_vl_text", "qwen2_vl_text", rope_parameters=MROPE, use_sliding_window=True),
    *_alike(
        "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text", rope_parameters=MROPE_HALF
    ),
    *_alike("olmo", "olmoe", clip_qkv=3.0),
    tiny_model("bamba", attn_layer_indices=[1]),
    tiny_model(
        "chameleon",
        tokens=60,
        vq_config={
            "embed_dim": 4,
            "num_embeddings": 8,
            "latent_channels": 32,
            "resolution": 8,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
        },
        vocabulary_map={"<image>": 90, "IMGIMGAZ": 91},
    ),
    tiny_model("cohere", logit_scale=1.0),
    *_alike("cohere2", "cohere2_moe", logit_scale=1.0, layer_types=MIXED),
    tiny_model(
        "cohere_compass_text", layer_types=MIXED, rope_parameters={SLIDING: MROPE, FULL: None}
    ),
    tiny_model(
        "dbrx",
        kv=lambda kv_heads: {"attn_config.kv_n_heads": kv_heads},
        attn_config={"clip_qkv": 3.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_top_k": 2},
    ),
    tiny_model("diffllama", kv_counts=(4, 2)),
    tiny_model("embedding_gemma2_text", kv=_global_kv, has_cache=False, embedding_dim=8),
    tiny_model("emu3_text_model", "Emu3ForCausalLM"),
    tiny_model(
        "ernie4_5_vl_moe_text",
        moe_intermediate_size=[16, 16],
        rope_parameters={**MROPE, "mrope_section": [1, 1, 2]},
    ),
    tiny_model(
        "falcon", new_decoder_architecture=True, kv=lambda kv_heads: {"num_kv_heads": kv_heads}
    ),
    tiny_model("falcon_h1", key_multiplier=0.7),
    tiny_model("flint", layer_types=MIXED, attention=EAGER),
    tiny_model(
        "gemma3n_text",
        layer_types=MIXED * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
    ),
    *_alike("gemma4_text", "gemma4_unified_text", kv=_global_kv),
    tiny_model("gpt_bigcode", kv=_falcon_kv, kv_counts=(4, 1)),
    tiny_model("gpt_oss", attention=EAGER, rope_parameters=YARN),
    tiny_model("granite", embedding_multiplier=2.0),
    tiny_model("granite_docling_text", residual_multiplier=1.0, embedding_multiplier=1.0),
    tiny_model("granitemoehybrid", layer_types=MAMBA_MIXED, position_embedding_type="rope"),
    tiny_model(
        "higgs_audio_v2",
        rope_parameters=LLAMA3,
        audio_token_id=3,
        audio_bos_token_id=4,
        audio_delay_token_id=5,
        codebook_size=16,
        audio_stream_bos_id=14,
        audio_stream_eos_id=15,
    ),
    tiny_model("hunyuan_vl_text", rope_parameters={**MROPE, "mrope_section": [1, 1, 1, 1]}),
    tiny_model("jamba", attn_layer_period=2, attn_layer_offset=1),
    tiny_model("laguna", layer_types=[FULL, SLIDING], num_attention_heads_per_layer=[4, 8]),
    tiny_model("lfm2", layer_types=["conv", FULL]),
    tiny_model("lfm2_moe", layer_types=["conv", FULL], num_dense_layers=1),
    tiny_model("lfm3", layer_types=["conv", SLIDING, FULL], num_hidden_layers=3),
    tiny_model(
        "llama4_text",
        no_rope_layers=[1, 0],
        moe_layers=[1],
        attention_chunk_size=8,
        intermediate_size_mlp=16,
        num_experts_per_tok=1,
    ),
    # Sliding layers have twice the KV heads, hence more query heads than elsewhere.
    tiny_model("mimo_v2_flash", num_attention_heads=8, v_head_dim=4, attention=EAGER),
    tiny_model("minimax", block_size=4),
    tiny_model("minimax_m3_vl_text", dense_intermediate_size=64, rotary_dim=4),
    tiny_model("ministral3", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}),
    tiny_model(
        "mllama_text_model",
        "MllamaForCausalLM",
        num_hidden_layers=3,
        cross_attention_layers=[1],
        float_inputs={"cross_attention_states": (4, 32)},
        fixed_inputs={"cross_attention_mask": (0.0, (1, LENGTH, 4))},
    ),
    tiny_model("molmo2_text", additional_vocab_size=8),
    tiny_model("moshi", ffn_dim=64, audio_vocab_size=16),
    tiny_model("muse_spark_text", moe_hidden_size=32),
    tiny_model(
        "nemotron_h",
        layers_block_type=["linear_attention", "moe", FULL, "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=8,
        moe_shared_expert_intermediate_size=16,
    ),
    tiny_model("openai_privacy_filter", attention=EAGER, has_cache=False, rope_parameters=YARN),
    tiny_model(
        "qwen2_5_omni_text",
        "Qwen2_5OmniThinkerTextModel",
        rope_parameters=MROPE,
        use_sliding_window=True,
    ),
    tiny_model("qwen3_moe", use_sliding_window=True),
    tiny_model("qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextModel"),
    tiny_model("recurrent_gemma", block_types=["recurrent", "attention"], has_cache=False),
    tiny_model("smollm3", use_sliding_window=True, layer_types=MIXED, no_rope_layers=[1, 0]),
    tiny_model(
        "step3p5",
        "Step3p7TextModel",
        layer_types=[FULL, SLIDING],
        num_sliding_attention_heads=8,
        rope_parameters={SLIDING: DEFAULT_ROPE, FULL: {**DEFAULT_ROPE, "rope_theta": 50000.0}},
    ),
    tiny_model("ultrabert", has_cache=False, layer_types=MIXED),
    # Its eager attention does not repeat KV heads, so eager runs with 4 (and, by broadcasting, 1)
    # only.
    tiny_model("unlimited_ocr_text", attention=("sdpa",)),
    tiny_model("voxtral_realtime_text", float_inputs={"t_cond": (1, 32)}),
    tiny_model(
        "zamba",
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        head_dim=16,
    ),
    tiny_model(
        "zamba2",
        num_hidden_layers=4,
        n_mamba_heads=4,
        num_mem_blocks=2,
        adapter_rank=4,
        head_dim=16,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "hybrid"],
    ),
)

FALCON_OLD: dict[str, Any] = {
    "new_decoder_architecture": False,
    "kv": _falcon_kv,
    "kv_counts": (4, 1),
}

VARIANTS: tuple[Tiny, ...] = (
    *(
        _variant(base, "bias", attention_bias=True)
        for base in (
            "cohere",
            "gemma4_text",
            "llama",
            "mimo_v2_flash",
            "nemotron",
            "olmo2",
            "recurrent_gemma",
        )
    ),
    _variant("llama", "wide", head_dim=16),
    *(_variant(base, "tied", tie_word_embeddings=True) for base in ("llama", "qwen2")),
    _variant("cohere", "qk_norm", use_qk_norm=True),
    _variant("falcon", "old", **FALCON_OLD, parallel_attn=True),
    # Eager adds the alibi slopes twice (transformers 5.23), so it differs from sdpa.
    _variant("falcon", "old_alibi", **FALCON_OLD, parallel_attn=True, alibi=True, bias=True),
    _variant("falcon", "rw", **FALCON_OLD, parallel_attn=False, alibi=True, bias=True),
    _variant(
        "gemma4_text", "global_kv", attention_k_eq_v=True, kv=_fewer_global_kv, kv_counts=(4, 2)
    ),
    _variant("gemma4_text", "k_eq_v", attention_k_eq_v=True),
    _variant(
        "gemma4_text",
        "kv_shared",
        num_hidden_layers=4,
        layer_types=MIXED * 2,
        num_kv_shared_layers=2,
        kv=lambda kv_heads: {
            KV: kv_heads,
            "per_layer_config": {
                "1": {"head_dim": 16, KV: kv_heads},
                "3": {"head_dim": 16, KV: kv_heads},
            },
        },
    ),
    _variant("glm4_moe", "qk_norm", use_qk_norm=True),
    _variant("granitemoehybrid", "nope", position_embedding_type=None),
    _variant(
        "minimax_m3_vl_text",
        "sparse",
        layer_types=[FULL, "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=8,
        index_block_size=4,
        index_topk_blocks=2,
    ),
    _variant("molmo2_text", "olmo_norm", qk_norm_type="olmo"),
    _variant("olmo", "unclipped", clip_qkv=None),
    _variant("phi", "qk_norm", qk_layernorm=True),
)

# Those whose attention in transformers is a copy of BART's or T5's.
COPIES = ("mbart", "marian", "pegasus", "m2m_100", "mt5")


def _source(model_type: str, model_class: str, /, **options: Any) -> Tiny:
    return tiny_model(model_type, model_class, kv=lambda kv_heads: {}, kv_counts=(4,), **options)


TEXTS = {"input_ids": (), "decoder_input_ids": ()}
_BART: dict[str, Any] = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
    "token_inputs": TEXTS,
}
_T5: dict[str, Any] = {"d_ff": 64, "decoder_start_token_id": 1, "token_inputs": TEXTS}

SOURCES: tuple[Tiny, ...] = (
    _source("gpt2", "GPT2LMHeadModel"),
    _source("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    _source("bart", "BartForConditionalGeneration", **_BART),
    _source("mbart", "MBartForConditionalGeneration", **_BART),
    _source("marian", "MarianMTModel", **_BART),
    _source("pegasus", "PegasusForConditionalGeneration", **_BART),
    _source(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        **_BART | {"decoder_layers": 3, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    ),
    _source("t5", "T5ForConditionalGeneration", **_T5),
    _source("mt5", "MT5ForConditionalGeneration", **_T5),
)
# The same in custom modeling code, with 4, 2 or 1 key/value heads.
CUSTOM: tuple[Tiny, ...] = tuple(
    replace(
        tiny,
        name=f"gqa_{tiny.name}",
        model_type=f"gqa_{tiny.name}",
        model_class=f"GQA{tiny.model_class}",
        kv=Tiny.kv,
        kv_counts=Tiny.kv_counts,
    )
    for tiny in SOURCES
)
