"""The training loop. Read `train` from top to bottom: it is what a run does."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gqa.corpus.tokens import Block
from gqa.uptrain.feed import Feed, stack
from gqa.uptrain.log import Log
from gqa.uptrain.lora import merged
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.schedule import rate_factor, warmup_steps
from gqa.uptrain.scope import decay_groups
from gqa.uptrain.state import States, check_same_run
from gqa.uptrain.training_model import Batch, TrainingModel, predictions

if TYPE_CHECKING:
    from accelerate import Accelerator

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
class Progress:
    """What a state must remember besides weights and optimiser. Losses are nats per token."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    heldout_before: float | None = None
    heldout_after: float | None = None
    loss: float | None = None


def make_optimizer(model: TrainingModel, options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW (fused), or Adafactor with the rate that is given, as in the paper (section 3.1)."""
    groups = decay_groups(model, options.weight_decay)
    if options.optimizer == "adafactor":
        from transformers import Adafactor

        found: torch.optim.Optimizer = Adafactor(
            groups, lr=options.learning_rate, relative_step=False, scale_parameter=False, warmup_init=False
        )
        return found
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused)


def train(
    accelerator: Accelerator,
    model: TrainingModel,
    feed: Feed,
    heldout: list[Block],
    options: TrainOptions,
    *,
    micro: int,
    states: States,
    log: Callable[[int], Log],
    resume: bool = False,
    after_step: AfterStep | None = None,
) -> tuple[Progress, Weights]:
    """Train over the feed's steps; returns how it went and the weights (adapters apart), whole on the main process.

    `log` makes the log once it is known where the run starts. Raises RefusedError (a state of another run),
    DivergedError, StoppedError, and OutputError where no state can be saved.
    """
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model, options))
    progress = _resume(accelerator, states, feed, options) if resume else Progress()
    if progress.step == 0 and heldout:
        progress.heldout_before = heldout_loss(accelerator, wrapped, heldout, micro)
    told = log(progress.step)
    warmup = warmup_steps(options.warmup, options.schedule, feed.steps)
    saved = time.monotonic()
    wrapped.train()
    with _signals() as signalled:
        batches = feed.batches(progress.step, accelerator.process_index, accelerator.num_processes, micro)
        for step, micro_batches in enumerate(batches, progress.step):
            rate = options.learning_rate * rate_factor(step, feed.steps, options.schedule, warmup, options.decay)
            sums, norm = _step(accelerator, wrapped, optimizer, micro_batches, rate, options.clip)
            told.trained(feed.tokens_per_step)
            _count(progress, sums, norm, feed, options)

            numbers = _numbers(sums, norm, rate, progress, feed)
            last = progress.step == feed.steps
            if heldout and (last or (options.eval_every and progress.step % options.eval_every == 0)):
                progress.heldout_after = numbers["heldout_loss"] = heldout_loss(accelerator, wrapped, heldout, micro)
            record = told.step(progress.step, numbers)
            if after_step:
                after_step(progress.step, record, lambda: merged(weights(accelerator, wrapped)))

            stop, due = _agree(accelerator, signalled, _is_due(options, progress.step, saved, last))
            if stop or due:
                states.save(accelerator, _record(progress, feed, options))
                saved = time.monotonic()
            if stop:
                raise StoppedError(stop, progress.step)
            told.begin()
    told.close()
    return progress, weights(accelerator, wrapped)


def _step(
    accelerator: Accelerator, model: Any, optimizer: Any, micro_batches: list[Batch], rate: float, clip: float
) -> tuple[Tensor, float]:
    """One optimiser step over all micro-batches of all ranks; returns their summed numbers and the gradient's norm.

    The gradient is that of the mean over all predictions: sums divided once by the number that all ranks have, which
    accelerate's means over micro-batches and ranks are undone for. Where loss or gradient is not finite nothing
    changes (in float16 that is for the scaler to see to, which then scales less).
    """
    device = accelerator.device
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches]
    total = accelerator.reduce(torch.tensor(float(sum(map(predictions, batches))), device=device), "sum")
    scale = len(batches) * accelerator.num_processes / total.clamp_min(1.0)
    sums = _zeros(4, device)
    for group in optimizer.param_groups:  # before the last backward pass, in which DeepSpeed steps
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
    if found is None:  # DeepSpeed clips by itself, and may not tell
        return 0.0
    return float(found.full_tensor() if hasattr(found, "full_tensor") else found)


def _is_finite(sums: Tensor, norm: float) -> bool:
    return math.isfinite(norm) and bool(sums.isfinite().all())


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)


def _count(progress: Progress, sums: Tensor, norm: float, feed: Feed, options: TrainOptions) -> None:
    progress.step, progress.tokens = progress.step + 1, progress.tokens + feed.tokens_per_step
    if _is_finite(sums, norm):
        progress.skipped_in_a_row = 0
        progress.loss = _per_prediction(sums)[0]
        return
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    if progress.skipped_in_a_row >= options.patience:
        raise DivergedError(
            f"loss or gradient was not finite {progress.skipped_in_a_row} steps in a row, up to step {progress.step}; "
            "what was saved before is kept. Lower --learning-rate, lengthen --warmup or use bf16 instead of fp16"
        )


def _per_prediction(sums: Tensor) -> list[float]:
    """Nats, distillation and matching error of the mean prediction."""
    count, *others = sums.tolist()
    return [value / max(count, 1.0) for value in others]


def _numbers(sums: Tensor, norm: float, rate: float, progress: Progress, feed: Feed) -> dict[str, float]:
    nats, divergence, matching = _per_prediction(sums)
    numbers = {
        "tokens": progress.tokens, "step_tokens": feed.tokens_per_step, "loss": nats,
        "learning_rate": rate, "gradient_norm": norm, "skipped": progress.skipped,
    }  # fmt: skip
    if divergence:
        numbers["distillation"] = divergence
    if matching:
        numbers["matching"] = matching
    return numbers


@torch.no_grad()
def heldout_loss(accelerator: Accelerator, model: Any, blocks: list[Block], micro: int) -> float:
    """Mean nats per token over blocks that are never trained on, shared by the ranks."""
    model.eval()
    device, ranks, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    sums = _zeros(2, device)
    # All ranks make the same number of passes (FSDP waits for them); one without a block repeats and does not count.
    for start in range(0, len(blocks), micro * ranks):
        own = blocks[start + rank * micro : start + (rank + 1) * micro]
        batch = {name: tensor.to(device) for name, tensor in stack(own or blocks[:1]).items()}
        _, numbers = model(**batch)
        if own:
            sums += numbers[:2]
    sums = accelerator.reduce(sums, "sum")
    model.train()
    return _per_prediction(sums)[0]


def weights(accelerator: Accelerator, wrapped: Any) -> Weights:
    """The model's state dict, gathered from all ranks (whole on the main one), under the model's own names."""
    found = accelerator.get_state_dict(wrapped)
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def _is_due(options: TrainOptions, step: int, saved: float, last: bool) -> bool:
    """The last step too, so that what fails or is stopped while the result is written need not be trained again."""
    if options.save_every and (last or step % options.save_every == 0):
        return True
    return bool(options.save_minutes and (last or time.monotonic() - saved > 60 * options.save_minutes))


def _record(progress: Progress, feed: Feed, options: TrainOptions) -> dict[str, Any]:
    return {**vars(progress), "options": options.binding(), "data": feed.fingerprint}


def _resume(accelerator: Accelerator, states: States, feed: Feed, options: TrainOptions) -> Progress:
    path, record = states.latest(whole=accelerator.is_main_process)
    check_same_run(path, record, options.binding(), feed.fingerprint)
    accelerator.load_state(str(path))
    return Progress(**{name: record[name] for name in vars(Progress())})


def _agree(accelerator: Accelerator, signalled: list[int], due: bool) -> tuple[int, bool]:
    """What all ranks do: one that was signalled stops all, and clocks that differ must not split them."""
    number = signalled[0] if signalled else 0
    if accelerator.num_processes == 1:
        return number, due
    told = accelerator.gather(torch.tensor([[number, due]], device=accelerator.device))
    return int(told[:, 0].max()), bool(told[:, 1].max())


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
