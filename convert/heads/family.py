"""What is said of an architecture: how its attention heads are stored, counted, and free to change.

One entry (`Family`, in `families/`) says which modules are attention, which stored tensors below them hold key/value
heads and how they lie, where the config counts heads, and of every model type its symmetry, or why it has none. What it
does not name inside an attention module is an error, not a guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gqa.checkpoint.custom_code import listed_as
from gqa.convert.heads.layout import LayerHeads, Rule, Separate
from gqa.convert.heads.symmetries import Symmetry

Edits = dict[str, Any]

SEPARATE = (Rule("k_proj", Separate("key")), Rule("v_proj", Separate("value")))

# Below an attention module, whatever the number of KV heads: per query head, or shared by all heads.
QUERY_SIDE = (
    "q_proj", "o_proj", "out_proj", "dense", "q_norm", "query_layernorm", "q_layernorm", "sinks", "gate_proj",
    "gate_bias", "g_proj",
)  # fmt: skip
# One vector of the head dimension, shared by all heads; the plan checks that it is that.
SHARED_KEY_SIDE = ("k_norm", "key_layernorm", "k_layernorm", "v_norm")
# Buffers that old versions of transformers stored; nothing reads them.
BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "bias", "masked_bias")


def query_heads(config: Any) -> int:
    """H of transformers' config; of an encoder-decoder, of its decoder."""
    return int(getattr(config, "decoder_attention_heads", None) or config.num_attention_heads)


def uniform_heads(config: Any, kv: int | None = None) -> LayerHeads:
    """What nearly every config says: `config` is that of one layer; `kv` where it counts KV heads in another field."""
    query = query_heads(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // query
    return LayerHeads(query, kv or getattr(config, "num_key_value_heads", None) or query, dim, dim)


def layer_heads(config: Any, layer: int) -> LayerHeads:
    """Heads of one layer where counts may differ between layers (`per_layer_config` of transformers)."""
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is None or not getattr(config, "is_heterogeneous", False):
        return uniform_heads(config)
    return uniform_heads(per_layer[layer])


@dataclass(frozen=True)
class Family:
    """One way in which attention heads are stored and counted, and the model types that do so.

    symmetries: Model type -> how its heads can be changed, or one sentence why they cannot.
    note: What a user should know, in words.
    attention, cross_attention: Names below a layer of its attention modules.
    rules: Of the tensors below them that depend on KV heads; `unchanged` are others (patterns), that do not, besides
        those that a symmetry names.
    kv_fields: Keys of config.json that count KV heads, dotted below the owner: the first is always written, the others
        are kept in proportion where the config has them.
    layers: The attribute of transformers' config that counts layers; `heads` of (config, layer) are those of one.
    edits: Of (G, heads, config), what is written instead of `kv_fields`, or None where there cannot be G heads.
    when: Values of config fields that tell it from other families of its model types.
    refusal: Why a config of these types cannot be converted, or None.
    not_layerwise: Model type -> why models of it cannot be run layer by layer on text, where that is known.
    caches_all_heads: Whether transformers' cache holds all H heads.
    """

    name: str
    symmetries: Mapping[str, Symmetry | str]
    note: str = ""
    attention: tuple[str, ...] = ("self_attn",)
    cross_attention: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = SEPARATE
    unchanged: tuple[str, ...] = ()
    kv_fields: tuple[str, ...] = ("num_key_value_heads",)
    layers: str = "num_hidden_layers"
    heads: Callable[[Any, int], LayerHeads] = layer_heads
    edits: Callable[[int, LayerHeads, Any], Edits | None] | None = None
    when: Mapping[str, Any] = field(default_factory=dict)
    refusal: Callable[[Any], str | None] = lambda config: None
    not_layerwise: Mapping[str, str] = field(default_factory=dict)
    caches_all_heads: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        return tuple(self.symmetries)

    def matches(self, model_type: str, config: Any) -> bool:
        return listed_as(model_type) in self.symmetries and all(
            getattr(config, name, None) == value for name, value in self.when.items()
        )

    def symmetry(self, config: Any) -> Symmetry | str:
        """How the heads of a model with this config can be changed, or why they cannot."""
        entry = self.symmetries[listed_as(config.model_type)]
        exception = entry.unless if isinstance(entry, Symmetry) else None
        return exception[0] if exception and exception[1](config) else entry
