"""Losses over a large vocabulary whose logits exist one slice at a time, forward and backward.

`chunked_sum` takes the gradient of each slice's loss as soon as its logits are there, so that neither logits nor their
gradient are ever held for a batch, and nothing is computed twice. (The idea of fused linear cross-entropy, here with
the model's own head in the place of one matrix.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


_NOTHING = -1e4  # the logarithm of a probability that is zero, also in float16


@dataclass(frozen=True)
class TopTargets:
    """A teacher's most probable tokens in n places, k of them in all: `counts` (n,) of each place, `ids` and `logs`
    (k,), which are the logarithms of their probabilities, place after place; `rest` (n,): the logarithm of what all
    other tokens have together.
    """

    counts: Tensor
    ids: Tensor
    logs: Tensor
    rest: Tensor

    @staticmethod
    def of(logits: Tensor, mass: float, temperature: float) -> TopTargets:
        """Of each row of (n, V) logits as many as have the `mass` at that temperature; of a mass of 1 all."""
        logs, ids = (logits.float() / temperature).log_softmax(-1).sort(-1, descending=True)
        before = logs.exp().cumsum(-1) - logs.exp()
        kept = (before < mass) | (mass >= 1)
        rest = logs.masked_fill(kept, -torch.inf).logsumexp(-1)
        return TopTargets(kept.sum(-1), ids[kept], logs[kept].clamp_min(_NOTHING), rest.clamp_min(_NOTHING))

    @staticmethod
    def in_batch(batch: Mapping[str, Tensor]) -> TopTargets | None:
        """Those of a batch of blocks, as `gqa.uptrain.targets` keeps them; None where it has none."""
        if "top_ids" not in batch:
            return None
        logs, rest = (batch[name].view(torch.float16) for name in ("top_logs", "top_rest"))
        return TopTargets(batch["top_counts"].flatten(), batch["top_ids"], logs, rest.flatten())

    def __getitem__(self, piece: slice) -> TopTargets:
        begin, end = (int(self.counts[:at].sum()) for at in (piece.start, piece.stop))
        return TopTargets(self.counts[piece], self.ids[begin:end], self.logs[begin:end], self.rest[piece])

    def divergence(self, student: Tensor, temperature: float) -> Tensor:
        """As `distillation`, of a teacher that says no more than this: (n, V) logits -> (n,).

        All other tokens count as one, for the student too. So it is less than the teacher's own divergence by r x that
        of the two distributions among the other tokens, r being their mass (the chain rule of relative entropy).
        """
        q = (student / temperature).log_softmax(-1)
        rows = torch.repeat_interleave(torch.arange(len(q), device=q.device), self.counts)
        place, logs, rest = (rows, self.ids.long()), self.logs.float(), self.rest.float()
        total = rest.exp().index_add(0, rows, logs.exp()).log()  # 1, but for the rounding of what is kept in 16 bits
        logs, rest = logs - total[rows], rest - total
        others = q.index_put(place, q.new_tensor(_NOTHING)).logsumexp(-1)
        found = (rest.exp() * (rest - others)).index_add(0, rows, logs.exp() * (logs - q[place]))
        return temperature**2 * found


def next_token_loss(
    logits: Tensor,
    targets: Tensor,
    teacher: Tensor | TopTargets | None = None,
    weight: float = 1.0,
    temperature: float = 1.0,
    counted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(1 - weight) x cross-entropy + weight x distillation, summed; and (sum of nats, sum of distillation).

    Args:
        logits: (n, V) of the student, any dtype; computed in float32.
        targets: (n,) ids.
        teacher: (n, V), or what is kept of them, or None: then the loss is the cross-entropy.
        counted: (n,) booleans, which rows are summed; None for all.
    """

    def summed(values: Tensor) -> Tensor:
        return (values if counted is None else values.where(counted, 0.0)).sum()

    logits = logits.float()
    likelihood = summed(nats(logits, targets))
    if teacher is None:
        return likelihood, torch.stack([likelihood, likelihood.new_zeros(())])
    if isinstance(teacher, TopTargets):
        divergence = summed(teacher.divergence(logits, temperature))
    else:
        divergence = summed(distillation(logits, teacher.float(), temperature))
    loss = divergence if weight == 1 else (1 - weight) * likelihood + weight * divergence
    return loss, torch.stack([likelihood, divergence])
