"""What the benchmarks share: processes that take turns, their time and memory, random models, how figures are kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "examples" / "stdlib-mha"
MIB = 1 << 20


class Shape(NamedTuple):
    """Of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    positions: int = 2048


SHAPES = {
    "135m": Shape(576, 1536, 30, 9, 3, 49152, True),  # SmolLM2-135M
    "135m-mha": Shape(576, 1536, 30, 9, 9, 49152, True),
    "1.1b": Shape(2048, 5632, 22, 32, 4, 32000),  # TinyLlama
    "1.3b": Shape(2048, 5504, 24, 16, 16, 32000),
    "llama-7b": Shape(4096, 11008, 32, 32, 32, 32000),
    "llama-7b-4": Shape(4096, 11008, 4, 32, 32, 32000, True),  # four of its layers
}
SAMPLE_SECONDS = 0.003
JSON_OPTION = click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")


def write_json(figures: Any, file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n")


def random_llama(shape: Shape, dtype: str = "float32", device: str = "cpu", **options: Any) -> Any:
    """A random model, made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions, tie_word_embeddings=shape.tied, bos_token_id=1, eos_token_id=2,
        dtype=dtype,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype), **options)


def write_random(directory: Path, shape: str | Shape, dtype: str = "float32", device: str = "cpu") -> str:
    """A checkpoint of a random Llama with the embedded tokenizer, whose ids it can all predict."""
    random_llama(SHAPES[shape] if isinstance(shape, str) else shape, dtype, device).save_pretrained(directory)
    for file in EMBEDDED.glob("*token*"):
        shutil.copyfile(file, directory / file.name)
    return str(directory)


def status(key: str, process: int | str = "self") -> int:
    """Bytes of one line of /proc/PID/status; 0 where there is none."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key)), 0)


def peak_from_here() -> Callable[[], int]:
    """From here on the highest resident set counts; what is returned tells how far it is above what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    return lambda: status("VmHWM") - before


def processor_seconds() -> float:
    """Of children too: cp is one."""
    return time.process_time() + sum(os.times()[2:4])


class Turn(NamedTuple):
    """Seconds by the clock and of the processors, what the run returned, and bytes of anonymous memory if sampled."""

    seconds: float
    processor: float
    value: Any
    anonymous: int = 0


class Turns:
    """A contestant's end: `wait` for a turn and what it is about, then say that it is `done`."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def wait(self) -> Any:
        given = self.pipe.recv()
        self._start, self._work = time.perf_counter(), processor_seconds()
        return given

    def done(self, value: Any = None) -> None:
        self.pipe.send(Turn(time.perf_counter() - self._start, processor_seconds() - self._work, value))


def serve(make: Callable[..., Callable[[Any], Any]], *arguments: Any) -> None:
    """A contestant that prepares what `make` returns and runs it in every turn; its end tells the peak of its memory
    above what was held before.
    """
    *arguments, turns = arguments  # type: ignore[assignment]
    run = make(*arguments)
    peak = peak_from_here()
    turns.pipe.send(None)
    while (given := turns.wait()) is not None:
        turns.done(run(given))
    turns.pipe.send(peak())


class Contestant:
    """A process that does `target(*arguments, turns)`; it sends something when it is ready and when it is to end."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, Turns(theirs)), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def turn(self, given: Any = True, sampled: bool = False) -> Turn:
        """`sampled`: its memory is looked at from here, where its own work cannot hold the sampler up."""
        pid = self.process.pid or 0
        start = peak = status("RssAnon", pid) if sampled else 0
        self.pipe.send(given)
        while sampled and not self.pipe.poll(SAMPLE_SECONDS):
            peak = max(peak, status("RssAnon", pid))
        found: Turn = self.pipe.recv()
        return found._replace(anonymous=peak - start)

    def end(self) -> Any:
        self.pipe.send(None)
        found = self.pipe.recv()
        self.process.join()
        return found
