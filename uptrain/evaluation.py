"""The validation losses of a training, and its best weights by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from gqa.core.errors import RefusedError
from gqa.uptrain.dataloader import stack
from gqa.uptrain.schedule import depends_on_length
from gqa.uptrain.scope import trained_names
from gqa.uptrain.setup import ReadyRun
from gqa.uptrain.sharding import local_shard
from gqa.uptrain.state_files import TrainingProgress
from gqa.uptrain.stored_weights import stored_weights
from gqa.uptrain.training_model import mean_losses, zero_sums

Weights = dict[str, Tensor]


def not_finite_error(name: str) -> RefusedError:
    """The error for a model, or its teacher, whose loss is not finite before any training."""
    return RefusedError(
        f"the loss is not finite, because {name} or its teacher has weights that are NaN or "
        "infinite; pass intact checkpoints"
    )


def measure_and_keep(
    run: ReadyRun, wrapped: Any, progress: TrainingProgress, best: Weights
) -> dict[str, float]:
    """Measure the validation losses of the weights as they would be stored.

    They are noted in `progress`, and the weights that train are copied to `best` if they are the
    best so far.

    Returns:
        The losses, for the log.
    """
    with stored_weights(run.model, run.checkpoint):
        losses = validation_losses(run, wrapped)
    loss = losses[run.options.objective]
    if not progress.step and not math.isfinite(loss):
        raise not_finite_error(run.checkpoint.name)

    lowest = progress.lowest_validation
    if lowest is None:
        progress.first_validation = progress.lowest_validation = losses
        best.update(copy_trained(run, wrapped))
    elif loss < lowest[run.options.objective]:  # NaN and infinity are not
        progress.lowest_validation = losses
        progress.best_step = progress.step
        # The last weights are in memory when the result is written
        if progress.step < run.dataloader.steps:
            best.update(copy_trained(run, wrapped))
    return {f"validation_{name}": value for name, value in losses.items()}


@torch.no_grad()
def validation_losses(run: ReadyRun, wrapped: Any) -> dict[str, float]:
    """Means per token, in nats, over the validation blocks, which the ranks share: `cross_entropy`,
    and with a teacher `kl`.
    """
    accelerator = run.accelerator
    device = accelerator.device
    ranks = accelerator.num_processes
    rank = accelerator.process_index
    blocks = run.dataloader.validation_blocks
    micro = run.micro_batch

    wrapped.eval()
    sums = zero_sums(device)
    # All ranks make the same number of passes (FSDP waits for them); a rank without a block repeats
    # the first ones, which do not count.
    for start in range(0, len(blocks), micro * ranks):
        share = blocks[start + rank * micro : start + (rank + 1) * micro]
        batch = {name: tensor.to(device) for name, tensor in stack(share or blocks[:1]).items()}
        _loss, batch_sums = wrapped(**batch)
        if share:
            sums += batch_sums
    sums = accelerator.reduce(sums, "sum")
    wrapped.train()

    means = mean_losses(sums)
    losses = {"cross_entropy": means.cross_entropy}
    if run.options.distills:
        losses["kl"] = means.kl
    return losses


def go_back_if_not_better(
    run: ReadyRun, wrapped: Any, progress: TrainingProgress, best: Weights
) -> bool:
    """If the loss that `measure_and_keep` has measured is not lower than before, give the model the
    best weights so far, and let the run go on from them at a lower learning rate.

    How large a rate may be depends on the model, on its text and on the tokens of a step. One that
    is too large shows in the validation loss; without this, such a run would gain nothing. Not with
    a constant schedule, where the first steps of a longer run are those of a shorter one.

    Returns:
        Whether the rate is lowered.
    """
    is_better = progress.best_step == progress.step
    is_last = progress.step == run.dataloader.steps
    if is_better or is_last or not depends_on_length(run.options.schedule):
        return False

    _copy_into(state_dict(run.accelerator, wrapped), best)
    progress.rate_cuts += 1
    return True


def best_weights(run: ReadyRun, wrapped: Any, progress: TrainingProgress, best: Weights) -> Weights:
    """This process' weights with the lowest validation loss, once training is done.

    They are the model's own, into which `best` is copied if an earlier step was better. Without
    validation text they are the last ones. Empty if no step improved the model.
    """
    has_validation = bool(run.dataloader.validation_blocks)
    if has_validation and not progress.best_step:
        return {}

    weights = state_dict(run.accelerator, wrapped)
    if has_validation and progress.best_step < progress.step:
        _copy_into(weights, best)
    return weights


@torch.no_grad()
def _copy_into(weights: Weights, best: Weights) -> None:
    """Copy the best weights of this process into those of its model."""
    for name, tensor in best.items():
        local_shard(weights[name]).copy_(local_shard(tensor))


def copy_trained(run: ReadyRun, wrapped: Any) -> Weights:
    """Copies of the weights that train, or of this process' shards, in the host's memory."""
    weights = state_dict(run.accelerator, wrapped)
    return {
        name: weights[name].to("cpu", copy=True)
        for name in trained_names(run.model)
        if name in weights
    }


def state_dict(accelerator: Accelerator, wrapped: Any) -> Weights:
    """The model's state dict under its own names, sharing the model's memory; under FSDP2 its
    shards.
    """
    get: Callable[[Any], dict[str, Any]] = (
        get_model_state_dict if accelerator.is_fsdp2 else accelerator.get_state_dict
    )
    return {name.removeprefix("model."): tensor for name, tensor in get(wrapped).items()}
