"""How an architecture stores and counts its heads, and how they can be changed without changing the
model.

A symmetry is a change of the weights that leaves scores and output the same (docs/methods.md):

- Rotated dimensions: each pair is a complex number. A key may be multiplied by c, one for each head
  and frequency, and its queries by 1 / conj(c).
- Other dimensions of keys, with queries: any invertible matrix, and its inverse transpose.
- Values, with the columns of W_O: any invertible matrix, and its inverse.

This holds if only the rotary embedding stands between projections and scores. Norms and gates take
some of it away. The tests compare every entry with its transformers class.

An entry (`Family`, in `families/`) names the attention modules, the tensors below them that hold
key/value heads, with their layout, the config keys that count heads, and for every model type its
symmetry, or why it has none. Any other tensor of an attention module is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gqa.convert.heads.layouts import LayerHeads, Layout, Rule, Separate, Transposed
from gqa.convert.heads.rotary import Pairing, Rotary, rope_parameters, rotary_frequencies
from gqa.models.custom_code import listed_as

# KV heads of a result: of all layers (where types of layers differ, of the main one; the others in
# proportion), or of each. In names, `kv_heads` is this, of a whole model; `groups` is G, the number
# of KV heads of one layer of the result.
KVCounts = int | tuple[int, ...]


def heads_suffix(kv_heads: int) -> str:
    """What a number of KV heads adds to the name of a model: `-gqa4`."""
    return f"-gqa{kv_heads}"


def kv_heads_text(kv_heads: KVCounts) -> str:
    """`2`, or `1 to 3 (1.67 on average)`."""
    if isinstance(kv_heads, int):
        return str(kv_heads)
    average = sum(kv_heads) / len(kv_heads)
    return f"{min(kv_heads)} to {max(kv_heads)} ({average:.3g} on average)"


def embedding_multiplier(config: Any) -> float:
    """The usual factor of the embeddings."""
    return float(getattr(config, "embedding_multiplier", None) or 1.0)


@dataclass(frozen=True)
class Symmetry:
    """How heads can be changed without changing the model, and the tensors that change with them.

    Attributes:
        rotates: Whether heads have rotary embeddings, or a function of (config of the text part,
            layer) that says it.
        pairing: Which two dimensions make a rotated pair (`Rotary`).
        query: The name of W_Q, which absorbs the inverse map; None if fused with keys and values.
        output: The name of W_O, which absorbs it, too.
        stores_transposed: Whether the layer's matrices (W_Q, W_O, its MLP) are stored (in, out).
        norms: Possible names, below the layer, of the norm whose output attention reads; empty if
            it reads the residual stream.
        one_plus: Whether that norm's gain is 1 + the weight.
        embedding_factor: Function from the config of the text part to the factor of the embeddings.
        aligns_keys: Whether keys can be aligned; or the name of a config field: they cannot where
            that field is set (a norm before the scores).
        reorders_heads: Whether heads can be reordered; or the name of a config field: they cannot
            where that field is set (a head's index sets its ALiBi slope).
        per_query: Further tensors with a part for each query head, which moves with it when heads
            are regrouped.
        impossible_if: Why none of this holds (values are clipped, or gated by dimension), and for
            which configs.
    """

    rotates: bool | Callable[[Any, int], bool] = True
    pairing: Pairing = "half"
    query: str | None = "q_proj"
    output: str = "o_proj"
    stores_transposed: bool = False
    norms: tuple[str, ...] = ("input_layernorm",)
    one_plus: bool = False
    embedding_factor: Callable[[Any], float] = embedding_multiplier
    aligns_keys: bool | str = True
    reorders_heads: bool | str = True
    per_query: tuple[Rule, ...] = ()
    impossible_if: tuple[str, Callable[[Any], bool]] | None = None

    @property
    def query_side_rules(self) -> tuple[Rule, ...]:
        """Rules of W_Q, W_O and the tensors of each query head, which change with the heads."""
        query: Layout = Separate("query")
        output: Layout = Separate("output", axis=1)
        if self.stores_transposed:
            query = Transposed(query)
            output = Transposed(output)

        rules = (Rule(self.output, output), *self.per_query)
        if self.query is None:  # it is one of the rules of keys and values
            return rules
        return (Rule(self.query, query), *rules)

    def can_align_keys(self, config: Any) -> bool:
        """Whether keys can be aligned in a model with this config."""
        if isinstance(self.aligns_keys, bool):
            return self.aligns_keys
        return not getattr(config, self.aligns_keys, None)

    def can_reorder_heads(self, config: Any) -> bool:
        """Whether heads can be reordered in a model with this config."""
        if isinstance(self.reorders_heads, bool):
            return self.reorders_heads
        return not getattr(config, self.reorders_heads, None)

    def _has_rotary(self, config: Any, layer: int) -> bool:
        if isinstance(self.rotates, bool):
            return self.rotates
        return self.rotates(config, layer)

    def rotary(self, config: Any, layer: int, dim: int, length: int = 1) -> Rotary:
        """The rotary embedding of a layer.

        Args:
            config: The config of the text part.
            layer: The layer's number.
            dim: Numbers of a key of one head.
            length: Tokens of the text, by which dynamic RoPE chooses frequencies.

        Returns:
            Its frequencies are empty if keys are not aligned, for which alone they are needed; also
            if the config names no frequencies or no longest text. Then each pair of dimensions is
            merged alone, which needs no frequencies.

        Raises:
            ValueError: The share of rotated dimensions is impossible.
        """
        parameters, _ = rope_parameters(config, layer)
        if not self._has_rotary(config, layer) or parameters is None:
            return Rotary(0, self.pairing)

        share = parameters.get("partial_rotary_factor")
        # Type `proportional` rotates all pairs, those beyond the factor by zero.
        if share is None or parameters.get("rope_type") == "proportional":
            share = 1.0
        if not 0 <= share <= 1:
            raise ValueError(f"{share} of a head's dimensions are rotated, but 0 to 1 are possible")
        dims = int(dim * share)

        longest = getattr(config, "max_position_embeddings", None)
        if not longest or not self.can_align_keys(config):
            return Rotary(dims, self.pairing)
        frequencies, factor = rotary_frequencies(config, layer, dims, length)
        return Rotary(dims, self.pairing, tuple(frequencies), longest, factor)


Edits = dict[str, Any]

SEPARATE = (Rule("k_proj", Separate("key")), Rule("v_proj", Separate("value")))


def query_heads(config: Any) -> int:
    """H of transformers' config; of an encoder-decoder, of its decoder."""
    return int(getattr(config, "decoder_attention_heads", None) or config.num_attention_heads)


def uniform_heads(config: Any, kv: int | None = None) -> LayerHeads:
    """Heads by the usual fields of the `config` of one layer.

    `kv`: KV heads, if it counts them in another field.
    """
    query = query_heads(config)
    dim = getattr(config, "head_dim", None) or config.hidden_size // query
    if kv is None:
        kv = getattr(config, "num_key_value_heads", None)
    if kv is None:
        kv = query
    return LayerHeads(query, kv, dim, dim)


def layer_heads(config: Any, layer: int) -> LayerHeads:
    """Heads of one layer where counts may differ between layers (`per_layer_config` of
    transformers, or a list).
    """
    per_layer = getattr(config, "per_layer_config", None)
    if per_layer is not None and getattr(config, "is_heterogeneous", False):
        return uniform_heads(per_layer[layer])

    heads = uniform_heads(config)
    query_counts = getattr(config, "num_attention_heads_per_layer", None)
    if not query_counts:
        return heads
    return replace(heads, query=query_counts[layer])


@dataclass(frozen=True)
class Family:
    """Model types that store and count attention heads in the same way.

    Attributes:
        name: How heads are stored, in words.
        symmetries: Model type -> how its heads can be changed, or one sentence that says why they
            cannot.
        note: A remark for users, in the table of docs/models.md and in errors.
        attention: Names of the self-attention modules below a layer.
        cross_attention: Names of the cross-attention modules below a layer.
        rules: For tensors below these modules that depend on KV heads.
        query_side: Names of W_Q and W_O, where a model type has no symmetry that names them;
            `refined` trains them. Not all have to be there.
        unchanged_patterns: Patterns of other tensors, except those of the query side.
        kv_fields: Keys of config.json that count KV heads, dotted from the config of the text part.
            The first is always written; the others, if present, are scaled alike.
        layers_field: The attribute of transformers' config that counts layers.
        heads: Function from (config, layer) to its heads.
        edits: Function from (G, heads, config) to the keys to write instead of `kv_fields`; None if
            G is impossible.
        only_if: Values of config fields that distinguish families with the same model types.
        not_layerwise: Model type -> why models of it cannot be run layer by layer on text, if
            known.
    """

    name: str
    symmetries: Mapping[str, Symmetry | str]
    note: str = ""
    attention: tuple[str, ...] = ("self_attn",)
    cross_attention: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = SEPARATE
    query_side: tuple[str, ...] = ("q_proj", "o_proj", "out_proj", "dense")
    unchanged_patterns: tuple[str, ...] = ()
    kv_fields: tuple[str, ...] = ("num_key_value_heads",)
    layers_field: str = "num_hidden_layers"
    heads: Callable[[Any, int], LayerHeads] = layer_heads
    edits: Callable[[int, LayerHeads, Any], Edits | None] | None = None
    only_if: Mapping[str, Any] = field(default_factory=dict)
    not_layerwise: Mapping[str, str] = field(default_factory=dict)

    def matches(self, model_type: str, config: Any) -> bool:
        """Whether a model of this type and with this config is one of the family."""
        if listed_as(model_type) not in self.symmetries:
            return False
        return all(getattr(config, name, None) == value for name, value in self.only_if.items())

    def symmetry(self, config: Any) -> Symmetry | str:
        """How the heads of a model with this config can be changed, or why they cannot."""
        entry = self.symmetries[listed_as(config.model_type)]
        if isinstance(entry, Symmetry) and entry.impossible_if:
            reason, applies = entry.impossible_if
            if applies(config):
                return reason
        return entry

    def query_side_rules(self, config: Any) -> tuple[Rule, ...]:
        """Rules of the tensors beside keys and values that a method with maps changes.

        Where heads cannot be aligned these are W_Q and W_O, which `refined` trains and stores
        whole: a plain Layout makes a `Change` of them, whose place the trained tensor takes, but
        splits no heads.
        """
        symmetry = self.symmetry(config)
        if isinstance(symmetry, Symmetry):
            return symmetry.query_side_rules
        return tuple(Rule(name, Layout()) for name in self.query_side)
