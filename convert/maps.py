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
        """Heads (Hk, rows, *rest) -> (G, rows, *rest), summed in the dtype of `heads`."""
        import torch

        weights = self.value if role == "value" else self.key
        groups, per_group = weights.shape
        grouped: Tensor = heads.unflatten(0, (groups, per_group))  # (G, m, rows, *rest)
        if heads.is_meta:
            return grouped[:, 0]
        merged = heads.new_zeros(groups, *heads.shape[1:])
        for a in range(per_group):
            column = weights[:, a].to(heads.dtype)
            if not bool(column.any()):
                continue  # an unused head must not turn an Inf of its own into a NaN of the group
            merged = torch.addcmul(merged, grouped[:, a], column.view(groups, *[1] * (heads.ndim - 1)))
        return merged
