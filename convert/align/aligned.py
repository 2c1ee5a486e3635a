"""Maps from the weights alone: what heads compute is guessed from their projections and what they are given.

Nothing is run: the moments of a layer's keys, queries and values are those that its projections give to inputs like
those that the layers before it write (`Stream`). `calibrated` measures instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.alignment import GroupMaps, procrustes_key, procrustes_value
from gqa.convert.align.grouping import find_order
from gqa.convert.align.moments import Moments, head_maps
from gqa.convert.align.stream import Stream, gram, norm_gain
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import Change, attention_modules
from gqa.convert.heads.symmetries import Rotary, Symmetry
from gqa.convert.maps import HeadMaps, query_order
from gqa.convert.plan import Plan

# Moments of a layer, (H, e, D) of W_O transposed, what is rotated -> what its groups share.
Solve = Callable[[Moments, Tensor, Rotary], tuple[list[GroupMaps], list[GroupMaps]]]


def procrustes(plan: Plan, search: bool = False, device: str = "cpu") -> Iterator[tuple[str, HeadMaps]]:
    """The maps of one attention module after another, of heads that are turned to agree and then averaged; `search` for
    the best groups. Raises RefusedError where weights are no numbers.
    """
    return _found(plan, search, _turned, guess=False, device=device)


def aligned(plan: Plan, search: bool = False, device: str = "cpu") -> Iterator[tuple[str, HeadMaps]]:
    """The same by the closed form, on what the weights make layers expect; large products are made on `device`."""
    return _found(plan, search, _closed, guess=True, device=device)


def _found(plan: Plan, search: bool, solve: Solve, guess: bool, device: str) -> Iterator[tuple[str, HeadMaps]]:
    """By `solve`, from a `guess` of what layers are given or from independent inputs."""
    checkpoint, text, symmetry, stream = plan.checkpoint, plan.config.text, plan.config.symmetry, None
    assert isinstance(symmetry, Symmetry)
    free_keys = symmetry.free_keys(text)
    modules = sorted(attention_modules(checkpoint, plan.config), key=lambda module: module.layer)
    changed = [(module, changes) for module in modules if (changes := plan.changes_of(module))]
    for module, changes in changed:
        heads, groups, stored = changes[0].heads, changes[0].groups, heads_of(checkpoint, changes)
        if not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
            raise RefusedError(f"{module.path} of {checkpoint.name} holds NaN or Inf; heads cannot be aligned by it")
        width = stored["key"].shape[-1]
        stream = stream or Stream(checkpoint, text, symmetry, width, guess, device)
        gain, inputs = norm_gain(checkpoint, module, symmetry, width), stream.given(module)
        if module is not changed[-1][0]:
            stream.add(module, gain, stored["output"], stored["value"])
        # Guessed moments do not say which slow frequencies could share: every frequency for itself loses less.
        rotary, order = replace(symmetry.rotary(text, module.layer, heads.key_dim), slow=()), None
        for role in ("query", "key", "value"):
            rows = inputs.through((stored[role] * gain).flatten(0, 1))
            stored[role] = rows.unflatten(0, stored[role].shape[:2])
        if search:
            order = find_order(_guessed(stored, heads, 1), stored["output"], groups, rotary, free_keys)
        if order:
            places = {heads.kv: list(order), heads.query: query_order(order, heads.query)}
            stored = {role: tensor[places[len(tensor)]] for role, tensor in stored.items()}
        keys, values = solve(_guessed(stored, heads, groups), stored["output"], rotary)
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
    return moments.shared_keys(rotary), moments.shared_values((of[None] for of in moments.values), w_o)


def _guessed(rows: dict[str, Tensor], heads: LayerHeads, groups: int) -> Moments:
    """Of the groups' heads: `rows` (n, w, K) of keys, queries and values whose products are the moments (`Inputs`)."""

    def of(role: str, parts: int) -> tuple[Tensor, Tensor]:
        """(parts, w, w) second moments and (parts, w) means of the heads of `role`, w rows of each part of them."""
        whole = rows[role].unflatten(0, (parts, -1)).flatten(1, 2)  # (parts, w, K)
        bias = rows.get(f"{role}.bias")
        means = whole.new_zeros(whole.shape[:2]).double() if bias is None else bias.reshape(parts, -1).double()
        return torch.stack([gram(part.double()) for part in whole]) + means[:, :, None] * means[:, None, :], means

    queries = of("query", heads.query)[0].unflatten(0, (heads.kv, -1)).sum(1)
    return Moments(*of("key", groups), queries, of("value", groups)[0])
