"""Layer-wise matching: train a converted attention module towards the output of the source's module.

Only the module's projections are trained, inputs and targets are fixed, and no other layer is in memory. It runs
transformers' modules, so it works for every architecture and from any start (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from gqa.checkpoint.devices import native_bfloat16
from gqa.convert.merge.closed_form import mean_squares
from gqa.convert.merge.layerwise import Arguments, first_tensor
from gqa.convert.merge.options import AT_ONCE, Refinement

_CHECKS = 8  # of the held-out error in a run


def _module_output(module: nn.Module, weights: Mapping[str, Tensor], arguments: Arguments) -> Tensor:
    """The output (B, T, D) of a module with other weights."""
    args, kwargs = arguments
    hidden = args[0] if args else kwargs["hidden_states"]
    parameters = {name: tensor.to(hidden.dtype) for name, tensor in weights.items()}
    return first_tensor(torch.func.functional_call(module, parameters, args, kwargs))


def refine(
    module: nn.Module, start: Mapping[str, Tensor], arguments: Callable[[Tensor], Arguments], targets: Tensor,
    counts: Tensor, settings: Refinement,
) -> tuple[dict[str, Tensor], float, float]:  # fmt: skip
    """Train the parameters `start` (names below `module`) towards `targets` (N, T, D); an error at a position counts
    `counts` (N, T). `arguments` gives those that `module` is called with, from indices of blocks.

    Returns the parameters with the least held-out error, which may be the start, and that error at the start and at
    the best: squared, relative to the targets' energy.
    """
    device, length = next(iter(start.values())).device, targets.shape[1]
    autocast = native_bfloat16(str(device)) if settings.autocast is None else settings.autocast
    generator = torch.Generator().manual_seed(settings.seed)
    heldout, train = _split(len(targets), settings, generator)
    weights = {name: tensor.float().clone().requires_grad_() for name, tensor in start.items()}
    optimizers = _optimizers(list(weights.values()), settings.learning_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - step / settings.steps) for each in optimizers]
    scale = (mean_squares(targets) * counts).mean().clamp_min(1e-30).to(device)

    def losses(rows: Tensor) -> Iterator[Tensor]:
        """The mean over blocks in parts, of as many blocks as fit into a layer at a time."""
        for part in rows.split(max(1, AT_ONCE // length)):
            inputs = arguments(part)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                output = _module_output(module, weights, inputs)
            errors = (output.float() - targets[part].to(device).float()).square().mean(-1)
            yield (errors * counts[part].to(device)).mean() / scale * (len(part) / len(rows))

    def error() -> float:
        with torch.no_grad():
            parts = [loss * len(rows) for rows in heldout.split(settings.batch) for loss in losses(rows)]
        return float(torch.stack(parts).sum()) / len(heldout)

    def copy() -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in weights.items()}

    best, first = copy(), error()
    least, interval = first, max(1, settings.steps // _CHECKS)
    for step in range(settings.steps):
        rows = train[torch.randperm(len(train), generator=generator)[: settings.batch]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses(rows):
            loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if ((step + 1) % interval == 0 or step + 1 == settings.steps) and (current := error()) < least:
            best, least = copy(), current
    return best, first, least


def without_heldout(counts: Tensor, settings: Refinement) -> Tensor:
    """(N, T) weights of positions with 0 in the blocks that `refine` holds out. A start fitted to these would be better
    there than on new text, so that hardly any step would improve on it.
    """
    heldout, train = _split(len(counts), settings, torch.Generator().manual_seed(settings.seed))
    used = counts.new_empty(len(counts))
    used[heldout], used[train] = 0, 1  # in this order: a single block is both
    return counts * used.unsqueeze(1)


def _split(blocks: int, settings: Refinement, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of the held-out blocks and of the others; a single block is both."""
    order = torch.randperm(blocks, generator=generator)
    count = max(1, round(blocks * settings.heldout)) if blocks > 1 else 0
    return (order[:count], order[count:]) if count else (order, order)


def _optimizers(parameters: list[Tensor], rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for matrices, Adam for the rest. Learning rates are `rate` times the size of a tensor:
    the root mean square of its singular values or of its numbers, which differs tenfold between layers and models. A
    tensor of zeros gets the size of the smallest other one.
    """
    sizes = [float(p.detach().norm()) / (min(p.shape) if p.ndim == 2 else p.numel()) ** 0.5 for p in parameters]
    least = min((size for size in sizes if size), default=1.0)
    sized = [(p, rate * (size or least)) for p, size in zip(parameters, sizes, strict=True)]
    # torch's Muon takes steps that are larger by a root where a matrix has more rows than columns
    matrices = [{"params": [p], "lr": lr / max(1, len(p) / p.shape[1]) ** 0.5} for p, lr in sized if p.ndim == 2]
    others = [{"params": [p], "lr": lr} for p, lr in sized if p.ndim != 2]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0.0, momentum=0.9))
    if others:
        optimizers.append(torch.optim.Adam(others, betas=(0.9, 0.99)))
    return optimizers
