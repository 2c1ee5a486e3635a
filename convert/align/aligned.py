"""Maps from the weights alone: what heads compute is guessed from their projections and what they are given.

Nothing is run: the moments of a layer's keys, queries and values are those that its projections give to inputs like
those that the layers before it write (`Stream`). `calibrated` measures instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.alignment import GroupMaps, procrustes_key, procrustes_value
from gqa.convert.align.grouping import find_order
from gqa.convert.align.moments import Moments, head_maps
from gqa.convert.align.stream import Stream, norm_gain
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import Change, attention_modules
from gqa.convert.heads.symmetries import Rotary, Symmetry
from gqa.convert.maps import HeadMaps, query_order
from gqa.convert.plan import Plan

# Moments of a layer, (H, e, D) of W_O transposed, what is rotated -> what its groups share.
Solve = Callable[[Moments, Tensor, Rotary], tuple[list[GroupMaps], list[GroupMaps]]]


def procrustes(plan: Plan, search: bool = False) -> Iterator[tuple[str, HeadMaps]]:
    """The maps of one attention module after another, of heads that are turned to agree and then averaged; `search` for
    the best groups. Raises RefusedError where weights are no numbers.
    """
    return _found(plan, search, _turned, guess=False)


def aligned(plan: Plan, search: bool = False) -> Iterator[tuple[str, HeadMaps]]:
    """The same by the closed form, on what the weights make layers expect."""
    return _found(plan, search, _closed, guess=True)


def _found(plan: Plan, search: bool, solve: Solve, guess: bool) -> Iterator[tuple[str, HeadMaps]]:
    """By `solve`, from a `guess` of what layers are given or from independent inputs."""
    checkpoint, text, symmetry, stream = plan.checkpoint, plan.config.text, plan.config.symmetry, None
    assert isinstance(symmetry, Symmetry)
    free_keys = symmetry.free_keys(text)
    for module in sorted(attention_modules(checkpoint, plan.config), key=lambda module: module.layer):
        if not (changes := plan.changes_of(module)):
            continue
        heads, groups, stored = changes[0].heads, changes[0].groups, heads_of(checkpoint, changes)
        if not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
            raise RefusedError(f"{module.path} of {checkpoint.name} holds NaN or Inf; heads cannot be aligned by it")
        width = stored["key"].shape[-1]
        stream = stream or Stream(checkpoint, text, symmetry, width, guess)
        gain = norm_gain(checkpoint, module, symmetry, width)
        given = gain[:, None] * stream.given(module) * gain
        stream.add(module, gain, stored)
        # Guessed moments do not say which slow frequencies could share: every frequency for itself loses less.
        rotary, order = replace(symmetry.rotary(text, module.layer, heads.key_dim), slow=()), None
        if search:
            order = find_order(_guessed(stored, given, heads, 1), stored["output"], groups, rotary, free_keys)
        if order:
            rows = {heads.kv: list(order), heads.query: query_order(order, heads.query)}
            stored = {role: tensor[rows[len(tensor)]] for role, tensor in stored.items()}
        keys, values = solve(_guessed(stored, given, heads, groups), stored["output"], rotary)
        yield module.path, head_maps(heads, groups, keys if free_keys else (), values, order)


def heads_of(checkpoint: Checkpoint, changes: list[Change]) -> dict[str, Tensor]:
    """The stored heads of a module by role, (n, rows, D) float64, and biases (n, rows) as `role.bias`."""
    found: dict[str, Tensor] = {}
    for change in changes:
        if change.rule.projection:
            suffix = ".bias" if change.sources[0].name.endswith(".bias") else ""
            parts = change.split([checkpoint.read(spec) for spec in change.sources])
            found |= {part + suffix: heads.double() for part, heads in parts.items() if part != "whole"}
    return found


def _turned(moments: Moments, w_o: Tensor, rotary: Rotary) -> tuple[list[GroupMaps], list[GroupMaps]]:
    m, repeat = len(moments.queries) // len(moments.keys), len(w_o) // len(moments.queries)
    keys = [procrustes_key(of, rotary, m) for of in moments.keys]
    return keys, [procrustes_value(of, m, repeat) for of in moments.values]


def _closed(moments: Moments, w_o: Tensor, rotary: Rotary) -> tuple[list[GroupMaps], list[GroupMaps]]:
    each = len(w_o) // len(moments.values)  # query heads of a group see the same
    return moments.shared_keys(rotary), moments.shared_values((of.expand(each, -1, -1) for of in moments.values), w_o)


def _guessed(stored: dict[str, Tensor], given: Tensor, heads: LayerHeads, groups: int) -> Moments:
    """Of the groups' heads on inputs of the moments `given` (D, D)."""

    def of(role: str, parts: int) -> tuple[Tensor, Tensor]:
        """(parts, w, w) second moments and (parts, w) means of the heads of `role`, w rows of each part of them."""
        weights = stored[role].unflatten(0, (parts, -1)).flatten(1, 2)  # (parts, w, D)
        bias = stored.get(f"{role}.bias")
        means = weights.new_zeros(weights.shape[:2]) if bias is None else bias.reshape(parts, -1)
        return weights @ given @ weights.mT + means[:, :, None] * means[:, None, :], means

    queries = of("query", heads.query)[0].unflatten(0, (heads.kv, -1)).sum(1)
    return Moments(*of("key", groups), queries, of("value", groups)[0])
