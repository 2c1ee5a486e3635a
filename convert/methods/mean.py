"""`mean`: the pooling of the GQA paper (arXiv 2305.13245, section 2.1)."""

from __future__ import annotations

from gqa.convert.head_maps import HeadMaps, mean_maps
from gqa.convert.methods.base import Method


class Mean(Method):
    """Average the heads of each group."""

    name = "mean"
    cost = "seconds"
    result = "averaged"
    example_ratio = "x15.4"

    def fixed_maps(self, kv: int, groups: int) -> HeadMaps:
        return mean_maps(kv, groups)
