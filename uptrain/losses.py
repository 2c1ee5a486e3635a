"""Losses over a large vocabulary whose logits exist one slice at a time, forward and backward.

`chunked_sum` takes the gradient of each slice's loss as soon as its logits are there, so that neither logits nor their
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
        ctx: Any, loss: SliceLoss, vocabulary: int, differentiate: bool, rows: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, told = rows.new_zeros((), dtype=torch.float32), None
        row_gradient = torch.empty_like(rows) if differentiate else None
        sums: list[Tensor | None] = [None] * len(parameters)
        for piece in chunks(len(rows), vocabulary, rows.device):
            with torch.set_grad_enabled(differentiate):
                leaf = rows[piece].detach().requires_grad_(differentiate)
                value, numbers = loss(leaf, piece)
            total += value.detach()
            told = numbers.detach() if told is None else told + numbers.detach()
            if row_gradient is not None:
                with torch.autocast(rows.device.type, enabled=False):  # as every backward pass is
                    row_gradient[piece], *found = torch.autograd.grad(value, [leaf, *parameters], allow_unused=True)
                sums = [_add(before, part) for before, part in zip(sums, found, strict=True)]
        ctx.held = None if row_gradient is None else (row_gradient, sums)
        assert told is not None
        ctx.mark_non_differentiable(told)
        return total, told

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        held, ctx.held = ctx.held, None  # scaled in place: good for once
        if held is None:
            raise RuntimeError("the gradient of a chunked sum was already taken")
        rows, sums = held
        # In float32, for a loss scale is more than float16 can hold; autograd casts what it gets.
        return (None, None, None, *(None if part is None else part.float().mul_(upstream[0]) for part in (rows, *sums)))


def _add(before: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Sums over slices are in float32, however little of a bfloat16 sum each slice would be."""
    if before is None or part is None:
        return before if part is None else part.float()
    return before.add_(part)


def chunked_sum(
    loss: SliceLoss, vocabulary: int, rows: Tensor, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Sum of `loss` over slices of (N, D) rows, differentiable (once) in them and in `parameters` (those of the head).

    Returns the sum and the summed numbers to report. The gradient is that of a sum: divide afterwards, so that in
    float16 it is not divided into nothing. Parameters that need no gradient are none of those given.
    """
    differentiate = torch.is_grad_enabled()
    found: tuple[Tensor, Tensor] = _ChunkedSum.apply(loss, vocabulary, differentiate, rows, *parameters)  # type: ignore[no-untyped-call]
    return found


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) at temperature T (Hinton et al., arXiv 1503.02531, section 2): (n, V) logits -> (n,).

    T^2 keeps the gradient's size the same for every temperature.
    """
    p, q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return temperature**2 * torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def next_token_loss(
    logits: Tensor,
    targets: Tensor,
    teacher: Tensor | None = None,
    weight: float = 1.0,
    temperature: float = 1.0,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(1 - weight) x cross-entropy + weight x distillation, summed; and (sum of nats, sum of distillation).

    Args:
        logits: (n, V) of the student, any dtype; computed in float32.
        targets: (n,) ids.
        teacher: (n, V) of the teacher, or None: then the loss is the cross-entropy.
        counted: (n,) booleans, which rows are summed; None for all.
    """

    def summed(values: Tensor) -> Tensor:
        return (values if counted is None else values.where(counted, 0.0)).sum()

    logits = logits.float()
    likelihood = summed(nats(logits, targets))
    if teacher is None:
        return likelihood, torch.stack([likelihood, likelihood.new_zeros(())])
    divergence = summed(distillation(logits, teacher.float(), temperature))
    loss = divergence if weight == 1 else (1 - weight) * likelihood + weight * divergence
    return loss, torch.stack([likelihood, divergence])
