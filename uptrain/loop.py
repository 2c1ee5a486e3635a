"""The training loop. Read `train` from top to bottom: it is what a run does."""

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

from gqa.checkpoint.processes import main_first
from gqa.uptrain.dataloader import stack
from gqa.uptrain.log import Log
from gqa.uptrain.lora import merged
from gqa.uptrain.optimizer import make_optimizer
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.schedule import rate_factor, warmup_steps
from gqa.uptrain.scope import trained_names
from gqa.uptrain.setup import Setup
from gqa.uptrain.shards import prepared
from gqa.uptrain.state import check_same_run, load
from gqa.uptrain.stored import stored_weights
from gqa.uptrain.training_model import Batch, predictions

EVALUATIONS = 4  # of held-out text on the way, unless --eval-every says how often
Weights = dict[str, Tensor]
# Called after a step with its number, the record of metrics.jsonl and a function that gives the weights then.
AfterStep = Callable[[int, dict[str, Any], Callable[[], Weights]], None]


class DivergedError(Exception):
    """Loss or gradients were not finite too often in a row."""


class StoppedError(Exception):
    """A signal asked for the end; the state was saved after `step`."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by signal {number} after step {step}")
        self.number, self.step = number, step


@dataclass
class TrainingProgress:
    """What a state must remember besides weights and optimiser. Losses are nats per token.

    heldout_before, heldout_after: as `heldout_losses` tells, at the start and after `best_step`, where the loss was
    lowest so far; 0 is the model as it came.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    best_step: int = 0
    heldout_before: dict[str, float] | None = None
    heldout_after: dict[str, float] | None = None
    loss: float | None = None


def train(setup: Setup, *, quiet: bool = True, after_step: AfterStep | None = None) -> tuple[TrainingProgress, Weights]:
    """Train a setup that is `held`; returns how it went and the weights as each process has them (adapters apart, of
    FSDP2 shards): those with the lowest held-out loss, or the last where nothing is held out; none where those that
    came are best.

    No checkpoint is written. Raises RefusedError (a state of another run, or too little memory), DivergedError,
    StoppedError, and OutputError where no state can be saved.
    """
    options, accelerator, dataloader = setup.options, setup.accelerator, setup.dataloader
    set_seed(options.seed, device_specific=True)  # dropout differs between ranks
    training = setup.training
    with _trackers(setup):
        with setup.memory_explained():
            model, optimizer = prepared(accelerator, training, make_optimizer(training, options))
            progress = _resume(setup, model, optimizer) if options.resume else TrainingProgress()
        came = _evaluate(setup, model, progress) if progress.step == 0 and setup.heldout else {}
        log = Log(setup, progress.step, quiet, came.get("heldout_loss"))
        warmup = warmup_steps(options.warmup, options.schedule, dataloader.steps)
        every = options.eval_every or math.ceil(dataloader.steps / EVALUATIONS)
        model.train()
        with _signals() as signalled:
            ranks = accelerator.process_index, accelerator.num_processes
            for step, micro_batches in enumerate(dataloader.batches(progress.step, *ranks, setup.micro), progress.step):
                factor = rate_factor(step, dataloader.steps, options.schedule, warmup, options.decay)
                rate = options.learning_rate * factor
                with setup.memory_explained():
                    sums, norm = train_step(accelerator, model, optimizer, micro_batches, rate, options.clip)
                log.trained(dataloader.tokens_per_step)
                numbers = _count(progress, sums, norm, rate, setup)

                last = progress.step == dataloader.steps
                if setup.heldout and (last or progress.step % every == 0):
                    numbers |= _evaluate(setup, model, progress)
                record = log.step(progress.step, numbers)
                if after_step:
                    after_step(progress.step, record, lambda: merged(weights(accelerator, model)))

                stop, due = _agree(accelerator, signalled, _is_due(options, progress.step, last))
                if stop or due:
                    state = vars(progress) | _identity(setup) | {"stream": gather_object(dataloader.places)}
                    state["ranks"] = accelerator.num_processes
                    with setup.memory_explained():
                        setup.states.save(accelerator, model, optimizer, state)
                if stop:
                    raise StoppedError(stop, progress.step)
                log.begin()
        log.close()
        setup.states.finish()
        return progress, _best(setup, model, progress)


def train_step(
    accelerator: Accelerator, model: Any, optimizer: Any, micro_batches: list[Batch], rate: float, clip: float
) -> tuple[Tensor, float]:
    """One optimiser step over the micro-batches of all ranks; returns (predictions, nats, distillation) as sums over
    ranks, and the norm of the gradient before it is clipped.

    The gradient is that of the mean over all predictions of the step. If loss or gradient is not finite nothing
    changes; in float16 the gradient scaler sees to that, and then scales less.
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
    """Clip the gradient to a norm; returns the norm before."""
    found = accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], limit)
    return float(found.full_tensor() if hasattr(found, "full_tensor") else found)


def _is_finite(sums: Tensor, norm: float) -> bool:
    return math.isfinite(norm) and bool(sums.isfinite().all())


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)


def _count(progress: TrainingProgress, sums: Tensor, norm: float, rate: float, setup: Setup) -> dict[str, float]:
    """Note a step in `progress`; returns its numbers as they are told."""
    tokens = setup.dataloader.tokens_per_step
    nats, divergence = _per_prediction(sums)
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


def _per_prediction(sums: Tensor) -> list[float]:
    """Sums, the first of which is of predictions -> the others for each prediction."""
    count, *others = sums.tolist()
    return [value / max(count, 1.0) for value in others]


def _evaluate(setup: Setup, model: Any, progress: TrainingProgress) -> dict[str, float]:
    """Note the held-out losses of what would be written, and keep the weights if they are the best so far. Returns the
    numbers for the log.
    """
    with stored_weights(setup.model, setup.checkpoint):
        found, best = heldout_losses(setup, model), progress.heldout_after
    if best is None:
        progress.heldout_before = progress.heldout_after = found
    elif math.isfinite(found["loss"]) and not found["loss"] >= best["loss"]:  # which need not be finite
        progress.heldout_after, progress.best_step = found, progress.step
        if progress.step < setup.dataloader.steps:  # the last are at hand when they are written
            setup.states.keep_best(_trained(setup, weights(setup.accelerator, model)))
    return {f"heldout_{name}": value for name, value in found.items()}


def _best(setup: Setup, model: Any, progress: TrainingProgress) -> Weights:
    """What `train` returns."""
    if setup.heldout and not progress.best_step:
        return {}
    found = weights(setup.accelerator, model)
    if setup.heldout and progress.best_step < progress.step:
        setup.states.read_best(_trained(setup, found))
    return found


def _trained(setup: Setup, found: Weights) -> Weights:
    return {name: found[name] for name in trained_names(setup.model) if name in found}


@torch.no_grad()
def heldout_losses(setup: Setup, model: Any) -> dict[str, float]:
    """Means per token over blocks that are never trained on, shared by the ranks: `loss`, which training minimises, and
    what it is made of, `nats` and, with a teacher, `distillation`.
    """
    model.eval()
    accelerator, blocks, micro = setup.accelerator, setup.heldout, setup.micro
    device, ranks, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    sums = _zeros(4, device)
    # All ranks make the same number of passes (FSDP waits for them); one without a block repeats and does not count.
    for start in range(0, len(blocks), micro * ranks):
        own = blocks[start + rank * micro : start + (rank + 1) * micro]
        batch = {name: tensor.to(device) for name, tensor in stack(own or blocks[:1]).items()}
        with setup.memory_explained():
            loss, numbers = model(**batch)
        if own:
            sums += torch.stack([*numbers, loss])
    sums = accelerator.reduce(sums, "sum")
    model.train()
    nats, divergence, mean = _per_prediction(sums)
    return {"loss": mean, "nats": nats} | ({"distillation": divergence} if setup.options.teachers else {})


def weights(accelerator: Accelerator, wrapped: Any) -> Weights:
    """The model's state dict, under FSDP2 of shards, under the model's own names; they are the model's own memory."""
    get: Callable[[Any], dict[str, Any]] = get_model_state_dict if accelerator.is_fsdp2 else accelerator.get_state_dict
    return {name.removeprefix("model."): tensor for name, tensor in get(wrapped).items()}


def _is_due(options: TrainOptions, step: int, last: bool) -> bool:
    """The last step too, so that what fails or is stopped while the result is written need not be trained again."""
    return bool(options.save_every and (last or step % options.save_every == 0))


def _identity(setup: Setup) -> dict[str, Any]:
    """What a state must have in common with the run that continues it."""
    teacher = {"teacher_revision": setup.base.revision} if setup.base else {}
    return {"options": setup.options.binding() | teacher, "data": setup.dataloader.fingerprint}


def _resume(setup: Setup, model: Any, optimizer: Any) -> TrainingProgress:
    path, record = setup.states.latest()
    check_same_run(path, record, _identity(setup))
    load(path, record["ranks"], setup.accelerator, model, optimizer)
    with main_first("the best weights"):
        if setup.accelerator.is_main_process:
            setup.states.take_best(path)
    setup.dataloader.seek(record.get("stream", []))
    return TrainingProgress(**{name: record[name] for name in vars(TrainingProgress())})


def _agree(accelerator: Accelerator, signalled: list[int], due: bool) -> tuple[int, bool]:
    """What all ranks do: one that was signalled stops all, and clocks that differ must not split them."""
    number = signalled[0] if signalled else 0
    if accelerator.num_processes == 1:
        return number, due
    told = accelerator.gather(torch.tensor([[number, due]], device=accelerator.device))
    return int(told[:, 0].max()), bool(told[:, 1].max())


@contextmanager
def _trackers(setup: Setup) -> Iterator[None]:
    """Those of --report-to are open, and closed also where the run stops."""
    described = {name: str(value) for name, value in setup.options.binding().items()}
    setup.accelerator.init_trackers("gqa-uptrain", config=described)
    try:
        yield
    finally:
        for tracker in setup.accelerator.trackers:  # accelerate's own end would end what the ranks have in common too
            tracker.finish()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted and acted upon between two steps."""
    noted: list[int] = []
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, lambda n, frame: noted.append(n))
        except ValueError:  # not the main thread
            break
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
