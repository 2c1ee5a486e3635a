"""Layer-wise matching: a converted attention module is trained until it gives what the source's gives.

Only the module's own projections move, inputs and targets are fixed, and no other layer is in memory. It works on
transformers' own modules, so on every architecture, from whatever start (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from gqa.convert.merge.attention import layer_attention
from gqa.convert.merge.closed_form import mean_squares
from gqa.convert.merge.layerwise import Arguments, Layer, Stream, first_tensor, is_by_block
from gqa.convert.merge.options import AT_ONCE, Refinement

_CHECKS = 8  # times that the held-out error is looked at


@dataclass(frozen=True)
class Rows:
    """What is of single blocks: (N, n, ...), n rows for each, or (1, n, ...) where all are given the same."""

    tensor: Tensor


@dataclass
class Calls:
    """What a module, or the layer that it is in, is called with: hidden states (N, T, D), and the other arguments, in
    which `Rows` stand for what is of single blocks.

    inside: What the layer then calls the module with.
    """

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: Callable[[Tensor, Arguments], Arguments]

    @classmethod
    def of(cls, layer: Layer, stream: Stream) -> Calls:
        """Of the attention of a layer that `stream` is given to."""
        batches = list(stream.batches(layer.index))
        other, others = stream.other
        sizes = [rows.stop - rows.start for rows, _ in batches]
        args, kwargs = _by_row([given for _, given in batches], sizes, other[layer.index], others)
        return cls(stream.hidden, args, kwargs, lambda *inputs: layer.capture_blocks(*inputs, "arguments").arguments)

    def given(self, rows: Tensor, device: torch.device) -> Arguments:
        """What the module is called with for some of the blocks."""

        def fit(of: Rows) -> Tensor:
            own = of.tensor.expand(len(rows), *of.tensor.shape[1:]) if len(of.tensor) == 1 else of.tensor[rows]
            return own.flatten(0, 1).to(device)

        return self.inside(self.hidden[rows].to(device), tree_map_only(Rows, fit, (self.args, self.kwargs)))


def called(module: nn.Module, weights: Mapping[str, Tensor], given: Arguments) -> Tensor:
    """The output (B, T, D) of a module with other weights."""
    args, kwargs = given
    hidden = args[0] if args else kwargs["hidden_states"]
    own = {name: tensor.to(hidden.dtype) for name, tensor in weights.items()}
    with layer_attention():
        output = torch.func.functional_call(module, own, args, kwargs)
    return first_tensor(output)


def _by_row(values: list[Arguments], rows: list[int], other: Arguments, others: int) -> Arguments:
    """The arguments of all batches, of so many blocks, as one; they are `other` where they are `others`."""

    def joined(one: Any, *parts: Any) -> Any:
        if not isinstance(parts[0], Tensor) or not is_by_block(parts[0], rows[0], one, others):
            return parts[0]
        own = [part.unflatten(0, (n, -1)) for part, n in zip(parts, rows, strict=True)]
        distinct = {id(part): found for part, found in zip(parts, own, strict=True)}  # most are the same of all batches
        alike = all(bool((found == own[0][:1]).all()) for found in distinct.values())
        return Rows(own[0][:1] if alike else torch.cat([found.cpu() for found in own]))

    made: Arguments = tree_map(joined, other, *values)
    return made


def refine(
    module: nn.Module,
    start: Mapping[str, Tensor],
    calls: Calls,
    targets: Tensor,
    counts: Tensor,
    how: Refinement,
    progress: Callable[[int], None] = lambda tokens: None,
) -> tuple[dict[str, Tensor], float, float]:
    """Train the parameters `start` (names below `module`) towards `targets` (N, T, D); an error at a position counts
    `counts` (N, T).

    Returns the best parameters seen (the start among them), and the held-out squared error relative to the targets'
    energy at the start and at the best.
    """
    device, length = next(iter(start.values())).device, calls.hidden.shape[1]
    generator = torch.Generator().manual_seed(how.seed)
    heldout, train = _split(len(calls.hidden), how, generator)
    weights = {name: tensor.float().clone().requires_grad_() for name, tensor in start.items()}
    optimizers = _optimizers(list(weights.values()), how.learning_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - step / how.steps) for each in optimizers]
    scale = (mean_squares(targets) * counts).mean().clamp_min(1e-30).to(device)

    def losses(rows: Tensor) -> Iterator[Tensor]:
        """Parts of the mean over blocks, as many at a time as a layer takes."""
        for part in rows.split(max(1, AT_ONCE // length)):
            given = calls.given(part, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=bool(how.autocast)):
                output = called(module, weights, given)
            missed = (output.float() - targets[part].to(device).float()).square().mean(-1)
            yield (missed * counts[part].to(device)).mean() / scale * (len(part) / len(rows))

    def error() -> float:
        with torch.no_grad():
            found = [loss * len(rows) for rows in heldout.split(how.batch) for loss in losses(rows)]
        return float(torch.stack(found).sum()) / len(heldout)

    def copy() -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in weights.items()}

    best, first = copy(), error()
    least = first
    every = max(1, how.steps // _CHECKS)
    for step in range(how.steps):
        rows = train[torch.randperm(len(train), generator=generator)[: how.batch]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses(rows):
            loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        progress(len(rows) * length)
        if ((step + 1) % every == 0 or step + 1 == how.steps) and (found := error()) < least:
            best, least = copy(), found
    return best, first, least


def without_heldout(counts: Tensor, how: Refinement) -> Tensor:
    """What positions (N, T) count before `refine` holds some of these out: those count nothing.
    A start that had seen them would be better there than on new text, and hardly any step would be kept.
    """
    heldout, train = _split(len(counts), how, torch.Generator().manual_seed(how.seed))
    seen = counts.new_empty(len(counts))
    seen[heldout], seen[train] = 0, 1  # in this order: a single block is both
    return counts * seen.unsqueeze(1)


def _split(blocks: int, how: Refinement, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The numbers of those held out and of the others; a single block is both."""
    order = torch.randperm(blocks, generator=generator)
    kept_out = max(1, round(blocks * how.heldout)) if blocks > 1 else 0
    return (order[:kept_out], order[kept_out:]) if kept_out else (order, order)


def _optimizers(parameters: list[Tensor], rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for matrices, Adam for the rest. Steps are `rate` of the size that a tensor has at the
    start, the root mean square of its singular values or of its numbers: layers and models differ in size by tens. What
    is zero has no size and is given that of the smallest.
    """
    sizes = [float(p.detach().norm()) / (min(p.shape) if p.ndim == 2 else p.numel()) ** 0.5 for p in parameters]
    least = min((size for size in sizes if size), default=1.0)
    sized = [(p, rate * (size or least)) for p, size in zip(parameters, sizes, strict=True)]
    # torch's Muon takes steps that are larger by a root where a matrix has more rows than columns
    matrices = [{"params": [p], "lr": lr / max(1, len(p) / p.shape[1]) ** 0.5} for p, lr in sized if p.ndim == 2]
    others = [{"params": [p], "lr": lr} for p, lr in sized if p.ndim != 2]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(torch.optim.Muon(matrices, weight_decay=0.0, momentum=0.9))
    if others:
        found.append(torch.optim.Adam(others, betas=(0.9, 0.99)))
    return found
