"""`random`: the control of the GQA paper (figure 4 of arXiv 2305.13245)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gqa.convert.heads.layouts import QUERY_ROLES
from gqa.convert.methods.base import Method

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.head_maps import MergeHeads
    from gqa.convert.heads.config import ModelConfig
    from gqa.convert.heads.layouts import Role
    from gqa.convert.heads.modules import Change

_INITIALIZER_RANGE = 0.02  # of configs that state none


class Random(Method):
    """Draw the projections of keys and values from N(0, initializer_range); biases are zero.

    Norms and gates, which random numbers would break, are averaged.
    """

    name = "random"
    cost = "seconds"
    result = "random, as a control"
    settings = frozenset({"seed"})
    is_control = True

    def merge_without_maps(self, change: Change, config: ModelConfig, seed: int) -> MergeHeads:
        if not change.rule.projection:
            return super().merge_without_maps(change, config, seed)
        import torch

        # Independent of the order of shards and threads
        digest = hashlib.sha256(f"{seed}:{change.source.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        spread = _initializer_range(config)

        def draw(role: Role, heads: Tensor) -> Tensor:
            if role in QUERY_ROLES:
                return heads
            shape = (change.groups, *heads.shape[1:])
            if change.source.name.endswith(".bias"):
                return heads.new_zeros(shape)
            return torch.normal(0.0, spread, shape, generator=generator).to(heads.dtype)

        return draw


def _initializer_range(config: ModelConfig) -> float:
    """The standard deviation of the model's own initial weights."""
    stated = getattr(config.text_config, "initializer_range", None)
    if isinstance(stated, int | float) and stated > 0:
        return stated
    return _INITIALIZER_RANGE
