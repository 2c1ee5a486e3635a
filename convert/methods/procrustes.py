"""`procrustes`: rotate the heads of a group onto each other, then average (arXiv 2412.20677)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gqa.convert.methods.weights_method import WeightsMethod

if TYPE_CHECKING:
    from gqa.convert.head_maps import HeadMaps
    from gqa.convert.merge.maps_from_weights import ModuleEstimate


class Procrustes(WeightsMethod):
    """Rotate heads onto each other and average them."""

    name = "procrustes"
    cost = "minutes on two CPU cores"
    result = "rotated onto each other, then averaged"

    def module_maps(self, module: ModuleEstimate) -> HeadMaps:
        from gqa.convert.merge.moments import head_maps
        from gqa.convert.merge.procrustes import procrustes_key, procrustes_value

        heads = module.heads
        per_group = heads.kv // module.groups
        moments = module.moments

        keys = []
        if module.aligns_keys:
            keys = [procrustes_key(group, module.rotary, per_group) for group in moments.keys]
        values = [
            procrustes_value(group, per_group, heads.queries_per_kv) for group in moments.values
        ]
        return head_maps(heads, module.groups, keys, values)
