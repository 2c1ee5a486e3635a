"""The training loop. `train` is a run from top to bottom."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.tensor import DTensor

from gqa.core.console import SILENT, Watcher
from gqa.core.errors import DivergedError, RefusedError, StoppedError, UnfinishedError, explain
from gqa.corpus.streamed import Bookmark, StreamedBlocks
from gqa.uptrain.evaluation import (
    NOT_FINITE,
    Weights,
    best_weights,
    copy_trained,
    evaluate,
    means,
    zero_sums,
)
from gqa.uptrain.log import Log
from gqa.uptrain.optimizer import base_rate, make_optimizer, set_rate
from gqa.uptrain.saver import Saver
from gqa.uptrain.schedule import evaluation_interval, rate_factor, warmup_steps
from gqa.uptrain.setup import Setup
from gqa.uptrain.state_files import TrainingProgress, load
from gqa.uptrain.training_model import Batch, split_batch
from gqa.uptrain.weights import prepare_model

_PROBE_TOKENS = 16  # of a pass that shows whether a model draws at random


def train(setup: Setup, watcher: Watcher = SILENT) -> tuple[TrainingProgress, Weights]:
    """Train; return the progress and this process' weights with the lowest held-out loss (with
    adapters apart, and as shards under FSDP2).

    Without held-out text these are the last weights. They are empty if no step improved the model.
    The caller holds the lock of `setup.states`. No checkpoint is written. Raises RefusedError (a
    damaged state, too little memory), DivergedError, StoppedError, OutputError if the state at
    which a signal stops it cannot be saved, and UnfinishedError if text cannot be read: the steps
    before are saved.
    """
    accelerator = setup.accelerator
    steps = setup.dataloader.steps
    set_seed(setup.options.seed, device_specific=True)  # for custom code that draws at random
    optimizer = make_optimizer(setup.training_model, setup.options)
    model, optimizer = prepare_model(accelerator, setup.training_model, optimizer)
    _warn_of_random_numbers(setup, model, watcher)

    progress, best = _begin_or_continue(setup, model, optimizer)
    log = Log(setup, progress.step, watcher)
    saver = Saver(setup, model, optimizer, watcher)
    model.train()

    with _signals() as signals:
        batches = BatchReader(setup, progress.step)
        batches.read_next()
        if batches.error:  # of the first step: nothing is lost
            raise batches.error

        reading = 0.0  # seconds
        while progress.step < steps:
            start = time.perf_counter()
            rate = _learning_rate(setup, progress.step)
            sums, norm = train_step(
                accelerator, model, optimizer, batches.micro_batches, rate, setup.options.clip
            )
            numbers = _add_step(progress, sums, norm, rate, setup)
            seconds = reading + time.perf_counter() - start

            if _evaluates_after(setup, progress.step):
                numbers |= evaluate(setup, model, progress, best)
            log.step(progress, numbers, seconds)

            reading = batches.read_next()
            # All ranks must do the same after the same step, whichever of them was signaled or
            # could not read.
            stopped, failed, due = _any_rank(
                accelerator, bool(signals), batches.error is not None, saver.is_due(progress.step)
            )
            if stopped or failed or due:
                saved = saver.save(
                    progress,
                    best,
                    batches.bookmark,
                    unreadable_text=failed,
                    stops=stopped or failed,
                )
            if stopped:
                number = signals[0] if signals else signal.SIGTERM
                raise StoppedError(number, progress.step, saved)
            if failed:
                raise _unreadable(batches.error, progress.step, saved) from batches.error
    return progress, best_weights(setup, model, progress, best)


# ---------------------------------------------------------------------------- before the first step


def _warn_of_random_numbers(setup: Setup, model: Any, watcher: Watcher) -> None:
    """Warn, on the main process, if the model draws at random."""
    # A compiled model would be compiled for the shape of the probe too
    if setup.options.compile or not draws_at_random(setup, model):
        return
    if setup.accelerator.is_main_process:
        watcher.warn(
            f"{setup.checkpoint.name} computes with random numbers in training, "
            "other than dropout, which is off: the "
            "result depends on --micro-batch and on the number of processes"
        )


@torch.no_grad()
def draws_at_random(setup: Setup, model: Any) -> bool:
    """Whether two passes over the same few tokens in training mode differ.

    All processes must call it.
    """
    vocabulary = setup.model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=setup.accelerator.device)[None] % vocabulary
    batch = {"input_ids": ids}
    if setup.model.config.is_encoder_decoder:
        batch |= {"attention_mask": torch.ones_like(ids), "labels": ids}

    def nats_of_a_pass() -> float:
        _, sums = model(**batch)
        return float(sums[1])

    model.train()
    first = nats_of_a_pass()
    second = nats_of_a_pass()
    # Kernels of GPUs may add in another order.
    return abs(first - second) > 1e-4 * abs(first)


def _begin_or_continue(
    setup: Setup, model: Any, optimizer: Any
) -> tuple[TrainingProgress, Weights]:
    """The progress and the best weights so far: of the state from which the run continues, or of a
    new run, whose held-out losses are measured.
    """
    progress = TrainingProgress()
    best: Weights = {}
    if setup.start:
        progress, best = _restore(setup, model, optimizer)
    if progress.step == 0 and setup.dataloader.heldout_blocks:
        evaluate(setup, model, progress, best)
    return progress, best


def _restore(setup: Setup, model: Any, optimizer: Any) -> tuple[TrainingProgress, Weights]:
    """The progress and the best weights of the state to continue from, whose weights and optimizer
    are loaded.
    """
    assert setup.start
    progress = TrainingProgress.of(setup.start.record)

    best: Weights = {}
    if 0 < progress.best_step < setup.dataloader.steps:
        best = copy_trained(setup, model)  # of the right shapes, to be read into
    load(setup.start, setup.accelerator, model, optimizer, best)

    blocks = setup.dataloader.blocks
    if isinstance(blocks, StreamedBlocks):
        blocks.seek(setup.start.record["stream"])
    return progress, best


# ----------------------------------------------------------------------------------------- one step


def _learning_rate(setup: Setup, step: int) -> float:
    """The learning rate of a step (from 0)."""
    options = setup.options
    steps = setup.dataloader.steps
    warmup = warmup_steps(options.warmup, options.schedule, steps)
    return base_rate(options) * rate_factor(step, steps, options.schedule, warmup)


def train_step(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    micro_batches: list[Batch],
    rate: float,
    clip: float,
) -> tuple[Tensor, float]:
    """Take one optimizer step over the micro-batches of all ranks; return (predictions, nats,
    distillation) summed over ranks, and the norm of the gradient before clipping.

    The gradient is that of the mean over all predictions of the step.
    """
    device = accelerator.device
    predictions = 0
    batches = list[Batch]()
    for batch in micro_batches:
        _, targets = split_batch(batch)
        predictions += int((targets >= 0).sum())
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    total = accelerator.reduce(torch.tensor(float(predictions), device=device), "sum")

    # accelerate divides by the micro-batches, DDP and FSDP by the ranks: undone here, as the sum is
    # divided only once.
    scale = len(batches) * accelerator.num_processes / total.clamp_min(1.0)

    sums = zero_sums(3, device)
    for batch in batches:
        with accelerator.accumulate(model):
            loss, numbers = model(**batch)
            sums += numbers
            accelerator.backward(loss * scale)
    sums = accelerator.reduce(sums, "sum")

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = accelerator.clip_grad_norm_(trained, clip)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()

    set_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad()
    return sums, float(norm)


def _add_step(
    progress: TrainingProgress, sums: Tensor, norm: float, rate: float, setup: Setup
) -> dict[str, float]:
    """Add a step to `progress`; return its numbers for the log. Raises DivergedError."""
    nats, divergence = means(sums)
    is_finite = bool(sums.isfinite().all())
    # With held-out text the weights have been evaluated before the first step
    if not progress.step and not setup.dataloader.heldout_blocks and not is_finite:
        raise RefusedError(NOT_FINITE.format(setup.checkpoint.name))

    data = setup.dataloader
    step_tokens = data.tokens_until(progress.step + 1) - data.tokens_until(progress.step)
    progress.step += 1
    progress.tokens += step_tokens
    progress.loss = nats
    if not is_finite or not math.isfinite(norm):
        raise DivergedError(
            f"loss or gradient was not finite in step {progress.step}; "
            "what was saved before is kept. Lower --learning-rate or lengthen --warmup"
        )

    numbers = {
        "tokens": progress.tokens,
        "step_tokens": step_tokens,
        "loss": nats,
        "learning_rate": rate,
        "gradient_norm": norm,
    }
    if divergence:
        numbers["distillation"] = divergence
    return numbers


def _evaluates_after(setup: Setup, step: int) -> bool:
    """Whether the held-out losses are measured after so many steps."""
    steps = setup.dataloader.steps
    interval = evaluation_interval(setup.options.eval_every, steps)
    return bool(setup.dataloader.heldout_blocks) and (step == steps or step % interval == 0)


# -------------------------------------------------------------------------------- between two steps


class BatchReader:
    """Reads the batches of this rank, one step ahead: text that cannot be read stops the run
    between two steps, when everything before it can be saved.

    Attributes:
        micro_batches: Of the next step; none after the last one.
        bookmark: Where a stream was before they were read; None if the data is no stream.
        error: Why there are none.
    """

    def __init__(self, setup: Setup, first: int) -> None:
        """`first` steps are done already."""
        accelerator = setup.accelerator
        self._batches = setup.dataloader.batches(
            first, accelerator.process_index, accelerator.num_processes, setup.micro_batch
        )
        self._blocks = setup.dataloader.blocks
        self.micro_batches: list[Batch] = []
        self.bookmark: Bookmark | None = None
        self.error: Exception | None = None

    def read_next(self) -> float:
        """Read the batches of the next step; return the seconds that it took."""
        start = time.perf_counter()
        if isinstance(self._blocks, StreamedBlocks):
            self.bookmark = self._blocks.bookmark()
        try:
            self.micro_batches = next(self._batches, [])
        except Exception as error:  # of the text, of a disk, of a hub
            self.error = error
        return time.perf_counter() - start


def _any_rank(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """Each flag: whether it is set on any rank."""
    counts = torch.tensor([float(flag) for flag in flags], device=accelerator.device)
    return [bool(count) for count in accelerator.reduce(counts, "sum").tolist()]


def _unreadable(error: Exception | None, step: int, saved: Path) -> UnfinishedError:
    """The error of a run whose text cannot be read on this rank, or on another one."""
    reason = explain(error, 600) if error else "another process could not read its text"
    return UnfinishedError(
        f"{reason}. The {step:,} steps before it are not lost: they are saved in {saved}, and the "
        "same command continues from there once the text can be read"
    )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, which the loop acts on between two steps."""
    received: list[int] = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            handlers[number] = signal.signal(number, lambda n, frame: received.append(n))
        except ValueError:  # not the main thread
            break
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
