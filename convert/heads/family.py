r"""How an architecture stores and counts its attention heads, and how they can be changed without
changing the model.

      MHA  G = H            GQA  1 < G < H          MQA  G = 1
    q q q q q q q q       q q q q q q q q       q q q q q q q q      query head i reads KV head
    | | | | | | | |        \| |/   \| |/         \ \ \| |/ / /       i // (H // G): contiguous
    k k k k k k k k         k       k                 k              groups, in every runtime

A layout splits a stored tensor into its heads and joins heads to a tensor: `join` is the inverse of
`split`, also for heads that were merged or repeated in between. `shape` is the shape of what it
joins, which the plan states before any tensor is read.

Shape letters: H query heads, Hk key/value heads before, G after, d head dimension, D hidden size.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from gqa.core.errors import CorruptError
from gqa.models.custom_code import listed_as

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["query", "key", "value", "output"]
# What a tensor is split into: heads (n, rows, *rest) by role, or `whole`: a tensor without heads,
# as it is.
Part = Literal["query", "key", "value", "output", "whole"]
Parts = dict[Part, "Tensor"]
Shape = tuple[int, ...]
QUERY_ROLES = ("query", "output")
# G of a result: of all layers (where types of layers differ, of the main one; the others in
# proportion), or of each.
Groups = int | tuple[int, ...]


def heads_suffix(groups: int) -> str:
    """What a number of KV heads adds to the name of a model: `-gqa4`, and `-mqa` for one."""
    return "-mqa" if groups == 1 else f"-gqa{groups}"


def groups_text(groups: Groups) -> str:
    """`2`, or `1 to 3 (1.67 on average)`."""
    if isinstance(groups, int):
        return str(groups)
    return f"{min(groups)} to {max(groups)} ({sum(groups) / len(groups):.3g} on average)"


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one attention layer.

    Attributes:
        query: H, the number of query heads.
        kv: Hk, the number of KV heads.
        key_dim: Rows of one key head.
        value_dim: Rows of one value head.
        keys_only: Whether its values are its keys, so that none are stored.
    """

    query: int
    kv: int
    key_dim: int
    value_dim: int
    keys_only: bool = False

    def count(self, role: Role) -> int:
        """Number of heads of a role."""
        return self.query if role in QUERY_ROLES else self.kv

    def dim(self, role: Role) -> int:
        """Rows of one head of a role."""
        return self.value_dim if role in ("value", "output") else self.key_dim


class Layout:
    """Where the heads lie in one stored tensor.

    The base of all layouts, and itself that of a tensor without heads, which is handled whole.
    """

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        """The heads (n, rows, *rest) of each role.

        Raises CorruptError if the shape contradicts `heads`.
        """
        return {"whole": tensor}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        """The tensor with these heads.

        Keys and values may have more or fewer than the `heads` of the source.
        """
        return parts["whole"]

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        """The shape of the tensor with `groups` key and value heads, from that with `heads`."""
        return shape


def _require(actual: int, expected: int, meaning: str) -> None:
    """Raise CorruptError unless a tensor has as many rows as expected."""
    if actual != expected:
        raise CorruptError(f"has {actual} rows where the config asks for {expected} ({meaning})")


@dataclass(frozen=True)
class Separate(Layout):
    """All heads of one role, one after another on one axis: (Hk * d, *rest).

    A bias is (Hk * d,); on axis 1 it has no heads.

    Attributes:
        role: What the heads are.
        width: Rows of one head: its `dim`, or `one` (a norm (Hk, d), a scalar).
        axis: The axis with the heads.
    """

    role: Role
    width: Literal["dim", "one"] = "dim"
    axis: Literal[0, 1] = 0

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        if tensor.ndim <= self.axis:
            return {"whole": tensor}

        tensor = tensor.transpose(0, self.axis)
        count = heads.count(self.role)
        rows = heads.dim(self.role) if self.width == "dim" else 1
        _require(tensor.shape[0], count * rows, f"{count} {self.role} heads x {rows}")
        return {self.role: tensor.reshape(count, rows, *tensor.shape[1:])}

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        if "whole" in parts:
            return parts["whole"]
        return parts[self.role].flatten(0, 1).transpose(0, self.axis)

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        if self.role in QUERY_ROLES or len(shape) <= self.axis:
            return shape
        rows = heads.dim(self.role) if self.width == "dim" else 1
        return (*shape[: self.axis], groups * rows, *shape[self.axis + 1 :])


FusedOrder = Literal["stacked", "grouped"]


@dataclass(frozen=True)
class Fused(Layout):
    """Queries, keys and values in one tensor, in one of the orders of rows `FusedOrder`.

    Attributes:
        order: `stacked`: all of Q, then all of K, then all of V (Phi-3, DBRX). `grouped`: for each
            KV head its queries, its key, its value (Falcon, GPTBigCode): with Hk = H one [q, k, v]
            after the other, with Hk = 1 the same as `stacked`.
    """

    order: FusedOrder

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        dim = heads.key_dim
        rest = tensor.shape[1:]
        count = heads.query + 2 * heads.kv
        meaning = f"({heads.query} query + 2 x {heads.kv} KV heads) x {dim}"
        _require(tensor.shape[0], count * dim, meaning)

        if self.order == "stacked":
            per_head = tensor.reshape(count, dim, *rest)
            query, key, value = per_head.split([heads.query, heads.kv, heads.kv])
            return {"query": query, "key": key, "value": value}

        repeat = heads.query // heads.kv
        per_group = tensor.reshape(heads.kv, repeat + 2, dim, *rest)  # (Hk, r + 2, d, *rest)
        return {
            "query": per_group[:, :repeat].flatten(0, 1),
            "key": per_group[:, repeat],
            "value": per_group[:, repeat + 1],
        }

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        import torch

        query = parts["query"]
        key = parts["key"]
        value = parts["value"]
        if self.order == "stacked":
            return torch.cat([query, key, value]).flatten(0, 1)

        assert self.order == "grouped"
        per_group = query.unflatten(0, (len(key), -1))  # (G, r, d, *rest)
        return torch.cat([per_group, key[:, None], value[:, None]], dim=1).flatten(0, 2)

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        return ((heads.query + 2 * groups) * heads.key_dim, *shape[1:])


@dataclass(frozen=True)
class Conv1D(Layout):
    """The weight of transformers' Conv1D, stored (in, out). A bias has one axis, so nothing is
    swapped.

    Attributes:
        layout: The layout of the tensor with its axes swapped.
    """

    layout: Layout

    def split(self, tensor: Tensor, heads: LayerHeads) -> Parts:
        return self.layout.split(self._swapped(tensor), heads)

    def join(self, parts: Mapping[Part, Tensor], heads: LayerHeads) -> Tensor:
        return self._swapped(self.layout.join(parts, heads))

    @staticmethod
    def _swapped(tensor: Tensor) -> Tensor:
        return tensor.T if tensor.ndim == 2 else tensor

    def shape(self, shape: Shape, heads: LayerHeads, groups: int) -> Shape:
        if len(shape) != 2:
            return self.layout.shape(shape, heads, groups)
        return self.layout.shape(shape[::-1], heads, groups)[::-1]


@dataclass(frozen=True)
class Rule:
    """One kind of tensor below an attention module.

    Attributes:
        tensor: Its name, without `.weight` or `.bias`.
        layout: Where the heads lie in it.
        projection: Whether it is the weight or bias of a linear layer that makes or reads heads
            (W_Q, W_K, W_V, W_O), and not something that belongs to heads (norms, convolutions,
            gates). Only projections are merged by maps.
        only_if: A config field, and the value for which the rule holds; None if it always does.
    """

    tensor: str
    layout: Layout
    projection: bool = True
    only_if: tuple[str, Any] | None = None

    def matches(self, tail: str, config: Any) -> bool:
        """Whether the rule applies to the tensor `tail`, its name below the module, of a model with
        this config.
        """
        if self.only_if is not None:
            key, value = self.only_if
            if getattr(config, key, None) != value:
                return False
        return tail in (self.tensor, f"{self.tensor}.weight", f"{self.tensor}.bias")


Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """Which of a head's dimensions are rotated.

    Attributes:
        dims: n, the number of dimensions that are rotated: the first ones.
        pairing: Whether their pairs are (f, f + n / 2) (`half`) or (2 f, 2 f + 1) (`interleaved`).
        frequencies: Radians per position of every pair; empty if unknown.
        longest: Positions of the longest text.
    """

    dims: int
    pairing: Pairing = "half"
    frequencies: tuple[float, ...] = ()
    longest: int = 1


def at_layer(listed: Sequence[Any], layer: int) -> Any:
    """What a list of the config says of a layer.

    Layers beyond it, which predict further tokens, are like the last.
    """
    return listed[min(layer, len(listed) - 1)]


def _rope_parameters(config: Any, layer: int) -> tuple[dict[str, Any] | None, str | None]:
    """The layer's `rope_parameters`, and its type where they differ by type.

    None for a type that has none.
    """
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    kind = at_layer(kinds, layer) if kinds else None
    if kind in parameters:
        return parameters[kind], kind
    return parameters, None


def _frequencies(config: Any, layer: int, dims: int, length: int) -> list[float]:
    """Radians per position of every pair; empty if they are unknown."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, kind = _rope_parameters(config, layer)
    parameters = parameters or {}
    initialize = ROPE_INIT_FUNCTIONS.get(parameters.get("rope_type"))
    if initialize:
        tensor, *_ = initialize(config, seq_len=length, layer_type=kind)
        frequencies: list[float] = tensor.tolist()
        if 2 * len(frequencies) != dims:
            return []
        return frequencies

    base = parameters.get("rope_theta")
    if not base:
        return []
    return [base ** (-2 * pair / dims) for pair in range(dims // 2)]


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
            query = Conv1D(query)
            output = Conv1D(output)

        rules = (Rule(self.output, output), *self.per_query)
        return rules if self.query is None else (Rule(self.query, query), *rules)

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
        """RoPE of a layer with heads of `dim` numbers.

        Frequencies are empty if keys are not aligned, for which alone they are needed. `length`:
        tokens of the text, by which dynamic RoPE chooses them. Raises ValueError for an impossible
        share of rotated dimensions.
        """
        parameters, _ = _rope_parameters(config, layer)
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
        frequencies = tuple(_frequencies(config, layer, dims, length))
        return Rotary(dims, self.pairing, frequencies, longest)


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
        unchanged_patterns: Patterns of other tensors, except those that a symmetry names.
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
