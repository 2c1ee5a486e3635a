"""What an attention layer lets be changed without changing the model, as data: which families' heads can be aligned.

Heads of a trained model live in bases of their own. Where nothing but the rotary embedding stands between the
projections and the scores, keys may be multiplied by a complex number per head and frequency and queries by the inverse
of its conjugate; dimensions that are not rotated, and values with the columns of W_O, by any invertible matrix
(docs/methods.md). What stands in between (norms, gates) takes some of that away. Every entry is held against its
transformers class by the tests: scrambled within the symmetry the logits stay, and aligning undoes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gqa.convert.families import Rule
from gqa.convert.layout import Separate

Pairing = Literal["half", "interleaved"]
_QUERY = Rule("q_proj", Separate("query"))
_OUTPUT = Rule("o_proj", Separate("output", axis=1))


@dataclass(frozen=True)
class Rotary:
    """Which of a head's dimensions are rotated: the first `dims` = n, in pairs (f, f + n / 2) (`half`) or
    (2 f, 2 f + 1) (`interleaved`).
    """

    dims: int
    pairing: Pairing = "half"


@dataclass(frozen=True)
class Symmetry:
    """One way in which heads can be changed, and the tensors that a change of them touches.

    rotated: Of (config of the text part, layer, d), how many dimensions of a head are rotated.
    query, output: Rules of W_Q and W_O, which absorb what is done to keys and values; None where they are fused.
    norm: The norm whose output attention reads, below the layer; `one_plus` where its gain is 1 + the weight.
    free_keys: Whether keys can be aligned; a norm of each head between the projections and the scores forbids it.
    per_query: Further tensors that belong to query heads, and so move with them when heads are regrouped.
    """

    model_types: tuple[str, ...]
    rotated: Callable[[Any, int, int], int]
    pairing: Pairing = "half"
    query: Rule | None = _QUERY
    output: Rule = _OUTPUT
    norm: str = "input_layernorm"
    one_plus: bool = False
    free_keys: bool = True
    per_query: tuple[Rule, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Of the tensors beside keys and values that a change of heads touches."""
        return (*((self.query,) if self.query else ()), self.output, *self.per_query)

    def rotary(self, config: Any, layer: int, dim: int) -> Rotary:
        return Rotary(self.rotated(config, layer, dim), self.pairing)


def _rotated(config: Any, layer: int, dim: int) -> int:
    """What `rope_parameters` says: all dimensions, or the first part of them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    if kinds and isinstance(parameters.get(kinds[layer]), dict):
        parameters = parameters[kinds[layer]]
    if parameters.get("rope_type") == "proportional":  # frequencies beyond the fraction are zero, the pairs stay
        return dim
    return int(dim * (parameters.get("partial_rotary_factor") or 1.0))


def _listed(config: Any, layer: int, dim: int) -> int:
    """`no_rope_layers` is 1 where a layer rotates."""
    listed = getattr(config, "no_rope_layers", None)
    return _rotated(config, layer, dim) if not listed or listed[layer] else 0


def _sliding(config: Any, layer: int, dim: int) -> int:
    """Only layers with a sliding window rotate."""
    return _rotated(config, layer, dim) if config.layer_types[layer] == "sliding_attention" else 0


def _never(config: Any, layer: int, dim: int) -> int:
    return 0


def find_symmetry(model_type: str) -> Symmetry | None:
    """How the heads of a model type can be changed; None where it is not known that they can."""
    return next((symmetry for symmetry in SYMMETRIES if model_type in symmetry.model_types), None)


_SINKS = (Rule("sinks", Separate("query", width="one"), projection=False),)

SYMMETRIES: tuple[Symmetry, ...] = (
    Symmetry(
        (
            "arcee",
            "aria_text",
            "bamba",
            "cwm",
            "deepseek_ocr2_text",
            "emu3_text_model",
            "falcon_h1",
            "granite",
            "granite_docling_text",
            "granitemoe",
            "granitemoeshared",
            "higgs_audio_v2",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "jais2",
            "llama",
            "ministral",
            "ministral3",
            "mistral",
            "mixtral",
            "paddleocr_vl_text",
            "phimoe",
            "qwen2",
            "qwen2_5_omni_text",
            "qwen2_5_vl_text",
            "qwen2_moe",
            "qwen2_vl_text",
            "seed_oss",
            "solar_open",
            "stablelm",
            "starcoder2",
        ),
        _rotated,
    ),
    Symmetry(("gemma", "gemma2", "vaultgemma", "nemotron"), _rotated, one_plus=True),
    Symmetry(("smollm3",), _listed),
    Symmetry(("jamba",), _never),
    Symmetry(("gpt_oss", "granite_swa", "granitemoe_swa"), _rotated, per_query=_SINKS),
    Symmetry(
        ("glm", "glm4", "glm4v_text", "glm_ocr_text", "helium", "ernie4_5", "ernie4_5_moe"),
        _rotated,
        pairing="interleaved",
    ),
    Symmetry(("cohere",), _rotated, pairing="interleaved"),
    Symmetry(("cohere2",), _sliding, pairing="interleaved"),
    Symmetry(("phi",), _rotated, output=Rule("dense", Separate("output", axis=1))),
    Symmetry(("phi3",), _rotated, query=None),
    Symmetry(("gpt_bigcode",), _never, query=None, output=Rule("c_proj", Separate("output", axis=1)), norm="ln_1"),
    Symmetry(
        ("qwen3", "qwen3_moe", "olmo2", "olmo3", "gemma3_text", "exaone4", "dots1", "hunyuan_v1_dense"),
        _rotated,
        free_keys=False,
    ),
)
