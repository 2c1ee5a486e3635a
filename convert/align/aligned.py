"""Maps from the weights alone: what heads compute is guessed from their projections and what they are given.

Nothing is run: the moments of a layer's keys, queries and values are those that its projections give to inputs like
those that the layers before it write (`Stream`). `calibrated` measures instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.alignment import KeyMaps, ValueMaps, procrustes_key, procrustes_value
from gqa.convert.align.grouping import find_order
from gqa.convert.align.moments import Moments, head_maps
from gqa.convert.align.stream import Stream, norm_gain
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import AttentionModule, Change, attention_modules
from gqa.convert.heads.symmetries import Rotary, Symmetry
from gqa.convert.maps import HeadMaps, query_order
from gqa.convert.plan import Plan

# Moments of a layer, (H, e, D) of W_O transposed, what is rotated -> what its groups share.
Solve = Callable[[Moments, Tensor, Rotary], tuple[list[KeyMaps], list[ValueMaps]]]


def procrustes(plan: Plan, search: bool = False) -> Iterator[tuple[str, HeadMaps]]:
    """The maps of one attention module after another, of heads that are turned to agree and then averaged; `search` for
    the best groups. Raises RefusedError where weights are no numbers.
    """
    for layer in _layers(plan):
        yield layer.module.path, layer.maps(torch.diag(layer.gain.square()), search, _turned)


def aligned(plan: Plan, search: bool = False) -> Iterator[tuple[str, HeadMaps]]:
    """The same by the closed form, on what the weights make layers expect."""
    stream = None
    for layer in _layers(plan):
        stream = stream or Stream(plan.checkpoint, plan.config.text, layer.symmetry, len(layer.gain))
        given = layer.gain[:, None] * stream.given(layer.module) * layer.gain
        stream.add(layer.module, layer.gain, layer.stored)
        yield layer.module.path, layer.maps(given, search, _closed)


def heads_of(checkpoint: Checkpoint, changes: list[Change]) -> dict[str, Tensor]:
    """The stored heads of a module by role, (n, rows, D) float64, and biases (n, rows) as `role.bias`."""
    found: dict[str, Tensor] = {}
    for change in changes:
        if change.rule.projection:
            suffix = ".bias" if change.sources[0].name.endswith(".bias") else ""
            parts = change.split([checkpoint.read(spec) for spec in change.sources])
            found |= {part + suffix: heads.double() for part, heads in parts.items() if part != "whole"}
    return found


@dataclass(frozen=True)
class _Layer:
    """The attention module of a layer whose heads are merged, as `heads_of` reads it; `gain` (D,) of its norm."""

    plan: Plan
    module: AttentionModule
    groups: int
    symmetry: Symmetry
    stored: dict[str, Tensor]
    gain: Tensor

    def maps(self, given: Tensor, search: bool, solve: Solve) -> HeadMaps:
        """From the second moments (D, D) of what the module is given."""
        heads, text, stored = self.plan.config.heads(self.module.layer), self.plan.config.text, self.stored
        # Guessed moments do not say which slow frequencies could share: every frequency for itself loses less.
        rotary = replace(self.symmetry.rotary(text, self.module.layer, heads.key_dim), slow=())
        free_keys, order = self.symmetry.free_keys(text), None
        if search:
            guessed = _guessed(stored, given, heads, 1)
            order = find_order(guessed, stored["output"], self.groups, rotary, free_keys)
        if order:
            rows = {heads.kv: list(order), heads.query: query_order(order, heads.query)}
            stored = {role: tensor[rows[len(tensor)]] for role, tensor in stored.items()}
        keys, values = solve(_guessed(stored, given, heads, self.groups), stored["output"], rotary)
        return head_maps(heads, self.groups, keys if free_keys else (), values, order)


def _layers(plan: Plan) -> Iterator[_Layer]:
    symmetry = plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    for module in sorted(attention_modules(plan.checkpoint, plan.config), key=lambda module: module.layer):
        if not (changes := plan.changes_of(module)):
            continue
        stored = heads_of(plan.checkpoint, changes)
        if not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
            raise RefusedError(
                f"{module.path} of {plan.checkpoint.name} holds NaN or Inf; heads cannot be aligned by it"
            )
        gain = norm_gain(plan.checkpoint, module, symmetry, stored["key"].shape[-1])
        yield _Layer(plan, module, changes[0].groups, symmetry, stored, gain)


def _turned(moments: Moments, w_o: Tensor, rotary: Rotary) -> tuple[list[KeyMaps], list[ValueMaps]]:
    m, repeat = len(moments.queries) // len(moments.keys), len(w_o) // len(moments.queries)
    keys = [procrustes_key(of, rotary, m) for of in moments.keys]
    return keys, [procrustes_value(of, m, repeat) for of in moments.values]


def _closed(moments: Moments, w_o: Tensor, rotary: Rotary) -> tuple[list[KeyMaps], list[ValueMaps]]:
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
