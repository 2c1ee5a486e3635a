"""`first`: one head of each group (figure 4 of the GQA paper, arXiv 2305.13245)."""

from __future__ import annotations

from gqa.convert.head_maps import HeadMaps, first_maps
from gqa.convert.methods.base import Method


class First(Method):
    """Keep the first head of each group."""

    name = "first"
    cost = "seconds"
    result = "the first of each group"
    example_ratio = "x16.4"

    def fixed_maps(self, kv: int, groups: int) -> HeadMaps:
        return first_maps(kv, groups)
