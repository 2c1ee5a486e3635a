"""Maps from the weights alone: what heads compute is guessed from their projections and what they are given.

Nothing is run: the moments of a layer's keys, queries and values are those that its projections give to inputs like
those that the layers before it write (`Stream`). `calibrated` measures instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.alignment import procrustes_key, procrustes_value, shared_key, shared_value
from gqa.convert.align.grouping import LayerMoments, find_order
from gqa.convert.align.stream import Stream, norm_gain
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import AttentionModule, Change, attention_modules, module_changes
from gqa.convert.heads.symmetries import Symmetry
from gqa.convert.maps import HeadMaps, query_order
from gqa.convert.plan import Plan, rules_beside


def weight_maps(plan: Plan, search: bool = False) -> Iterator[tuple[str, HeadMaps]]:
    """The maps of one attention module after another, by `procrustes` or `aligned`; `search` for the best groups."""
    symmetry = plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    beside = rules_beside(plan.config, plan.merging.method, plan.checkpoint.name)
    stream = None
    for module in sorted(attention_modules(plan.checkpoint, plan.config), key=lambda module: module.layer):
        if not (changes := module_changes(module, plan.config, plan.groups, beside)):
            continue
        stored = heads_of(plan.checkpoint, changes)
        if not all(bool(tensor.isfinite().all()) for tensor in stored.values()):
            raise RefusedError(
                f"{module.path} of {plan.checkpoint.name} holds NaN or Inf; heads cannot be aligned by it"
            )
        width = stored["key"].shape[-1]
        gain = norm_gain(plan.checkpoint, module, symmetry, width)
        given = torch.diag(gain.square())
        if plan.merging.method == "aligned":
            stream = stream or Stream(plan.checkpoint, plan.config.text, symmetry, width)
            given = gain[:, None] * stream.given(module) * gain
            stream.add(module, gain, stored)
        yield module.path, _module_maps(plan, module, changes[0].groups, stored, given, symmetry, search)


def heads_of(checkpoint: Checkpoint, changes: list[Change]) -> dict[str, Tensor]:
    """The stored heads of a module by role, (n, rows, D) float64, and biases (n, rows) as `role.bias`."""
    found: dict[str, Tensor] = {}
    for change in changes:
        if change.rule.projection:
            suffix = ".bias" if change.sources[0].name.endswith(".bias") else ""
            parts = change.split([checkpoint.read(spec) for spec in change.sources])
            found |= {part + suffix: heads.double() for part, heads in parts.items() if part != "whole"}
    return found


def _module_maps(
    plan: Plan,
    module: AttentionModule,
    groups: int,
    stored: dict[str, Tensor],
    given: Tensor,
    symmetry: Symmetry,
    search: bool,
) -> HeadMaps:
    """From the heads and the second moments (D, D) of what they are given."""
    heads = plan.config.heads(module.layer)
    m, repeat = heads.kv // groups, heads.query // heads.kv
    # Guessed moments do not say which slow frequencies could share: every frequency for itself loses less.
    rotary = replace(symmetry.rotary(plan.config.text, module.layer, heads.key_dim), slow=())
    free_keys = symmetry.free_keys(plan.config.text)
    order = None
    if search:
        order = find_order(_layer_moments(stored, given, heads), groups, rotary, free_keys)
        stored = _ordered(stored, order, heads)
    keys, key_means = _moments(stored, "key", given, groups)
    values, _ = _moments(stored, "value", given, groups)
    queries, _ = _moments(stored, "query", given, heads.query)
    queries = queries.unflatten(0, (heads.kv, repeat)).sum(1)
    owner = torch.arange(m).repeat_interleave(repeat)
    key, query, value, output = [], [], [], []
    for j in range(groups):
        of = slice(j * m * repeat, (j + 1) * m * repeat)
        if plan.merging.method == "procrustes":
            shared, seen = procrustes_key(keys[j], rotary, m), procrustes_value(values[j], m, repeat)
        else:
            shared = shared_key(keys[j], queries[j * m : (j + 1) * m], key_means[j], rotary)
            w_o = stored["output"][of]  # (m r, e, D)
            seen = shared_value(values[j].expand(m * repeat, -1, -1), values[j], w_o @ w_o.mT, owner)
        key.append(shared.key)
        query.append(shared.query.repeat_interleave(repeat, 0))
        value.append(seen.value)
        output += list(seen.output)
    maps = HeadMaps(torch.stack(key), torch.stack(value), torch.cat(query), torch.block_diag(*output), order)
    if free_keys:
        return maps
    return HeadMaps(torch.full((groups, m), 1 / m), maps.value, None, maps.output, order)


def _layer_moments(stored: dict[str, Tensor], given: Tensor, heads: LayerHeads) -> LayerMoments:
    """Of all heads of a layer."""
    repeat = heads.query // heads.kv
    keys, key_means = _moments(stored, "key", given, 1)
    values, _ = _moments(stored, "value", given, 1)
    queries, _ = _moments(stored, "query", given, heads.query)
    gains = (stored["output"] @ stored["output"].mT).unflatten(0, (heads.kv, repeat)).sum(1)
    return LayerMoments(keys[0], key_means[0], queries.unflatten(0, (heads.kv, repeat)).sum(1), values[0], gains)


def _ordered(stored: dict[str, Tensor], order: tuple[int, ...] | None, heads: LayerHeads) -> dict[str, Tensor]:
    if order is None:
        return stored
    rows = {heads.kv: list(order), heads.query: query_order(order, heads.query)}
    return {role: tensor[rows[len(tensor)]] for role, tensor in stored.items()}


def _moments(stored: dict[str, Tensor], role: str, given: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(groups, w, w) second moments and (groups, w) means of the heads of `role`, w rows of each group of heads."""
    weights = stored[role].unflatten(0, (groups, -1)).flatten(1, 2)  # (G, m d, D)
    bias = stored.get(f"{role}.bias")
    means = weights.new_zeros(weights.shape[:2]) if bias is None else bias.reshape(groups, -1)
    return weights @ given @ weights.mT + means[:, :, None] * means[:, None, :], means
