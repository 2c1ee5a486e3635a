"""What serving engines are known to refuse or misread of a converted checkpoint (docs/engines.md).

One entry per limit, each with a case in tests/serving that fails when a newer engine does better.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gqa.checkpoint.custom_code import PREFIX, loads_as_decilm
from gqa.checkpoint.modelling.text import BY_LAYER
from gqa.convert.heads.config import ModelConfig
from gqa.convert.heads.kv_cache import KVCache

_DEFAULT_THETA = 10_000


_LLAMA_3_WORDS = 128_256
_BY_LAYER = tuple(f"{PREFIX}{source}" for source in BY_LAYER)
_DECILM = tuple(filter(loads_as_decilm, _BY_LAYER))


def _rope(config: ModelConfig, key: str, default: Any) -> Any:
    parameters = getattr(config.text, "rope_parameters", None)
    return parameters.get(key, default) if isinstance(parameters, dict) else default


def _theta(config: ModelConfig) -> Any:
    return _rope(config, "rope_theta", _DEFAULT_THETA)


def _other_theta(config: ModelConfig) -> bool:
    return bool(_theta(config) != _DEFAULT_THETA)


def _other_head_dim(config: ModelConfig) -> bool:
    return config.main.key_dim * config.main.query != getattr(config.text, "hidden_size", None)


@dataclass(frozen=True)
class Limit:
    """An engine, the model types it has trouble with, when, and what happens.

    In `text`, {model_type}, {theta}, {rope} and {head_dim} stand for those of the checkpoint.
    """

    engine: str
    model_types: tuple[str, ...]
    when: Callable[[ModelConfig], bool]
    text: str


LIMITS: tuple[Limit, ...] = (
    Limit("llama.cpp", ("phi",), lambda config: config.main.kv < config.main.query,
          "its converter gives {model_type} as many KV heads as query heads, so it cannot load the result"),
    Limit("llama.cpp", ("gpt_bigcode",), lambda config: config.main.kv > 1,
          "its converter gives {model_type} one KV head, so it cannot load the result"),
    Limit("llama.cpp", ("falcon", "gemma", "gemma2", "stablelm"), _other_theta,
          "its converter does not write the rope_theta of {model_type}: it computes with 10000, not {theta}"),
    Limit("CTranslate2", ("falcon", "gemma", "gemma2"), _other_theta,
          "its loader does not read the rope_theta of {model_type}: it computes with 10000, not {theta}"),
    Limit("llama.cpp", ("qwen2",), _other_head_dim,
          "it knows no head_dim of {model_type} but hidden_size / heads, so it cannot load {head_dim}"),
    Limit("CTranslate2", ("llama", "qwen2"), _other_head_dim,
          "its loader knows no head_dim of {model_type} but hidden_size / heads: it refuses or misreads {head_dim}"),
    Limit("CTranslate2, onnxruntime-genai", _BY_LAYER, lambda config: True,
          "they know no model whose layers have different numbers of KV heads, so they cannot load the result"),
    Limit("llama.cpp", tuple(made for made in _BY_LAYER if made not in _DECILM), lambda config: True,
          "of models whose layers have different numbers of KV heads it knows Llama, so it cannot load the result"),
    Limit("llama.cpp", _DECILM, lambda config: bool(config.text.vocab_size != _LLAMA_3_WORDS),
          "its converter refuses the result if the tokenizer is BPE without byte fallback (docs/engines.md)"),
    Limit("llama.cpp", _DECILM, lambda config: _rope(config, "rope_type", "") in ("llama3", "longrope", "yarn"),
          "its converter cannot read the tokenizer beside the custom code of a model with {rope} rotary embeddings"),
)  # fmt: skip


def engine_notes(config: ModelConfig, cache: KVCache) -> tuple[str, ...]:
    """One line per limit that a checkpoint with this config meets."""
    model_type, theta = config.raw.get("model_type"), _theta(config)
    facts = {
        "model_type": model_type,
        "theta": f"{theta:.12g}" if isinstance(theta, float) else theta,
        "rope": _rope(config, "rope_type", None),
        "head_dim": config.main.key_dim,
    }
    met = [limit for limit in LIMITS if model_type in limit.model_types and limit.when(config)]
    notes = [f"{limit.engine}: {limit.text.format(**facts)}" for limit in met]
    return (*notes, cache.remark) if cache.remark else tuple(notes)
