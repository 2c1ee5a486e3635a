"""Tiny models of the families with custom modelling code, and of the classes that those extend."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiny_configs import Tiny, tiny_model

# Those whose attention in transformers is a copy of BART's or T5's.
COPIES = ("mbart", "marian", "pegasus", "m2m_100", "mt5")


def _no_kv(kv_heads: int) -> dict[str, Any]:
    return {}


def _source(model_type: str, model_class: str, /, **options: Any) -> Tiny:
    return tiny_model(model_type, model_class, kv=_no_kv, kv_counts=(4,), **options)


TEXTS = {"input_ids": (), "decoder_input_ids": ()}
_BART: Mapping[str, Any] = {
    "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "forced_eos_token_id": None, "decoder_start_token_id": 1, "token_inputs": TEXTS,
}  # fmt: skip
_T5: Mapping[str, Any] = {"d_ff": 64, "decoder_start_token_id": 1, "token_inputs": TEXTS}

SOURCES: tuple[Tiny, ...] = (
    _source("gpt2", "GPT2LMHeadModel"),
    _source("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    _source("bart", "BartForConditionalGeneration", **_BART),
    _source("mbart", "MBartForConditionalGeneration", **_BART),
    _source("marian", "MarianMTModel", **_BART),
    _source("pegasus", "PegasusForConditionalGeneration", **_BART),
    _source("m2m_100", "M2M100ForConditionalGeneration", **_BART | {"decoder_layers": 3, "encoder_layerdrop": 0.0,
                                                                    "decoder_layerdrop": 0.0}),
    _source("t5", "T5ForConditionalGeneration", **_T5),
    _source("mt5", "MT5ForConditionalGeneration", **_T5),
)  # fmt: skip
# The same in custom modelling code, with 4, 2 or 1 key/value heads.
CUSTOM: tuple[Tiny, ...] = tuple(
    replace(
        tiny, name=f"gqa_{tiny.name}", model_type=f"gqa_{tiny.name}", model_class=f"GQA{tiny.model_class}",
        kv=Tiny.kv, kv_counts=Tiny.kv_counts,
    )
    for tiny in SOURCES
)  # fmt: skip
