"""gqa-uptrain's loop beside transformers' Trainer and a bare PyTorch loop: tokens a second and peak memory in one run.

    python benchmarks/uptrain.py                      # CPU: the embedded model with 2 KV heads; GPU: a Llama of 1.1B
    python benchmarks/uptrain.py --shape 135m --batch-size 2 --block-size 256 --steps 3
    python benchmarks/uptrain.py --model MODEL-gqa8 --block-size 2048 --batch-size 8 --precision bf16
    python benchmarks/uptrain.py --states --shape 135m --rounds 7    # how long saving a state holds up training
    python benchmarks/uptrain.py --stream 2M          # what --streaming tokenises in a second of one core

All train the same weights on the same blocks with AdamW (fused), the same batch, precision and number of threads. Each
is a process of its own, new in every round. They take turns of one step (on a GPU of all steps, one process after the
other), the others waiting meanwhile, so that whatever else the machine does hits all alike; ratios are of neighbouring
turns. The first steps are not timed. `bare loop` is forward with all logits, cross-entropy, backward and the
optimiser's step: no clipping, no log, no schedule. The others do what they do by default (both clip gradients), without
evaluation and without saving. `processor` compares processor time, which says the same where a machine is busy with
other things (with --threads 1: threads that wait for others spin). Memory is the most that was held while training,
above what it was with the model loaded (on a GPU: all that was allocated). That all compute the same is seen from the
loss of the first step.

With --states nothing is trained: by turns, all tensors of a state (weights and AdamW's moments) are copied to the
memory of the host, and a state is saved: until training may go on, and until all of it is on the disk.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from harness import EMBEDDED, JSON_OPTION, MIB, SHAPES, Contestant, Turns, peak_from_here, write_json, write_random
from torch.nn.functional import cross_entropy
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from gqa.checkpoint.console import Count
from gqa.checkpoint.read import read_checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert import convert_checkpoint
from gqa.corpus.sources import parse_sources
from gqa.corpus.streamed import StreamedBlocks
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.run import uptrain
from gqa.uptrain.setup import prepare
from gqa.uptrain.state import States

RATE = 1e-4


# ------------------------------------------------------------------------------------------------- measuring


def peak_of_training() -> Callable[[], int]:
    """From here on the peak counts."""
    return torch.cuda.max_memory_allocated if torch.accelerator.is_available() else peak_from_here()


@dataclass
class Clock:
    """Call `tick` after every step. Turns are the warm-up, then `turn` steps each; in between others have theirs."""

    options: dict[str, Any]
    turns: Turns
    memory: Callable[[], int]
    step: int = 0
    peak: int = 0

    def tick(self) -> None:
        self.step += 1
        timed = self.step - self.options["warmup"]
        if timed < 0 or timed % self.options["turn"]:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if timed == self.options["steps"]:
            self.peak = self.memory()  # what is written afterwards is not training
        self.turns.done()
        if timed < self.options["steps"]:
            self.turns.wait()


def stream_rate(model: Path, block_size: int, tokens: int) -> float:
    """Tokens of `stdlib:train` in blocks for each second of processor time, read in one thread."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # a busy thread more would not show how fast one is
    blocks = StreamedBlocks(
        parse_sources(["stdlib:train"]), load_tokenizer(read_checkpoint(Path(model))),
        block_size=block_size, n_blocks=tokens // block_size,
    )  # fmt: skip
    began = time.process_time()
    count = sum(len(block["input_ids"]) for block in blocks)
    return count / (time.process_time() - began)


# ------------------------------------------------------------------------------------------------- what is compared

# What a contestant returns: a function that trains, calls clock.tick() after each step, and returns the loss of the
# first step and, where the device's peak is known, the model FLOPs utilisation for each token a second.
Train = Callable[[Clock], tuple[float, float | None]]


def open_setup(options: dict[str, Any], scratch: Path) -> Any:
    """What gqa-uptrain prepares; the others take model and blocks from it."""
    chosen = TrainOptions(
        model=options["model"], output=scratch / "out", data=("stdlib:train",), block_size=options["block_size"],
        batch_size=options["batch_size"], precision=options["precision"],
        steps=options["warmup"] + options["steps"], learning_rate=RATE, schedule="constant", train="all",
        teacher="none",
    )  # fmt: skip
    return replace(prepare(chosen), heldout=[])


def bare_loop(setup: Any) -> Train:
    model, device = setup.model.train(), setup.accelerator.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = [micro["input_ids"] for (micro,) in setup.dataloader.batches(0, 0, 1, setup.micro)]

    def run(clock: Clock) -> tuple[float, float | None]:
        first = None
        for batch in batches:
            ids = batch.to(device)
            with setup.accelerator.autocast():
                logits = model(input_ids=ids, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first = loss.detach() if first is None else first
            clock.tick()
        assert first is not None
        return float(first), None

    return run


def ours(setup: Any) -> Train:
    def run(clock: Clock) -> tuple[float, float | None]:
        records: list[dict[str, Any]] = []

        def after_step(step: int, record: dict[str, Any], weights: Any) -> None:
            records.append(record)
            clock.tick()

        uptrain(setup, after_step=after_step)
        last = records[-1]
        return records[0]["loss"], last["mfu"] / last["tokens_per_second"] if "mfu" in last else None

    return run


def trainer(setup: Any) -> Train:
    options, blocks = setup.options, setup.dataloader.blocks
    arguments = TrainingArguments(
        output_dir=str(options.output.with_name("trainer")), per_device_train_batch_size=setup.micro,
        max_steps=setup.dataloader.steps, learning_rate=RATE, lr_scheduler_type="constant", adam_beta2=0.95,
        weight_decay=0.1, optim="adamw_torch_fused", bf16=options.precision == "bf16",
        save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(), dataloader_pin_memory=False,
    )  # fmt: skip

    class InOrder(Trainer):
        """Reads the blocks in their order, as the others do; keeps losses without waiting for them."""

        losses: list[Any] = []  # noqa: RUF012

        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(blocks)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.losses.append(super().training_step(*args, **kwargs).detach())
            return self.losses[-1]

    def run(clock: Clock) -> tuple[float, float | None]:
        class Tick(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.tick()

        def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
            ids = torch.stack([torch.from_numpy(row["input_ids"]) for row in rows])
            return {"input_ids": ids, "labels": ids}

        found = InOrder(
            model=setup.model, args=arguments, train_dataset=blocks, data_collator=collate, callbacks=[Tick()]
        )
        found.remove_callback(PrinterCallback)
        found.train()
        return float(found.losses[0]), None

    return run


CONTESTANTS = {"bare loop": bare_loop, "gqa-uptrain": ours, "Trainer": trainer}


def contestant(name: str, options: dict[str, Any], turns: Turns) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        setup = open_setup(options, Path(scratch))
        torch.set_num_threads(options["threads"])  # after accelerate, which sets its own
        run, clock = CONTESTANTS[name](setup), Clock(options, turns, peak_of_training())
        turns.pipe.send(None)
        turns.wait()
        loss, mfu = run(clock)
    turns.wait()
    turns.pipe.send({"memory_bytes": clock.peak, "first_loss": loss, "mfu_of_rate": mfu})


# ------------------------------------------------------------------------------------------------- report


def one_round(names: list[str], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn by turn where turns are steps; else one after the other, each with the device to itself."""
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    ends: dict[str, dict[str, Any]] = {}
    turns = options["steps"] // options["turn"]
    for group in [names] if turns > 1 else [[name] for name in names]:
        running = {name: Contestant(contestant, name, options) for name in group}
        for number in range(1 + turns):
            for name, process in running.items():
                taken = process.turn()
                if number:  # the first turn is the warm-up
                    steps[name].append([seconds / options["turn"] for seconds in taken[:2]])
        ends |= {name: process.end() for name, process in running.items()}
    return {name: {"seconds": steps[name], **ends[name]} for name in names}


def memory(names: list[str], options: dict[str, Any]) -> dict[str, int]:
    """Of runs of their own, in which glibc keeps nothing that was freed: how much it keeps is a matter of chance."""
    few = options | {"warmup": 1, "steps": 1, "turn": 1}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    try:
        return {name: one_round([name], few)[name]["memory_bytes"] for name in names}
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def compare(options: dict[str, Any], rounds: int) -> dict[str, Any]:
    tokens = options["batch_size"] * options["block_size"]
    names = list(CONTESTANTS)
    found, peaks = [], memory(names, options)
    for number in range(rounds):
        shift = number % len(names)
        found.append(one_round(names[shift:] + names[:shift], options))
        for name, run in found[-1].items():
            rate = tokens / statistics.median(clock for clock, _ in run["seconds"])
            print(f"  round {number + 1}  {name:14}{rate:10,.0f} tokens/s", flush=True)

    def turns(name: str, kind: int = 0) -> list[float]:
        return [taken[kind] for runs in found for taken in runs[name]["seconds"]]

    def speed(name: str, other: str, kind: int = 0) -> dict[str, float]:
        """How many times as fast as another, turn by turn: median and quartiles."""
        ratios = [theirs / ours for ours, theirs in zip(turns(name, kind), turns(other, kind), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return {"median": middle, "low": low, "high": high}

    rows = {
        name: {
            "tokens_per_second": tokens / statistics.median(turns(name)),
            "slowest": tokens / max(turns(name)),
            "fastest": tokens / min(turns(name)),
            "of_bare": speed(name, "bare loop"),
            "processor_of_bare": speed(name, "bare loop", 1),
            "memory_bytes": peaks[name],
            "first_loss": found[0][name]["first_loss"],
        }
        for name in names
    }
    if of_rate := found[0]["gqa-uptrain"]["mfu_of_rate"]:
        for row in rows.values():
            row["mfu"] = of_rate * row["tokens_per_second"]
    over = {name: speed("gqa-uptrain", "Trainer", kind) for kind, name in enumerate(("over_trainer", "processor_over"))}
    return {"options": options, "tokens_per_step": tokens, **over, "rows": rows, "rounds": found}


def report(figures: dict[str, Any]) -> None:
    rows, options = figures["rows"], figures["options"]
    print(
        f"\n{Path(options['model']).name}, steps of {options['batch_size']} blocks of {options['block_size']} = "
        f"{figures['tokens_per_step']:,} tokens, precision {options['precision']}"
    )
    last = "mfu" if "mfu" in rows["Trainer"] else "processor"
    print(f"{'':14}{'tokens/s':>10}{'slowest - fastest':>20}{'of bare':>9}{last:>11}{'memory':>12}{'first loss':>12}")
    for name, row in rows.items():
        share = f"{row['mfu']:.0%}" if last == "mfu" else f"{row['processor_of_bare']['median']:.2f}"
        print(
            f"{name:14}{row['tokens_per_second']:10,.0f}{row['slowest']:11,.0f} - {row['fastest']:6,.0f}"
            f"{row['of_bare']['median']:9.2f}{share:>11}{row['memory_bytes'] / MIB:8,.0f} MiB{row['first_loss']:12.4f}"
        )

    def spread(ratio: dict[str, float]) -> str:
        return f"{ratio['median']:.3f} ({ratio['low']:.3f} - {ratio['high']:.3f})"

    losses = [row["first_loss"] for row in rows.values()]
    own = rows["gqa-uptrain"]
    print(f"""
speed of gqa-uptrain    by the clock (quartiles)      by processor time
over Trainer            {spread(figures["over_trainer"])}    {spread(figures["processor_over"])}    at least 1.00 asked
over the bare loop      {spread(own["of_bare"])}    {spread(own["processor_of_bare"])}    at least 0.90 asked
its peak memory         {own["memory_bytes"] / rows["Trainer"]["memory_bytes"]:.2f} of Trainer's
first losses agree to   {max(losses) - min(losses):.1e}""")


def time_states(options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Medians of seconds; the first turn is the warm-up."""
    with tempfile.TemporaryDirectory() as scratch:
        setup = open_setup(options, Path(scratch))
        torch.set_num_threads(options["threads"])
        model, optimizer = setup.accelerator.prepare(setup.model, torch.optim.AdamW(setup.model.parameters(), lr=RATE))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        states, turns = States(Path(scratch) / "states", 1), list[list[float]]()
        moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
        tensors = [parameter.data for parameter in model.parameters()] + moments
        for number in range(rounds + 1):
            start = time.perf_counter()
            copies = [tensor.to("cpu", copy=True) for tensor in tensors]
            copied = time.perf_counter() - start
            del copies
            start = time.perf_counter()
            states.save(setup.accelerator, model, optimizer, {"step": number})
            held = time.perf_counter() - start
            states.finish()
            turns.append([copied, held, time.perf_counter() - start])
    size = sum(tensor.nbytes for tensor in tensors)
    named = dict(zip(("copied", "held_up", "on_disk"), zip(*turns[1:], strict=True), strict=True))
    return {"options": options, "bytes": size, "turns": turns, **{k: statistics.median(v) for k, v in named.items()}}


def report_states(figures: dict[str, Any]) -> None:
    ratios = [held / copied for copied, held, _ in figures["turns"][1:]]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) of a copy"
    print(f"""
{Path(figures["options"]["model"]).name}, a state of {figures["bytes"] / 1e9:.2f} GB; medians of {len(ratios)} turns
a copy of its tensors     {figures["copied"]:.2f} s
saving holds up training  {figures["held_up"]:.2f} s    {spread}
on the disk after         {figures["on_disk"]:.2f} s""")


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), help="A checkpoint.  [default: the embedded one -> 2 KV heads]")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model instead.  [default on a GPU: 1.1b]")
@click.option("--block-size", type=int, help="[default: 512; on a GPU 2048]")
@click.option("--batch-size", type=int, default=8, help="Blocks of a step.")
@click.option("--precision", type=click.Choice(["no", "bf16"]), default="bf16")
@click.option("--warmup", type=click.IntRange(min=1), default=2, help="Steps that are not timed.")
@click.option("--steps", type=click.IntRange(min=1), default=8, help="Steps that are.")
@click.option("--threads", type=int, default=2)
@click.option("--rounds", type=int, default=3)
@click.option("--states", is_flag=True, help="Time saving a state instead.")
@click.option("--stream", type=Count(), help="Time so many tokens of a stream, and nothing else.")
@JSON_OPTION
def main(
    rounds: int, shape: str | None, states: bool, stream: int | None, json_file: Path | None, **options: Any
) -> None:
    if stream:
        rates = [
            stream_rate(options["model"] or EMBEDDED, options["block_size"] or 2048, stream) for _ in range(rounds)
        ]
        print(
            f"{statistics.median(rates):,.0f} tokens a second of processor time ({min(rates):,.0f} - {max(rates):,.0f})"
        )
        write_json({"tokens_per_core_second": rates}, json_file)
        return
    gpu = torch.accelerator.is_available()
    options["block_size"] = options["block_size"] or (2048 if gpu else 512)
    options["turn"] = options["steps"] if gpu else 1
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / (shape or "model")
        if options["model"] is None:
            if shape or gpu:
                write_random(made, shape or "1.1b")
            else:
                convert_checkpoint(EMBEDDED, 2, made, method="mean")
            options["model"] = str(made)
        figures = time_states(options, rounds) if states else compare(options, rounds)
    (report_states if states else report)(figures)
    write_json(figures, json_file)


if __name__ == "__main__":
    main()
