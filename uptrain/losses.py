"""Losses over a large vocabulary whose logits exist one slice at a time, forward and backward.

`ChunkedSum` takes the gradient of each slice's loss as soon as its logits are there, so that neither logits nor their
gradient are ever held for a batch, and nothing is computed twice. (The idea of fused linear cross-entropy, here with
the model's own head in the place of one matrix.)
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
        ctx: Any, loss: SliceLoss, vocabulary: int, needs_gradient: bool, rows: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, told = rows.new_zeros((), dtype=torch.float32), None
        row_gradient = torch.zeros_like(rows) if needs_gradient else None
        gradients: list[Tensor | None] = [None] * len(parameters)
        for piece in chunks(len(rows), vocabulary):
            with torch.set_grad_enabled(needs_gradient):
                leaf = rows[piece].detach().requires_grad_(needs_gradient)
                value, numbers = loss(leaf, piece)
            total += value.detach()
            told = numbers.detach() if told is None else told + numbers.detach()
            if row_gradient is None:
                continue
            wanted = [leaf, *(p for p in parameters if p.requires_grad)]
            found = iter(torch.autograd.grad(value, wanted, allow_unused=True))
            first = next(found)
            assert first is not None
            row_gradient[piece] = first
            for index, parameter in enumerate(parameters):
                part = next(found) if parameter.requires_grad else None
                if part is not None:
                    before = gradients[index]
                    gradients[index] = part if before is None else before.add_(part)
        ctx.row_gradient, ctx.gradients = row_gradient, gradients
        assert told is not None
        ctx.mark_non_differentiable(told)
        return total, told

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        scale = upstream[0]
        parts = [None if g is None else g * scale.to(g.dtype) for g in (ctx.row_gradient, *ctx.gradients)]
        return (None, None, None, *parts)


def chunked_sum(
    loss: SliceLoss, vocabulary: int, rows: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Sum of `loss` over slices of (N, D) rows, differentiable in them and in `parameters` (those of the head).

    Returns the sum and the summed numbers to report. The gradient is that of a sum: divide afterwards, so that in
    float16 it is not divided into nothing.
    """
    needs_gradient = torch.is_grad_enabled()
    found: tuple[Tensor, Tensor] = _ChunkedSum.apply(loss, vocabulary, needs_gradient, rows, *parameters)  # type: ignore[no-untyped-call]
    return found


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) at temperature T (Hinton et al., arXiv 1503.02531, section 2): (n, V) logits -> (n,).

    T^2 keeps the gradient's size the same for every temperature.
    """
    p, q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return temperature**2 * torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def next_token_loss(
    logits: Tensor, targets: Tensor, teacher: Tensor | None, weight: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """(1 - weight) x cross-entropy + weight x distillation, summed; and (sum of nats, sum of distillation).

    Args:
        logits: (n, V) of the student, any dtype; computed in float32.
        targets: (n,) ids.
        teacher: (n, V) or None.
    """
    logits = logits.float()
    likelihood = nats(logits, targets).sum()
    if teacher is None:
        return likelihood, torch.stack([likelihood, likelihood.new_zeros(())])
    divergence = distillation(logits, teacher.float(), temperature).sum()
    loss = (1 - weight) * likelihood + weight * divergence if weight < 1 else divergence
    return loss, torch.stack([likelihood, divergence])
