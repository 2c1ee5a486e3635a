"""`aligned`: the closed form of `calibrated` on inputs that are estimated from the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gqa.convert.methods.weights_method import WeightsMethod

if TYPE_CHECKING:
    from gqa.convert.head_maps import HeadMaps
    from gqa.convert.merge.maps_from_weights import ModuleEstimate
    from gqa.convert.merge.options import MapsOptions
    from gqa.convert.merge.workload import Workload
    from gqa.convert.plan import Plan


class Aligned(WeightsMethod):
    """Shared keys and values in closed form, on estimated moments of keys, queries and values."""

    name = "aligned"
    cost = "minutes on two CPU cores"
    result = "merged in closed form, from the weights alone"
    example_ratio = "x1.99"
    needs = frozenset({"symmetry", "inputs"})

    def module_maps(self, module: ModuleEstimate) -> HeadMaps:
        from gqa.convert.merge.moments import head_maps

        moments = module.moments
        keys = moments.shared_keys(module.rotary) if module.aligns_keys else None
        attended = (group[None] for group in moments.values)  # alike by all query heads of a group
        values = moments.shared_values(attended, module.heads_by_role["output"])
        return head_maps(module.heads, module.groups, keys, values)

    def workload(self, plan: Plan, options: MapsOptions) -> Workload:
        from gqa.convert.merge.workload import aligned_workload

        return aligned_workload(plan)
