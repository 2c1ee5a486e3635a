"""What decoding, conversion and training cost on one GPU.

    python benchmarks/gpu.py --out DIR                          # all parts, in order
    python benchmarks/gpu.py --out DIR --part decode            # one part
    python benchmarks/gpu.py --out DIR --tiny                   # every part on a CPU, with tiny models

decode: tokens per second of a random bfloat16 model of Llama-2-7B's shape by KV heads, context and batch, as one CUDA
    graph per step and as transformers runs it. `roofline` is the share of the device's copy bandwidth that the bytes of
    the weights and of the cache take: 1 is the limit. `largest` is the largest batch whose cache fits.
convert: a model of 1.3 billion parameters with 4 of 16 KV heads by `calibrated` and `refined`, on text that it writes
    itself: seconds and peak memory of each stage (the first samples the text: its tokens per second are the sampler's).
uptrain: tokens per second of gqa-uptrain on a model of that size, with and without
    --compile and --checkpointing, with NCCL on one rank and with FSDP2 on one rank.

Each measurement is written to DIR/PART.json at once, and the same command continues after a failure or a kill. Models
are written to --work. Nothing needs a network. gqa need not be installed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from harness import ROOT, SHAPES, Shape, random_llama, run_command, write_random

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FREE = 0.85  # share of the free memory that a cache may take


@dataclass(frozen=True)
class Scale:
    """What is measured; the defaults are for a GPU with 80 GB."""

    shape: Shape = SHAPES["llama-7b"]
    kv_heads: tuple[int, ...] = (32, 8, 4, 1)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    batches: tuple[int | None, ...] = (1, 16, 64, None)  # None: the largest that fits
    largest: int = 4096
    steps: int = 10
    copy_bytes: int = 1 << 32
    converted: Shape = SHAPES["1.3b"]
    convert_heads: int = 4
    convert: tuple[str, ...] = ("--tokens", "65536")
    refine: tuple[str, ...] = ()
    compile: bool = True
    launchers: bool = True
    trained: Shape = SHAPES["1.3b"]
    train: tuple[str, ...] = (
        "--steps", "12", "--batch-size", "8", "--micro-batch", "4", "--context", "2048", "--precision", "bfloat16",
    )  # fmt: skip


TINY = Scale(
    shape=Shape(64, 128, 2, 8, 8, 4096), kv_heads=(8, 2), contexts=(32,), batches=(1, None), largest=4, steps=2,
    copy_bytes=1 << 20, converted=Shape(64, 128, 2, 8, 8, 4096), convert_heads=2,
    convert=("--tokens", "512", "--context", "32"), refine=("--refine-steps", "4"), compile=False,
    trained=Shape(64, 128, 2, 8, 8, 4096),
    train=("--steps", "4", "--batch-size", "2", "--micro-batch", "1", "--context", "32", "--heldout-tokens", "128"),
)  # fmt: skip


class Results:
    """The measurements of one part by name, in a file that is written after each."""

    def __init__(self, file: Path, work: Path, scale: Scale) -> None:
        self.file, self.work, self.scale = file, work, scale
        self.rows: dict[str, dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else {}

    def missing(self, *names: str) -> bool:
        """Whether one of them was not measured, or failed."""
        return any("error" in self.rows.get(name, {"error": ""}) for name in names)

    def measure(self, name: str, function: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Store what `function` returns, or why it failed, unless `name` was measured."""
        if not self.missing(name):
            return
        started = time.monotonic()
        try:
            row = function(*arguments)
        except Exception as error:  # one measurement that fails must not cost the others
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
        self.rows[name] = row | {"took": round(time.monotonic() - started, 2)}
        device = f"{torch.cuda.get_device_name() if CUDA else 'cpu'}, torch {torch.__version__}"
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"device": device, "rows": self.rows}, indent=1) + "\n")
        temporary.replace(self.file)
        print(f"{self.file.stem:8} {name}: {json.dumps(self.rows[name])[:160]}", flush=True)
        free_memory()


def free_memory() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------- commands


class Stages(io.StringIO):
    """Stands for a terminal's stderr: which progress bars a command showed, for how long, with how much memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self._name, self._since = "start", time.monotonic()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        title = re.search(r"^\s*([^:\r\n|]+?):? +\d+%\|?", text) or re.search(r"\r([^:\r\n|]+):", text)
        self.next(title[1] if title else self._name)
        return super().write(text)

    def next(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        if CUDA:
            self.peaks[self._name] = max(self.peaks.get(self._name, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        self._name, self._since = name, now


def command(module: str, *words: str) -> dict[str, Any]:
    """Run `python -m gqa.MODULE` in this process. Returns seconds and peak bytes by stage."""
    stages = Stages()
    try:
        with contextlib.redirect_stderr(stages), contextlib.redirect_stdout(io.StringIO()):
            run_command(module, *words)
    except RuntimeError as error:
        raise RuntimeError(f"{error} after {stages.seconds}: {stages.getvalue()[-1500:]}") from error
    stages.next("end")
    return {"seconds": {name: round(value, 2) for name, value in stages.seconds.items()}, "peak_bytes": stages.peaks}


# ------------------------------------------------------------------------------------------------- decode


def bandwidth(size: int) -> dict[str, Any]:
    """Bytes read and written per second by copies on the device."""
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return {"bytes_per_second": 2 * size / seconds_of(lambda: target.copy_(source), 5)}


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after a warm-up."""

    def once() -> float:
        started = time.perf_counter()
        run()
        if CUDA:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(repeats))


class Decoder:
    """One step of a model whose cache is full: the last position is written, all are read, nothing grows."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        class Full(DynamicLayer):  # type: ignore[misc]
            def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
                self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
                return self.keys, self.values

            def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
                return context, 0

        config = model.config
        size = batch, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads
        self.cache, self.model = DynamicCache(), model
        self.cache.layers = [Full() for _ in range(config.num_hidden_layers)]
        for layer in self.cache.layers:
            layer.is_initialized, layer.dtype, layer.device = True, model.dtype, model.device
            layer.keys, layer.values = (torch.empty(size, dtype=model.dtype, device=model.device) for _ in range(2))
            for part in (layer.keys, layer.values):
                part.normal_()
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.positions = torch.full((1, 1), context - 1, device=model.device)
        # The weights but for the rows of the embedding that are not looked up, and the cache.
        self.bytes = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
        self.bytes += sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def step(self) -> None:
        from gqa.checkpoint.loading import cache_name

        inputs = {cache_name(self.model): self.cache, "position_ids": self.positions}
        self.ids.copy_(self.model(input_ids=self.ids, use_cache=True, **inputs).logits[:, -1:].argmax(-1))

    def graph(self) -> Callable[[], None]:
        """The step as a CUDA graph, without what Python takes between kernels."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which still fills the cache
        with torch.cuda.stream(stream):
            self.step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def decode_point(model: Any, batch: int | None, context: int, scale: Scale, copied: float) -> dict[str, Any]:
    """Tokens per second of all sequences together, and the share of the roofline."""
    config = model.config
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * context * model.dtype.itemsize
    cache *= config.hidden_size // config.num_attention_heads
    free = torch.cuda.mem_get_info()[0] if CUDA else cache * scale.largest
    fit = min(scale.largest, int(FREE * free) // cache) if batch is None else batch
    for rows in (fit, fit * 9 // 10, fit * 3 // 4):  # what a step itself takes is known only when it has run
        if 0 < rows * cache <= FREE * free:
            with contextlib.suppress(torch.OutOfMemoryError):
                return timed(model, rows, context, scale.steps, copied)
            free_memory()
        if batch is not None:
            break
    return {"batch": batch, "fits": False}


def timed(model: Any, batch: int, context: int, steps: int, copied: float) -> dict[str, Any]:
    """One row of `decode_point`, by a CUDA graph, if there are some, and by transformers' own calls."""
    with torch.inference_mode():
        decoder = Decoder(model, batch, context)
        row = {"fits": True, "batch": batch, "bytes": decoder.bytes}
        for kind in ("graph", "eager") if CUDA else ("eager",):
            try:
                seconds = seconds_of(decoder.graph() if kind == "graph" else decoder.step, steps)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # what cannot be captured can still be run
                row[f"{kind}_error"] = str(error)[:300]
                continue
            row |= {f"{kind}_tokens_per_second": batch / seconds, f"{kind}_roofline": decoder.bytes / seconds / copied}
    return row


def decode(results: Results) -> None:
    scale = results.scale
    results.measure("bandwidth", bandwidth, scale.copy_bytes)
    copied = float(results.rows["bandwidth"]["bytes_per_second"])
    for heads in scale.kv_heads:
        names = {
            f"sdpa {heads} heads {context} context {batch or 'largest'} batch": (batch, context)
            for context in scale.contexts for batch in scale.batches
        }  # fmt: skip
        if not results.missing(*names):
            continue
        shape = scale.shape._replace(kv_heads=heads, positions=max(scale.contexts))
        model = random_llama(shape, "bfloat16", DEVICE, attn_implementation="sdpa").eval()
        for name, (batch, context) in names.items():
            results.measure(name, decode_point, model, batch, context, scale, copied)
        del model
        free_memory()


# ------------------------------------------------------------------------------------------------- convert, train


def random_model(results: Results, name: str, shape: Shape, dtype: str) -> str:
    """A random checkpoint in the working directory, written once."""
    directory = results.work / name
    if not (directory / "complete").exists():
        write_random(directory, shape, dtype, DEVICE)
        (directory / "complete").touch()
    return str(directory)


def convert(results: Results) -> None:
    scale, more = results.scale, {"calibrated": (), "refined": results.scale.refine}
    if not results.missing(*more):
        return
    model = random_model(results, "large", scale.converted, "bfloat16")

    for method, words in more.items():
        words = ("--groups", str(scale.convert_heads), "--method", method, *scale.convert, *words)
        results.measure(method, command, "convert", model, *words, "-o", f"{results.work}/{method}", "--overwrite")


def metrics(state: Path) -> dict[str, Any]:
    """The last record of a run: its speed and memory."""
    return dict(json.loads((state / "metrics.jsonl").read_text().splitlines()[-1]))


def trained(results: Results, model: str, launcher: Sequence[str], more: Sequence[str]) -> dict[str, Any]:
    """gqa-uptrain on the library's own text, in this process or by a launcher, whose last word is a port."""
    out = results.work / "trained"
    words = [model, "--data", "stdlib:train", "--teacher", "none", "--train", "all", *results.scale.train, *more]
    words += ["-o", str(out), "--keep-state", "--overwrite"]
    state = out.with_name(f"{out.name}-state")
    shutil.rmtree(state, ignore_errors=True)
    if not launcher:
        command("uptrain", *words)
        return metrics(state)
    whole = [sys.executable, "-m", *launcher, free_port(), "-m", "gqa.uptrain", *words]
    environment = os.environ | {"NCCL_DEBUG": "VERSION"}
    done = subprocess.run(whole, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return metrics(state) | {"nccl": "NCCL version" in done.stdout + done.stderr}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def uptrain(results: Results) -> None:
    shape = results.scale.trained
    model = random_model(results, "trained-from", shape._replace(kv_heads=max(1, shape.heads // 4)), "float32")
    torchrun = ["torch.distributed.run", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port"]
    fsdp2 = ["accelerate.commands.launch", "--config_file", str(ROOT / "examples" / "accelerate" / "fsdp2.yaml")]
    fsdp2 += [*([] if CUDA else ["--mixed_precision", "no"]), "--num_processes", "1"]
    fsdp2 += ["--main_process_ip", "127.0.0.1", "--main_process_port"]
    runs: dict[str, tuple[list[str], list[str]]] = {
        "plain": ([], []),
        "checkpointing": ([], ["--checkpointing"]),
        "one rank": (torchrun, []),
        "one rank fsdp2": (fsdp2, []),
    }
    if not results.scale.launchers:
        runs = {name: (launcher, more) for name, (launcher, more) in runs.items() if not launcher}
    if results.scale.compile:
        runs |= {f"compile {name}": ([], ["--compile", *runs[name][1]]) for name in ("plain", "checkpointing")}
    for name, (launcher, more) in runs.items():
        results.measure(name, trained, results, model, launcher, more)


PARTS: dict[str, Callable[[Results], None]] = {"decode": decode, "convert": convert, "uptrain": uptrain}


# ------------------------------------------------------------------------------------------------- command


@contextlib.contextmanager
def importable() -> Iterator[str]:
    """A directory that makes this checkout's gqa importable, for PYTHONPATH."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "gqa"
        package.mkdir()
        folders = ("checkpoint", "corpus", "convert", "uptrain", "eval")
        for target in [*(ROOT / "package").iterdir(), *(ROOT / folder for folder in folders)]:
            (package / target.name).symlink_to(target)
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        metadata = Path(scratch) / f"gqa-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gqa\nVersion: {version}\n")
        yield scratch


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option(
    "--out", type=click.Path(path_type=Path), default=os.environ.get("OUT"), required=True, help="For results."
)
@click.option("--work", type=click.Path(path_type=Path), default=f"{tempfile.gettempdir()}/gqa-gpu", help="For models.")
@click.option("--part", "parts", multiple=True, type=click.Choice([*PARTS]), help="Several times for several.")
@click.option("--tiny", is_flag=True, help="Tiny models, for a CPU.")
def main(out: Path, work: Path, parts: tuple[str, ...], tiny: bool) -> None:
    for directory in (out, work):
        directory.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    with importable() as path:
        sys.path.insert(0, path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))  # for launchers
        for name in parts or PARTS:
            PARTS[name](Results(out / f"{name}.json", work, TINY if tiny else Scale()))


if __name__ == "__main__":
    main()
