"""Model types that cannot be converted, each with the reason, which the user is told."""

_NO_FIELD = (
    "transformers' class has no number of key/value heads, so a checkpoint with fewer would not load "
    "(or, worse, would run and be wrong); use a sister model with grouped-query support"
)
_MLA = "multi-head latent attention: its cache holds one compressed vector a token, there are no KV heads to merge"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots3_note",
         "dots3_note_text", "glm4_moe_lite", "glm5_next", "glm5_next_text", "glm_moe_dsa", "hy_v4", "kimi_linear",
         "kimi_k25", "longcat_flash", "minicpm3", "mistral4", "mistral_large4", "mistral_large4_text", "youtu"),
        _MLA,
    ),
    **dict.fromkeys(
        ("gpt_neox_japanese", "longt5", "switch_transformers", "blenderbot", "blenderbot-small", "plbart", "biogpt",
         "mvp", "led", "fsmt", "xglm", "persimmon", "openai-gpt", "ctrl", "imagegpt", "bert", "roberta", "modernbert",
         "modernbert-decoder", "hrm_text", "xlnet", "xlm", "bloom", "gpt_neo", "mpt", "umt5",
         "whisper"),
        _NO_FIELD,
    ),
    "jetmoe": "it has H = G x top-k query heads by construction and repeats K and V in tiles, not in groups",
    "zaya": "its convolutions mix the channels of queries and keys, which do not merge head by head",
    "moonshine": "transformers reshapes its queries with the number of KV heads, so fewer of them fail in forward",
    "moonshine_streaming": "transformers reshapes its queries with the number of KV heads, so fewer fail in forward",
    "neomme": "its value embeddings hold KV heads outside the attention modules",
    "esmc": "transformers requires as many KV heads as query heads",
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"),
        "it has no attention: nothing to merge",
    ),
}  # fmt: skip
