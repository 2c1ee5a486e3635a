"""What a plan has in place of a method of merging if no heads are merged.

Nobody chooses them with `--method`, so they are not in table.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gqa.convert.heads.layouts import QUERY_ROLES
from gqa.convert.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.head_maps import MergeHeads
    from gqa.convert.heads.config import ModelConfig
    from gqa.convert.heads.layouts import Role
    from gqa.convert.heads.modules import Change


class Unmerged(Method):
    """Leave the heads of a model as they are: the result has as many."""

    name = "none"
    cost = "seconds"
    result = "no heads are merged"
    merges = False


class Repeat(Method):
    """Repeat each head: the result has more."""

    name = "repeat"
    cost = "seconds"
    result = "by repeating each: the same logits"
    merges = False

    def merge_without_maps(self, change: Change, config: ModelConfig, seed: int) -> MergeHeads:
        return partial(repeat_heads, change)


def repeat_heads(change: Change, role: Role, heads: Tensor) -> Tensor:
    """Keys or values (Hk, rows, *rest) -> (G, rows, *rest), each G / Hk times in a row, which
    changes no logit; queries and outputs stay.
    """
    if role in QUERY_ROLES:
        return heads
    return heads.repeat_interleave(change.groups // change.heads.kv, dim=0)
