"""What conversion, sampling, training and decoding cost on one GPU: one command of nine minutes at
most.

    python benchmarks/gpu.py --out DIR                          # all parts, in order
    python benchmarks/gpu.py --out DIR --part distill           # one part, with all of the time
    python benchmarks/gpu.py --out DIR --smollm2 SMOLLM2 --text stories.txt --text wikitext.txt
    python benchmarks/gpu.py --out DIR --tiny    # every part on a CPU, with tiny models

decode: tokens per second of a random bfloat16 model of Llama-2-7B's shape by KV heads, context and
    batch, as one CUDA graph per step. `roofline` is the share of the device's copy bandwidth that
    the bytes of the weights and of the cache take: 1 is the limit. `largest` is the largest batch
    whose cache fits.
convert: a model of 1.3 billion parameters with 4 of 16 KV heads by `calibrated` and `refined`, on
    text that it writes itself: seconds and peak memory of each stage (the first samples the text:
    its tokens per second are the sampler's).
uptrain: tokens per second of gqa-uptrain on a model of that size, with and without --compile and
    --gradient-checkpointing, with NCCL on one rank and with FSDP2 on one rank. `mfu` is 6
    operations per parameter and token, of the rate of a matrix product on the device.
distill: the embedded model with 2 and 1 heads, distilled on 1 to 50 million tokens that it writes
itself. smollm2: SmolLM2 (a directory, --smollm2) with 1 head, distilled on 20 million: perplexity
and recall on each --text.

Each part is a process with a time limit. Each measurement is appended to DIR/PART.jsonl; what is
there is not measured again, so the same command continues after a limit or a failure. Models are
written to --work. Nothing needs a network. gqa need not be installed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
from harness import (
    EMBEDDED,
    ROOT,
    SHAPES,
    Measurements,
    Shape,
    random_llama,
    run_command,
    write_random,
)

# Seconds, if several parts run
LIMITS = {"decode": 110, "convert": 150, "uptrain": 110, "distill": 110, "smollm2": 60}
LEAST = 5.0  # seconds that must be left for another measurement
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
VERSION = torch.__version__
FREE = 0.85  # share of the free memory that a cache may take
# That install as gqa.core and so on
FOLDERS = ("core", "checkpoint", "models", "corpus", "convert", "uptrain", "eval", "study")


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
    product: int = 8192
    large: Shape = SHAPES["1.3b"]  # converted and trained
    convert_heads: int = 4
    convert: tuple[str, ...] = ("--tokens", "65536")
    refine: tuple[str, ...] = ()
    compile: bool = True
    train: tuple[str, ...] = (
        "--steps",
        "12",
        "--batch-size",
        "8",
        "--micro-batch",
        "4",
        "--context",
        "2048",
        "--precision",
        "bfloat16",
    )
    tokens: tuple[int, ...] = (1_000_000, 3_000_000, 10_000_000, 20_000_000, 50_000_000)
    distil: tuple[str, ...] = ("--context", "512", "--batch-size", "32", "--precision", "bfloat16")
    heads: tuple[int, ...] = (2, 1)
    method: tuple[str, ...] = ("--method", "refined")
    smollm2_tokens: int = 20_000_000
    evaluate: tuple[str, ...] = ("--tokens", "100000", "--context", "512")
    recall: tuple[str, ...] = ("--recall",)


TINY = Scale(
    shape=Shape(64, 128, 2, 8, 8, 4096),
    kv_heads=(8, 2),
    contexts=(32,),
    batches=(1, None),
    largest=4,
    steps=2,
    copy_bytes=1 << 20,
    product=64,
    large=Shape(64, 128, 2, 8, 8, 4096),
    convert_heads=2,
    convert=("--tokens", "512", "--context", "32"),
    refine=("--refine-steps", "4"),
    compile=False,
    train=(
        "--steps",
        "4",
        "--batch-size",
        "2",
        "--micro-batch",
        "1",
        "--context",
        "32",
        "--validation-tokens",
        "128",
    ),
    tokens=(256, 512),
    distil=("--context", "32", "--batch-size", "2", "--validation-tokens", "512"),
    heads=(1,),
    method=("--method", "mean"),
    smollm2_tokens=256,
    evaluate=("--tokens", "500", "--context", "64"),
    recall=(),
)


class Part(Measurements):
    """The measurements of one part, until `deadline` by time.monotonic.

    `smollm2`: SmolLM2's checkpoint; `texts`: data to evaluate distilled models on.
    """

    def __init__(
        self,
        file: Path,
        work: Path,
        scale: Scale,
        deadline: float = float("inf"),
        smollm2: Path | None = None,
        texts: Sequence[str] = (),
    ) -> None:
        super().__init__(file)
        self.work = work
        self.scale = scale
        self.deadline = deadline
        self.smollm2 = smollm2
        self.texts = texts

    def measure(self, name: str, function: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """As `Measurements`, then free the device's memory.

        Raises TimeoutError if no time is left.
        """
        if self.missing(name) and time.monotonic() > self.deadline - LEAST:
            raise TimeoutError(f"no time left for {name}")
        super().measure(name, function, *arguments)
        free_memory()

    def run(self, part: Callable[[Part], None]) -> None:
        """Measure what is missing and, if nothing failed, that the part is complete."""
        device = torch.cuda.get_device_name() if CUDA else "cpu"
        self.measure("device", lambda: {"device": device, "torch": VERSION})
        part(self)
        if not self.missing(*self.rows):
            self.measure("complete", dict)


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def command(module: str, *words: str) -> dict[str, Any]:
    """Run the command gqa-MODULE in this process.

    Returns seconds and peak bytes of each stage whose progress it shows, and its JSON as `record`.
    """
    from gqa.core.console import Watcher

    seconds = dict[str, float]()
    peaks = dict[str, int]()
    show = Watcher.stage
    stage = "start"
    since = time.monotonic()

    def next_stage(watcher: Watcher | None, name: str, *rest: Any) -> None:
        nonlocal stage, since
        seconds[stage] = round(seconds.get(stage, 0.0) + time.monotonic() - since, 2)
        if CUDA:
            peaks[stage] = max(peaks.get(stage, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        stage = name
        since = time.monotonic()
        if watcher:
            show(watcher, name, *rest)

    errors = io.StringIO()
    output = io.StringIO()
    Watcher.stage = next_stage  # type: ignore[method-assign,assignment]
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
            run_command(module, *words, "--json")
    except RuntimeError as error:
        raise RuntimeError(
            f"{error} in {stage}, after {seconds}: {errors.getvalue()[-1500:]}"
        ) from error
    finally:
        next_stage(None, "end")
        Watcher.stage = show  # type: ignore[method-assign]
    return {
        "seconds": seconds,
        "peak_bytes": peaks,
        "record": json.loads(output.getvalue().splitlines()[-1]),
    }


def bandwidth(size: int) -> dict[str, Any]:
    """Bytes read and written per second by copies on the device."""
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), 5)
    return {"bytes_per_second": 2 * size / seconds}


def product_rate(size: int) -> dict[str, Any]:
    """Operations per second of a product of two bfloat16 matrices (size, size)."""
    one = torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE)
    other = torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE)
    seconds = seconds_of(lambda: one @ other, 20)
    return {"flops_per_second": 2 * size**3 / seconds}


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
    """One step of a model whose cache is full: the last position is written, all are read, nothing
    grows.
    """

    def __init__(self, model: Any, batch: int, context: int) -> None:
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        class Full(DynamicLayer):  # type: ignore[misc]
            def update(
                self, key_states: Any, value_states: Any, *_: Any, **__: Any
            ) -> tuple[Any, Any]:
                self.keys[:, :, -1:] = key_states
                self.values[:, :, -1:] = value_states
                return self.keys, self.values

            def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
                return context, 0

        self.model = model
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.positions = torch.full((1, 1), context - 1, device=model.device)

        config = model.config
        head_dim = config.hidden_size // config.num_attention_heads
        size = (batch, config.num_key_value_heads, context, head_dim)
        self.cache = DynamicCache()
        self.cache.layers = [Full() for _ in range(config.num_hidden_layers)]
        for layer in self.cache.layers:
            layer.is_initialized = True
            layer.dtype = model.dtype
            layer.device = model.device
            layer.keys = torch.empty(size, dtype=model.dtype, device=model.device).normal_()
            layer.values = torch.empty(size, dtype=model.dtype, device=model.device).normal_()

        # The weights but for the rows of the embedding that are not looked up, and the cache.
        self.bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.bytes -= model.get_input_embeddings().weight.nbytes
        for layer in self.cache.layers:
            self.bytes += layer.keys.nbytes + layer.values.nbytes

    def step(self) -> None:
        from gqa.models.loading import cache_name

        inputs = {
            "input_ids": self.ids,
            "position_ids": self.positions,
            cache_name(self.model): self.cache,
        }
        self.ids.copy_(self.model(use_cache=True, **inputs).logits[:, -1:].argmax(-1))

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


def decode_point(
    model: Any, batch: int | None, context: int, scale: Scale, copied: float
) -> dict[str, Any]:
    """Tokens per second of all sequences together, and the share of the roofline."""
    sequence_bytes = cache_bytes(model, context)
    free = sequence_bytes * scale.largest
    if CUDA:
        free, _ = torch.cuda.mem_get_info()
    fit = int(FREE * free) // sequence_bytes

    candidates = [batch]
    if batch is None:
        # What a step itself takes is known only when it has run.
        largest = min(scale.largest, fit)
        candidates = [largest, largest * 9 // 10, largest * 3 // 4]
    for rows in candidates:
        if not 0 < rows <= fit:
            continue
        with contextlib.suppress(torch.OutOfMemoryError), torch.inference_mode():
            decoder = Decoder(model, rows, context)
            step = decoder.graph() if CUDA else decoder.step
            seconds = seconds_of(step, scale.steps)
            return {
                "fits": True,
                "batch": rows,
                "bytes": decoder.bytes,
                "tokens_per_second": rows / seconds,
                "roofline": decoder.bytes / seconds / copied,
            }
        free_memory()
    return {"batch": batch, "fits": False}


def cache_bytes(model: Any, context: int) -> int:
    """Bytes of the KV cache of one sequence of so many tokens."""
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    numbers_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return int(numbers_per_token * context * model.dtype.itemsize)


def decode(part: Part) -> None:
    from transformers.utils import is_flash_attn_2_available

    scale = part.scale
    part.measure("bandwidth", bandwidth, scale.copy_bytes)
    copied = float(part.rows["bandwidth"]["bytes_per_second"])

    attentions = ["sdpa"]
    if CUDA and is_flash_attn_2_available():
        attentions.append("flash_attention_2")
    for attention, heads in product(attentions, scale.kv_heads):
        points = dict[str, tuple[int | None, int]]()
        for context, batch in product(scale.contexts, scale.batches):
            name = f"{attention} {heads} heads {context} context {batch or 'largest'} batch"
            points[name] = (batch, context)
        if not part.missing(*points):
            continue

        shape = scale.shape._replace(kv_heads=heads, positions=max(scale.contexts))
        model = random_llama(shape, "bfloat16", DEVICE, attn_implementation=attention).eval()
        for name, (batch, context) in points.items():
            part.measure(name, decode_point, model, batch, context, scale, copied)
        del model
        free_memory()


def random_model(part: Part, name: str, shape: Shape, dtype: str) -> str:
    """A random checkpoint in the working directory, written once."""
    directory = part.work / name
    if (directory / "tokenizer.json").exists():  # the last file
        return str(directory)
    return write_random(directory, shape, dtype, DEVICE)


def convert(part: Part) -> None:
    scale = part.scale

    def run(method: str, *more: str) -> dict[str, Any]:
        words = [random_model(part, "large", scale.large, "bfloat16")]
        words += ["--kv-heads", str(scale.convert_heads), "--method", method]
        words += [*scale.convert, *more]
        words += ["-o", str(part.work / f"large-{method}"), "--overwrite"]
        row = command("convert", *words)
        return {name: row[name] for name in ("seconds", "peak_bytes")}

    part.measure("calibrated", run, "calibrated")
    part.measure("refined", run, "refined", *scale.refine)


def metrics(out: Path) -> dict[str, Any]:
    """The last record of the run that wrote `out`: its speed and memory."""
    lines = (out.with_name(f"{out.name}-state") / "metrics.jsonl").read_text().splitlines()
    return dict(json.loads(lines[-1]))


def uptrain(part: Part) -> None:
    shape = part.scale.large
    fewer_heads = shape._replace(kv_heads=max(1, shape.heads // 4))
    model = random_model(part, "trained-from", fewer_heads, "float32")

    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    fsdp2_config = ROOT / "examples" / "accelerate" / "fsdp2.yaml"
    fsdp2 = ["accelerate.commands.launch", "--config_file", str(fsdp2_config)]
    fsdp2 += ["--num_processes", "1", "--main_process_port", "0"]
    if not CUDA:
        fsdp2 += ["--mixed_precision", "no"]

    checkpointing = ["--gradient-checkpointing"]
    compiled = ["--compile"]
    runs = {"plain": [], "checkpointing": checkpointing, "one rank": [], "one rank fsdp2": []}
    if part.scale.compile:
        runs |= {"compile plain": compiled, "compile checkpointing": compiled + checkpointing}
    launchers = {"one rank": torchrun, "one rank fsdp2": fsdp2}

    part.measure("matrix product", product_rate, part.scale.product)
    parameters = random_llama(shape, "bfloat16", "meta").num_parameters()
    needed = 6 * parameters / float(part.rows["matrix product"]["flops_per_second"])

    def run(name: str) -> dict[str, Any]:
        """gqa-uptrain on the library's own text, in this process or by a launcher."""
        out = part.work / "trained"
        shutil.rmtree(out.with_name(f"{out.name}-state"), ignore_errors=True)
        words = [model, "--data", "stdlib:train", "--teacher", "none", "--train", "all"]
        words += [*part.scale.train, *runs[name]]
        words += ["-o", str(out), "--keep-state", "--overwrite"]

        if name in launchers:
            words = [sys.executable, "-m", *launchers[name], "-m", "gqa.uptrain", *words]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[-1500:])
        else:
            command("uptrain", *words)

        row = metrics(out)
        return row | {"mfu": needed * row["tokens_per_second"]}

    for name in runs:
        part.measure(name, run, name)


def distilled(
    part: Part, base: Path, heads: int, tokens: int, texts: Sequence[str], *more: str
) -> dict[str, Any]:
    """A converted model distilled on so much of its base model's own text, and how both predict
    `texts`.
    """
    start = part.work / f"{base.name}-{heads}"
    out = part.work / f"{base.name}-{heads}-{tokens}"
    if not (start / "config.json").exists():
        words = [str(base), "--kv-heads", str(heads), *part.scale.method]
        command("convert", *words, "-o", str(start), "--overwrite")

    words = [str(start), "--data", f"self:{tokens}", "--tokens", str(tokens)]
    words += [*part.scale.distil, "--teacher", str(base), "-o", str(out), "--keep-state"]
    if out.exists():  # without a result, a run that was stopped continues
        words.append("--overwrite")
    run = command("uptrain", *words)
    row = {"tokens": tokens, "losses": run["record"]["losses"], "seconds": run["seconds"]}
    for name, value in metrics(out).items():
        if name in ("tokens_per_second", "memory_bytes"):
            row[name] = value

    for text in texts:
        words = [str(base), str(start), str(out), "--data", text, "--kl"]
        evaluation = command("eval", *words, *part.scale.evaluate, *more)["record"]
        row[Path(text).name] = [measured(model) for model in evaluation["models"]]
    return row


def measured(model: dict[str, Any]) -> dict[str, Any]:
    """What the record of a model says of its quality."""
    return {key: model.get(key) for key in ("name", "quality", "recall")}


def distill(part: Part) -> None:
    for tokens in part.scale.tokens:
        for heads in part.scale.heads:
            part.measure(
                f"{heads} heads {tokens} tokens",
                distilled,
                part,
                EMBEDDED,
                heads,
                tokens,
                part.texts[:1],
            )


def smollm2(part: Part) -> None:
    if not part.smollm2:
        raise click.UsageError("the part smollm2 needs --smollm2")
    tokens = part.scale.smollm2_tokens
    part.measure("1 head", distilled, part, part.smollm2, 1, tokens, part.texts, *part.scale.recall)


PARTS: dict[str, Callable[[Part], None]] = {
    "decode": decode,
    "convert": convert,
    "uptrain": uptrain,
    "distill": distill,
    "smollm2": smollm2,
}


@contextlib.contextmanager
def importable() -> Iterator[str]:
    """A directory that makes this checkout's gqa importable, for PYTHONPATH."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "gqa"
        package.mkdir()
        targets = [*(ROOT / "package").iterdir()]
        targets += [ROOT / folder for folder in FOLDERS]
        for target in targets:
            (package / target.name).symlink_to(target)

        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        metadata = Path(scratch) / f"gqa-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: gqa\nVersion: {version}\n"
        )
        yield scratch


def run_part(name: str, seconds: float, environment: dict[str, str]) -> None:
    """Run the part in a process of its own, with the options of this one, for so many seconds at
    most.
    """
    words = [sys.executable, *sys.argv, "--alone", name, "--minutes", str(seconds / 60)]
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(
            f"{name}: stopped after {seconds:.0f} seconds; the same command continues it",
            flush=True,
        )

    # Launchers end their workers, which are not of the group
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(LEAST)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option(
    "--out", type=click.Path(path_type=Path), envvar="OUT", required=True, help="For results."
)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=f"{tempfile.gettempdir()}/gqa-gpu",
    help="For models.",
)
@click.option(
    "--part", "parts", multiple=True, type=click.Choice([*PARTS]), help="Several times for several."
)
@click.option("--minutes", default=9.0, help="For all parts together.")
@click.option(
    "--smollm2", type=click.Path(exists=True, path_type=Path), help="SmolLM2's checkpoint."
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    default=("stdlib:heldout",),
    help="For perplexity; several times.",
)
@click.option("--tiny", is_flag=True, help="Tiny models, for a CPU.")
@click.option(
    "--alone", hidden=True, type=click.Choice([*PARTS]), help="Run this part in this process."
)
def main(
    out: Path,
    work: Path,
    parts: tuple[str, ...],
    minutes: float,
    smollm2: Path | None,
    texts: tuple[str, ...],
    tiny: bool,
    alone: str | None,
) -> None:
    deadline = time.monotonic() + 60 * minutes
    for directory in (out, work):
        directory.mkdir(parents=True, exist_ok=True)
    if alone:
        scale = TINY if tiny else Scale()
        part = Part(out / f"{alone}.jsonl", work, scale, deadline, smollm2, texts)
        with contextlib.suppress(TimeoutError):
            part.run(PARTS[alone])
        return

    names = list(parts)
    if not names:
        names = [name for name in PARTS if name != "smollm2" or smollm2]
    has_all_time = tiny or len(parts) == 1
    with importable() as path:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([path, *os.environ.get("PYTHONPATH", "").split()]),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(work / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        for name in names:
            left = deadline - time.monotonic() - LEAST
            if not Measurements(out / f"{name}.jsonl").missing("complete"):
                print(f"{name}: complete in {out}", flush=True)
            elif left > LEAST:
                limit = left if has_all_time else min(left, LIMITS[name])
                run_part(name, limit, environment)


if __name__ == "__main__":
    main()
