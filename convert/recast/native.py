"""Classes of transformers that compute what another class does and can have fewer key/value heads.

Each entry is exact: with as many heads as before the target gives the source's logits (to rounding, where LayerNorms
are folded). `tests/test_native_targets.py` holds every entry against both classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from gqa.checkpoint.errors import RefusedError
from gqa.convert.heads.family import Fused
from gqa.convert.recast.parts import Module, Place, Recasting, Rows

if TYPE_CHECKING:
    from torch import Tensor

_Role = Literal["query", "key", "value"]
_ROLES: tuple[_Role, ...] = ("query", "key", "value")


def _per_head(role: _Role, tensor: Tensor, place: Place) -> Tensor:
    """One of the three of GPT-NeoX's per-head [q, k, v] (H, 3, d, *rest) -> (H * d, *rest)."""
    return Fused("grouped").split(tensor, place.heads)[role].flatten(0, 1)


def _rotary(tensor: Tensor, place: Place) -> Tensor:
    """GPT-J rotates pairs (2 f, 2 f + 1), the targets (f, f + n / 2): rows 0, 2, 4 ... 1, 3, 5 ... of each head."""
    rotated = place.config.rotary_dim
    heads = tensor.reshape(place.heads.query, place.heads.key_dim, *tensor.shape[1:])
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, place.heads.key_dim)]
    return heads[:, order].flatten(0, 1)


_CODEGEN_BLOCKS = 4  # of the TPU cores that trained it; transformers has this number built in


def _codegen(role: _Role, tensor: Tensor, place: Place) -> Tensor:
    """One of the three of CodeGen's 4 blocks, each [q, v, k] of H / 4 heads -> (H * d, *rest)."""
    blocks = tensor.reshape(_CODEGEN_BLOCKS, 3, -1, *tensor.shape[1:])
    rows = blocks[:, ("query", "value", "key").index(role)].flatten(0, 1)
    return rows if role == "value" else _rotary(rows, place)


def _bigcode(tensor: Tensor, place: Place) -> Tensor:
    """GPT-2's [Q | K | V] -> GPTBigCode's per-head [q, k, v]; what scales scores by 1 / (layer + 1) goes into Q."""
    parts = Fused("stacked").split(tensor, place.heads)
    scale = 1 / (place.layer + 1) if place.config.scale_attn_by_inverse_layer_idx else 1
    return Fused("grouped").join({**parts, "query": parts["query"] * scale}, place.heads)


def _copied(config: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _like_neox(config: Any) -> dict[str, Any]:
    """What Phi and Starcoder2 call as GPT-NeoX does. `rope_theta` and its like are where both transformers
    4 and 5, and serving engines, read them.
    """
    rope = dict(config.rope_parameters)
    dims = int(config.hidden_size // config.num_attention_heads * rope["partial_rotary_factor"])
    if dims <= 0 or dims % 2:
        raise RefusedError(
            f"{dims} rotated dimensions of a head, where a natural number of pairs is allowed (rotary_pct)"
        )
    fields = _copied(
        config, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "hidden_act", "max_position_embeddings", "initializer_range", "attention_dropout", "use_cache",
    ) | {"num_key_value_heads": config.num_attention_heads}  # fmt: skip
    fields |= {"rope_theta": rope.pop("rope_theta"), "partial_rotary_factor": rope.pop("partial_rotary_factor")}
    return fields | ({"rope_scaling": rope} if rope.get("rope_type") != "default" else {})


def _phi_of_neox(config: Any) -> dict[str, Any]:
    dropout = {"resid_pdrop": config.hidden_dropout, "embd_pdrop": config.hidden_dropout}
    return _like_neox(config) | {"layer_norm_eps": config.layer_norm_eps} | dropout


def _starcoder2_of_neox(config: Any) -> dict[str, Any]:
    fields = _like_neox(config)
    if (part := fields.pop("partial_rotary_factor")) != 1:
        raise RefusedError(f"no class has sequential layers with {part:g} of each head rotated (rotary_pct)")
    dropout = {"residual_dropout": config.hidden_dropout, "embedding_dropout": config.hidden_dropout}
    return fields | {"norm_epsilon": config.layer_norm_eps, "use_bias": True, "sliding_window": None} | dropout


def _phi_of_gptj(config: Any) -> dict[str, Any]:
    """Also of CodeGen."""
    dim, rotated = config.n_embd // config.n_head, config.rotary_dim
    if rotated <= 0 or rotated % 2 or rotated > dim:
        raise RefusedError(f"rotary_dim {rotated}, where an even number up to the {dim} of a head is allowed")
    factor = rotated / dim
    return _copied(config, "vocab_size", "initializer_range", "resid_pdrop", "embd_pdrop", "use_cache") | {
        "hidden_size": config.n_embd,
        "intermediate_size": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "hidden_act": config.activation_function,
        "max_position_embeddings": config.n_positions,
        "layer_norm_eps": config.layer_norm_epsilon,
        "attention_dropout": config.attn_pdrop,
        "rope_theta": 10000.0,
        # Phi multiplies and rounds down.
        "partial_rotary_factor": factor if int(dim * factor) == rotated else math.nextafter(factor, 2),
    }


def _phi_of_codegen(config: Any) -> dict[str, Any]:
    if config.n_head % _CODEGEN_BLOCKS:
        raise RefusedError(f"{config.n_head} heads, where CodeGen's class needs a multiple of {_CODEGEN_BLOCKS}")
    return _phi_of_gptj(config)


def _bigcode_of_gpt2(config: Any) -> dict[str, Any]:
    if config.add_cross_attention:
        raise RefusedError("add_cross_attention: GPTBigCode has no cross-attention with one key/value head")
    return _copied(
        config, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function",
        "resid_pdrop", "embd_pdrop", "attn_pdrop", "layer_norm_epsilon", "initializer_range", "scale_attn_weights",
        "use_cache",
    ) | {"multi_query": False}  # fmt: skip


_LAYER = "model.layers.{}"
_ATTENTION = f"{_LAYER}.self_attn"
_NEOX = "layers.{}"
_GPT2_BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask", "*.attn.embed_positions")


def _linear(rows: Mapping[_Role, Rows | None], stored: str, **options: Any) -> Iterator[Module]:
    """q_proj, k_proj and v_proj out of `stored`, where {role} stands for their first letter."""
    for role, picked in rows.items():
        yield Module(f"{_ATTENTION}.{role[0]}_proj", stored.replace("{role}", role[0]), rows=picked, **options)


def _of_neox(
    target: str, architecture: str, names: tuple[str, str, str], config: Callable[[Any], dict[str, Any]],
    *, folded: bool = False, **how: Any,
) -> Recasting:  # fmt: skip
    """Of GPT-NeoX.

    names: What the target calls the layers out of attention, up and down.
    folded: Whether the LayerNorms of a layer are folded into what reads them, which stands beside one that is neutral.
    """
    output, up, down = names
    attention, mlp = f"{_NEOX}.input_layernorm", f"{_NEOX}.post_attention_layernorm"
    rows: dict[_Role, Rows | None] = {role: partial(_per_head, role) for role in _ROLES}
    qkv = _linear(rows, f"{_NEOX}.attention.query_key_value", norm=attention if folded else None, always_bias=True)
    parts = [
        Module("model.embed_tokens", "embed_in"),
        *qkv,
        Module(f"{_ATTENTION}.{output}", f"{_NEOX}.attention.dense", always_bias=True),
        Module(f"{_LAYER}.mlp.{up}", f"{_NEOX}.mlp.dense_h_to_4h", norm=mlp if folded else None),
        Module(f"{_LAYER}.mlp.{down}", f"{_NEOX}.mlp.dense_4h_to_h"),
        Module("lm_head", "embed_out|lm_head", always_bias=folded, tied="embed_in"),
        Module(f"{_LAYER}.input_layernorm", attention, neutral=folded),
        Module("model.final_layernorm" if folded else "model.norm", "final_layer_norm"),
    ]
    if not folded:
        parts.append(Module(f"{_LAYER}.post_attention_layernorm", mlp))
    dropped = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")
    return Recasting(
        "gpt_neox", target, architecture, config, prefix="gpt_neox.", parts=tuple(parts), dropped=dropped, **how
    )


def _phi_of(source: str, config: Callable[[Any], dict[str, Any]], qkv: Iterable[Module], note: str) -> Recasting:
    """Of GPT-J and CodeGen, whose attention differs in how it stores projections."""
    parts = (
        Module("model.embed_tokens", "wte"),
        Module(f"{_LAYER}.input_layernorm", "h.{}.ln_1"),
        *qkv,
        Module(f"{_ATTENTION}.dense", "h.{}.attn.out_proj", always_bias=True),
        Module(f"{_LAYER}.mlp.fc1", "h.{}.mlp.fc_in"),
        Module(f"{_LAYER}.mlp.fc2", "h.{}.mlp.fc_out"),
        Module("model.final_layernorm", "ln_f"),
        Module("lm_head", "lm_head", always_bias=True, tied="wte"),
    )
    return Recasting(
        source, "phi", "PhiForCausalLM", config, prefix="transformer.", parts=parts, note=note, dropped=_GPT2_BUFFERS
    )


NATIVE: tuple[Recasting, ...] = (
    _of_neox(
        "phi",
        "PhiForCausalLM",
        ("dense", "fc1", "fc2"),
        _phi_of_neox,
        folded=True,
        which="parallel residual (Pythia, GPT-NeoX-20B, Dolly)",
        when=lambda config: bool(config.use_parallel_residual),
        note="both LayerNorms are folded into the linear layers that read them",
    ),
    _of_neox(
        "starcoder2",
        "Starcoder2ForCausalLM",
        ("o_proj", "c_fc", "c_proj"),
        _starcoder2_of_neox,
        which="sequential, fully rotary (RedPajama-INCITE)",
        when=lambda config: not config.use_parallel_residual,
    ),
    _phi_of(
        "gptj",
        _phi_of_gptj,
        _linear({"query": _rotary, "key": _rotary, "value": None}, "h.{}.attn.{role}_proj", always_bias=True),
        "rotary rows are reordered from pairs to halves",
    ),
    _phi_of(
        "codegen",
        _phi_of_codegen,
        _linear({role: partial(_codegen, role) for role in _ROLES}, "h.{}.attn.qkv_proj", always_bias=True),
        "its 4 blocks are undone, rotary rows reordered from pairs to halves",
    ),
    Recasting(
        "gpt2",
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        _bigcode_of_gpt2,
        prefix="transformer.",
        which="Cerebras-GPT, DialoGPT, distilgpt2",
        groups="1 or H",
        dropped=_GPT2_BUFFERS,
        parts=(
            Module("transformer.h.{}.attn.c_attn", "h.{}.attn.c_attn", rows=_bigcode, transposed=True),
            *(
                Module(f"transformer.h.{{}}.{name}", f"h.{{}}.{name}", transposed=True)
                for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            ),
            *(Module(f"transformer.{name}", name) for name in ("wte", "wpe", "h.{}.ln_1", "h.{}.ln_2", "ln_f")),
            Module("lm_head", "lm_head", tied="wte"),
        ),
    ),
)
