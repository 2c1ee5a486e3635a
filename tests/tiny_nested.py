"""Tiny models with key/value heads in a sub-config (multimodal, encoder-decoder, speech), and models to refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiny_configs import FIELDS, FULL, KV, LENGTH, MAMBA_MIXED, MIXED, MROPE, MROPE_HALF, SLIDING, SPARSE, Tiny

CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "projection_dim": 16}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
           "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
IMAGE_IDS: dict[str, Any] = {"image_token_id": 3, "video_token_id": 4}
VISION_IDS: dict[str, Any] = {**IMAGE_IDS, "vision_start_token_id": 5, "vision_end_token_id": 6}


def _wrapper(model_type: str, model_class: str, text_type: str, /, text: Mapping[str, Any] | None = None,
             section: str = "text_config", **options: Any) -> Tiny:  # fmt: skip
    """A multimodal model that is given text only."""
    known = {name: options.pop(name) for name in set(options) & FIELDS}
    known.setdefault("kv", lambda kv_heads: {f"{section}.{KV}": kv_heads})
    inner: dict[str, Any] = options.setdefault(section.split(".")[0], {})
    for key in section.split(".")[1:]:
        inner = inner.setdefault(key, {})
    inner.update({"model_type": text_type, **(text or {})})
    return Tiny(model_type, model_type, model_class, options, owners=(section,), **known)


def _several(model_type: str, model_class: str, owners: Mapping[str, str], /,
             sections: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> Tiny:  # fmt: skip
    """A model with key/value heads in several sub-configs (path -> model type), or with more inputs than text."""
    known = {name: options.pop(name) for name in set(options) & FIELDS}
    known.setdefault("kv", lambda kv_heads: {f"{path}.{KV}".lstrip("."): kv_heads for path in owners})
    for path, values in (sections or {}).items():
        inner = options
        for key in path.split("."):
            inner = inner.setdefault(key, {})
        inner.update(values)
    for path, owner_type in owners.items():
        inner = options
        for key in filter(None, path.split(".")):
            inner = inner.setdefault(key, {})
        if path:
            inner["model_type"] = owner_type
    return Tiny(model_type, model_type, model_class, options, owners=tuple(owners), **known)


def _dia_kv(kv_heads: int) -> dict[str, Any]:
    return {f"encoder_config.{KV}": kv_heads, f"decoder_config.{KV}": kv_heads,
            f"decoder_config.cross_{KV}": kv_heads}  # fmt: skip


def _text_global_kv(kv_heads: int) -> dict[str, Any]:
    return {f"text_config.{KV}": kv_heads,
            "text_config.per_layer_config": {"1": {"head_dim": 16, KV: kv_heads}}}  # fmt: skip


SEQ2SEQ = {"input_ids": (), "decoder_input_ids": ()}
SCALED: dict[str, Any] = {"layer_types": MIXED, "query_pre_attn_scalar": 8}
PARAKEET = {"model_type": "parakeet_encoder", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 4, "subsampling_conv_channels": 8, "num_mel_bins": 16, "conv_kernel_size": 3,
            "subsampling_factor": 2, "max_position_embeddings": 64}  # fmt: skip
MIMI = {"model_type": "mimi", "hidden_size": 16, "num_filters": 4, "upsampling_ratios": [2, 2], "codebook_size": 16,
        "codebook_dim": 8, "vector_quantization_hidden_dimension": 8, "num_quantizers": 2, "upsample_groups": 16,
        "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2, KV: 2}  # fmt: skip
QWEN3_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
                "intermediate_size": 16, "spatial_merge_size": 1, "num_position_embeddings": 4}  # fmt: skip
NEO_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
OMNI: dict[str, Any] = {
    "audio_config": {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                     "d_model": 16, "max_source_positions": 8, "n_window": 4, "output_dim": 32},
    "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
                      "intermediate_size": 16, "spatial_merge_size": 1, "fullatt_block_indexes": [0]},
}  # fmt: skip
OMNI3: dict[str, Any] = {
    "audio_config": {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                     "d_model": 16, "max_source_positions": 8, "n_window": 4, "output_dim": 32,
                     "downsample_hidden_size": 8},
    "vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [0]},
}  # fmt: skip

NESTED: tuple[Tiny, ...] = (
    _wrapper("aria", "AriaForConditionalGeneration", "aria_text", image_token_index=3, vision_config={
        "model_type": "idefics3_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4}, projector_patch_to_query_dict={4: 2}),
    _wrapper("cohere2_vision", "Cohere2VisionForConditionalGeneration", "cohere2", {"layer_types": MIXED},
             vision_config=SIGLIP, image_token_id=3, alignment_intermediate_size=32),
    _wrapper("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text", {"layer_types": MIXED},
             vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=3, boi_token_index=4, eoi_token_index=5),
    _wrapper("glm4v", "Glm4vForConditionalGeneration", "glm4v_text", {"rope_parameters": MROPE_HALF},
             vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 8, "patch_size": 4,
                            "out_hidden_size": 32, "intermediate_size": 16, "spatial_merge_size": 1}, **IMAGE_IDS),
    _wrapper("idefics3", "Idefics3ForConditionalGeneration", "llama", image_token_id=3, scale_factor=1,
             vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "image_size": 8, "patch_size": 4}),
    _wrapper("internvl", "InternVLForConditionalGeneration", "qwen2", image_token_id=3,
             vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "image_size": [8, 8], "patch_size": [4, 4]}),
    _wrapper("llava", "LlavaForConditionalGeneration", "llama", vision_config=CLIP, image_token_index=3,
             vision_feature_layer=-1),
    _wrapper("llava_next", "LlavaNextForConditionalGeneration", "mistral", vision_config=CLIP, image_token_index=3,
             vision_feature_layer=-1, image_grid_pinpoints=[[8, 8]]),
    _wrapper("mistral3", "Mistral3ForConditionalGeneration", "mistral", vision_config=PIXTRAL, image_token_index=3,
             vision_feature_layer=-1, spatial_merge_size=1),
    _wrapper("mllama", "MllamaForConditionalGeneration", "mllama_text_model",
             {"num_hidden_layers": 3, "cross_attention_layers": [1]}, image_token_index=3,
             vision_config={"hidden_size": 16, "attention_heads": 2, "num_hidden_layers": 1, "num_global_layers": 1,
                            "intermediate_size": 16, "vision_output_dim": 32, "image_size": 8, "patch_size": 4,
                            "intermediate_layers_indices": [0]}),
    _wrapper("molmo2", "Molmo2ForConditionalGeneration", "molmo2_text", {"additional_vocab_size": 8},
             vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "patch_size": 4,
                            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "image_size": [8, 8],
                            "num_position_embeddings": 4},
             adapter_config={"hidden_size": 16, "intermediate_size": 16, "text_hidden_size": 32,
                             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                             "vision_feature_layer": [-1]},
             image_start_token_id=3, low_res_image_start_token_id=4, image_end_token_id=5, image_patch_id=6,
             frame_start_token_id=7, frame_end_token_id=8),
    _wrapper("paligemma", "PaliGemmaForConditionalGeneration", "gemma", vision_config=SIGLIP,
             image_token_index=3, projection_dim=32, fixed_inputs={"token_type_ids": (1, (LENGTH,))}),
    _wrapper("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", {"rope_parameters": MROPE},
             vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
                            "intermediate_size": 16, "spatial_merge_size": 1, "fullatt_block_indexes": [0]},
             **VISION_IDS),
    _wrapper("qwen2_audio", "Qwen2AudioForConditionalGeneration", "qwen2", audio_token_index=3,
             audio_config={"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                           "num_mel_bins": 8, "max_source_positions": 8}),
    _wrapper("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text", {"rope_parameters": MROPE},
             vision_config={"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "hidden_size": 32,
                            "mlp_ratio": 1, "spatial_merge_size": 1}, **VISION_IDS),
    _wrapper("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", {"layer_types": MAMBA_MIXED},
             vision_config=QWEN3_VISION, **VISION_IDS),
    _wrapper("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text",
             vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0]}, **VISION_IDS),
    _wrapper("smolvlm", "SmolVLMForConditionalGeneration", "llama", image_token_id=3, scale_factor=1,
             vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "image_size": 8, "patch_size": 4}),
    _wrapper("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text",
             {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}, kv=_text_global_kv, image_token_id=3,
             boi_token_id=4, eoi_token_id=5, video_token_id=6, boa_token_id=7, eoa_token_index=8, audio_token_id=9),
    _wrapper("llama4", "Llama4ForConditionalGeneration", "llama4_text",
             {"layer_types": ["chunked_attention", FULL], "no_rope_layers": [1, 0], "moe_layers": [1],
              "attention_chunk_size": 8, "intermediate_size_mlp": 16, "num_experts_per_tok": 1},
             boi_token_index=3, eoi_token_index=4, image_token_index=5,
             vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
                            "intermediate_size": 64, "patch_size": 4, "projector_input_dim": 16,
                            "vision_output_dim": 16, "projector_output_dim": 16}),
    _wrapper("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl_text",
             {**SPARSE, "dense_intermediate_size": 64, "rotary_dim": 4}, image_token_index=3, video_token_index=4,
             projector_hidden_size=16,
             vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
                            "intermediate_size": 16, "patch_size": 4}),
    _wrapper("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", {"layer_types": MAMBA_MIXED},
             vision_config=QWEN3_VISION, **VISION_IDS),
    _wrapper("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", **VISION_IDS,
             vision_config={**QWEN3_VISION, "deepstack_visual_indexes": [0]}),
    _wrapper("step3p7", "Step3p7ForConditionalGeneration", "step3p5",
             {"layer_types": [FULL, SLIDING], **SPARSE, "rope_parameters": {FULL: NEO_ROPE, SLIDING: NEO_ROPE},
              "num_sliding_attention_heads": 8}, image_token_id=3,
             vision_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
                            "patch_size": 4, "mlp_ratio": 1.0}),
    # Vision towers with key/value heads of their own, which must stay as they are.
    _wrapper("exaone4_5", "Exaone4_5_ForConditionalGeneration", "exaone4", {"layer_types": MIXED},
             vision_config={"depth": 1, "hidden_size": 32, "num_heads": 4, KV: 2, "patch_size": 4,
                            "intermediate_size": 16, "out_hidden_size": 32, "spatial_merge_size": 1,
                            "fullatt_block_indexes": [0]},
             **IMAGE_IDS),
    _wrapper("hunyuan_vl", "HunYuanVLForConditionalGeneration", "hunyuan_vl_text",
             {"rope_parameters": {**MROPE, "mrope_section": [1, 1, 1, 1]}}, image_token_id=3, im_start_id=4,
             im_end_id=5, im_newline_id=6,
             vision_config={"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, KV: 4,
                            "num_hidden_layers": 1, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 1,
                            "text_hidden_size": 32, "max_image_size": 8, "min_image_size": 8, "max_vit_seq_len": 4,
                            "img_max_token_num": 4}),
    _wrapper("lfm2_vl", "Lfm2VlForConditionalGeneration", "lfm2", {"layer_types": ["conv", FULL]}, image_token_id=3,
             projector_hidden_size=16, downsample_factor=1,
             vision_config={"model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16,
                            "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "num_patches": 4}),
    _wrapper("lfm3_vl", "Lfm3VlForConditionalGeneration", "lfm3", {"layer_types": [MIXED[0], FULL]},
             projector_hidden_size=16, **VISION_IDS,
             vision_config={"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4,
                            "num_attention_heads": 4, KV: 2, "spatial_merge_size": 1}),
    _wrapper("voxtral", "VoxtralForConditionalGeneration", "llama", audio_token_id=3,
             audio_config={"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_mel_bins": 8,
                           "num_attention_heads": 2, "max_source_positions": 8}),
    _wrapper("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_text",
             {"rope_parameters": MROPE}, **OMNI, audio_token_index=7, image_token_index=3, video_token_index=4),
    # Without its talker; only the thinker has a forward pass.
    _wrapper("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe_text", {},
             "thinker_config.text_config", part="thinker", enable_audio_output=False,
             thinker_config={**OMNI3, "audio_token_id": 7, "image_token_id": 3, "video_token_id": 4}),
    _wrapper("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_text", {},
             **OMNI3, audio_token_id=7, image_token_id=3, video_token_id=4),
    _wrapper("glm4v_moe", "Glm4vMoeForConditionalGeneration", "glm4v_moe_text", {"rope_parameters": MROPE_HALF},
             vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 8, "patch_size": 4,
                            "out_hidden_size": 32, "intermediate_size": 16, "spatial_merge_size": 1}, **IMAGE_IDS),
    _wrapper("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe_text",
             {"moe_intermediate_size": [16, 16], **SPARSE, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]}},
             vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "intermediate_size": 16,
                            "spatial_merge_size": 1}, image_token_id=3, video_token_id=4),
    # Encoder-decoders: several sub-configs, one number of heads.
    _several("t5gemma", "T5GemmaForConditionalGeneration", {"encoder": "t5_gemma_module", "decoder": "t5_gemma_module"},
             sections={"encoder": SCALED, "decoder": SCALED}, vocab_size=96, attention=("eager",),
             token_inputs=SEQ2SEQ, tie_word_embeddings=True),
    _several("t5gemma2", "T5Gemma2ForConditionalGeneration",
             {"encoder.text_config": "t5gemma2_text", "decoder": "t5gemma2_decoder"},
             sections={"encoder.text_config": SCALED, "decoder": SCALED,
                       "encoder": {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 3,
                                   "boi_token_index": 4, "eoi_token_index": 5}},
             image_token_index=3, eoi_token_index=5, token_inputs=SEQ2SEQ),
    _several("dia", "DiaForConditionalGeneration", {"encoder_config": "dia_encoder", "decoder_config": "dia_decoder"},
             sections={"decoder_config": {"cross_num_attention_heads": 4, "cross_head_dim": 8, "num_channels": 2,
                                          "cross_hidden_size": 32}},
             kv=_dia_kv, token_inputs={"input_ids": (), "decoder_input_ids": (2,)}, delay_pattern=[0, 1]),
    _several("canary", "CanaryForConditionalGeneration", {"decoder_config": "canary_decoder"},
             sections={"encoder_config": PARAKEET}, vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             decoder_start_token_id=1, float_inputs={"input_features": (16, 16)},
             token_inputs={"decoder_input_ids": ()}),
    _several("cohere_asr", "CohereAsrForConditionalGeneration", {"": "cohere_asr"},
             sections={"encoder_config": PARAKEET}, float_inputs={"input_features": (16, 16)},
             token_inputs={"decoder_input_ids": ()}),
    _several("blt", "BltForCausalLM",
             {"patcher_config": "blt_patcher", "encoder_config": "blt_local_encoder",
              "decoder_config": "blt_local_decoder", "global_config": "blt_global_transformer"},
             sections={"encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32},
                       "patcher_config": {}},
             vocab_size=96, encoder_hash_byte_group_size=[2, 3], encoder_hash_byte_group_vocab=16,
             local_attention_window_len=5, patching_threshold=0.5, use_cache=False,
             has_cache=False),
    _several("csm", "CsmForConditionalGeneration", {"": "csm", "depth_decoder_config": "csm_depth_decoder_model"},
             sections={"depth_decoder_config": {"num_codebooks": 2, "backbone_hidden_size": 32}}, codec_config=MIMI,
             num_codebooks=2, text_vocab_size=96, audio_token_id=3, audio_eos_token_id=4, codebook_pad_token_id=5,
             codebook_eos_token_id=6, kv=lambda kv_heads: {KV: kv_heads}),
    _several("evolla", "EvollaForProteinText2Text", {"": "evolla"},
             sections={"protein_encoder_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                                  "intermediate_size": 16, "vocab_size": 96,
                                                  "max_position_embeddings": 64}},
             aligner_num_add_layers=1, resampler_depth=1, resampler_dim_head=8, resampler_heads=2,
             resampler_num_latents=4, resampler_ff_mult=1, aligner_ffn_mult=1,
             token_inputs={"input_ids": (), "protein_input_ids": ()}),
    _several("kyutai_speech_to_text", "KyutaiSpeechToTextForConditionalGeneration", {"": "kyutai_speech_to_text"},
             codec_config=MIMI, ffn_dim=64, num_codebooks=2, codebook_vocab_size=17, audio_bos_token_id=16,
             audio_pad_token_id=3, tokens=16, token_inputs={"input_ids": (3,)}),
    _several("phi4_multimodal", "Phi4MultimodalForCausalLM", {"": "phi4_multimodal"},
             vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "crop_size": 8,
                            "image_token_id": 3},
             audio_config={"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
                           "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16,
                           "input_size": 16, "audio_token_id": 4, "bias_max_distance": 8}),
    _several("diffusion_gemma", "DiffusionGemmaForBlockDiffusion", {"text_config": "diffusion_gemma_text"},
             sections={"text_config": {"num_experts": 4, "top_k_experts": 2}}, kv=_text_global_kv,
             vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, KV: 2,
                            "num_attention_heads": 2, "patch_size": 4, "position_embedding_size": 8},
             boi_token_id=3, eoi_token_id=4, image_token_id=5, canvas_length=4,
             token_inputs={"input_ids": (), "decoder_input_ids": ()}),
    _several("qwen4_exp_text", "Qwen4ExpForCausalLM", {"": "qwen4_exp_text"}, hc_count=2,
             layer_types=["linear_attention", "indexed_attention"], indexer_n_heads=2, indexer_kv_heads=1,
             indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2,
             hc_lowrank=4, ngram_vocab_size_base=64, make_ngram_vocab_size_divisible_by=1, heads_per_ngram=1,
             split_ngram_parts=1, ple_embed_dim=8),
    _several("neomme", "NeoMMEForMaskedLM", {"": "neomme"}, embedding_rank=8, layer_types=MIXED, patch_size=4,
             embedding_dim=8, document_token_id=3, image_token_id=4, has_cache=False,
             rope_parameters={SLIDING: NEO_ROPE, FULL: NEO_ROPE}),
)  # fmt: skip

MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
GROUP = {"n_group": 1, "topk_group": 1}


def _refused(model_type: str, model_class: str, /, **options: Any) -> Tiny:
    """A model whose config names key/value heads that its tensors do not have, or that it cannot vary."""
    known = {name: options.pop(name) for name in set(options) & FIELDS}
    return Tiny(model_type, model_type, model_class, options, kv_counts=(4,), contiguous=False, **known)


def _four_kv(kv_heads: int) -> dict[str, Any]:
    if kv_heads != 4:
        raise ValueError(f"always 4 key/value heads, not {kv_heads}")
    return {}


REFUSED: tuple[Tiny, ...] = (
    _refused("deepseek_v2", "DeepseekV2ForCausalLM", **MLA, head_dim=4),
    _refused("deepseek_v3", "DeepseekV3ForCausalLM", **MLA, **GROUP),
    _refused("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **MLA, **GROUP, **SPARSE),
    _refused("kimi_linear", "KimiLinearForCausalLM", **MLA, **GROUP, **SPARSE, linear_head_dim=8, linear_num_heads=2,
             layer_types=MAMBA_MIXED),
    _refused("longcat_flash", "LongcatFlashForCausalLM", **MLA, num_layers=1, ffn_hidden_size=64, zero_expert_num=2,
             expert_ffn_hidden_size=16, head_dim=4),
    _refused("minicpm3", "MiniCPM3ForCausalLM", **MLA, head_dim=4, dim_model_base=32),
    _refused("mistral4", "Mistral4ForCausalLM", **MLA, **GROUP),
    _refused("youtu", "YoutuForCausalLM", **MLA, tie_word_embeddings=False),
    _refused("moonshine", "MoonshineForConditionalGeneration", encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
             encoder_num_attention_heads=4, decoder_num_attention_heads=4, float_inputs={"input_values": (2000,)},
             token_inputs={"decoder_input_ids": ()}, kv=lambda kv_heads: {f"decoder_{KV}": kv_heads,
                                                                          f"encoder_{KV}": kv_heads}),
)  # fmt: skip

_MLA = "multi-head latent attention like deepseek_v3, which stands in"
_AUDIO = "transformer inside an audio codec or tower; its heads are never converted"
_TALKER = "speech generator driven by its parent's hidden states; no forward pass on tokens alone"
UNBUILDABLE: dict[str, str] = {
    **dict.fromkeys(
        ("axk1", "axk2", "bailing_hybrid", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm5_next_text",
         "glm_moe_dsa", "hy_v4", "kimi_k25", "mistral_large4_text"), _MLA),
    **dict.fromkeys(
        ("dots3_note_audio_encoder", "glmasr_encoder", "granite_speech5_encoder", "mimi",
         "moonshine_streaming_encoder", "nemotron3_5_transcribe_asr_audio", "nemotron3_diarization_audio", "neucodec",
         "pe_audio_encoder",
         "pocket_tts_audio_tokenizer", "voxtral_realtime_encoder", "xcodec2"), _AUDIO),
    **dict.fromkeys(
        ("gradium_phonon_tts", "pocket_tts", "qwen2_5_omni_talker", "qwen3_omni_moe_talker_text",
         "qwen3_omni_moe_talker_code_predictor"), _TALKER),
    "esmc": "its config insists on as many KV heads as query heads",
    "gemma3n": "the vision tower is a timm model, which needs Pillow and timm; gemma3n_text stands for the text part",
    "muse_glimmer_assistant": "reads the key/value states of its target model",
    "qwen2_5_omni": "loading needs spk_dict.pt beside the weights; qwen2_5_omni_thinker and qwen3_omni_moe stand in",
    "timesfm2_5": "takes time series, not tokens",
    "voxtral_realtime": "text needs the audio tower's time conditioning, which voxtral_realtime_text is given",
}  # fmt: skip
