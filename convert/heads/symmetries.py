"""What an attention layer lets be changed without changing the model, as data: which families' heads can be aligned.

Heads of a trained model live in bases of their own. Where nothing but the rotary embedding stands between the
projections and the scores, keys may be multiplied by a complex number per head and frequency and queries by the inverse
of its conjugate; dimensions that are not rotated, and values with the columns of W_O, by any invertible matrix
(docs/methods.md). What stands in between (norms, gates) takes some of that away. Every entry is held against its
transformers class by the tests: scrambled within the symmetry the logits stay, and aligning undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from gqa.convert.heads.family import Rule
from gqa.convert.heads.layout import Conv1D, Numbered, Separate

Pairing = Literal["half", "interleaved"]
_QUERY = Rule("q_proj", Separate("query"))
_OUTPUT = Rule("o_proj", Separate("output", axis=1))


def _always(config: Any) -> bool:
    return True


def _fixed(config: Any) -> bool:
    return False


def _without(field: str) -> Callable[[Any], bool]:
    """Whether a config has nothing in that field."""
    return lambda config: not getattr(config, field, None)


def _gated_by_head(config: Any) -> bool:
    return config.gating in (True, "per-head")


@dataclass(frozen=True)
class Rotary:
    """Which of a head's dimensions are rotated: the first `dims` = n, in pairs (f, f + n / 2) (`half`) or
    (2 f, 2 f + 1) (`interleaved`). `slow`: radians a position of the last pairs, those that turn by less than half a
    circle over the longest text.
    """

    dims: int
    pairing: Pairing = "half"
    slow: tuple[float, ...] = ()


@dataclass(frozen=True)
class Symmetry:
    """One way in which heads can be changed, and the tensors that a change of them touches.

    rotated: Of (config of the text part, layer, d), how many dimensions of a head are rotated.
    query, output: Rules of W_Q and W_O, which absorb what is done to keys and values; None where they are fused.
    norms: Names below the layer, one of which is the norm whose output attention reads; none where it reads the
        residual stream as it is. `one_plus` where the norm's gain is 1 + the weight.
    free_keys: Whether the keys of a config can be aligned; a norm between the projections and the scores forbids it.
    holds: Whether any of this is true of a config; what clips values or gates each of their dimensions forbids it.
    per_query: Further tensors that belong to query heads, and so move with them when heads are regrouped.
    regroups: Whether heads can change places; what goes by their number (ALiBi, relative position biases) forbids it.
    """

    model_types: tuple[str, ...]
    rotated: Callable[[Any, int, int], int]
    pairing: Pairing = "half"
    query: Rule | None = _QUERY
    output: Rule = _OUTPUT
    norms: tuple[str, ...] = ("input_layernorm",)
    one_plus: bool = False
    free_keys: Callable[[Any], bool] = _always
    holds: Callable[[Any], bool] = _always
    per_query: tuple[Rule, ...] = ()
    regroups: Callable[[Any], bool] = _always

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Of the tensors beside keys and values that a change of heads touches."""
        return (*((self.query,) if self.query else ()), self.output, *self.per_query)

    def matches(self, config: Any) -> bool:
        return config.model_type in self.model_types and self.holds(config)

    def rotary(self, config: Any, layer: int, dim: int, length: int = 1) -> Rotary:
        """Of heads (dim) on a text of `length` tokens, by which some embeddings choose their speeds."""
        dims = self.rotated(config, layer, dim)
        longest = getattr(config, "max_position_embeddings", None)
        slow: list[float] = []
        if longest and self.free_keys(config):
            slow.extend(
                takewhile(lambda speed: speed * longest < math.pi, reversed(_speeds(config, layer, dims, length)))
            )
        return Rotary(dims, self.pairing, tuple(reversed(slow)))


def _at(listed: Sequence[Any], layer: int) -> Any:
    """What a config lists for a layer; layers beyond its own, which predict further tokens, are like the last."""
    return listed[min(layer, len(listed) - 1)]


def _parameters(config: Any, layer: int) -> dict[str, Any] | None:
    """The layer's `rope_parameters`; None where its type of layers has none."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    return parameters[_at(kinds, layer)] if kinds and _at(kinds, layer) in parameters else parameters


def _speeds(config: Any, layer: int, dims: int, length: int) -> list[float]:
    """Radians a position of every pair, the fastest first; none where they are not known."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _parameters(config, layer) or {}
    base, kind = parameters.get("rope_theta"), parameters.get("rope_type")
    if kind in ROPE_INIT_FUNCTIONS:
        named = _at(config.layer_types, layer) if parameters is not config.rope_parameters else None
        found: list[float] = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length, layer_type=named)[0].tolist()
        return found if 2 * len(found) == dims else []
    return [base ** (-2 * pair / dims) for pair in range(dims // 2)] if base else []


def _rotated(config: Any, layer: int, dim: int) -> int:
    """What `rope_parameters` says: all dimensions, or the first part of them; none where a type of layers has none."""
    parameters = _parameters(config, layer)
    if parameters is None:
        return 0
    if parameters.get("rope_type") == "proportional":  # frequencies beyond the fraction are zero, the pairs stay
        return dim
    return int(dim * (parameters.get("partial_rotary_factor") or 1.0))


def _listed(config: Any, layer: int, dim: int) -> int:
    """`no_rope_layers` is 1 where a layer rotates."""
    listed = getattr(config, "no_rope_layers", None)
    return _rotated(config, layer, dim) if not listed or _at(listed, layer) else 0


def _sliding(config: Any, layer: int, dim: int) -> int:
    """Only layers with a sliding window rotate."""
    return _rotated(config, layer, dim) if _at(config.layer_types, layer) == "sliding_attention" else 0


def _if_rope(config: Any, layer: int, dim: int) -> int:
    """What kind of positions there are is a field."""
    return _rotated(config, layer, dim) if config.position_embedding_type == "rope" else 0


def _unless_alibi(config: Any, layer: int, dim: int) -> int:
    return 0 if config.alibi else dim


def _never(config: Any, layer: int, dim: int) -> int:
    return 0


def _norm_before(config: Any) -> bool:
    return bool(config.do_layer_norm_before)


def _unclipped(config: Any) -> bool:
    return not config.attn_config.clip_qkv


def find_symmetry(config: Any) -> Symmetry | None:
    """How the heads of a model with this config (of the text part) can be changed; None where it is not known."""
    return next((symmetry for symmetry in SYMMETRIES if symmetry.matches(config)), None)


def _per_head(tensor: str) -> tuple[Rule, ...]:
    """One row for each query head."""
    return (Rule(tensor, Separate("query", width="one"), projection=False),)


_Q_NORM = (Rule("q_norm", Separate("query"), projection=False),)  # over all heads
_NUMBERED_Q_NORMS = (Rule("q_layernorm.norms.{head}", Numbered("query"), projection=False),)
_DENSE = Rule("dense", Separate("output", axis=1))
_OUT = Rule("out_proj", Separate("output", axis=1))

_LIKE_LLAMA = (
    "arcee", "aria_text", "bamba", "cohere_compass_text", "cosmos3_edge_text", "csm", "cwm", "deepseek_ocr2_text",
    "emu3_text_model", "eurobert", "evolla", "falcon_h1", "glm4v_moe_text", "glm_image_text", "granite",
    "granite4_vision_text", "granite_docling_text", "granitemoe", "granitemoeshared", "higgs_audio_v2",
    "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "minimax", "ministral",
    "ministral3", "mistral", "mixtral", "paddleocr_vl_text", "phimoe", "qwen2", "qwen2_5_omni_text",
    "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "seed_oss", "solar_open", "starcoder2", "ultrabert",
    "unlimited_ocr_text", "voxtral_realtime_text",
)  # fmt: skip
SYMMETRIES: tuple[Symmetry, ...] = (
    Symmetry(
        _LIKE_LLAMA,
        _rotated,
    ),
    Symmetry(("mimo_v2_flash",), _rotated, per_query=_per_head("attention_sink_bias")),
    Symmetry(("glm4_moe",), _rotated, free_keys=_without("use_qk_norm")),
    Symmetry(("stablelm",), _rotated, free_keys=_without("qk_layernorm"), per_query=_NUMBERED_Q_NORMS),
    Symmetry(("olmo",), _rotated, holds=_without("clip_qkv")),
    Symmetry(("granitemoehybrid",), _if_rope),
    Symmetry(("gemma", "gemma2", "vaultgemma", "nemotron"), _rotated, one_plus=True),
    Symmetry(("recurrent_gemma",), _rotated, norms=("temporal_pre_norm",), one_plus=True),
    Symmetry(("smollm3",), _listed),
    Symmetry(("jamba",), _never),
    Symmetry(("nemotron_h",), _never, norms=("norm",)),
    Symmetry(("gpt_oss", "granite_swa", "granitemoe_swa"), _rotated, per_query=_per_head("sinks")),
    Symmetry(("openai_privacy_filter",), _rotated, pairing="interleaved", per_query=_per_head("sinks")),
    Symmetry(
        (
            "ernie4_5",
            "ernie4_5_moe",
            "ernie4_5_vl_moe_text",
            "glm",
            "glm4",
            "glm4v_text",
            "glm_ocr_text",
            "helium",
        ),
        _rotated,
        pairing="interleaved",
    ),
    Symmetry(
        ("cohere",),
        _rotated,
        pairing="interleaved",
        free_keys=_without("use_qk_norm"),
        per_query=_per_head("q_norm"),
    ),
    Symmetry(("cohere2", "cohere2_moe"), _sliding, pairing="interleaved"),
    Symmetry(("llama4_text",), _listed, pairing="interleaved", free_keys=_without("use_qk_norm")),
    Symmetry(("phi",), _rotated, output=_DENSE, free_keys=_without("qk_layernorm")),
    Symmetry(("phi3", "phi4_multimodal"), _rotated, query=None),
    Symmetry(
        ("falcon",),
        _unless_alibi,
        query=None,
        output=_DENSE,
        norms=("ln_attn", "input_layernorm"),
        regroups=_without("alibi"),
    ),
    Symmetry(
        ("moshi",),
        _rotated,
        query=Rule("q_proj.linear", Separate("query")),
        output=Rule("o_proj.linear", Separate("output", axis=1)),
    ),
    Symmetry(("gpt_bigcode",), _never, query=None, output=Rule("c_proj", Separate("output", axis=1)), norms=("ln_1",)),
    Symmetry(
        ("gqa_gpt2",),
        _never,
        query=None,
        output=Rule("c_proj", Conv1D(Separate("output", axis=1))),
        norms=("ln_1",),
    ),
    Symmetry(("gqa_opt",), _never, output=_OUT, norms=("self_attn_layer_norm",), holds=_norm_before),
    Symmetry(("gqa_bart", "gqa_marian"), _never, output=_OUT, norms=()),
    Symmetry(
        ("gqa_m2m_100", "gqa_mbart", "gqa_pegasus", "gqa_whisper"),
        _never,
        output=_OUT,
        norms=("self_attn_layer_norm",),
    ),
    Symmetry(
        ("gqa_mt5", "gqa_t5", "gqa_umt5"),
        _never,
        query=Rule("q", Separate("query")),
        output=Rule("o", Separate("output", axis=1)),
        norms=("layer.0.layer_norm",),
        regroups=_fixed,
    ),
    Symmetry(("gqa_gpt_neo",), _never, output=_OUT, norms=("ln_1",)),
    Symmetry(("gqa_bloom",), _never, query=None, output=_DENSE, regroups=_fixed),
    Symmetry(("gqa_mpt",), _never, query=None, output=_OUT, norms=("norm_1",), holds=_unclipped, regroups=_fixed),
    Symmetry(
        (
            "dots1",
            "exaone_moe",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "hunyuan_vl_text",
            "hy_v3",
            "kolibri1",
            "mellum",
            "nanochat",
            "qwen3",
            "qwen3_moe",
            "qwen3_omni_moe_text",
            "qwen3_vl_moe_text",
            "qwen3_vl_text",
        ),
        _rotated,
        free_keys=_fixed,
    ),
    Symmetry(("chameleon",), _rotated, free_keys=_fixed, per_query=_per_head("q_norm")),
    Symmetry(("flint",), _rotated, free_keys=_fixed, per_query=_per_head("softmax_offset")),
    Symmetry(("minimax_m2",), _rotated, free_keys=_fixed, per_query=_Q_NORM),
    Symmetry(("exaone4",), _rotated, norms=(), free_keys=_fixed),
    Symmetry(("flex_olmo", "olmo2", "olmo3", "olmo_hybrid"), _rotated, norms=(), free_keys=_fixed, per_query=_Q_NORM),
    Symmetry(("apertus",), _rotated, norms=("attention_layernorm",), free_keys=_fixed),
    Symmetry(("laguna",), _rotated, free_keys=_fixed, holds=_gated_by_head, per_query=_per_head("g_proj")),
    Symmetry(
        ("step3p5",), _rotated, one_plus=True, free_keys=_fixed, holds=_gated_by_head, per_query=_per_head("g_proj")
    ),
    Symmetry(("olmoe",), _rotated, free_keys=_fixed, holds=_without("clip_qkv"), per_query=_Q_NORM),
    Symmetry(("gemma3_text", "minimax_m3_vl_text"), _rotated, one_plus=True, free_keys=_fixed),
    Symmetry(
        ("lfm2", "lfm2_moe"),
        _rotated,
        output=_OUT,
        norms=("operator_norm",),
        free_keys=_fixed,
    ),
    Symmetry(("lfm3",), _rotated, norms=("operator_norm",), free_keys=_fixed, per_query=_per_head("gate_proj")),
    Symmetry(
        ("molmo2_text",),
        _rotated,
        query=None,
        output=Rule("attn_out", Separate("output", axis=1)),
        norms=("attn_norm",),
        free_keys=_fixed,
        per_query=(replace(_Q_NORM[0], when=("qk_norm_type", "olmo")),),
    ),
)
