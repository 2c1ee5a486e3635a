"""Maps from the weights alone: second moments are estimated, not measured on text.

No forward pass: the moments of keys, queries and values are W E[x x^T] W^T, with E[x x^T] from
`InputMoments`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.family import LayerHeads, Rotary, Symmetry
from gqa.convert.heads.modules import AttentionModule, Change, attention_modules, module_changes
from gqa.convert.merge.grouping import find_order
from gqa.convert.merge.input_moments import InputMoments, gram, norm_gain
from gqa.convert.merge.linear_algebra import GroupMaps
from gqa.convert.merge.moments import Moments, head_maps, heads_of
from gqa.convert.merge.procrustes import procrustes_key, procrustes_value
from gqa.convert.methods import HeadMaps, query_order
from gqa.convert.plan import Plan
from gqa.core.errors import RefusedError

# Heads by role, (n, w, K), projected so that R R^T are the second moments of what they compute.
Projected = dict[str, Tensor]


def from_weights(
    plan: Plan, search: bool = False, device: str = "cpu"
) -> Iterator[tuple[str, HeadMaps]]:
    """Yield path and maps of each attention module. Raises RefusedError if weights are NaN or Inf.

    `aligned`: closed form on estimated inputs; `procrustes`: rotate and average.

    Args:
        search: Find the groups with the least loss.
        device: For large products.
    """
    symmetry = plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    text = plan.config.text
    free_keys = symmetry.free_keys(text)
    guesses = plan.merging.traits.guesses

    modules = _changed_modules(plan, symmetry)
    inputs: InputMoments | None = None
    for number, (module, changes) in enumerate(modules):
        heads = changes[0].heads
        groups = changes[0].groups
        stored = _finite_heads(plan.checkpoint, module, changes)
        width = stored["key"].shape[-1]
        if inputs is None:
            inputs = InputMoments(plan.checkpoint, text, symmetry, width, guesses, device)

        # 1. Moments of the layer's inputs, and of what its heads make of them.
        inputs.enter(module)
        gain = norm_gain(plan.checkpoint, module, symmetry, width).float()
        merges = groups < heads.kv
        for role in ("query", "key", "value") if merges else ("value",):
            rows = inputs.project((stored[role] * gain).flatten(0, 1))
            stored[role] = rows.unflatten(0, stored[role].shape[:2])
        if number + 1 < len(modules):
            inputs.add(module, gain, stored["output"], stored["value"])
        if not merges:
            continue

        # Estimated moments do not show how frequencies correlate: merging each alone loses less.
        rotary = replace(symmetry.rotary(text, module.layer, heads.key_dim), frequencies=())

        # 2. The groups.
        order = None
        if search:
            w_o = stored["output"].double()
            order = find_order(_estimated(stored, heads, 1), w_o, groups, rotary, free_keys)
        if order:
            stored = _reordered(stored, order, heads)

        # 3. The maps.
        moments = _estimated(stored, heads, groups)
        if guesses:
            keys, values = _closed_form(moments, rotary, stored["output"])
        else:
            keys, values = _procrustes(moments, rotary, heads, groups)
        yield module.path, head_maps(heads, groups, keys if free_keys else (), values, order)


def _changed_modules(plan: Plan, symmetry: Symmetry) -> list[tuple[AttentionModule, list[Change]]]:
    """The attention modules with their changes, by layer, up to the last whose heads are merged."""
    modules = sorted(
        attention_modules(plan.checkpoint, plan.config), key=lambda module: module.layer
    )
    changed = [
        (module, module_changes(module, plan.config, plan.groups, symmetry.rules))
        for module in modules
    ]
    last = max(
        number
        for number, (_, changes) in enumerate(changed)
        if changes[0].groups < changes[0].heads.kv
    )
    return changed[: last + 1]


def _finite_heads(
    checkpoint: Checkpoint, module: AttentionModule, changes: list[Change]
) -> dict[str, Tensor]:
    """Stored heads of a module by role. Raises RefusedError if they contain NaN or Inf."""
    stored = heads_of(checkpoint, changes)
    if not all(bool(tensor.sum().isfinite()) for tensor in stored.values()):
        raise RefusedError(
            f"{module.path} of {checkpoint.name} contains NaN or Inf; its heads cannot be aligned"
        )
    return stored


def _reordered(stored: Projected, order: tuple[int, ...], heads: LayerHeads) -> Projected:
    """KV heads in this order, and query heads with them."""
    orders = {heads.kv: list(order), heads.query: query_order(order, heads.query)}
    return {role: tensor[orders[len(tensor)]] for role, tensor in stored.items()}


def _closed_form(
    moments: Moments, rotary: Rotary, w_o: Tensor
) -> tuple[list[GroupMaps], list[GroupMaps]]:
    """Maps of keys and values of each group.

    All query heads of a group are taken to attend alike.
    """
    attended = (group[None] for group in moments.values)
    return moments.shared_keys(rotary), moments.shared_values(attended, w_o)


def _procrustes(
    moments: Moments, rotary: Rotary, heads: LayerHeads, groups: int
) -> tuple[list[GroupMaps], list[GroupMaps]]:
    """Rotations of keys and values of each group."""
    merged = heads.kv // groups
    query_heads = heads.query // heads.kv
    keys = [procrustes_key(group, rotary, merged) for group in moments.keys]
    values = [procrustes_value(group, merged, query_heads) for group in moments.values]
    return keys, values


def _estimated(rows: Projected, heads: LayerHeads, groups: int) -> Moments:
    """Moments of each group from factors R (n, w, K) by role: E[h h^T] = R R^T."""

    def moments_of(role: str, parts: int) -> tuple[Tensor, Tensor]:
        """Second moments (parts, w, w) and means (parts, w) of heads split into `parts` of w
        rows.
        """
        factors = rows[role].unflatten(0, (parts, -1)).flatten(1, 2)  # (parts, w, K)
        means = factors.new_zeros(factors.shape[:2]).double()
        bias = rows.get(f"{role}.bias")
        if bias is not None:
            means = bias.reshape(parts, -1).double()
        centered = torch.stack([gram(part.double()) for part in factors])
        return centered + means[:, :, None] * means[:, None, :], means

    keys, key_means = moments_of("key", groups)
    queries, _ = moments_of("query", heads.query)
    values, _ = moments_of("value", groups)
    queries = queries.unflatten(0, (heads.kv, -1)).sum(1)
    not_measured = queries.new_zeros(heads.kv, 0)
    return Moments(keys, key_means, queries, values, not_measured)
