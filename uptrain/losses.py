"""Losses over a large vocabulary with the logits of one slice of a batch in memory at a time.

`chunked_sum` computes the gradient of a slice's loss during the forward pass, so logits and their gradients never exist
for a whole batch, and nothing is computed twice: fused linear cross-entropy, with any head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gqa.corpus.likelihood import chunks, nats

# (rows (n, D) with gradient, their slice) -> (loss to descend, numbers to report), both summed over the rows.
SliceLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: SliceLoss, vocabulary: int, differentiate: bool, rows: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, report = rows.new_zeros((), dtype=torch.float32), None
        row_gradient = torch.empty_like(rows) if differentiate else None
        sums: list[Tensor | None] = [None] * len(parameters)
        for piece in chunks(len(rows), vocabulary, rows.device):
            with torch.set_grad_enabled(differentiate):
                leaf = rows[piece].detach().requires_grad_(differentiate)
                value, numbers = loss(leaf, piece)
            total += value.detach()
            report = numbers.detach() if report is None else report + numbers.detach()
            if row_gradient is not None:
                with torch.autocast(rows.device.type, enabled=False):  # as every backward pass is
                    row_gradient[piece], *gradients = torch.autograd.grad(value, [leaf, *parameters], allow_unused=True)
                sums = [_add(before, part) for before, part in zip(sums, gradients, strict=True)]
        ctx.gradients = None if row_gradient is None else (row_gradient, sums)
        assert report is not None
        ctx.mark_non_differentiable(report)
        return total, report

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # they are scaled in place, so only once
        if gradients is None:
            raise RuntimeError("the gradient of a chunked sum was already taken")
        rows, sums = gradients
        # In float32: float16 cannot hold the loss scale. autograd casts the result.
        return (None, None, None, *(None if part is None else part.float().mul_(upstream[0]) for part in (rows, *sums)))


def _add(before: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Add in float32: bfloat16 would round small slices away."""
    if before is None or part is None:
        return before if part is None else part.float()
    return before.add_(part)


def chunked_sum(
    loss: SliceLoss, vocabulary: int, rows: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Sum of `loss` over slices of (N, D) rows, differentiable (once) in them and in `parameters` (those of the head).

    Return the sum and the summed numbers to report. Divide the gradient afterwards: a mean could underflow in float16.
    All `parameters` need a gradient.
    """
    differentiate = torch.is_grad_enabled()
    sums: tuple[Tensor, Tensor] = _ChunkedSum.apply(loss, vocabulary, differentiate, rows, *parameters)  # type: ignore[no-untyped-call]
    return sums


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) at temperature T (Hinton et al., arXiv 1503.02531, section 2): (n, V) logits -> (n,).

    T^2 keeps the gradient's size the same for every temperature.
    """
    p, q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return temperature**2 * torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def next_token_loss(
    logits: Tensor, targets: Tensor, teacher: Tensor | None = None, weight: float = 1.0, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(1 - weight) x cross-entropy + weight x distillation, summed; and (sum of nats, sum of distillation).

    Args:
        logits: (n, V) of the student, any dtype; computed in float32.
        targets: (n,) ids; rows of -100 do not count.
        teacher: (n, V) of the teacher, or None: then the loss is the cross-entropy.
    """
    logits = logits.float()
    likelihood = nats(logits, targets).sum()
    if teacher is None:
        return likelihood, torch.stack([likelihood, likelihood.new_zeros(())])
    divergence = distillation(logits, teacher.float(), temperature).where(targets >= 0, 0.0).sum()
    loss = divergence if weight == 1 else (1 - weight) * likelihood + weight * divergence
    return loss, torch.stack([likelihood, divergence])
