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
from gqa.core.devices import out_of_memory
from gqa.core.errors import DivergedError, RefusedError, StoppedError, UnfinishedError, explain
from gqa.corpus.streamed import Bookmark, StreamedBlocks
from gqa.uptrain.evaluation import (
    Weights,
    best_weights,
    copy_trained,
    go_back_if_not_better,
    measure_and_keep,
    not_finite_error,
)
from gqa.uptrain.log import Log
from gqa.uptrain.optimizer import base_rate, forget_moments, make_optimizer, set_rate
from gqa.uptrain.saver import Saver
from gqa.uptrain.schedule import RATE_CUT, evaluates_after, rate_factor, warmup_steps
from gqa.uptrain.setup import ReadyRun
from gqa.uptrain.sharding import prepare_model
from gqa.uptrain.state_files import TrainingProgress, read_tensors
from gqa.uptrain.training_model import Batch, mean_losses, split_batch, zero_sums

_PROBE_TOKENS = 16  # tokens of the passes that show whether a model draws at random


def train(run: ReadyRun, watcher: Watcher = SILENT) -> tuple[TrainingProgress, Weights]:
    """Run all steps that are left, and save states of the run on the way.

    The caller holds the lock of `run.states`, and writes the checkpoint from what is returned.

    Returns:
        How far the run came, and the weights of the step with the lowest validation loss: the last
        weights without validation text, none if no step improved the model. Adapters are not merged
        into them. Under FSDP2 they are the shards of this process.

    Raises:
        RefusedError: The state to continue from is damaged, or the model's loss is not finite
            before the first step.
        RefusedError, TextError, or what else reading raises: The first batch cannot be read.
        RuntimeError, MemoryError: There is not enough memory (`gqa.uptrain.run` explains it).
        DivergedError: A loss or gradient is not finite in a later step.
        StoppedError: SIGINT or SIGTERM arrived; the steps before are saved.
        UnfinishedError: Text cannot be read; the steps before are saved.
        OutputError: The state of a run that stops cannot be saved.
    """
    accelerator = run.accelerator
    steps = run.dataloader.steps
    set_seed(run.options.seed, device_specific=True)  # for custom code that draws at random
    optimizer = make_optimizer(run.training_model, run.options)
    # The `TrainingModel`, as accelerate wraps it: wrapped(**batch) -> its loss and its sums (3,)
    wrapped, optimizer = prepare_model(accelerator, run.training_model, optimizer)
    _try_a_few_tokens(run, wrapped, watcher)

    progress, best = _begin_or_continue(run, wrapped, optimizer)
    log = Log(run, progress.step, watcher)
    saver = Saver(run, wrapped, optimizer, watcher)
    wrapped.train()

    with _signals() as signals:
        batches = BatchReader(run, progress.step)
        batches.read_next()
        (failed,) = _any_rank(accelerator, batches.error is not None)
        if failed:
            # Nothing was done since this command began, so there is nothing new to save
            raise batches.error or RefusedError(
                "another process could not read its text; its message says why"
            )

        reading_seconds = 0.0  # how long the batches of a step took to read
        while progress.step < steps:
            began = time.perf_counter()
            rate = _learning_rate(run, progress)

            sums, norm = train_step(
                accelerator, wrapped, optimizer, batches.micro_batches, rate, run.options.clip
            )
            numbers = _add_step(progress, sums, norm, rate, run)
            seconds = reading_seconds + time.perf_counter() - began

            if _evaluates_after(run, progress.step):
                numbers |= measure_and_keep(run, wrapped, progress, best)
                if go_back_if_not_better(run, wrapped, progress, best):
                    forget_moments(optimizer)
                    log.lowered_rate(progress)
            log.step(progress, numbers, seconds)

            reading_seconds = batches.read_next()
            # One rank alone may be signaled, fail to read, or see that it is time to save: then
            # all ranks save and stop after the same step.
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
    return progress, best_weights(run, wrapped, progress, best)


# ---------------------------------------------------------------------------- before the first step


def _try_a_few_tokens(run: ReadyRun, wrapped: Any, watcher: Watcher) -> None:
    """Raise RefusedError if the model's class cannot compute a loss on text at all; warn, on the
    main process, if the model draws at random.
    """
    # A compiled model would be compiled for the shape of the probe too
    if run.options.compile:
        return
    try:
        is_random = draws_at_random(run, wrapped)
    except Exception as error:  # whatever a class raises that does not run on text alone
        if out_of_memory(error) or mixes_dtypes(run.accelerator, error):
            raise
        raise RefusedError(
            f"{type(run.model).__name__} cannot be trained on text: it fails on "
            f"{_PROBE_TOKENS} tokens ({explain(error)}); try another version of transformers, or "
            "train it with the code of its authors"
        ) from error

    if is_random and run.accelerator.is_main_process:
        watcher.warn(
            f"{run.checkpoint.name} draws random numbers in training (not for dropout, which is "
            "off), so the result depends on --micro-batch and on the number of processes"
        )


@torch.no_grad()
def draws_at_random(run: ReadyRun, wrapped: Any) -> bool:
    """Whether two passes over the same few tokens in training mode differ.

    All processes must call it.
    """
    vocabulary = run.model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=run.accelerator.device)[None] % vocabulary
    batch = {"input_ids": ids}
    if run.model.config.is_encoder_decoder:
        batch |= {"attention_mask": torch.ones_like(ids), "labels": ids}

    def loss_of_a_pass() -> float:
        _, sums = wrapped(**batch)
        return mean_losses(sums).cross_entropy

    wrapped.train()
    first = loss_of_a_pass()
    second = loss_of_a_pass()
    # Not exactly: kernels of GPUs may add the same numbers in another order.
    return abs(first - second) > 1e-4 * abs(first)


def mixes_dtypes(accelerator: Accelerator, error: Exception) -> bool:
    """Whether an error is that code of a model, like DBRX's, cannot mix float32 with the bfloat16
    of autocast. torch has only messages for it.
    """
    words = ("same scalar type", "same dtype", "expected scalar type")
    autocast = accelerator.mixed_precision == "bf16"
    return autocast and any(part in str(error) for part in words)


def _begin_or_continue(
    run: ReadyRun, wrapped: Any, optimizer: Any
) -> tuple[TrainingProgress, Weights]:
    """The progress and the best weights so far, from the state of a run that continues.

    Before its first step, a run measures the validation losses.
    """
    progress = TrainingProgress()
    best: Weights = {}
    if run.continues_from:
        progress, best = _restore(run, wrapped, optimizer)
    if progress.step == 0 and run.dataloader.validation_blocks:
        measure_and_keep(run, wrapped, progress, best)
    return progress, best


def _restore(run: ReadyRun, wrapped: Any, optimizer: Any) -> tuple[TrainingProgress, Weights]:
    """Load the model's weights and the optimizer from the state to continue from; return the
    progress and the best weights in that state.
    """
    assert run.continues_from
    progress = TrainingProgress.of(run.continues_from.record)

    best: Weights = {}
    if run.dataloader.validation_blocks:
        # The saved weights are read into these, which have their names and shapes
        best = copy_trained(run, wrapped)
    read_tensors(run.continues_from, run.accelerator, wrapped, optimizer, best)

    blocks = run.dataloader.blocks
    if isinstance(blocks, StreamedBlocks):
        blocks.seek(run.continues_from.record["stream"])
    return progress, best


# ----------------------------------------------------------------------------------------- one step


def _learning_rate(run: ReadyRun, progress: TrainingProgress) -> float:
    """The learning rate of the next step."""
    options = run.options
    steps = run.dataloader.steps
    warmup = warmup_steps(options.warmup, options.schedule, steps)
    factor = rate_factor(progress.step, steps, options.schedule, warmup)
    return base_rate(options) * factor * RATE_CUT**progress.rate_cuts


def train_step(
    accelerator: Accelerator,
    wrapped: Any,
    optimizer: Any,
    micro_batches: list[Batch],
    rate: float,
    clip: float,
) -> tuple[Tensor, float]:
    """Take one optimizer step over the micro-batches of all ranks.

    The gradient is that of the mean over all predictions of the step.

    Returns:
        The sums (3,) of `TrainingModel` over all ranks, and the norm of the gradient before
        clipping.
    """
    device = accelerator.device
    predictions = 0
    batches = list[Batch]()
    for batch in micro_batches:
        _, targets = split_batch(batch)
        predictions += int((targets >= 0).sum())
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    total = accelerator.reduce(torch.tensor(float(predictions), device=device), "sum")

    # The gradient of a summed loss must be divided by the predictions of the step, and by nothing
    # else. accelerate also divides each loss by the number of micro-batches, and DDP and FSDP
    # divide gradients by the number of ranks: the factors in the numerator cancel both.
    scale = len(batches) * accelerator.num_processes / total.clamp_min(1.0)

    sums = zero_sums(device)
    for batch in batches:
        with accelerator.accumulate(wrapped):
            loss, batch_sums = wrapped(**batch)
            sums += batch_sums
            accelerator.backward(loss * scale)
    sums = accelerator.reduce(sums, "sum")

    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    norm = accelerator.clip_grad_norm_(trained, clip)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()

    set_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad()
    return sums, float(norm)


def _add_step(
    progress: TrainingProgress, sums: Tensor, norm: float, rate: float, run: ReadyRun
) -> dict[str, float]:
    """Add a step to `progress`; return its numbers for the log.

    Raises DivergedError if loss or gradient is not finite, RefusedError if the weights that the
    training began with are the reason.
    """
    losses = mean_losses(sums)
    is_finite = bool(sums.isfinite().all())
    # With validation text the weights that the training began with have been evaluated
    is_first_measurement = progress.step == 0 and not run.dataloader.validation_blocks
    if is_first_measurement and not is_finite:
        raise not_finite_error(run.checkpoint.name)

    data = run.dataloader
    step_tokens = data.tokens_until(progress.step + 1) - data.tokens_until(progress.step)
    progress.step += 1
    progress.tokens += step_tokens
    progress.training_cross_entropy = losses.cross_entropy
    if not is_finite or not math.isfinite(norm):
        raise _diverged(progress.step, run)

    numbers = {
        "tokens": progress.tokens,
        "step_tokens": step_tokens,
        "cross_entropy": losses.cross_entropy,
        "learning_rate": rate,
        "gradient_norm": norm,
    }
    if run.options.distills:
        numbers["kl"] = losses.kl
    return numbers


def _diverged(step: int, run: ReadyRun) -> DivergedError:
    """The error of a run whose loss or gradient is not finite in `step`."""
    problem = f"loss or gradient was not finite in step {step}"
    advice = "a lower --learning-rate or a longer --warmup"
    if run.states.step_directories():
        return DivergedError(
            f"{problem}; what was saved before is kept. Repeat the command with --overwrite and "
            f"{advice}"
        )
    return DivergedError(f"{problem}; nothing was saved before. Repeat the command with {advice}")


def _evaluates_after(run: ReadyRun, step: int) -> bool:
    """Whether the validation losses are measured once `step` steps are done."""
    if not run.dataloader.validation_blocks:
        return False
    return evaluates_after(step, run.dataloader.steps, run.options.eval_every)


# -------------------------------------------------------------------------------- between two steps


class BatchReader:
    """Reads the micro-batches of this rank, one step ahead.

    So text that cannot be read stops the run between two steps, when all that was trained can be
    saved.

    Attributes:
        micro_batches: The micro-batches of the next step; empty after the last step.
        bookmark: Where the stream of text was before `micro_batches` were read; None if the data is
            no stream.
        error: Why the next step could not be read; None if it could.
    """

    def __init__(self, run: ReadyRun, first_step: int) -> None:
        """`first_step` (from 0) is the first to be read: 0, or where a run continues."""
        accelerator = run.accelerator
        self._batches = run.dataloader.batches(
            first_step, accelerator.process_index, accelerator.num_processes, run.micro_batch
        )
        self._blocks = run.dataloader.blocks
        self.micro_batches: list[Batch] = []
        self.bookmark: Bookmark | None = None
        self.error: Exception | None = None

    def read_next(self) -> float:
        """Read the micro-batches of the next step; return the seconds that it took."""
        start = time.perf_counter()
        if isinstance(self._blocks, StreamedBlocks):
            self.bookmark = self._blocks.bookmark()
        try:
            self.micro_batches = next(self._batches, [])
        except Exception as error:  # bad text, a failing disk or hub: `train` decides
            self.error = error
        return time.perf_counter() - start


def _any_rank(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """For each flag, whether it is set on at least one rank."""
    counts = torch.tensor([float(flag) for flag in flags], device=accelerator.device)
    return [bool(count) for count in accelerator.reduce(counts, "sum").tolist()]


def _unreadable(error: Exception | None, step: int, saved: Path) -> UnfinishedError:
    """The error that ends a run whose text cannot be read.

    Args:
        error: Why this rank could not read; None if only another rank could not.
        step: The number of steps that are done.
        saved: The directory of the state that was saved.
    """
    reason = explain(error, 600) if error else "another process could not read its text"
    return UnfinishedError(
        f"{reason}. The {step:,} steps before it are not lost: they are saved in {saved}, and the "
        "same command continues from there once the text can be read"
    )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the numbers of SIGINT and SIGTERM; the loop looks at them between two steps."""
    received: list[int] = []
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            handlers[number] = signal.signal(number, lambda n, frame: received.append(n))
        except ValueError:  # only the main thread may set handlers
            break
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
