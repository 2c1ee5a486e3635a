"""Models that are written as another class of transformers."""

from dataclasses import dataclass
from typing import Any

from support.tiny_configs import Tiny, tiny_model


@dataclass(frozen=True)
class Case:
    """A tiny source, what becomes of it, and the heads that the target holds.

    exact: Whether not even the last bit of a logit changes at G = H.
    """

    tiny: Tiny
    target: str
    groups: tuple[int, ...] = (4, 2, 1)
    exact: bool = False


def _neox(name: str, **options: Any) -> Case:
    return Case(tiny_model(name, **options, kv=lambda kv_heads: {}), "phi")


def _gpt2(name: str, exact: bool = True, **options: Any) -> Case:
    return Case(tiny_model(name, **options, kv=lambda kv_heads: {}), "gpt_bigcode", (4, 1), exact)


_DROPOUT: dict[str, Any] = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "layer_norm_eps": 1e-3}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}


CASES: dict[str, Case] = {
    case.tiny.name: case
    for case in (
        _neox("gpt_neox", **_DROPOUT),
        _neox(
            "gpt_neox+plain",
            attention_bias=False,
            tie_word_embeddings=True,
            hidden_act="relu",
            rotary_pct=1.0,
        ),
        _neox("gpt_neox+yarn", **_DROPOUT, rope_parameters=_YARN),
        _gpt2("gpt2"),
        _gpt2(
            "gpt2+scaled",
            exact=False,
            scale_attn_by_inverse_layer_idx=True,
            activation_function="relu",
            n_inner=48,
            n_layer=3,
        ),
        _gpt2(
            "gpt2+unscaled",
            scale_attn_weights=False,
            tie_word_embeddings=False,
            layer_norm_epsilon=1e-3,
        ),
    )
}
