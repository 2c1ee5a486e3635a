"""Rotary embeddings of a layer, by its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """Which of a head's dimensions are rotated.

    Attributes:
        dims: n, the number of dimensions that are rotated: the first ones.
        pairing: Whether their pairs are (f, f + n / 2) (`half`) or (2 f, 2 f + 1) (`interleaved`).
        frequencies: Radians per position of every pair; empty if unknown.
        longest: Positions of the longest text.
        factor: What the rotated dimensions are multiplied by when they are rotated (the attention
            factor of YaRN and LongRoPE).
    """

    dims: int
    pairing: Pairing = "half"
    frequencies: tuple[float, ...] = ()
    longest: int = 1
    factor: float = 1.0


def unrotated(rotary: Rotary) -> Rotary:
    """The same without rotation, as in cross-attention, whose keys have no positions."""
    return replace(rotary, dims=0, frequencies=(), factor=1.0)


def at_layer(listed: Sequence[Any], layer: int) -> Any:
    """What a list of the config says of a layer.

    Layers beyond it, which predict further tokens, are like the last.
    """
    return listed[min(layer, len(listed) - 1)]


def rope_parameters(config: Any, layer: int) -> tuple[dict[str, Any] | None, str | None]:
    """The layer's `rope_parameters`, and its type where they differ by type.

    None for a type that has none.
    """
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    kind = at_layer(kinds, layer) if kinds else None
    if kind in parameters:
        return parameters[kind], kind
    return parameters, None


def rotary_frequencies(
    config: Any, layer: int, dims: int, length: int
) -> tuple[list[float], float]:
    """Radians per position of every pair, empty if they are unknown; and the factor of rotated
    dimensions (see `Rotary`).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters, kind = rope_parameters(config, layer)
    parameters = parameters or {}
    initialize = ROPE_INIT_FUNCTIONS.get(parameters.get("rope_type"))
    if initialize:
        tensor, factor = initialize(config, seq_len=length, layer_type=kind)
        frequencies: list[float] = tensor.tolist()
        if 2 * len(frequencies) != dims:
            return [], 1.0
        return frequencies, float(factor)

    base = parameters.get("rope_theta")
    if not base:
        return [], 1.0
    return [base ** (-2 * pair / dims) for pair in range(dims // 2)], 1.0
