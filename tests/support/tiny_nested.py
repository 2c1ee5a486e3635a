"""Tiny models with key/value heads in a sub-config (multimodal, encoder-decoder, speech)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gqa.convert.heads.families.table import NESTED as OWNERS
from support.tiny_configs import CONFIG_MAPPING, FAMILIES, KV, LENGTH, MIXED, Tiny, tiny_model

TEXT: Mapping[str, Tiny] = {tiny.name: tiny for tiny in FAMILIES}


def _sections(options: dict[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds to the sub-configs at dotted paths."""
    for path, values in sections.items():
        inner = options
        for key in filter(None, path.split(".")):
            inner = inner.setdefault(key, {})
        inner.update(values)


def _wrapper(
    model_type: str, /, text_type: str = "", section: str = "text_config", **options: Any
) -> Tiny:
    """A multimodal model that is given text only; its text part has the options of that family's
    own tiny model.
    """
    text = TEXT.get(text_type or f"{model_type}_text") or next(
        tiny for tiny in NESTED if tiny.name == text_type
    )
    options.setdefault(
        "kv",
        lambda kv_heads: {f"{section}.{key}": value for key, value in text.kv(kv_heads).items()},
    )
    _sections(options, {section: {**text.options, "model_type": text.model_type}})
    return tiny_model(model_type, owners=(section,), **options)


def _several(
    model_type: str,
    owners: Mapping[str, str],
    /,
    model_class: str = "",
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> Tiny:
    """A model with key/value heads in several sub-configs (path -> model type), or with more inputs
    than text.
    """
    options.setdefault(
        "kv", lambda kv_heads: {f"{path}.{KV}".lstrip("."): kv_heads for path in owners}
    )
    _sections(options, sections or {})
    _sections(
        options, {path: {"model_type": owner_type} for path, owner_type in owners.items() if path}
    )
    return tiny_model(model_type, model_class, owners=tuple(owners), **options)


def _dia_kv(kv_heads: int) -> dict[str, Any]:
    return {
        f"encoder_config.{KV}": kv_heads,
        f"decoder_config.{KV}": kv_heads,
        f"decoder_config.cross_{KV}": kv_heads,
    }


def _text_global_kv(kv_heads: int) -> dict[str, Any]:
    return {
        f"text_config.{KV}": kv_heads,
        "text_config.per_layer_config": {"1": {"head_dim": 16, KV: kv_heads}},
    }


SEQ2SEQ = {"input_ids": (), "decoder_input_ids": ()}
SCALED: dict[str, Any] = {"layer_types": MIXED, "query_pre_attn_scalar": 8}
FROM_SOUND: dict[str, Any] = {
    "encoder_config": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "conv_kernel_size": 3,
        "num_mel_bins": 16,
        "subsampling_conv_channels": 8,
        "subsampling_factor": 2,
        "max_position_embeddings": 64,
    },
    "float_inputs": {"input_features": (16, 16)},
    "token_inputs": {"decoder_input_ids": ()},
}
MIMI = {
    "model_type": "mimi",
    "num_filters": 4,
    "upsampling_ratios": [2, 2],
    "codebook_size": 16,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": 2,
    "upsample_groups": 16,
    KV: 2,
}

NESTED: tuple[Tiny, ...] = (
    _wrapper("ernie4_5_vl_moe"),
    _wrapper("gemma3", mm_tokens_per_image=4),
    _wrapper("aria", projector_patch_to_query_dict={4: 2}),
    _wrapper("internvl", "qwen2"),
    _wrapper("llava", "llama", vision_feature_layer=-1),
    _wrapper("llava_next", "mistral", vision_feature_layer=-1, image_grid_pinpoints=[[8, 8]]),
    _wrapper(
        "mllama",
        "mllama_text_model",
        vision_config={
            "attention_heads": 2,
            "num_global_layers": 1,
            "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
        },
    ),
    _wrapper(
        "molmo2",
        image_start_token_id=3,
        low_res_image_start_token_id=4,
        image_end_token_id=5,
        image_patch_id=6,
        frame_start_token_id=7,
        frame_end_token_id=8,
        vision_config={"num_hidden_layers": 2, KV: 2, "head_dim": 8, "image_size": [8, 8]},
        adapter_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "text_hidden_size": 32,
            KV: 2,
            "num_attention_heads": 2,
            "head_dim": 8,
            "vision_feature_layer": [-1],
        },
    ),
    _wrapper(
        "paligemma", "gemma", projection_dim=32, fixed_inputs={"token_type_ids": (1, (LENGTH,))}
    ),
    _wrapper("qwen2_audio", "qwen2"),
    _wrapper("qwen2_vl", vision_config={"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 1}),
    _wrapper(
        "llama4",
        vision_config={
            "intermediate_size": 64,
            "projector_input_dim": 16,
            "vision_output_dim": 16,
            "projector_output_dim": 16,
        },
    ),
    _wrapper("minimax_m3_vl", projector_hidden_size=16),
    _wrapper("step3p7", "step3p5", vision_config={"mlp_ratio": 1.0}),
    # Vision towers with key/value heads of their own, which must stay as they are.
    _wrapper("exaone4_5", "exaone4", vision_config={"hidden_size": 32, "num_heads": 4, KV: 2}),
    _wrapper(
        "lfm3_vl",
        "lfm3",
        projector_hidden_size=16,
        vision_config={"hidden_size": 32, "num_attention_heads": 4, KV: 2},
    ),
    _wrapper("qwen2_5_omni_thinker", "qwen2_5_omni_text"),
    # Without its talker; only the thinker has a forward pass.
    _wrapper(
        "qwen3_omni_moe",
        "qwen3_omni_moe_text",
        "thinker_config.text_config",
        part="thinker",
        enable_audio_output=False,
    ),
    _wrapper("qwen3_omni_moe_thinker", "qwen3_omni_moe_text"),
    # Encoder-decoders: several sub-configs, one number of heads.
    _several(
        "t5gemma",
        {"encoder": "t5_gemma_module", "decoder": "t5_gemma_module"},
        vocab_size=96,
        attention=("eager",),
        token_inputs=SEQ2SEQ,
    ),
    _several(
        "t5gemma2",
        {"encoder.text_config": "t5gemma2_text", "decoder": "t5gemma2_decoder"},
        sections={
            "encoder.text_config": SCALED,
            "decoder": SCALED,
            "encoder": {"mm_tokens_per_image": 4},
        },
        token_inputs=SEQ2SEQ,
    ),
    _several(
        "dia",
        {"encoder_config": "dia_encoder", "decoder_config": "dia_decoder"},
        sections={
            "decoder_config": {
                "cross_num_attention_heads": 4,
                "cross_head_dim": 8,
                "num_channels": 2,
                "cross_hidden_size": 32,
            }
        },
        kv=_dia_kv,
        token_inputs={"input_ids": (), "decoder_input_ids": (2,)},
        delay_pattern=[0, 1],
    ),
    _several(
        "canary",
        {"decoder_config": "canary_decoder"},
        vocab_size=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **FROM_SOUND,
    ),
    _several("cohere_asr", {"": "cohere_asr"}, **FROM_SOUND),
    _several(
        "blt",
        {
            "patcher_config": "blt_patcher",
            "encoder_config": "blt_local_encoder",
            "decoder_config": "blt_local_decoder",
            "global_config": "blt_global_transformer",
        },
        sections={
            "encoder_config": {"hidden_size_global": 32},
            "decoder_config": {"hidden_size_global": 32},
            "patcher_config": {},
        },
        vocab_size=96,
        encoder_hash_byte_group_size=[2, 3],
        encoder_hash_byte_group_vocab=16,
        local_attention_window_len=5,
        patching_threshold=0.5,
        use_cache=False,
        has_cache=False,
    ),
    _several(
        "csm",
        {"": "csm", "depth_decoder_config": "csm_depth_decoder_model"},
        sections={"depth_decoder_config": {"num_codebooks": 2, "backbone_hidden_size": 32}},
        codec_config=MIMI,
        text_vocab_size=96,
        audio_token_id=3,
        audio_eos_token_id=4,
        codebook_pad_token_id=5,
        codebook_eos_token_id=6,
        kv=lambda kv_heads: {KV: kv_heads},
    ),
    _several(
        "evolla",
        {"": "evolla"},
        sections={
            "protein_encoder_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "vocab_size": 96,
                "max_position_embeddings": 64,
            }
        },
        aligner_num_add_layers=1,
        resampler_depth=1,
        resampler_dim_head=8,
        resampler_heads=2,
        resampler_num_latents=4,
        resampler_ff_mult=1,
        aligner_ffn_mult=1,
        token_inputs={"input_ids": (), "protein_input_ids": ()},
    ),
    _several(
        "kyutai_speech_to_text",
        {"": "kyutai_speech_to_text"},
        codec_config=MIMI,
        ffn_dim=64,
        codebook_vocab_size=17,
        audio_bos_token_id=16,
        audio_pad_token_id=3,
        tokens=16,
        token_inputs={"input_ids": (3,)},
    ),
    _several(
        "phi4_multimodal",
        {"": "phi4_multimodal"},
        vision_config={"num_hidden_layers": 2, "crop_size": 8, "image_token_id": 3},
        audio_config={
            "num_blocks": 1,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
            "input_size": 16,
            "audio_token_id": 4,
            "bias_max_distance": 8,
        },
    ),
    _several(
        "diffusion_gemma",
        {"text_config": "diffusion_gemma_text"},
        sections={"text_config": {"top_k_experts": 2}},
        kv=_text_global_kv,
        canvas_length=4,
        token_inputs=SEQ2SEQ,
        vision_config={"head_dim": 8, KV: 2, "position_embedding_size": 8},
    ),
    _several(
        "qwen4_exp_text",
        {"": "qwen4_exp_text"},
        hc_count=2,
        layer_types=["linear_attention", "indexed_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
        hc_lowrank=4,
        ngram_vocab_size_base=64,
        make_ngram_vocab_size_divisible_by=1,
        heads_per_ngram=1,
        split_ngram_parts=1,
        ple_embed_dim=8,
    ),
)


def larger(model_type: str) -> Tiny:
    """With the text part that its config has by default and towers that may be of full size: for
    the meta device.
    """
    part, options = CONFIG_MAPPING[model_type](), dict(_OPTIONS.get(model_type, {}))
    made_of = options.pop("model_class", "")
    for step in (path := OWNERS[model_type]):
        part = getattr(part, step)
    tiny = _wrapper(model_type, part.model_type, ".".join(path), **options)
    return replace(tiny, model_class=made_of or tiny.model_class)


_OPTIONS: dict[str, dict[str, Any]] = {
    "emu3": {"vocabulary_map": {"<image>": 90}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "granite4_vision": {
        "image_grid_pinpoints": [[8, 8]],
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64, "num_attention_heads": 2},
    },
    "fast_vlm": {"vision_config": {"hidden_size": 16}},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "musicflamingo": {"audio_config": {"model_type": "audioflamingo3_encoder"}},
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 16}}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "shieldgemma2": {"model_class": "ShieldGemma2ForImageClassification"},
}
LARGER = sorted(OWNERS.keys() & set(CONFIG_MAPPING) - {tiny.model_type for tiny in NESTED})
