"""gqa-uptrain's loop beside transformers' Trainer and a bare PyTorch loop: tokens a second and peak memory in one run.

    python benchmarks/uptrain.py                      # the embedded model with 2 KV heads
    python benchmarks/uptrain.py --model MODEL-gqa8 --context 2048

All train the same weights on the same blocks with AdamW (fused), the same batch, in bfloat16, with two threads, each as
a process of its own in every round. The first steps are not timed, nor is saving: times are of a step. `bare loop` is
forward with all logits, cross-entropy, backward and the optimiser's step: no clipping, no log, no schedule. That all
compute the same is seen from the loss of the first step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from harness import EMBEDDED, report, rounds
from torch.nn.functional import cross_entropy

RATE, WARM_UP = 1e-4, 2


class Clock:
    """Call `tick` with the loss after every step. `result`: the first loss, and seconds of a step, warm-up left out."""

    def __init__(self) -> None:
        self.times, self.losses = list[float](), list[Any]()

    def tick(self, loss: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.times.append(time.perf_counter())
        self.losses.append(loss)

    def result(self) -> tuple[float, float]:
        return float(self.losses[0]), (self.times[-1] - self.times[WARM_UP - 1]) / (len(self.times) - WARM_UP)


def prepare(options: dict[str, Any]) -> Any:
    """What gqa-uptrain prepares; the others take model and blocks from it."""
    from transformers.utils import logging

    from gqa.uptrain.options import TrainOptions
    from gqa.uptrain.setup import prepare as prepared

    logging.set_verbosity_error()
    chosen = TrainOptions(
        model=options["model"], output=Path(tempfile.mkdtemp(dir=options["scratch"])) / "out", data=("stdlib:train",),
        context=options["context"], batch_size=options["batch_size"], precision="bfloat16",
        steps=WARM_UP + options["steps"], learning_rate=RATE, schedule="constant", train="all", teacher="none",
    )  # fmt: skip
    setup = prepared(chosen)
    setup = replace(setup, dataloader=replace(setup.dataloader, heldout=[]))
    torch.set_num_threads(2)  # after accelerate, which sets its own
    return setup


def bare_loop(options: dict[str, Any]) -> Callable[[], Any]:
    setup = prepare(options)
    model, device, clock = setup.model.train(), setup.accelerator.device, Clock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def run() -> tuple[float, float]:
        for (micro,) in setup.dataloader.batches(0, 0, 1, setup.micro_batch):
            ids = micro["input_ids"].to(device)
            with setup.accelerator.autocast():
                logits = model(input_ids=ids, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.tick(loss.detach())
        return clock.result()

    return run


def ours(options: dict[str, Any]) -> Callable[[], Any]:
    from gqa.uptrain import loop
    from gqa.uptrain.run import uptrain

    setup, clock, step = prepare(options), Clock(), loop.train_step

    def timed_step(*arguments: Any) -> Any:
        sums, norm = step(*arguments)
        clock.tick(float(sums[1] / sums[0]))
        return sums, norm

    def run() -> tuple[float, float]:
        loop.train_step = timed_step
        uptrain(setup)
        return clock.result()

    return run


def trainer(options: dict[str, Any]) -> Callable[[], Any]:
    from transformers import Trainer, TrainingArguments

    setup, clock = prepare(options), Clock()

    class Timed(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs).detach()
            clock.tick(loss)
            return loss

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.stack([torch.from_numpy(row["input_ids"]) for row in rows])
        return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=options["scratch"], per_device_train_batch_size=setup.micro_batch, max_steps=setup.dataloader.steps,
        learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.1, optim="adamw_torch_fused",
        bf16=True, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(), dataloader_pin_memory=False, logging_strategy="no",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    training = Timed(model=setup.model, args=arguments, train_dataset=setup.dataloader.blocks, data_collator=collate)

    def run() -> tuple[float, float]:
        training.train()
        return clock.result()

    return run


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), help="A checkpoint.  [default: the embedded one -> 2 KV heads]")
@click.option("--context", default=512, help="Tokens of a block.")
@click.option("--batch-size", default=8, help="Blocks of a step.")
@click.option("--steps", default=8, help="Steps that are timed.")
@click.option("--repeats", default=3)
def main(repeats: int, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        options["scratch"] = scratch
        if options["model"] is None:
            from gqa.convert.api import convert_checkpoint

            options["model"] = f"{scratch}/model"
            convert_checkpoint(EMBEDDED, 2, Path(options["model"]), method="mean")
        contestants = {"gqa-uptrain": ours, "Trainer": trainer, "bare loop": bare_loop}
        runs = rounds({name: (contestant, options) for name, contestant in contestants.items()}, repeats)
    losses = {name: entries[0].value[0] for name, entries in runs.items()}
    of_steps = {name: [run._replace(seconds=run.value[1]) for run in entries] for name, entries in runs.items()}
    report(of_steps, "gqa-uptrain", options["batch_size"] * options["context"])
    print("first losses", "  ".join(f"{loss:.6f}" for loss in losses.values()))


if __name__ == "__main__":
    main()
