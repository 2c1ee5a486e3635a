"""All families.

The tests compare their layouts and symmetries with transformers, by a tiny model of each model
type.

A new architecture is one entry in one of the files that are joined here.
"""

from gqa.convert.heads.families import custom, fused, separate
from gqa.convert.heads.family import Family

FAMILIES: tuple[Family, ...] = (*separate.FAMILIES, *fused.FAMILIES, *custom.FAMILIES)

# Models whose text part is one of the above: where in config.json its config is.
_TEXT = ("text_config",)
NESTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "aria",
            "aya_vision",
            "cohere2_vision",
            "cohere_compass",
            "deepseek_ocr2",
            "deepseek_vl",
            "deepseek_vl_hybrid",
            "diffusion_gemma",
            "emu3",
            "ernie4_5_vl_moe",
            "exaone4_5",
            "fast_vlm",
            "gemma3",
            "gemma3n",
            "gemma4",
            "gemma4_unified",
            "glm46v",
            "glm4v",
            "glm4v_moe",
            "glm_ocr",
            "glmga",
            "got_ocr2",
            "granite4_vision",
            "granite_docling",
            "hunyuan_vl",
            "hyperclovax_vision_v2",
            "idefics2",
            "idefics3",
            "internvl",
            "janus",
            "lfm2_vl",
            "lfm3_vl",
            "lighton_ocr",
            "llama4",
            "llava",
            "llava_next",
            "llava_next_video",
            "llava_onevision",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
            "minimax_m3_vl",
            "mistral3",
            "mllama",
            "molmo2",
            "muse_glimmer",
            "muse_spark",
            "nemotron_h_omni",
            "ovis2",
            "paddleocr_vl",
            "paligemma",
            "perception_lm",
            "pp_chart2table",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen4_exp",
            "shieldgemma2",
            "smolvlm",
            "step3p7",
            "unlimited_ocr",
            "video_llama_3",
            "video_llava",
            "vipllava",
            "fun_asr_nano",
            "glmasr",
            "granite_speech",
            "granite_speech_plus",
            "moss_transcribe_diarize",
            "qwen2_audio",
            "qwen3_asr",
            "vibevoice_asr",
            "voxtral",
            "audioflamingo3",
            "musicflamingo",
        ),
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
}

# Model types that cannot be converted, with the reason for the error.
_NO_FIELD = (
    "the class in transformers has no number of key/value heads: a checkpoint with fewer would "
    "not load, or would "
    "compute something else; use a related model with grouped-query attention"
)
_ENCODER = "it is an encoder, which reads a whole text at once: it has no KV cache to shrink"
_MLA = (
    "multi-head latent attention: its cache holds one compressed vector a token, "
    "there are no KV heads to "
    "merge"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "bailing_hybrid",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v4",
            "dots3_note",
            "dots3_note_text",
            "glm4_moe_lite",
            "glm5_next",
            "glm5_next_text",
            "glm_moe_dsa",
            "hy_v4",
            "kimi_linear",
            "kimi_k25",
            "longcat_flash",
            "minicpm3",
            "mistral4",
            "mistral_large4",
            "mistral_large4_text",
            "youtu",
        ),
        _MLA,
    ),
    **dict.fromkeys(
        (
            "gpt_neox_japanese",
            "longt5",
            "switch_transformers",
            "blenderbot",
            "blenderbot-small",
            "plbart",
            "biogpt",
            "mvp",
            "led",
            "fsmt",
            "xglm",
            "persimmon",
            "openai-gpt",
            "ctrl",
            "imagegpt",
            "modernbert-decoder",
            "hrm_text",
            "xlnet",
            "xlm",
            "bloom",
            "gpt_neo",
            "mpt",
            "umt5",
            "whisper",
            "gptj",
            "codegen",
        ),
        _NO_FIELD,
    ),
    **dict.fromkeys(
        (
            "albert",
            "bert",
            "camembert",
            "deberta",
            "deberta-v2",
            "distilbert",
            "electra",
            "ernie",
            "esm",
            "longformer",
            "modernbert",
            "mpnet",
            "nomic_bert",
            "roberta",
            "roformer",
            "squeezebert",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"),
        "it has no attention: nothing to merge",
    ),
}
