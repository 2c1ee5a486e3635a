"""Tiny models of the classes that are written for another class, and their heads made equal in their own layout.

Nothing here knows how the converter lays tensors out: what keys and values are is said once more, in the layouts of the
source classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tiny_configs import Tiny, tiny_model
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Case:
    """A tiny source and what becomes of it.

    groups: Those that the target holds.
    exact: Whether not even the last bit of a logit changes at G = H.
    """

    tiny: Tiny
    target: str
    groups: tuple[int, ...] = (4, 2, 1)
    exact: bool = False


def _case(name: str, target: str, /, **options: Any) -> Case:
    known = {key: options.pop(key) for key in {"groups", "exact"} & options.keys()}
    return Case(tiny_model(name, **options, kv=lambda kv_heads: {}), target, **known)


_NEOX: dict[str, Any] = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "layer_norm_eps": 1e-3}
_SEQUENTIAL = _NEOX | {"use_parallel_residual": False, "exact": True}
_GPTJ: dict[str, Any] = {"rotary_dim": 4, "layer_norm_epsilon": 1e-3, "attn_pdrop": 0.1}
_GPT2: dict[str, Any] = {"groups": (4, 1), "exact": True}
_EIGHT = {"n_head": 8, "n_embd": 64, "groups": (8, 4, 2, 1)}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 32,
         "partial_rotary_factor": 0.5}  # fmt: skip

CASES: dict[str, Case] = {
    case.tiny.name: case
    for case in (
        _case("gpt_neox", "phi", **_NEOX),
        _case("gpt_neox+plain", "phi", attention_bias=False, tie_word_embeddings=True, hidden_act="relu",
              rotary_pct=1.0),
        _case("gpt_neox+yarn", "phi", **_NEOX, rope_parameters=_YARN),
        _case("gpt_neox+rotary", "starcoder2", **_SEQUENTIAL, rotary_pct=1.0),
        _case("gpt_neox+rotary_plain", "starcoder2", **_SEQUENTIAL, rotary_pct=1.0, attention_bias=False,
              rotary_emb_base=500, tie_word_embeddings=True),
        _case("gptj", "phi", **_GPTJ),
        _case("gptj+narrow", "phi", n_embd=196, rotary_dim=16, n_inner=48, activation_function="gelu"),
        _case("codegen", "phi", **_GPTJ),
        _case("codegen+eight", "phi", **_GPTJ, **_EIGHT),
        _case("gpt2", "gpt_bigcode", **_GPT2),
        _case("gpt2+scaled", "gpt_bigcode", groups=(4, 1), scale_attn_by_inverse_layer_idx=True,
              activation_function="relu", n_inner=48, n_layer=3),
        _case("gpt2+unscaled", "gpt_bigcode", **_GPT2, scale_attn_weights=False,
              tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    )
}  # fmt: skip

# A parameter of a layer -> its keys and its values as (H, d, *rest) that share the parameter's memory; H heads.
Views = Callable[[Tensor, int], tuple[Tensor, ...]]


def _neox(parameter: Tensor, heads: int) -> tuple[Tensor, ...]:
    per_head = parameter.view(heads, 3, -1, *parameter.shape[1:])
    return per_head[:, 1], per_head[:, 2]


def _codegen(parameter: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Blocks of q, v, k; a head's place is (block, head in it), which views cannot make one axis: see `tie_heads`."""
    blocks = parameter.view(4, 3, heads // 4, -1, parameter.shape[-1])
    return blocks[:, 1], blocks[:, 2]


def _gpt2(parameter: Tensor, heads: int) -> tuple[Tensor, ...]:
    per_role = parameter.view(*parameter.shape[:-1], 3, heads, -1)  # (in, out) or (out,): heads on the last axis
    return tuple(per_role.select(-3, role).movedim(-2, 0) for role in (1, 2))


def _separate(parameter: Tensor, heads: int) -> tuple[Tensor, ...]:
    return (parameter.view(heads, -1, parameter.shape[-1]),)


# Where the keys and values of a class are: ends of parameters' names, and the heads in them.
HEADS: dict[str, tuple[tuple[str, ...], Views]] = {
    "gpt_neox": (("query_key_value.weight", "query_key_value.bias"), _neox),
    "gptj": (("attn.k_proj.weight", "attn.v_proj.weight"), _separate),
    "codegen": (("qkv_proj.weight",), _codegen),
    "gpt2": (("c_attn.weight", "c_attn.bias"), _gpt2),
}


@torch.no_grad()
def tie_heads(model: PreTrainedModel, groups: int, tiled: bool = False) -> None:
    """Every key and value head becomes the mean of its group of neighbours; `tiled`: of the heads h mod G."""
    heads = model.config.num_attention_heads
    ends, views = HEADS[model.config.model_type]
    for name, parameter in model.named_parameters():
        for view in views(parameter, heads) if name.endswith(ends) else ():
            flat = view.reshape(heads, -1)
            order = (-1, groups) if tiled else (groups, -1)
            means = flat.unflatten(0, order).mean(0 if tiled else 1)
            flat = means.repeat(heads // groups, 1) if tiled else means.repeat_interleave(heads // groups, 0)
            view.copy_(flat.view(view.shape))
