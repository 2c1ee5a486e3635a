"""Maps from the weights alone: second moments of keys, queries and values are estimated, not measured on a text.

Nothing runs: the moments are those of the layer's projections applied to inputs like those that the layers before it
write (`Stream`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.layout import LayerHeads
from gqa.convert.heads.modules import Change, attention_modules, module_changes
from gqa.convert.heads.symmetries import Symmetry
from gqa.convert.maps import HeadMaps, query_order
from gqa.convert.merge.alignment import procrustes_key, procrustes_value
from gqa.convert.merge.grouping import find_order
from gqa.convert.merge.moments import Moments, head_maps
from gqa.convert.merge.stream import Stream, gram, norm_gain
from gqa.convert.plan import Plan


def from_weights(plan: Plan, search: bool = False, device: str = "cpu") -> Iterator[tuple[str, HeadMaps]]:
    """Yield path and maps of one attention module after another. A method that estimates the inputs of layers uses the
    closed form on them; another rotates heads onto each other, for independent inputs, and averages them. Raises
    RefusedError where weights are NaN or Inf.

    search: For the groups that lose least. device: Of large products.
    """
    checkpoint, text, symmetry = plan.checkpoint, plan.config.text, plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    guess, free_keys, stream = plan.merging.how.guesses, symmetry.free_keys(text), None
    modules = sorted(attention_modules(checkpoint, plan.config), key=lambda module: module.layer)
    changed = [(m, module_changes(m, plan.config, plan.groups, symmetry.rules)) for m in modules]
    last = max(number for number, (_, changes) in enumerate(changed) if changes[0].merges)
    for number, (module, changes) in enumerate(changed[: last + 1]):
        heads, groups, stored = changes[0].heads, changes[0].groups, heads_of(checkpoint, changes)
        if not all(bool(tensor.sum().isfinite()) for tensor in stored.values()):
            raise RefusedError(f"{module.path} of {checkpoint.name} holds NaN or Inf; heads cannot be aligned by it")
        width = stored["key"].shape[-1]
        stream = stream or Stream(checkpoint, text, symmetry, width, guess, device)
        gain, inputs = norm_gain(checkpoint, module, symmetry, width).float(), stream.given(module)
        for role in ("query", "key", "value") if changes[0].merges else ("value",):
            rows = inputs.through((stored[role] * gain).flatten(0, 1))
            stored[role] = rows.unflatten(0, stored[role].shape[:2])
        if number < last:
            stream.add(module, gain, stored["output"], stored["value"])
        if not changes[0].merges:
            continue
        # Estimated moments do not tell which slow frequencies could share a subspace: one by one they lose less.
        rotary, order = replace(symmetry.rotary(text, module.layer, heads.key_dim), slow=()), None
        if search:
            order = find_order(_estimated(stored, heads, 1), stored["output"].double(), groups, rotary, free_keys)
        if order:
            orders = {heads.kv: list(order), heads.query: query_order(order, heads.query)}
            stored = {role: tensor[orders[len(tensor)]] for role, tensor in stored.items()}
        moments, m = _estimated(stored, heads, groups), heads.kv // groups
        if guess:
            keys = moments.shared_keys(rotary)
            values = moments.shared_values((of[None] for of in moments.values), stored["output"])
        else:
            keys = [procrustes_key(of, rotary, m) for of in moments.keys]
            values = [procrustes_value(of, m, heads.query // heads.kv) for of in moments.values]
        yield module.path, head_maps(heads, groups, keys if free_keys else (), values, order)


def heads_of(checkpoint: Checkpoint, changes: list[Change]) -> dict[str, Tensor]:
    """The stored heads of a module by role, (n, rows, D) float32, and biases (n, rows) as `role.bias`."""
    by_role: dict[str, Tensor] = {}
    for change in changes:
        if change.rule.projection:
            suffix = ".bias" if change.sources[0].name.endswith(".bias") else ""
            parts = change.split([checkpoint.read(spec) for spec in change.sources])
            by_role |= {part + suffix: heads.float() for part, heads in parts.items() if part != "whole"}
    return by_role


def _estimated(rows: dict[str, Tensor], heads: LayerHeads, groups: int) -> Moments:
    """Moments of the heads of each group, from factors of them: `rows` (n, w, K) by role (`Inputs.through`)."""

    def moments_of(role: str, parts: int) -> tuple[Tensor, Tensor]:
        """(parts, w, w) second moments and (parts, w) means of the heads of `role`, w rows of each part of them."""
        whole = rows[role].unflatten(0, (parts, -1)).flatten(1, 2)  # (parts, w, K)
        bias = rows.get(f"{role}.bias")
        means = whole.new_zeros(whole.shape[:2]).double() if bias is None else bias.reshape(parts, -1).double()
        return torch.stack([gram(part.double()) for part in whole]) + means[:, :, None] * means[:, None, :], means

    queries = moments_of("query", heads.query)[0].unflatten(0, (heads.kv, -1)).sum(1)
    return Moments(*moments_of("key", groups), queries, moments_of("value", groups)[0])
