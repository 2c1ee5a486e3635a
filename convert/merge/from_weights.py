"""Maps from the weights alone: second moments are estimated, not measured on text.

No forward pass: the moments of keys, queries and values are W E[x x^T] W^T, with E[x x^T] from
`InputMoments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gqa.checkpoint.read import Checkpoint
from gqa.convert.head_maps import HeadMaps, query_order
from gqa.convert.heads.family import LayerHeads, Rotary, Symmetry
from gqa.convert.heads.modules import AttentionModule, Change, module_changes
from gqa.convert.merge.grouping import find_order
from gqa.convert.merge.input_moments import InputMoments, gram, norm_gain
from gqa.convert.merge.moments import Moments, heads_of
from gqa.convert.plan import Plan
from gqa.core.errors import RefusedError

# Of n heads, by role. "query", "key" and "value": factors R (n, w, D) with w rows a head, whose
# products R R^T are the second moments of what the heads compute. "output": W_O as stored,
# (H, e, D), which is no factor. "ROLE.bias": (n, w).
Factors = dict[str, Tensor]


@dataclass(frozen=True)
class ModuleEstimate:
    """An attention module, as far as the weights tell: what a method makes its maps of.

    heads, groups: H and Hk of the base model, G of the result.
    factors: Of the heads in the order of the groups.
    moments: Second moments of the heads of each group.
    aligns_keys: Whether keys may be multiplied by matrices; otherwise they are averaged.
    """

    heads: LayerHeads
    groups: int
    factors: Factors
    moments: Moments
    rotary: Rotary
    aligns_keys: bool


def from_weights(
    plan: Plan,
    module_maps: Callable[[ModuleEstimate], HeadMaps],
    estimates_inputs: bool,
    search: bool = False,
    device: str = "cpu",
) -> Iterator[tuple[str, HeadMaps]]:
    """Yield path and maps of each attention module. Raises RefusedError if weights are NaN or Inf.

    Args:
        module_maps: The maps of a module whose heads are in the order of the groups.
        estimates_inputs: Whether second moments of layer inputs are estimated from the embeddings
            and the layers before; otherwise they are the identity.
        search: Find the groups with the least loss.
        device: For large products.
    """
    symmetry = plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    text_config = plan.config.text
    aligns_keys = symmetry.can_align_keys(text_config)

    modules = _changed_modules(plan, symmetry)
    inputs: InputMoments | None = None
    for number, (module, changes) in enumerate(modules):
        heads = changes[0].heads
        groups = changes[0].groups
        stored = _finite_heads(plan.checkpoint, module, changes)
        width = stored["key"].shape[-1]  # D
        if inputs is None:  # D is known from the first module on
            inputs = InputMoments(
                plan.checkpoint, text_config, symmetry, width, estimates_inputs, device
            )

        # 1. Moments of the layer's inputs, and of what its heads make of them.
        inputs.enter(module)
        gain = norm_gain(plan.checkpoint, module, symmetry, width).float()
        merges = groups < heads.kv
        # Of a module whose heads stay no maps are made: only its values are needed, for the inputs
        # of later layers.
        roles = ("query", "key", "value") if merges else ("value",)
        factors: Factors = dict(stored)
        for role in roles:
            rows = inputs.project((stored[role] * gain).flatten(0, 1))
            factors[role] = rows.unflatten(0, stored[role].shape[:2])
            del stored[role]  # as large as its factors
        if number + 1 < len(modules):
            inputs.add(module, gain, factors["output"], factors["value"])
        if not merges:
            continue

        # Estimated moments do not show how frequencies correlate: merging each alone loses less.
        rotary = replace(symmetry.rotary(text_config, module.layer, heads.key_dim), frequencies=())

        # 2. The groups. From the moments of the whole layer as one group any partition follows.
        order = None
        if search:
            w_o = factors["output"].double()
            whole = _estimated_moments(factors, heads, 1)
            order = find_order(whole, w_o, groups, rotary, aligns_keys)
        if order:
            factors = _reordered(factors, order, heads)

        # 3. The maps.
        moments = _estimated_moments(factors, heads, groups)
        maps = module_maps(ModuleEstimate(heads, groups, factors, moments, rotary, aligns_keys))
        yield module.path, replace(maps, order=order)


def _changed_modules(plan: Plan, symmetry: Symmetry) -> list[tuple[AttentionModule, list[Change]]]:
    """The attention modules by layer, up to the last whose heads are merged, with the tensors that
    have heads: also of modules whose heads stay, because later layers read what they compute.
    """
    modules = sorted(plan.modules, key=lambda module: module.layer)
    last = max(number for number, module in enumerate(modules) if module.path in plan.changes)
    return [
        (module, module_changes(module, plan.config, plan.groups, symmetry.rules))
        for module in modules[: last + 1]
    ]


def _finite_heads(
    checkpoint: Checkpoint, module: AttentionModule, changes: list[Change]
) -> dict[str, Tensor]:
    """Stored heads of a module by role. Raises RefusedError if they contain NaN or Inf."""
    stored = heads_of(checkpoint, changes)
    if not all(bool(tensor.sum().isfinite()) for tensor in stored.values()):
        raise RefusedError(
            f"{module.path} of {checkpoint.name} contains NaN or Inf, so its heads cannot be "
            "aligned; download the checkpoint again"
        )
    return stored


def _reordered(factors: Factors, order: tuple[int, ...], heads: LayerHeads) -> Factors:
    """KV heads in this order, and query heads with them."""
    kv_order = list(order)
    kv_orders = {"key": kv_order, "value": kv_order}
    query_heads = query_order(order, heads.query)  # of queries and outputs
    return {
        name: tensor[kv_orders.get(name.removesuffix(".bias"), query_heads)]
        for name, tensor in factors.items()
    }


def _estimated_moments(factors: Factors, heads: LayerHeads, groups: int) -> Moments:
    """Moments of each group: E[h h^T] = R R^T + b b^T, with the bias b, if any, as the mean."""

    def moments_of(role: str, parts: int) -> tuple[Tensor, Tensor]:
        """Second moments (parts, p, p) and means (parts, p) of the heads of a role, stacked into
        `parts` of p rows each.
        """
        rows = factors[role].unflatten(0, (parts, -1)).flatten(1, 2)  # (parts, p, D)
        means = rows.new_zeros(rows.shape[:2]).double()
        bias = factors.get(f"{role}.bias")
        if bias is not None:
            means = bias.reshape(parts, -1).double()
        centered = torch.stack([gram(part.double()) for part in rows])
        return centered + means[:, :, None] * means[:, None, :], means

    keys, key_means = moments_of("key", groups)
    queries, _ = moments_of("query", heads.query)
    values, _ = moments_of("value", groups)
    queries = queries.unflatten(0, (heads.kv, -1)).sum(1)
    not_measured = queries.new_zeros(heads.kv, 0)
    return Moments(keys, key_means, queries, values, not_measured)
