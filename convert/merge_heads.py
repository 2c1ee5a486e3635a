"""The new numbers of a changed tensor: split into heads, merged or repeated, and joined."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gqa.convert.heads.layouts import QUERY_ROLES

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.head_maps import MergeHeads, StoredMaps
    from gqa.convert.heads.layouts import Role
    from gqa.convert.heads.modules import Change
    from gqa.convert.plan import Plan


def converted_tensor(plan: Plan, maps: StoredMaps | None, change: Change, tensor: Tensor) -> Tensor:
    """The tensor of the result for a stored tensor.

    maps: Those that the plan's method has found; None if it reads nothing. A tensor that the method
        has trained is in them as it will be stored.
    """
    if maps is not None and change.source.name in maps.names:
        return maps.tensor(change.source.name)
    return change.mapped(tensor, _head_merge(plan, maps, change))


def _head_merge(plan: Plan, maps: StoredMaps | None, change: Change) -> MergeHeads:
    """What happens to the heads of each role."""
    if change.groups >= change.heads.kv:
        return partial(repeat_heads, change)

    module_maps = maps.of_module(change.module) if maps is not None else None
    if module_maps is not None:
        return module_maps.merge
    assert plan.merge_method is not None
    return plan.merge_method.merge_without_maps(change, plan.config, plan.seed)


def repeat_heads(change: Change, role: Role, heads: Tensor) -> Tensor:
    """Keys or values (Hk, rows, *rest) -> (G, rows, *rest), each G / Hk times in a row, which
    changes no logit; queries and outputs stay.
    """
    if role in QUERY_ROLES:
        return heads
    return heads.repeat_interleave(change.groups // change.heads.kv, dim=0)
