"""What an attention layer lets be changed without changing the model: which families' heads can be aligned, and how.

Heads of a trained model live in bases of their own. Where nothing but the rotary embedding stands between the
projections and the scores, keys may be multiplied by a complex number per head and frequency and queries by the inverse
of its conjugate; dimensions that are not rotated, and values with the columns of W_O, by any invertible matrix
(docs/methods.md). What stands in between (norms, gates) takes some of that away. Every entry is held against its
transformers class by the tests: scrambled within the symmetry the logits stay, and aligning undoes it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from gqa.convert.heads.layout import Conv1D, Layout, Rule, Separate

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """Which of a head's dimensions are rotated: the first `dims` = n, in pairs (f, f + n / 2) (`half`) or
    (2 f, 2 f + 1) (`interleaved`). `slow`: radians a position of the last pairs, those that turn by less than half a
    circle over the longest text.
    """

    dims: int
    pairing: Pairing = "half"
    slow: tuple[float, ...] = ()


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
        kind_of_layer = _at(config.layer_types, layer) if parameters is not config.rope_parameters else None
        speeds: list[float] = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length, layer_type=kind_of_layer)[0].tolist()
        return speeds if 2 * len(speeds) == dims else []
    return [base ** (-2 * pair / dims) for pair in range(dims // 2)] if base else []


def all_layers(config: Any, layer: int, dim: int) -> int:
    """What `rope_parameters` says: all dimensions, or the first part of them; none where a type of layers has none."""
    parameters = _parameters(config, layer)
    if parameters is None:
        return 0
    if parameters.get("rope_type") == "proportional":  # frequencies beyond the fraction are zero, the pairs stay
        return dim
    return int(dim * (parameters.get("partial_rotary_factor") or 1.0))


def listed_layers(config: Any, layer: int, dim: int) -> int:
    """`no_rope_layers` is 1 where a layer rotates."""
    listed = getattr(config, "no_rope_layers", None)
    return all_layers(config, layer, dim) if not listed or _at(listed, layer) else 0


def sliding_layers(config: Any, layer: int, dim: int) -> int:
    """Only layers with a sliding window rotate."""
    return all_layers(config, layer, dim) if _at(config.layer_types, layer) == "sliding_attention" else 0


def if_rope(config: Any, layer: int, dim: int) -> int:
    """What kind of positions there are is a field."""
    return all_layers(config, layer, dim) if config.position_embedding_type == "rope" else 0


def unless_alibi(config: Any, layer: int, dim: int) -> int:
    return 0 if config.alibi else dim


def no_layer(config: Any, layer: int, dim: int) -> int:
    return 0


def listed_scale(config: Any) -> float:
    """What a config says that embeddings are multiplied by; 1 where it says nothing."""
    return float(getattr(config, "embedding_multiplier", None) or 1.0)


def root_of_width(config: Any) -> float:
    return math.sqrt(config.hidden_size)


@dataclass(frozen=True)
class Symmetry:
    """One way in which heads can be changed, and the tensors that a change of them touches.

    rotated: Of (config of the text part, layer, d), how many dimensions of a head are rotated.
    query, output: Names of W_Q (None where it is fused with keys and values) and W_O, which absorb what is done to
        those. `transposed` where they are stored (in, out).
    norms: Names below the layer, one of which is the norm whose output attention reads; none where it reads the
        residual stream as it is. `one_plus` where the norm's gain is 1 + the weight.
    embedded: Of the config of the text part, what embeddings are multiplied by at the beginning of the stream.
    keys: Whether keys can be aligned, or the config field which, where it is set, forbids it: a norm between the
        projections and the scores.
    places: Whether heads can change places, or the field which forbids it: ALiBi and relative positions go by number.
    per_query: Further tensors that belong to query heads, and so move with them when heads are regrouped.
    unless: Why none of this is true (what clips values or gates each of their dimensions), and of which configs.
    """

    rotated: Callable[[Any, int, int], int] = all_layers
    pairing: Pairing = "half"
    query: str | None = "q_proj"
    output: str = "o_proj"
    transposed: bool = False
    norms: tuple[str, ...] = ("input_layernorm",)
    one_plus: bool = False
    embedded: Callable[[Any], float] = listed_scale
    keys: bool | str = True
    places: bool | str = True
    per_query: tuple[Rule, ...] = ()
    unless: tuple[str, Callable[[Any], bool]] | None = None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Of the tensors beside keys and values that a change of heads touches."""
        columns: Layout = Separate("output", axis=1)
        output = Rule(self.output, Conv1D(columns) if self.transposed else columns)
        return (*([Rule(self.query, Separate("query"))] if self.query else []), output, *self.per_query)

    def free_keys(self, config: Any) -> bool:
        return self.keys if isinstance(self.keys, bool) else not getattr(config, self.keys, None)

    def regroups(self, config: Any) -> bool:
        return self.places if isinstance(self.places, bool) else not getattr(config, self.places, None)

    def rotary(self, config: Any, layer: int, dim: int, length: int = 1) -> Rotary:
        """Of heads (dim) on a text of `length` tokens, by which some embeddings choose their speeds."""
        dims = self.rotated(config, layer, dim)
        longest = getattr(config, "max_position_embeddings", None)
        if not longest or not self.free_keys(config):
            return Rotary(dims, self.pairing)
        speeds = _speeds(config, layer, dims, length)
        slow = [*takewhile(lambda speed: speed * longest < math.pi, reversed(speeds))]
        return Rotary(dims, self.pairing, tuple(reversed(slow)))
