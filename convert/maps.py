"""HeadMaps: what a merging method decides, as small maps on head space that the rewriter applies to stored weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.convert.layout import Role


@dataclass(frozen=True)
class HeadMaps:
    """Weights (G, m) of the m source heads in each merged key and value head.

    Merged head j is `sum_a key[j, a] * W_K[j * m + a]`, that is the `(d, m * d)` map of blocks `key[j, a] * I`.
    """

    key: Tensor
    value: Tensor

    def merge(self, role: Role, heads: Tensor) -> Tensor:
        """Heads (Hk, rows, *rest) -> (G, rows, *rest), summed in float32 (float64 for F64) and rounded once."""
        import torch

        weights = self.value if role == "value" else self.key
        groups, per_group = weights.shape
        merged = heads.new_empty(groups, *heads.shape[1:])
        if heads.is_meta:
            return merged
        precise = torch.float64 if heads.dtype == torch.float64 else torch.float32
        members = heads.unflatten(0, (groups, per_group))  # (G, m, rows, *rest)
        for j, row in enumerate(weights.tolist()):
            total: Tensor | None = None
            for head, weight in zip(members[j], row, strict=True):  # one at a time: the wide numbers stay in the cache
                if weight:  # times zero, an Inf of an unused head would become a NaN of the group
                    wide = head.to(precise)
                    total = wide * weight if total is None else total.add_(wide, alpha=weight)
            merged[j] = 0 if total is None else total
        return merged
