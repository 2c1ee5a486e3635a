"""What calibration costs: its time beside forward passes over the same text, and its memory, in one run.

    python benchmarks/calibrate.py                       # a random model of SmolLM2-135M's shape, 3 -> 1 KV heads
    python benchmarks/calibrate.py --shape llama-7b-4    # four layers of Llama-2-7B's shape, 32 -> 8: memory
    python benchmarks/calibrate.py --model MODEL --groups 8

Each is a process of its own, both use the same dtype, batches and number of threads. `forward` is a pass with logits;
its clock starts when the model is loaded, that of `calibrate` before any weights are read. Memory is the highest
resident set above imports; for `forward` with the model, for `calibrate` with what it reads of it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

GIB = 1 << 30
SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary, groups
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152, 1),
    "llama-7b-4": (4096, 11008, 4, 32, 32, 32000, 8),
}


def write_random(directory: Path, shape: str) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv, vocabulary, _ = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


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
    from gqa.convert.align.calibration import Calibrator, MapsOptions
    from gqa.convert.plan import make_plan

    started = time.perf_counter()
    plan = make_plan(read_checkpoint(Path(options["model"])), options["groups"], "calibrated")
    calibrator = Calibrator(plan, blocks, MapsOptions(device="cpu", dtype=options["dtype"], batch=options["batch"]))
    for layer in range(calibrator.layers):
        calibrator.run(layer)
    return time.perf_counter() - started


CONTESTANTS = {"forward": forward, "calibrate": calibrate}


def _child(name: str, options: dict[str, Any], pipe: Connection) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    vocabulary = transformers.AutoConfig.from_pretrained(options["model"]).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(vocabulary, (options["tokens"] // options["length"], options["length"]), generator=generator)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    seconds = CONTESTANTS[name](options, blocks)
    pipe.send((seconds, _resident("VmHWM") - before))


def measure(name: str, options: dict[str, Any]) -> tuple[float, int]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_child, args=(name, options, theirs))
    process.start()
    theirs.close()
    found: tuple[float, int] = pipe.recv()
    process.join()
    return found


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), help="A checkpoint, instead of a random one.")
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="smollm2-135m", help="Of the random one.")
@click.option("--groups", type=int, help="Of --model.")
@click.option("--tokens", type=int, default=16_384)
@click.option("--length", type=int, default=256)
@click.option("--batch", type=int, default=8)
@click.option("--dtype", default="float32")
@click.option("--threads", type=int, default=2)
@click.option("--rounds", type=int, default=3)
def main(rounds: int, shape: str, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        options["model"] = str(options["model"] or write_random(Path(scratch), shape))
        options["groups"] = options["groups"] or SHAPES[shape][-1]
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in CONTESTANTS}
        for number in range(rounds):
            for name in CONTESTANTS:
                found[name].append(measure(name, options))
                seconds, memory = found[name][-1]
                print(f"  round {number + 1}  {name:10}{seconds:8.1f} s{memory / GIB:8.2f} GiB", flush=True)
    ratio = statistics.median(c[0] / f[0] for c, f in zip(found["calibrate"], found["forward"], strict=True))
    print(f"\n{options['tokens']:,} tokens in blocks of {options['length']}, {options['dtype']}")
    for name, runs in found.items():
        print(f"{name:10}{statistics.median(r[0] for r in runs):8.1f} s{max(r[1] for r in runs) / GIB:8.2f} GiB")
    print(f"calibration takes {ratio:.2f} forward passes")


if __name__ == "__main__":
    main()
