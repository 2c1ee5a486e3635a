"""Muon (Jordan et al., 2024) in the number format that the device multiplies fast.

torch.optim.Muon multiplies in bfloat16 wherever it runs. A CPU without native bfloat16 emulates it:
a step on a matrix of 256 x 256 takes 286 ms there and 9 ms in float32, and `refined` hours for
minutes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Of the quintic iteration x -> a x + b x^3 + c x^5 on singular values: its slope at zero is as
# large as can be, and what was in (0, 1] ends near 1 (https://kellerjordan.github.io/posts/muon/).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7  # a gradient of zeros stays one


class Muon(torch.optim.Optimizer):
    """Steps of matrices in the direction of their momentum with all singular values about 1.

    A group's `lr` is therefore the size of a step in every direction, in units of singular values.
    There is no weight decay, and no factor for the matrix's shape.

    Args:
        groups: Parameter groups with `params` (matrices) and `lr`.
        momentum: Share of the earlier gradients in the running mean; Nesterov's form.
        dtype: What the iteration multiplies in.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, dtype: torch.dtype
    ) -> None:
        super().__init__(groups, {"momentum": momentum, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue

                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter.grad)
                mean = state["mean"].lerp_(parameter.grad, 1 - group["momentum"])

                ahead = parameter.grad.lerp(mean, group["momentum"])
                direction = orthogonalized(ahead, group["dtype"])
                parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"])


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """U S' V^T of a matrix U S V^T, with S' between about 0.7 and 1.2, by Newton-Schulz iterations.

    Directions with singular values below about a thousandth of the Frobenius norm stay smaller.
    """
    linear, cubic, quintic = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]

    wide = matrix.T if is_tall else matrix
    result: Tensor = (wide / wide.norm().clamp_min(_LEAST_NORM)).to(dtype)
    for _ in range(_ITERATIONS):
        gram = result @ result.T
        terms = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        result = torch.addmm(result, terms, result, beta=linear)
    return result.T if is_tall else result
