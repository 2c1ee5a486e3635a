"""Time and memory of gqa's commands beside what one would use instead, measured in turns.

    python benchmarks/speed.py convert      # 4.5 GB, beside `cp -r` and transformers
    python benchmarks/speed.py evaluate     # beside a bare forward pass and lm-evaluation-harness
    python benchmarks/speed.py evaluate --model examples/stdlib-mha --size 160
    python benchmarks/speed.py uptrain      # beside transformers' Trainer

Every run is a process of its own. Its clock starts when it has imported and loaded what it needs.
Memory is above what the process held then.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click
from harness import EMBEDDED, SHAPES, run_command, write_random

MIB = 1 << 20
SAMPLE_SECONDS = 0.003
THREADS = 2
# of scored windows and of training
CONTEXT = 512
BATCH = 8
# of training: learning rate, steps that are not timed
RATE = 1e-4
WARM_UP = 2
HEADS = 8  # of the converted checkpoint

# Prepares up to its first `yield`, then does what is timed; may then yield a value.
Contestant = Callable[..., Iterator[Any]]


class Run(NamedTuple):
    """Seconds of a run, what it returned, and the peak of its anonymous memory above what it held
    when it was ready.
    """

    seconds: float
    value: Any
    memory_bytes: int


def run_alone(contestant: Contestant, arguments: Sequence[Any], before: Callable[[], None]) -> Run:
    """Run a contestant in a process of its own. `before` is called here when it is ready.

    Its memory is read from here, where its own work cannot hold the reader up; pages of files,
    which vanish when somebody needs memory, do not count.
    """
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, contestant, arguments), daemon=True)
    process.start()
    child_end.close()
    pipe.recv()
    before()
    start = peak = anonymous_bytes(process.pid)
    pipe.send(None)
    while not pipe.poll(SAMPLE_SECONDS):
        peak = max(peak, anonymous_bytes(process.pid))
    seconds, value = pipe.recv()
    process.join()
    return Run(seconds, value, peak - start)


def _serve(pipe: Connection, contestant: Contestant, arguments: Sequence[Any]) -> None:
    run = contestant(*arguments)
    next(run)
    pipe.send(None)
    pipe.recv()
    started = time.perf_counter()
    value = next(run, None)
    pipe.send((time.perf_counter() - started, value))


def anonymous_bytes(process: int | None) -> int:
    """0 where the system does not say."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0
    )


def rounds(
    contestants: Mapping[str, Contestant],
    count: int,
    arguments: Sequence[Any],
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[Run]]:
    """Run all in turns, in another order in each round, so that other work on the machine hits all
    alike.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for number in range(count):
        first = number % len(contestants)
        for name in [*contestants][first:] + [*contestants][:first]:
            runs[name].append(run_alone(contestants[name], arguments, before))
            print(f"  round {number + 1}  {name:24}{runs[name][-1].seconds:8.2f} s", flush=True)
    return runs


def report(runs: Mapping[str, Sequence[Run]], baseline: str, tokens: int | None = None) -> None:
    """Print a row for each: times, the median over rounds of the time by the baseline's, and
    memory.
    """
    print(f"\n{'':24}{'median':>10}{'min - max':>18}{f'of {baseline}':>24}{'memory':>12}")
    for name, entries in runs.items():
        seconds = [run.seconds for run in entries]
        ratio = statistics.median(
            a.seconds / b.seconds for a, b in zip(entries, runs[baseline], strict=True)
        )
        memory = max(run.memory_bytes for run in entries)
        speed = f"{tokens / statistics.median(seconds):10,.0f} tokens/s" if tokens else ""
        print(
            f"{name:24}{statistics.median(seconds):8.2f} s{min(seconds):8.2f} - "
            f"{max(seconds):5.2f} s{ratio:24.3f}{memory / MIB:8,.0f} MiB{speed}"
        )


# ------------------------------------------------------------------------------------------ convert


def copy_files(source: Path, out: Path) -> Iterator[Any]:
    yield
    subprocess.run(["cp", "-r", source, out], check=True)
    os.sync()


def convert_by_mean(source: Path, out: Path) -> Iterator[Any]:
    words = "--method", "mean", "--quiet", "--overwrite", "--kv-heads"
    # Imports what it needs
    run_command("convert", str(EMBEDDED), *words, "2", "-o", str(out.with_name("small")))
    yield
    run_command("convert", str(source), *words, str(HEADS), "-o", str(out))


def convert_script(source: Path, out: Path) -> Iterator[Any]:
    """What one writes without a converter: load, average the heads, save."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    yield
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            heads = (
                linear.weight.detach().float().unflatten(0, (HEADS, -1, layer.self_attn.head_dim))
            )
            linear.weight = torch.nn.Parameter(
                heads.mean(1).flatten(0, 1).to(torch.bfloat16), requires_grad=False
            )
    model.config.num_key_value_heads = HEADS
    model.save_pretrained(out, max_shard_size="1GB")
    os.sync()


def convert(model: str | None, layers: int, repeats: int, scratch: Path) -> None:
    """Until the output is on disk.

    The source is in the page cache, the last output is deleted before.
    """
    source = Path(model or scratch / "source")
    out = scratch / "out"
    if not model:
        write_random(source, SHAPES["llama-7b"]._replace(layers=layers), "bfloat16")

    def read_source() -> None:
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        for path in source.iterdir():
            path.read_bytes()

    contestants = {
        "cp -r": copy_files,
        "gqa-convert": convert_by_mean,
        "transformers": convert_script,
    }
    report(rounds(contestants, repeats, (source, out), read_source), "cp -r")


# ----------------------------------------------------------------------------------------- evaluate


def load_text(name: str, count: int) -> tuple[Any, Any, str, Any]:
    """The model, its tokenizer, a text, and the text's windows."""
    os.environ["TQDM_DISABLE"] = "1"  # lm_eval has a bar for every batch
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gqa.corpus.encoders import Encoders, HarnessEncoder
    from gqa.corpus.stdlib import stdlib_texts
    from gqa.eval.text import document_windows, make_text

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer("\n\n".join(stdlib_texts("heldout")), add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    text = tokenizer.decode(ids[: count * CONTEXT])
    encoders = Encoders(tokenizer, text_encoder=HarnessEncoder)
    windows = document_windows([(text,)], encoders, CONTEXT)
    return model, tokenizer, text, make_text(windows, "rolling", CONTEXT).windows


def bare_forward(name: str, count: int) -> Iterator[Any]:
    import torch

    model, _, _, windows = load_text(name, count)
    yield
    with torch.inference_mode():
        for start in range(0, len(windows), BATCH):
            batch = windows[start : start + BATCH]
            longest = max(len(window.ids) for window in batch)
            rows = [[*window.ids, *[0] * longest][: longest - 1] for window in batch]
            model(input_ids=torch.tensor(rows), use_cache=False)


def score_windows(name: str, count: int) -> Iterator[Any]:
    from gqa.eval.scoring import score
    from gqa.models.chunked_head import ChunkedHead

    model, _, _, windows = load_text(name, count)
    head = ChunkedHead(model)
    yield
    yield float(score(head, windows, batch_size=BATCH)["nats"].sum(dtype="float64"))


def lm_eval(name: str, count: int) -> Iterator[Any]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, text, _ = load_text(name, count)
    evaluator = HFLM(pretrained=model, tokenizer=tokenizer, max_length=CONTEXT, batch_size=BATCH)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    yield
    yield -sum(evaluator.loglikelihood_rolling([request], disable_tqdm=True))


def evaluate(model: str | None, windows: int, repeats: int, scratch: Path) -> None:
    """In float32.

    The bare forward pass drops its logits: no evaluator that uses that forward can be faster.
    """
    model = model or write_random(scratch, SHAPES["135m"])
    contestants = {"gqa-eval": score_windows, "bare forward": bare_forward, "lm_eval": lm_eval}
    runs = rounds(contestants, repeats, (model, windows))
    report(runs, "gqa-eval", windows * CONTEXT)
    print(f"nats agree to {abs(runs['gqa-eval'][0].value / runs['lm_eval'][0].value - 1):.1e}")


# ------------------------------------------------------------------------------------------ uptrain


def prepare_training(model: str, steps: int, scratch: Path) -> Any:
    """What gqa-uptrain prepares; Trainer takes model and blocks from it."""
    import torch
    from transformers.utils import logging

    from gqa.uptrain.options import UptrainOptions
    from gqa.uptrain.setup import prepare

    logging.set_verbosity_error()
    setup = prepare(
        UptrainOptions(
            model=model,
            output=Path(tempfile.mkdtemp(dir=scratch)) / "out",
            data=("stdlib:train",),
            context=CONTEXT,
            batch_size=BATCH,
            precision="bfloat16",
            steps=WARM_UP + steps,
            learning_rate=RATE,
            schedule="constant",
            train="all",
            teacher="none",
            device="cpu",
        )
    )
    torch.set_num_threads(THREADS)  # after accelerate, which sets its own
    return replace(setup, dataloader=replace(setup.dataloader, validation_blocks=[]))


def uptrain_loop(*arguments: Any) -> Iterator[Any]:
    from gqa.uptrain import loop
    from gqa.uptrain.run import uptrain

    setup = prepare_training(*arguments)
    ticks = []
    step = loop.train_step

    def timed_step(*arguments: Any) -> Any:
        sums, norm = step(*arguments)
        ticks.append((time.perf_counter(), float(sums[1] / sums[0])))
        return sums, norm

    loop.train_step = timed_step
    yield
    uptrain(setup)
    yield ticks


def trainer(model: str, steps: int, scratch: Path) -> Iterator[Any]:
    import torch
    from transformers import Trainer, TrainingArguments

    setup = prepare_training(model, steps, scratch)
    ticks = []

    class Timed(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs).detach()
            ticks.append((time.perf_counter(), float(loss)))
            return loss

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.stack([torch.from_numpy(row["input_ids"]) for row in rows])
        return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=str(scratch),
        per_device_train_batch_size=setup.micro_batch,
        max_steps=setup.dataloader.steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        optim="adamw_torch_fused",
        bf16=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        train_sampling_strategy="sequential",
    )
    training = Timed(
        model=setup.model,
        args=arguments,
        train_dataset=setup.dataloader.blocks,
        data_collator=collate,
    )
    yield
    training.train()
    yield ticks


def uptrain(model: str | None, steps: int, repeats: int, scratch: Path) -> None:
    """In bfloat16, on the same blocks with AdamW (fused).

    Contestants yield the time and the loss of each step: seconds are of one step, without the first
    ones and without saving.
    """
    if model is None:
        model = f"{scratch}/model"
        run_command(
            "convert", str(EMBEDDED), "--kv-heads", "2", "--method", "mean", "-o", model, "--quiet"
        )
    contestants = {"gqa-uptrain": uptrain_loop, "Trainer": trainer}
    runs = rounds(contestants, repeats, (model, steps, scratch))

    def seconds_of_step(ticks: list[tuple[float, float]]) -> float:
        """The mean time of a step after the warm-up."""
        return (ticks[-1][0] - ticks[WARM_UP - 1][0]) / steps

    of_steps = {}
    for name, entries in runs.items():
        of_steps[name] = [run._replace(seconds=seconds_of_step(run.value)) for run in entries]
    report(of_steps, "gqa-uptrain", BATCH * CONTEXT)
    print(
        "losses of the first step",
        "  ".join(f"{entries[0].value[0][1]:.6f}" for entries in runs.values()),
    )


PARTS = {"convert": (convert, 10), "evaluate": (evaluate, 64), "uptrain": (uptrain, 8)}


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.argument("part", type=click.Choice([*PARTS]))
@click.option(
    "--model",
    type=click.Path(exists=True),
    help="A checkpoint.  [default: random, or the embedded one]",
)
@click.option("--size", type=int, help="Layers (convert), windows (evaluate) or steps (uptrain).")
@click.option("--repeats", default=5)
def main(part: str, model: str | None, size: int | None, repeats: int) -> None:
    function, default = PARTS[part]
    # /tmp may be memory
    with tempfile.TemporaryDirectory(prefix=".gqa-benchmark-", dir=Path.cwd()) as scratch:
        function(model, size or default, repeats, Path(scratch))


if __name__ == "__main__":
    main()
