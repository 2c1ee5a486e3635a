"""Maps from the weights alone: second moments are estimated, not measured on text.

No forward pass: the moments of keys, queries and values are W E[x x^T] W^T, with E[x x^T] from
`InputMoments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gqa.checkpoint.read import Checkpoint
from gqa.convert.head_maps import HeadMaps, query_order
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.layouts import LayerHeads
from gqa.convert.heads.modules import AttentionModule, Change, module_changes
from gqa.convert.heads.rotary import Rotary, unrotated
from gqa.convert.merge.grouping import find_order
from gqa.convert.merge.input_moments import InputMoments, gram, norm_gain
from gqa.convert.merge.moments import Moments, heads_of
from gqa.convert.plan import Plan
from gqa.core.errors import RefusedError

# The heads of a module by role, n heads of w rows:
#   query, key, value: (n, w, D), as stored, or a root R of each head's second moments R R^T;
#   output: (H, e, D), W_O as stored (transposed), in both cases;
#   ROLE.bias: (n, w).
ModuleTensors = dict[str, Tensor]


@dataclass(frozen=True)
class ModuleEstimate:
    """An attention module, as far as the weights tell: what a method makes its maps of.

    Attributes:
        heads: Of the base model: H query heads, Hk key heads of d rows, Hk value heads of e rows.
        groups: G of the result, each of m = Hk / G heads.
        heads_by_role: Roots of the moments of queries (H, d, D), keys (Hk, d, D) and values
            (Hk, e, D); heads of W_O (H, e, D); biases. In the order of the groups.
        moments: Second moments of the heads of each group: stacked keys (G, m d, m d), stacked
            values (G, m e, m e), queries (Hk, d, d). Distances are not estimated: (Hk, 0).
        rotary: Of the keys, as if its frequencies were unknown.
        aligns_keys: Whether keys may be multiplied by matrices; otherwise they are averaged.
    """

    heads: LayerHeads
    groups: int
    heads_by_role: ModuleTensors
    moments: Moments
    rotary: Rotary
    aligns_keys: bool


def estimate_maps(
    plan: Plan,
    module_maps: Callable[[ModuleEstimate], HeadMaps],
    estimates_inputs: bool,
    search: bool = False,
    device: str = "cpu",
) -> Iterator[tuple[str, HeadMaps]]:
    """Yield path and maps of each attention module. Raises RefusedError if weights are NaN or Inf.

    Args:
        plan: The plan of the conversion.
        module_maps: The maps of a module whose heads are in the order of the groups.
        estimates_inputs: Whether second moments of layer inputs are estimated from the embeddings
            and the layers before; otherwise they are the identity.
        search: Find the groups with the least loss.
        device: For large products.
    """
    symmetry = plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    text_config = plan.config.text_config
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
        by_role = _to_roots(stored, roles, gain, inputs)

        # 2. Moments of the inputs of the next layer.
        if number + 1 < len(modules):
            inputs.add(module, gain, by_role["output"], by_role["value"])
        if not merges:
            continue

        # 3. The groups and the maps.
        # Estimated moments do not show how frequencies correlate: merging each alone loses less.
        rotary = replace(symmetry.rotary(text_config, module.layer, heads.key_dim), frequencies=())
        if module.kind == "cross":
            rotary = unrotated(rotary)
        order, estimate = _choose_groups(by_role, heads, groups, rotary, aligns_keys, search)
        yield module.path, replace(module_maps(estimate), order=order)


def _to_roots(
    stored: ModuleTensors, roles: Sequence[str], gain: Tensor, inputs: InputMoments
) -> ModuleTensors:
    """The heads by role, those of `roles` as roots of their second moments.

    `stored` is emptied on the way: both together would take twice the memory.

    Args:
        stored: The heads W by role.
        roles: Of heads (n, w, D).
        gain: (D,), of the norm before attention.
        inputs: Moments of the normed stream that the layer reads.
    """
    by_role = {}
    for role in list(stored):
        tensor = stored.pop(role)
        if role in roles:
            rows = inputs.root_of((tensor * gain).flatten(0, 1))
            tensor = rows.unflatten(0, tensor.shape[:2])
        by_role[role] = tensor
    return by_role


def _choose_groups(
    by_role: ModuleTensors,
    heads: LayerHeads,
    groups: int,
    rotary: Rotary,
    aligns_keys: bool,
    search: bool,
) -> tuple[tuple[int, ...] | None, ModuleEstimate]:
    """Choose the heads of each group, and estimate the moments of the groups.

    Returns:
        The order of heads in which consecutive ones are a group, None if that is their own order;
        and the module with its heads in this order.
    """
    order = None
    if search:
        # From the moments of the whole layer as one group those of any partition follow.
        whole = _estimated_moments(by_role, heads, 1)
        order = find_order(whole, by_role["output"].double(), groups, rotary, aligns_keys)
    if order:
        by_role = _reordered(by_role, order, heads)

    moments = _estimated_moments(by_role, heads, groups)
    return order, ModuleEstimate(heads, groups, by_role, moments, rotary, aligns_keys)


def _changed_modules(plan: Plan, symmetry: Symmetry) -> list[tuple[AttentionModule, list[Change]]]:
    """The attention modules by layer, up to the last whose heads are merged, with the tensors that
    have heads: also of modules whose heads stay, because later layers read what they compute.
    """
    modules = sorted(plan.modules, key=lambda module: module.layer)
    last = max(number for number, module in enumerate(modules) if module.path in plan.changes)
    return [
        (module, module_changes(module, plan.config, plan.kv_heads, symmetry.query_side_rules))
        for module in modules[: last + 1]
    ]


def _finite_heads(
    checkpoint: Checkpoint, module: AttentionModule, changes: list[Change]
) -> ModuleTensors:
    """Stored heads of a module by role. Raises RefusedError if they contain NaN or Inf."""
    stored = heads_of(checkpoint, changes)
    if not all(bool(tensor.sum().isfinite()) for tensor in stored.values()):
        raise RefusedError(
            f"{module.path} of {checkpoint.name} contains NaN or Inf; download the checkpoint again"
        )
    return stored


def _reordered(by_role: ModuleTensors, order: tuple[int, ...], heads: LayerHeads) -> ModuleTensors:
    """KV heads in this order, and query heads with them."""
    kv_order = list(order)
    kv_orders = {"key": kv_order, "value": kv_order}
    query_numbers = query_order(order, heads.query)  # of queries and outputs
    return {
        name: tensor[kv_orders.get(name.removesuffix(".bias"), query_numbers)]
        for name, tensor in by_role.items()
    }


def _estimated_moments(by_role: ModuleTensors, heads: LayerHeads, groups: int) -> Moments:
    """Moments of each group: E[h h^T] = R R^T + b b^T, with the bias b, if any, as the mean."""

    def moments_of(role: str, parts: int) -> tuple[Tensor, Tensor]:
        """Second moments (parts, p, p) and means (parts, p) of the heads of a role, stacked into
        `parts` of p rows each.
        """
        rows = by_role[role].unflatten(0, (parts, -1)).flatten(1, 2)  # (parts, p, D)
        means = rows.new_zeros(rows.shape[:2]).double()
        bias = by_role.get(f"{role}.bias")
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
