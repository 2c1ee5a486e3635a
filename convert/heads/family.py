"""The vocabulary of `families.py`: what is said of a way in which attention heads are stored and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gqa.convert.heads.layout import LayerHeads, Layout, Separate

# What an attention module attends to: the text before a token, another sequence, or the other sequence itself.
Kind = Literal["decoder-self", "cross", "encoder"]
Edits = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """One kind of tensor below an attention module: its name (without `.weight`/`.bias`) and its layout.

    `projection` tells keys and values themselves from what belongs to their heads (norms, convolutions, gates).
    `when` is a config field and the value it must have for the rule to hold.
    """

    tensor: str
    layout: Layout
    projection: bool = True
    when: tuple[str, Any] | None = None


SEPARATE = (Rule("k_proj", Separate("key")), Rule("v_proj", Separate("value")))
FULL_WIDTH_K_NORM = Rule("k_norm", Separate("key"), projection=False)
PER_HEAD_K_NORM = Rule("k_norm", Separate("key", width="one"), projection=False)

# Below an attention module, whatever the number of KV heads: per query head, or shared by all heads.
QUERY_SIDE = (
    "q_proj", "o_proj", "out_proj", "dense", "q_norm", "query_layernorm", "q_layernorm", "sinks", "gate_proj",
    "gate_bias", "g_proj",
)  # fmt: skip
# One vector of the head dimension, shared by all heads; the plan checks that it is that.
SHARED_KEY_SIDE = ("k_norm", "key_layernorm", "k_layernorm", "v_norm")
# Buffers that old versions of transformers stored; nothing reads them.
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "bias", "masked_bias")


def uniform_heads(config: Any) -> LayerHeads:
    """What nearly every config says: `config` is that of one layer."""
    query = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // query
    return LayerHeads(query, getattr(config, "num_key_value_heads", None) or query, dim, dim)


def layer_heads(config: Any, layer: int) -> LayerHeads:
    """Heads of one layer where counts may differ between layers (`per_layer_config` of transformers)."""
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is None or not getattr(config, "is_heterogeneous", False):
        return uniform_heads(config)
    return uniform_heads(per_layer[layer])


@dataclass(frozen=True)
class Family:
    """One way in which attention heads are stored and counted."""

    name: str
    model_types: tuple[str, ...]
    note: str = ""
    attention: tuple[str, ...] = ("self_attn",)
    cross_attention: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = SEPARATE
    unchanged: tuple[str, ...] = ()
    # Config fields that count KV heads, dotted below the owner: the first is always written, the others are kept in
    # proportion where the config has them.
    kv_fields: tuple[str, ...] = ("num_key_value_heads",)
    heads: Callable[[Any, int], LayerHeads] = layer_heads
    layers: Callable[[Any], int] = lambda config: int(config.num_hidden_layers)
    # Whether the KV heads that the config counts are those of a kind of attention; else it keeps all heads.
    grouped: Callable[[Any, Kind], bool] = lambda config, kind: kind != "encoder"
    when: Mapping[str, Any] = field(default_factory=dict)
    allows: Callable[[int, LayerHeads, Any], bool] = lambda groups, heads, config: True
    edits: Callable[[int, LayerHeads], Edits] | None = None
    # KV heads that transformers' cache holds, where that is not the number of KV heads.
    cached_heads: Callable[[LayerHeads], int] = lambda heads: heads.kv
    refusal: Callable[[Any], str | None] = lambda config: None
    # Whether a layer's values are its keys (no v_proj of its own).
    keys_only: Callable[[Any, int], bool] = lambda config, layer: False

    def matches(self, model_type: str, config: Any) -> bool:
        return model_type in self.model_types and all(
            getattr(config, name, None) == value for name, value in self.when.items()
        )
