"""Tiny models of the families with custom modelling code, and of the classes that those extend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_configs import Tiny

from gqa.checkpoint import modelling
from gqa.checkpoint.modelling.text import MODELS

# Those that are another one with other names.
COPIES = [name for name in MODELS if not (Path(modelling.__path__[0]) / f"{name}.py").is_file()]


def _no_kv(kv_heads: int) -> dict[str, Any]:
    return {}


def _source(
    model_type: str, model_class: str, /, attention: tuple[str, ...] = ("eager", "sdpa"), **options: Any
) -> Tiny:
    return Tiny(model_type, model_type, model_class, options, kv=_no_kv, kv_counts=(4,), attention=attention)


def _seq2seq(model_type: str, model_class: str, /, **options: Any) -> Tiny:
    text = {"input_ids": (), "decoder_input_ids": ()}
    return replace(_source(model_type, model_class, decoder_start_token_id=1, **options), token_inputs=text)


_BART: Mapping[str, Any] = {
    "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "forced_eos_token_id": None, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}  # fmt: skip
_T5: Mapping[str, Any] = {"d_ff": 64}

SOURCES: tuple[Tiny, ...] = (
    _source("gpt2", "GPT2LMHeadModel"),
    _source("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    _source("bloom", "BloomForCausalLM", ("eager",)),
    _source("gpt_neo", "GPTNeoForCausalLM", ("eager",), attention_types=[[["global", "local"], 1]], window_size=5),
    _source("mpt", "MptForCausalLM", ("eager",), max_seq_len=64),
    _seq2seq("bart", "BartForConditionalGeneration", **_BART),
    _seq2seq("mbart", "MBartForConditionalGeneration", **_BART),
    _seq2seq("marian", "MarianMTModel", **_BART),
    _seq2seq("pegasus", "PegasusForConditionalGeneration", **_BART),
    _seq2seq("m2m_100", "M2M100ForConditionalGeneration", **_BART | {"decoder_layers": 3}),
    _seq2seq("t5", "T5ForConditionalGeneration", **_T5),
    _seq2seq("mt5", "MT5ForConditionalGeneration", **_T5),
    _seq2seq("umt5", "UMT5ForConditionalGeneration", **_T5),
    replace(
        _seq2seq(
            "whisper", "WhisperForConditionalGeneration", **_BART, num_mel_bins=8, max_source_positions=8,
            max_target_positions=64, suppress_tokens=None, begin_suppress_tokens=None,
        ),
        float_inputs={"input_features": (8, 16)}, token_inputs={"decoder_input_ids": ()},
    ),
)  # fmt: skip
# The same in custom modelling code, with 4, 2 or 1 key/value heads.
CUSTOM: tuple[Tiny, ...] = tuple(
    Tiny(
        f"gqa_{tiny.name}", f"gqa_{tiny.name}", f"GQA{tiny.model_class}", tiny.options, attention=tiny.attention,
        token_inputs=tiny.token_inputs, float_inputs=tiny.float_inputs,
    )
    for tiny in SOURCES
)  # fmt: skip
