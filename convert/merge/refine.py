"""Train one converted attention module toward its targets (`refined`): the output of the base
model's module, corrected for what earlier layers have lost.

Only the module's projections are trained. Its inputs and targets are fixed, and no other layer is
in memory. The module is transformers' own, so this works for every architecture and from any start
(docs/methods.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gqa.convert.merge.layer import Arguments, first_tensor
from gqa.convert.merge.muon import Muon
from gqa.convert.merge.options import TOKENS_AT_ONCE, Refinement
from gqa.convert.merge.sensitivity import mean_squares
from gqa.core.devices import fast_dtype, native_bfloat16

_CHECKS = 8  # the validation error is measured every steps // _CHECKS steps, and after the last


@dataclass(frozen=True)
class TrainedWeights:
    """The parameters with the least validation error, which may be those of the start.

    Attributes:
        weights: By name below the module.
        error_before: The validation error of the start: the squared error of the output on the
            validation blocks, relative to the energy of the targets of all blocks. Only tests read
            it.
        error: The validation error of these weights.
    """

    weights: dict[str, Tensor]
    error_before: float
    error: float


def split_blocks(
    blocks: int, settings: Refinement, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Split numbers of blocks into those for validation and those for training.

    Args:
        blocks: N.
        settings: With the share of validation blocks.
        generator: A new one with the seed of the settings, so that the split is always the same.

    Returns:
        Indices of the validation blocks and of the training blocks; a single block is both.
    """
    order = torch.randperm(blocks, generator=generator)
    if blocks == 1:
        return order, order
    count = max(1, round(blocks * settings.validation))
    return order[:count], order[count:]


def without_validation(position_weights: Tensor, settings: Refinement) -> Tensor:
    """The weights (N, T) of positions, with 0 in the validation blocks of `refine`.

    A start that is fitted to validation blocks would be better there than on new text, so that
    hardly any step would improve on it.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    _, train = split_blocks(len(position_weights), settings, generator)
    used = position_weights.new_zeros(len(position_weights))
    used[train] = 1  # a single block is used for validation and for training
    return position_weights * used.unsqueeze(1)


def refine(
    module: nn.Module,
    start: Mapping[str, Tensor],
    arguments: Callable[[Tensor], Arguments],
    targets: Tensor,
    position_weights: Tensor,
    settings: Refinement,
) -> TrainedWeights:
    """Train parameters of an attention module toward its targets.

    Some of the blocks are for validation: nothing is trained on them, and their error selects the
    best step.

    Args:
        module: The attention module, which itself is not changed.
        start: The parameters to train, by name below the module.
        arguments: Function from indices of blocks to the arguments of the module.
        targets: (N, T, D) float.
        position_weights: (N, T), what a squared error at a position counts.
        settings: Of the training.

    Returns:
        The parameters after the best step, float32.
    """
    device = next(iter(start.values())).device
    length = targets.shape[1]
    blocks_per_pass = max(1, TOKENS_AT_ONCE // length)
    blocks_of_step = settings.blocks_of_step(length)
    autocast = settings.autocast
    if autocast is None:
        autocast = native_bfloat16(str(device))

    # With the seed of `without_validation`, so the split is the same; then it draws the batches.
    generator = torch.Generator().manual_seed(settings.seed)
    validation, train = split_blocks(len(targets), settings, generator)
    weights = {name: tensor.float().clone().requires_grad_() for name, tensor in start.items()}
    optimizers = _optimizers(list(weights.values()), settings.learning_rate)
    schedules = [_linear_schedule(optimizer, settings.steps) for optimizer in optimizers]
    energy = (mean_squares(targets) * position_weights).mean().clamp_min(1e-30).to(device)

    def loss_parts(rows: Tensor) -> Iterator[Tensor]:
        """Parts whose sum is the loss of the blocks `rows`: a layer takes at most TOKENS_AT_ONCE
        tokens, so gradients are accumulated.

        The loss is relative to the energy of all blocks, so that steps are comparable.
        """
        for rows_at_once in rows.split(blocks_per_pass):
            args, kwargs = arguments(rows_at_once)
            hidden_states = args[0] if args else kwargs["hidden_states"]
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                cast = {name: tensor.to(hidden_states.dtype) for name, tensor in weights.items()}
                output = first_tensor(torch.func.functional_call(module, cast, args, kwargs))

            errors = (output.float() - targets[rows_at_once].to(device).float()).square().mean(-1)
            weighted = (errors * position_weights[rows_at_once].to(device)).mean()
            yield weighted / energy * (len(rows_at_once) / len(rows))

    def validation_error() -> float:
        return _mean_loss(loss_parts, validation, blocks_of_step)

    def copy_weights() -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in weights.items()}

    best = copy_weights()
    error_before = validation_error()
    least_error = error_before
    interval = max(1, settings.steps // _CHECKS)
    for step in range(1, settings.steps + 1):
        shuffled = train[torch.randperm(len(train), generator=generator)]
        rows = shuffled[:blocks_of_step]

        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in loss_parts(rows):
            loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()

        if step % interval == 0 or step == settings.steps:
            error = validation_error()
            if error < least_error:
                best = copy_weights()
                least_error = error
    return TrainedWeights(best, error_before, least_error)


@torch.no_grad()
def _mean_loss(
    loss_parts: Callable[[Tensor], Iterator[Tensor]], blocks: Tensor, blocks_per_step: int
) -> float:
    """The loss of all `blocks`, of which `blocks_per_step` go through `loss_parts` at a time."""
    weighted = []
    for rows in blocks.split(blocks_per_step):  # the last may be fewer, and count less
        weighted += [loss * len(rows) for loss in loss_parts(rows)]
    return float(torch.stack(weighted).sum()) / len(blocks)


def _linear_schedule(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that falls to 0 in so many steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def _optimizers(parameters: list[Tensor], rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for matrices, Adam for vectors.

    A tensor's learning rate is `rate` times its size: the root mean square of a matrix's singular
    values, or of a vector's numbers. Sizes differ tenfold between layers and models. A tensor of
    zeros gets the size of the smallest other one.
    """
    device = str(parameters[0].device)
    muon_dtype = fast_dtype(device)
    sizes = [_size(parameter.detach()) for parameter in parameters]
    smallest = min((size for size in sizes if size), default=1.0)

    matrices = []
    vectors = []
    for parameter, size in zip(parameters, sizes, strict=True):
        group = {"params": [parameter], "lr": rate * (size or smallest)}
        if parameter.ndim == 2:
            matrices.append(group)
        else:
            vectors.append(group)

    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, momentum=0.9, dtype=muon_dtype))
    if vectors:
        optimizers.append(torch.optim.Adam(vectors, betas=(0.9, 0.99)))
    return optimizers


def _size(tensor: Tensor) -> float:
    """Root mean square of a matrix's singular values, or of a vector's numbers."""
    count = min(tensor.shape) if tensor.ndim == 2 else tensor.numel()
    return float(tensor.norm()) / math.sqrt(count)
