"""What calibration costs: its time beside forward passes over the same text, and its memory, in one run.

    python benchmarks/calibrate.py                       # a random model of SmolLM2-135M's shape, 3 -> 1 KV heads
    python benchmarks/calibrate.py --shape llama-7b-4    # four layers of Llama-2-7B's shape, 32 -> 8: memory
    python benchmarks/calibrate.py --model MODEL --groups 8
    python benchmarks/calibrate.py --shape llama-7b-4 --aligned    # seconds of each layer of that method instead

Each is a process of its own, both use the same dtype, batches and number of threads. `forward` is a pass with logits;
its clock starts when the model is loaded, that of `calibrate` before any weights are read. Memory is the highest
resident set above imports; for `forward` with the model, for `calibrate` with what it reads of it, beside what
`gqa-convert --dry-run` says of it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from harness import Contestant, serve, write_random

GIB = 1 << 30
SHAPES = {"135m": 1, "llama-7b-4": 8}  # and the groups to convert to


def forward(options: dict[str, Any], blocks: Any) -> float:
    import torch

    from gqa.checkpoint.loading import load_model

    model = load_model(options["model"], dtype=options["dtype"], attention="sdpa")
    started = time.perf_counter()
    with torch.inference_mode():
        for batch in blocks.split(options["batch"]):
            model(input_ids=batch, use_cache=False)
    return time.perf_counter() - started


def calibrate(options: dict[str, Any], blocks: Any) -> float:
    from gqa.checkpoint.read import read_checkpoint
    from gqa.convert.align.calibration import Calibrator
    from gqa.convert.align.options import MapsOptions
    from gqa.convert.plan import make_plan

    started = time.perf_counter()
    plan = make_plan(read_checkpoint(Path(options["model"])), options["groups"], "calibrated")
    calibrator = Calibrator(plan, blocks, MapsOptions(device="cpu", dtype=options["dtype"], batch=options["batch"]))
    for layer in range(calibrator.layers):
        calibrator.run(layer)
    return time.perf_counter() - started


def aligned(model: str, groups: int) -> list[float]:
    """Seconds of each attention module; of the last one nothing is guessed that follows it."""
    from gqa.checkpoint.read import read_checkpoint
    from gqa.convert.align.aligned import from_weights
    from gqa.convert.plan import make_plan

    times = [time.perf_counter()]
    for _ in from_weights(make_plan(read_checkpoint(Path(model)), groups, "aligned")):
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def estimated(options: dict[str, Any]) -> int:
    """Bytes, of the method and the text of `calibrate`."""
    from gqa.checkpoint.read import read_checkpoint
    from gqa.convert.align.options import CalibrationText, MapsOptions
    from gqa.convert.estimate import memory
    from gqa.convert.methods import METHODS
    from gqa.convert.plan import make_plan

    plan = make_plan(read_checkpoint(Path(options["model"])), options["groups"], "calibrated")
    text = CalibrationText(("text",), options["tokens"], options["length"])
    return memory(plan, METHODS["calibrated"], MapsOptions(text=text, device="cpu"))


CONTESTANTS = {"forward": forward, "calibrate": calibrate}


def contestant(name: str, options: dict[str, Any]) -> Callable[[object], float]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    vocabulary = transformers.AutoConfig.from_pretrained(options["model"]).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(vocabulary, (options["tokens"] // options["length"], options["length"]), generator=generator)
    return lambda _: CONTESTANTS[name](options, blocks)


def measure(name: str, options: dict[str, Any]) -> tuple[float, int]:
    """Seconds and bytes."""
    process = Contestant(serve, contestant, name, options)
    return process.turn().value, process.end()


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), help="A checkpoint, instead of a random one.")
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="135m", help="Of the random one.")
@click.option("--groups", type=int, help="Of --model.")
@click.option("--tokens", type=int, default=16_384)
@click.option("--length", type=int, default=256)
@click.option("--batch", type=int, default=8)
@click.option("--dtype", default="float32")
@click.option("--threads", type=int, default=2)
@click.option("--rounds", type=int, default=3)
@click.option("--aligned", "by_weights", is_flag=True, help="Seconds of each layer with --method aligned.")
def main(rounds: int, shape: str, by_weights: bool, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        options["model"] = str(options["model"] or write_random(Path(scratch), shape, "bfloat16"))
        options["groups"] = options["groups"] or SHAPES[shape]
        if by_weights:
            print(*(f"{seconds:.1f} s" for seconds in aligned(options["model"], options["groups"])), sep="\n")
            return
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in CONTESTANTS}
        for number in range(rounds):
            for name in CONTESTANTS:
                found[name].append(measure(name, options))
                seconds, memory = found[name][-1]
                print(f"  round {number + 1}  {name:10}{seconds:8.1f} s{memory / GIB:8.2f} GiB", flush=True)
        expected = estimated(options)
    ratio = statistics.median(c[0] / f[0] for c, f in zip(found["calibrate"], found["forward"], strict=True))
    print(f"\n{options['tokens']:,} tokens in blocks of {options['length']}, {options['dtype']}")
    for name, runs in found.items():
        print(f"{name:10}{statistics.median(r[0] for r in runs):8.1f} s{max(r[1] for r in runs) / GIB:8.2f} GiB")
    print(f"calibration takes {ratio:.2f} forward passes, of memory {expected / GIB:.2f} GiB by its estimate")


if __name__ == "__main__":
    main()
