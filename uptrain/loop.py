"""The training loop. `train` is a run from top to bottom."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from gqa.checkpoint.write import finite, replacing
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import peak_memory
from gqa.core.errors import (
    DivergedError,
    OutputError,
    RefusedError,
    StoppedError,
    UnfinishedError,
    explain,
)
from gqa.corpus.streamed import Bookmark, StreamedBlocks, positions_of
from gqa.uptrain.dataloader import stack
from gqa.uptrain.models import make_optimizer, trained_names
from gqa.uptrain.options import Schedule
from gqa.uptrain.setup import Setup
from gqa.uptrain.state_files import TrainingProgress, load
from gqa.uptrain.training_model import Batch, split_batch
from gqa.uptrain.weights import local_shard, prepare_model, stored_weights

_PROBED = 16  # tokens of a pass that shows whether a model draws at random
STATE_SECONDS = 600  # between two states, at least
STATE_SHARE = 50  # times as long as saving one takes is between two, at least
EVALUATIONS = 4  # held-out evaluations of a run, unless `eval_every` is given
_NOT_FINITE = (
    "{} or its teacher has weights that are NaN or infinite: its loss is not finite; give intact "
    "checkpoints"
)
Weights = dict[str, Tensor]


def train(setup: Setup, watcher: Watcher = SILENT) -> tuple[TrainingProgress, Weights]:
    """Train; return the progress and this process' weights with the lowest held-out loss (with
    adapters apart, and as shards under FSDP2).

    Without held-out text these are the last weights. They are empty if no step improved the model.
    The caller holds the lock of `setup.states`. No checkpoint is written. Raises RefusedError (a
    damaged state, too little memory), DivergedError, StoppedError, OutputError if the state at
    which a signal stops it cannot be saved, and UnfinishedError if text cannot be read: the steps
    before are saved.
    """
    options, accelerator, dataloader = setup.options, setup.accelerator, setup.dataloader
    set_seed(options.seed, device_specific=True)  # for custom code that draws at random
    training = setup.training_model
    model, optimizer = prepare_model(accelerator, training, make_optimizer(training, options))
    if not options.compile and draws_at_random(setup, model) and accelerator.is_main_process:
        watcher.warn(
            f"{setup.checkpoint.name} computes with random numbers in training, "
            "other than dropout, which is off: the "
            "result depends on --micro-batch and on the number of processes"
        )
    progress, best = _restore(setup, model, optimizer) if setup.start else (TrainingProgress(), {})
    if progress.step == 0 and dataloader.heldout:
        _evaluate(setup, model, progress, best)
    log = Log(setup, progress.step, watcher)
    warmup = warmup_steps(options.warmup, options.schedule, dataloader.steps)
    eval_every = evaluation_interval(options.eval_every, dataloader.steps)
    saver = Saver(setup, watcher)
    model.train()

    with _signals() as signals:
        batches = Upcoming(setup, progress.step)
        batches.fetch()
        if batches.error:  # of the first step: nothing is lost
            raise batches.error

        start = time.perf_counter()
        while progress.step < dataloader.steps:
            rate = options.learning_rate * rate_factor(
                progress.step, dataloader.steps, options.schedule, warmup
            )
            sums, norm = train_step(
                accelerator, model, optimizer, batches.micro_batches, rate, options.clip
            )
            numbers = _add_step(progress, sums, norm, rate, setup)
            seconds = time.perf_counter() - start

            last = progress.step == dataloader.steps
            if dataloader.heldout and (last or progress.step % eval_every == 0):
                numbers |= _evaluate(setup, model, progress, best)
            log.step(progress, numbers, seconds)

            start = time.perf_counter()
            batches.fetch()
            reading = time.perf_counter() - start

            # All ranks must do the same after the same step, whichever of them was signalled or
            # could not read.
            stopped, failed, due = _any_rank(
                accelerator,
                bool(signals),
                batches.error is not None,
                saver.is_due(progress.step, last),
            )
            if stopped or failed or due:
                saved = saver.save(
                    progress, model, optimizer, best, batches.bookmark, failed, stopped or failed
                )
            if stopped:
                number = signals[0] if signals else signal.SIGTERM
                raise StoppedError(number, progress.step, saved)
            if failed:
                raise _unreadable(batches.error, progress.step, saved) from batches.error
            start = time.perf_counter() - reading
    return progress, _best(setup, model, progress, best)


@torch.no_grad()
def draws_at_random(setup: Setup, model: Any) -> bool:
    """Whether two passes over the same few tokens in training mode differ.

    All processes must call it.
    """
    vocabulary = setup.model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, _PROBED + 1, device=setup.accelerator.device)[None] % vocabulary
    batch = {"input_ids": ids}
    if setup.model.config.is_encoder_decoder:
        batch |= {"attention_mask": torch.ones_like(ids), "labels": ids}
    model.train()
    first, second = (float(model(**batch)[1][1]) for _ in range(2))
    # Kernels of GPUs may add in another order.
    return abs(first - second) > 1e-4 * abs(first)


class Upcoming:
    """The batches of this rank, read one step ahead: text that cannot be read stops the run between
    two steps, when everything before it can be saved.

    `micro_batches`: of the next step. `error`: why there are none. `bookmark`: where a stream was
    before they were read.
    """

    def __init__(self, setup: Setup, first: int) -> None:
        accelerator = setup.accelerator
        ranks = accelerator.process_index, accelerator.num_processes
        self._batches = setup.dataloader.batches(first, *ranks, setup.micro_batch)
        self._blocks = setup.dataloader.blocks
        self.micro_batches: list[Batch] = []
        self.bookmark: Bookmark | None = None
        self.error: Exception | None = None

    def fetch(self) -> None:
        """Read the batch of the next step; none after the last one."""
        if isinstance(self._blocks, StreamedBlocks):
            self.bookmark = self._blocks.bookmark()
        try:
            self.micro_batches = next(self._batches, [])
        except Exception as error:  # of the text, of a disk, of a hub
            self.error = error


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


class Saver:
    """Saves states: every `save_every` steps, by default by time; and when the run stops."""

    def __init__(self, setup: Setup, watcher: Watcher) -> None:
        self._setup, self._watcher = setup, watcher
        self._saved_at = time.monotonic()
        self._seconds = 0.0  # that the last save took

    def is_due(self, step: int, last: bool) -> bool:
        """Whether to save after this step.

        By time: every ten minutes, or less often, so that the run spends less than a fiftieth of
        its time on it.
        """
        every = self._setup.options.save_every
        if every:
            return last or step % every == 0
        if last:  # the trained weights are saved next
            return False
        interval = max(STATE_SECONDS, STATE_SHARE * self._seconds)
        return (
            self._setup.accelerator.is_main_process
            and time.monotonic() - self._saved_at >= interval
        )

    def save(
        self,
        progress: TrainingProgress,
        model: Any,
        optimizer: Any,
        best: Weights,
        bookmark: Bookmark | None,
        unreadable_text: bool,
        stops: bool,
    ) -> Path:
        """Save a state; return the directory in which it is.

        If that fails, the run goes on with a warning: it may save the next one, or reach its end.
        Raises OutputError if it `stops` here.
        """
        setup, start = self._setup, time.monotonic()
        positions = gather_object(positions_of(bookmark)) if bookmark else []
        record = (
            vars(progress)
            | setup.run
            | {
                "batch_size": setup.options.batch_size,
                "stream": positions,
                "unreadable_text": unreadable_text,
            }
        )
        keep = 2 if setup.options.save_every else 1
        try:
            setup.states.save(setup.accelerator, model, optimizer, best, record, keep)
        except OutputError as error:
            if stops:
                raise
            self._watcher.warn(f"{error}. The run goes on")
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - start
        return setup.states.directory


def warmup_steps(warmup: int | None, schedule: Schedule, steps: int) -> int:
    """Steps of warm-up: `warmup`, else none with `constant` and 5 % (100 at most) with schedules
    that end.

    So a constant schedule knows nothing of the length: the first steps of a smaller alpha are those
    of a larger one.
    """
    if warmup is not None:
        return warmup
    return 0 if schedule == "constant" else min(100, steps // 20)


def evaluation_interval(eval_every: int | None, steps: int) -> int:
    """Steps between two held-out evaluations."""
    return eval_every or math.ceil(steps / EVALUATIONS)


def rate_factor(step: int, steps: int, schedule: Schedule, warmup: int = 0) -> float:
    """What the learning rate is multiplied by in `step` (from 0) of `steps`.

    All rise linearly over `warmup` steps. Then `constant` stays, and `linear` and `cosine` fall to
    zero at the end.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    left = (steps - step) / (steps - warmup)
    return 0.5 * (1 - math.cos(math.pi * left)) if schedule == "cosine" else left


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
    predictions = sum(int((split_batch(batch)[1] >= 0).sum()) for batch in micro_batches)
    total = accelerator.reduce(torch.tensor(float(predictions), device=device), "sum")
    batches = [
        {name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches
    ]
    # accelerate divides by the micro-batches, DDP and FSDP by the ranks: undone here, as the sum is
    # divided only once.
    scale = len(batches) * accelerator.num_processes / total.clamp_min(1.0)
    sums = _zeros(3, device)
    for group in optimizer.param_groups:
        group["lr"] = rate
    for batch in batches:
        with accelerator.accumulate(model):
            loss, numbers = model(**batch)
            sums += numbers
            accelerator.backward(loss * scale)
    sums = accelerator.reduce(sums, "sum")
    norm = accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
    norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    optimizer.step()
    optimizer.zero_grad()
    return sums, norm


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(
        count, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device
    )


def _add_step(
    progress: TrainingProgress, sums: Tensor, norm: float, rate: float, setup: Setup
) -> dict[str, float]:
    """Add a step to `progress`; return its numbers for the log. Raises DivergedError."""
    before, after = (
        setup.dataloader.tokens_until(step) for step in (progress.step, progress.step + 1)
    )
    tokens = after - before
    nats, divergence = _means(sums)
    finite_loss = bool(sums.isfinite().all())
    if not progress.step and not setup.dataloader.heldout and not finite_loss:
        raise RefusedError(_NOT_FINITE.format(setup.checkpoint.name))
    progress.step, progress.tokens, progress.loss = (
        progress.step + 1,
        progress.tokens + tokens,
        nats,
    )
    if not finite_loss or not math.isfinite(norm):
        raise DivergedError(
            f"loss or gradient was not finite in step {progress.step}; "
            "what was saved before is kept. Lower --learning-rate or lengthen --warmup"
        )
    return {
        "tokens": progress.tokens,
        "step_tokens": tokens,
        "loss": nats,
        "learning_rate": rate,
        "gradient_norm": norm,
        **({"distillation": divergence} if divergence else {}),
    }


def _means(sums: Tensor) -> list[float]:
    """Divide sums (n,) by the first, the number of predictions; return the n - 1 means."""
    count, *totals = sums.tolist()
    return [total / max(count, 1.0) for total in totals]


def _evaluate(
    setup: Setup, model: Any, progress: TrainingProgress, best: Weights
) -> dict[str, float]:
    """Measure the held-out losses of the weights as they would be stored, and copy those that train
    to `best` if they are the best so far. Return the losses for the log.
    """
    with stored_weights(setup.model, setup.checkpoint):
        losses, lowest = heldout_losses(setup, model), progress.heldout_after
    if not progress.step and not math.isfinite(losses["loss"]):
        raise RefusedError(_NOT_FINITE.format(setup.checkpoint.name))
    if lowest is None:
        progress.heldout_before = progress.heldout_after = losses
    elif math.isfinite(losses["loss"]) and losses["loss"] < lowest["loss"]:
        progress.heldout_after, progress.best_step = losses, progress.step
        # The last weights are in memory when the result is written
        if progress.step < setup.dataloader.steps:
            best.update(_copy_trained(setup, model))
    return {f"heldout_{name}": value for name, value in losses.items()}


def _best(setup: Setup, model: Any, progress: TrainingProgress, best: Weights) -> Weights:
    """The weights that `train` returns."""
    if setup.dataloader.heldout and not progress.best_step:
        return {}
    weights = state_dict(setup.accelerator, model)
    if setup.dataloader.heldout and progress.best_step < progress.step:
        for name, tensor in best.items():
            local_shard(weights[name]).copy_(local_shard(tensor))
    return weights


def _copy_trained(setup: Setup, model: Any) -> Weights:
    """Copies of the weights that train, or of this process' shards, in the host's memory."""
    weights = state_dict(setup.accelerator, model)
    return {
        name: weights[name].to("cpu", copy=True)
        for name in trained_names(setup.model)
        if name in weights
    }


@torch.no_grad()
def heldout_losses(setup: Setup, model: Any) -> dict[str, float]:
    """Means per token over the held-out blocks, which the ranks share: `loss`, which training
    minimizes, and its parts `nats` and, with a teacher, `distillation`.
    """
    model.eval()
    accelerator, blocks, micro = setup.accelerator, setup.dataloader.heldout, setup.micro_batch
    device, ranks, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    sums = _zeros(4, device)
    # All ranks make the same number of passes (FSDP waits for them); a rank without a block repeats
    # the first ones, which do not count.
    for start in range(0, len(blocks), micro * ranks):
        share = blocks[start + rank * micro : start + (rank + 1) * micro]
        batch = {name: tensor.to(device) for name, tensor in stack(share or blocks[:1]).items()}
        loss, numbers = model(**batch)
        if share:
            sums += torch.stack([*numbers, loss])
    sums = accelerator.reduce(sums, "sum")
    model.train()
    nats, divergence, mean = _means(sums)
    return {"loss": mean, "nats": nats} | (
        {"distillation": divergence} if setup.options.distills else {}
    )


def state_dict(accelerator: Accelerator, wrapped: Any) -> Weights:
    """The model's state dict under its own names, sharing the model's memory; under FSDP2 its
    shards.
    """
    get: Callable[[Any], dict[str, Any]] = (
        get_model_state_dict if accelerator.is_fsdp2 else accelerator.get_state_dict
    )
    return {name.removeprefix("model."): tensor for name, tensor in get(wrapped).items()}


def _restore(setup: Setup, model: Any, optimizer: Any) -> tuple[TrainingProgress, Weights]:
    """The progress and the best weights of the state to continue from, whose weights and optimizer
    are loaded.
    """
    assert setup.start
    progress = TrainingProgress(
        **{name: setup.start.record[name] for name in vars(TrainingProgress())}
    )
    best = _copy_trained(setup, model) if 0 < progress.best_step < setup.dataloader.steps else {}
    load(setup.start, setup.accelerator, model, optimizer, best)
    if isinstance(blocks := setup.dataloader.blocks, StreamedBlocks):
        blocks.seek(setup.start.record["stream"])
    return progress, best


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


class Log:
    """Writes a record of each step to metrics.jsonl, and shows its losses."""

    def __init__(self, setup: Setup, first: int, watcher: Watcher) -> None:
        """`first` steps are done already; later lines of metrics.jsonl are dropped, as those steps
        are repeated.
        """
        self._device, self._main = setup.accelerator.device, setup.accelerator.is_main_process
        self._path, self._watcher, self._failed = setup.metrics, watcher, False
        watcher.stage("training", setup.dataloader.steps, "step", first)
        if self._main and (first or self._path.is_file()):
            self._path.touch()  # users delete it
            lines = self._path.read_text(errors="replace").splitlines(keepends=True)
            with replacing(self._path) as temporary:
                temporary.write_text(
                    "".join(line for line in lines if _step_of(line) in range(1, first + 1))
                )

    def step(self, progress: TrainingProgress, numbers: dict[str, float], seconds: float) -> None:
        """Record a step, which took so many seconds: `numbers` are its losses, learning rate and
        gradient norm.
        """
        if not self._main:
            return
        rate, used = numbers["step_tokens"] / seconds, memory(self._device)
        record = {
            "step": progress.step,
            **numbers,
            "tokens_per_second": round(rate, 1),
            "memory_bytes": used,
        }
        try:
            with self._path.open("a") as stream:
                stream.write(json.dumps(finite(record)) + "\n")
        except OSError as error:  # a line of a log is not worth a training
            if not self._failed:
                self._watcher.warn(
                    f"{self._path}: {error.strerror}; steps are missing in it. The run goes on"
                )
            self._failed = True
        # With a teacher the loss that training minimizes, and that is measured on held-out text, is
        # the divergence.
        losses = {"loss": numbers["loss"]}
        if "distillation" in numbers:
            losses = {"cross-entropy": numbers["loss"], "kl": numbers["distillation"]}
        if progress.heldout_after:
            minimized = list(losses)[-1]
            losses[f"lowest held-out {minimized}"] = progress.heldout_after["loss"]
        note = [f"{name} {loss:.4f}" for name, loss in losses.items()]
        self._watcher.update(note=", ".join([*note, f"{rate:,.0f} tok/s"]))


def _step_of(line: str) -> int:
    """The step that a line of the log records; 0 for half a line, of a run that was killed."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return 0
    return step if isinstance(step, int) and line.endswith("\n") else 0


def memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: of the GPU that it uses, else of the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_memory()
