"""The training loop. `train` is a run from top to bottom."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from gqa.checkpoint.identity import checkpoint_digest
from gqa.checkpoint.processes import main_first
from gqa.uptrain.dataloader import stack
from gqa.uptrain.log import Log
from gqa.uptrain.optimizer import make_optimizer
from gqa.uptrain.schedule import rate_factor, warmup_steps
from gqa.uptrain.scope import trained_names
from gqa.uptrain.setup import Setup
from gqa.uptrain.shards import prepare_model
from gqa.uptrain.state import check_run, load
from gqa.uptrain.stored import stored_weights
from gqa.uptrain.training_model import Batch, predictions

EVALUATIONS = 4  # held-out evaluations of a run, unless `eval_every` is given
Weights = dict[str, Tensor]


class DivergedError(Exception):
    """Loss or gradients were not finite too often in a row."""


class StoppedError(Exception):
    """A signal stopped the run; the state was saved after `step`."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by signal {number} after step {step}")
        self.number, self.step = number, step


@dataclass
class TrainingProgress:
    """The part of a state besides weights and optimiser. Losses are nats per token.

    heldout_before, heldout_after: results of `heldout_losses` at the start and after `best_step`, the step with the
    lowest loss so far; step 0 is the model before training.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best_step: int = 0
    heldout_before: dict[str, float] | None = None
    heldout_after: dict[str, float] | None = None
    loss: float | None = None


def train(setup: Setup, *, quiet: bool = True) -> tuple[TrainingProgress, Weights]:
    """Train; return the progress and this process' weights with the lowest held-out loss (with adapters apart, and as
    shards under FSDP2).

    Without held-out text these are the last weights. They are empty if no step improved the model. The caller holds the
    lock of `setup.states`. No checkpoint is written. Raises RefusedError (a state of another run, too little memory),
    DivergedError, StoppedError, and OutputError if a state cannot be saved.
    """
    options, accelerator, dataloader = setup.options, setup.accelerator, setup.dataloader
    set_seed(options.seed, device_specific=True)  # dropout differs between ranks
    training = setup.training_model
    with _trackers(setup):
        with setup.explain_memory():
            model, optimizer = prepare_model(accelerator, training, make_optimizer(training, options))
            progress = _resume(setup, model, optimizer) if options.resume else TrainingProgress()
        first_losses = _evaluate(setup, model, progress) if progress.step == 0 and setup.heldout else {}
        log = Log(setup, progress.step, quiet, first_losses.get("heldout_loss"))
        warmup = warmup_steps(options.warmup, options.schedule, dataloader.steps)
        eval_every = options.eval_every or math.ceil(dataloader.steps / EVALUATIONS)
        model.train()
        with _signals() as signals:
            ranks = accelerator.process_index, accelerator.num_processes
            for micro_batches in dataloader.batches(progress.step, *ranks, setup.micro_batch):
                factor = rate_factor(progress.step, dataloader.steps, options.schedule, warmup, options.decay)
                rate = options.learning_rate * factor
                with setup.explain_memory():
                    sums, norm = train_step(accelerator, model, optimizer, micro_batches, rate, options.clip)
                log.end_step(dataloader.tokens_per_step)
                numbers = _count(progress, sums, norm, rate, setup)

                last = progress.step == dataloader.steps
                if setup.heldout and (last or progress.step % eval_every == 0):
                    numbers |= _evaluate(setup, model, progress)
                log.step(progress.step, numbers)

                # The last step is saved too: if writing the result fails, nothing has to be trained again.
                save = bool(options.save_every and (last or progress.step % options.save_every == 0))
                if signal_number := _shared_signal(accelerator, signals):
                    save = True
                if save:
                    state = vars(progress) | _run_identity(setup) | {"stream": gather_object(dataloader.positions)}
                    state["ranks"] = accelerator.num_processes
                    with setup.explain_memory():
                        setup.states.save(accelerator, model, optimizer, state)
                if signal_number:
                    raise StoppedError(signal_number, progress.step)
                log.begin_step()
        log.close()
        setup.states.finish()
        return progress, _best(setup, model, progress)


def train_step(
    accelerator: Accelerator, model: Any, optimizer: Any, micro_batches: list[Batch], rate: float, clip: float
) -> tuple[Tensor, float]:
    """Take one optimiser step over the micro-batches of all ranks; return (predictions, nats, distillation) summed
    over ranks, and the norm of the gradient before clipping.

    The gradient is that of the mean over all predictions of the step. If loss or gradient is not finite, nothing
    changes; in float16 the gradient scaler skips the step, and then lowers its scale.
    """
    device = accelerator.device
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches]
    total = accelerator.reduce(torch.tensor(float(sum(map(predictions, batches))), device=device), "sum")
    # accelerate divides by the micro-batches, DDP and FSDP by the ranks: undone here, as the sum is divided only once.
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
    norm = _clip(accelerator, model, clip)
    if accelerator.scaler is not None or _is_finite(sums, norm):
        optimizer.step()
    optimizer.zero_grad()
    return sums, norm


def _clip(accelerator: Accelerator, model: Any, limit: float) -> float:
    """Clip the gradient to a norm; return the norm before."""
    norm = accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _is_finite(sums: Tensor, norm: float) -> bool:
    return math.isfinite(norm) and bool(sums.isfinite().all())


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)


def _count(progress: TrainingProgress, sums: Tensor, norm: float, rate: float, setup: Setup) -> dict[str, float]:
    """Add a step to `progress`; return its numbers for the log."""
    tokens = setup.dataloader.tokens_per_step
    nats, divergence = _means(sums)
    progress.step, progress.tokens = progress.step + 1, progress.tokens + tokens
    if _is_finite(sums, norm):
        progress.skipped_in_a_row, progress.loss = 0, nats
    else:
        progress.skipped, progress.skipped_in_a_row = progress.skipped + 1, progress.skipped_in_a_row + 1
    if progress.skipped_in_a_row >= setup.options.patience:
        raise DivergedError(
            f"loss or gradient was not finite {progress.skipped_in_a_row} steps in a row, up to step {progress.step}; "
            "what was saved before is kept. Lower --learning-rate, lengthen --warmup or use bfloat16 instead of float16"
        )
    return {
        "tokens": progress.tokens, "step_tokens": tokens, "loss": nats, "learning_rate": rate, "gradient_norm": norm,
        "skipped": progress.skipped, **({"distillation": divergence} if divergence else {}),
    }  # fmt: skip


def _means(sums: Tensor) -> list[float]:
    """Divide sums (n,) by the first, the number of predictions; return the n - 1 means."""
    count, *totals = sums.tolist()
    return [total / max(count, 1.0) for total in totals]


def _evaluate(setup: Setup, model: Any, progress: TrainingProgress) -> dict[str, float]:
    """Measure the held-out losses of the weights as they would be stored, and save the weights if they are the best so
    far. Return the losses for the log.
    """
    with stored_weights(setup.model, setup.checkpoint):
        losses, best = heldout_losses(setup, model), progress.heldout_after
    if best is None:
        progress.heldout_before = progress.heldout_after = losses
    elif math.isfinite(losses["loss"]) and not losses["loss"] >= best["loss"]:  # the best may be NaN
        progress.heldout_after, progress.best_step = losses, progress.step
        if progress.step < setup.dataloader.steps:  # the last weights are in memory when the result is written
            setup.states.save_best(_trained(setup, state_dict(setup.accelerator, model)))
    return {f"heldout_{name}": value for name, value in losses.items()}


def _best(setup: Setup, model: Any, progress: TrainingProgress) -> Weights:
    """The weights that `train` returns."""
    if setup.heldout and not progress.best_step:
        return {}
    weights = state_dict(setup.accelerator, model)
    if setup.heldout and progress.best_step < progress.step:
        setup.states.read_best(_trained(setup, weights))
    return weights


def _trained(setup: Setup, weights: Weights) -> Weights:
    return {name: weights[name] for name in trained_names(setup.model) if name in weights}


@torch.no_grad()
def heldout_losses(setup: Setup, model: Any) -> dict[str, float]:
    """Means per token over the held-out blocks, which the ranks share: `loss`, which training minimises, and its parts
    `nats` and, with a teacher, `distillation`.
    """
    model.eval()
    accelerator, blocks, micro = setup.accelerator, setup.heldout, setup.micro_batch
    device, ranks, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    sums = _zeros(4, device)
    # All ranks make the same number of passes (FSDP waits for them); a rank without a block repeats the first ones,
    # which do not count.
    for start in range(0, len(blocks), micro * ranks):
        share = blocks[start + rank * micro : start + (rank + 1) * micro]
        batch = {name: tensor.to(device) for name, tensor in stack(share or blocks[:1]).items()}
        with setup.explain_memory():
            loss, numbers = model(**batch)
        if share:
            sums += torch.stack([*numbers, loss])
    sums = accelerator.reduce(sums, "sum")
    model.train()
    nats, divergence, mean = _means(sums)
    return {"loss": mean, "nats": nats} | ({"distillation": divergence} if setup.options.distills else {})


def state_dict(accelerator: Accelerator, wrapped: Any) -> Weights:
    """The model's state dict under its own names, sharing the model's memory; under FSDP2 its shards."""
    get: Callable[[Any], dict[str, Any]] = get_model_state_dict if accelerator.is_fsdp2 else accelerator.get_state_dict
    return {name.removeprefix("model."): tensor for name, tensor in get(wrapped).items()}


def _run_identity(setup: Setup) -> dict[str, Any]:
    """The options and contents that a state must share with the run that continues it."""
    base = setup.teacher_checkpoint
    models = {"model": setup.checkpoint} | ({"teacher": base} if base else {})
    contents = {f"content of the {name}": checkpoint_digest(model) for name, model in models.items()}
    return {"options": setup.options.binding() | contents, "data": setup.dataloader.fingerprint}


def _resume(setup: Setup, model: Any, optimizer: Any) -> TrainingProgress:
    path, record = setup.states.latest()
    check_run(path, record, _run_identity(setup))
    load(path, record["ranks"], setup.accelerator, model, optimizer)
    with main_first("the best weights"):
        if setup.accelerator.is_main_process:
            setup.states.restore_best(path)
    setup.dataloader.seek(record.get("stream", []))
    return TrainingProgress(**{name: record[name] for name in vars(TrainingProgress())})


def _shared_signal(accelerator: Accelerator, signals: list[int]) -> int:
    """The signal that any rank received, or 0: all ranks must stop after the same step."""
    number = signals[0] if signals else 0
    if accelerator.num_processes == 1:
        return number
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())


@contextmanager
def _trackers(setup: Setup) -> Iterator[None]:
    """Open the trackers of --report-to, and close them also if the run stops."""
    config = {name: str(value) for name, value in setup.options.binding().items()}
    setup.accelerator.init_trackers("gqa-uptrain", config=config)
    try:
        yield
    finally:
        for tracker in setup.accelerator.trackers:  # accelerate's end_training would end the process group too
            tracker.finish()


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
