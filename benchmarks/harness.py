"""What the benchmarks share: processes that take turns, their time and memory, random models."""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "examples" / "stdlib-mha"
MIB = 1 << 20
SAMPLE_SECONDS = 0.003


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
    "135m": Shape(576, 1536, 30, 9, 9, 49152, True),  # SmolLM2-135M, with as many KV heads as query heads
    "1.3b": Shape(2048, 5504, 24, 16, 16, 32000),
    "llama-7b": Shape(4096, 11008, 32, 32, 32, 32000),
}


def random_llama(shape: Shape, dtype: str = "float32", device: str = "cpu", **options: Any) -> Any:
    """A random model, created on the device."""
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


def write_random(directory: Path, shape: Shape, dtype: str = "float32", device: str = "cpu") -> str:
    """Write a random Llama with the embedded tokenizer, whose ids it can all predict. Returns the directory."""
    random_llama(shape, dtype, device).save_pretrained(directory)
    for file in EMBEDDED.glob("*token*"):
        shutil.copyfile(file, directory / file.name)
    return str(directory)


def run_command(module: str, *words: str) -> None:
    """Run the command gqa-MODULE in this process. Raises RuntimeError if it fails."""
    arguments, sys.argv = sys.argv, [f"gqa-{module}", *words]
    try:
        import_module(f"gqa.{module}.cli").main()
    except SystemExit as leaving:
        if leaving.code:
            raise RuntimeError(f"gqa-{module} {' '.join(words)}: exit {leaving.code}") from leaving
    finally:
        sys.argv = arguments


class Run(NamedTuple):
    """Seconds of a run, what it returned, and the peak of its anonymous memory above what it held when it was ready."""

    seconds: float
    value: Any
    memory_bytes: int


def run_alone(prepare: Callable[..., Callable[[], Any]], *arguments: Any, before: Callable[[], None]) -> Run:
    """Time what `prepare(*arguments)` returns, in a process of its own that has imported and loaded what it needs.

    `before` is called here when it is ready. Its memory is read from here, where its own work cannot hold the reader
    up; pages of files, which vanish when somebody needs memory, do not count.
    """
    context = multiprocessing.get_context("spawn")
    pipe, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(child_end, prepare, *arguments), daemon=True)
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


def _serve(pipe: Connection, prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> None:
    run = prepare(*arguments)
    pipe.send(None)
    pipe.recv()
    started = time.perf_counter()
    value = run()
    pipe.send((time.perf_counter() - started, value))


def anonymous_bytes(process: int | None) -> int:
    """0 where the system does not say."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0)


def rounds(
    contestants: Mapping[str, tuple[Any, ...]], count: int, before: Callable[[], None] = lambda: None,
    after: Callable[[str], None] = lambda name: None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Run all in turns, in another order in each round, so that other work on the machine hits all alike."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    for number in range(count):
        first = number % len(contestants)
        for name in [*contestants][first:] + [*contestants][:first]:
            runs[name].append(run_alone(*contestants[name], before=before))
            after(name)
            print(f"  round {number + 1}  {name:24}{runs[name][-1].seconds:8.2f} s", flush=True)
    return runs


def report(runs: Mapping[str, Sequence[Run]], baseline: str, tokens: int | None = None) -> None:
    """Print a row for each: times, the median over rounds of the time by the baseline's, and memory."""
    print(f"\n{'':24}{'median':>10}{'min - max':>18}{f'of {baseline}':>24}{'memory':>12}")
    for name, entries in runs.items():
        seconds = [run.seconds for run in entries]
        ratio = statistics.median(a.seconds / b.seconds for a, b in zip(entries, runs[baseline], strict=True))
        memory = max(run.memory_bytes for run in entries)
        speed = f"{tokens / statistics.median(seconds):10,.0f} tokens/s" if tokens else ""
        print(f"{name:24}{statistics.median(seconds):8.2f} s{min(seconds):8.2f} - {max(seconds):5.2f} s{ratio:24.3f}"
              f"{memory / MIB:8,.0f} MiB{speed}")  # fmt: skip
