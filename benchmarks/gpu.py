"""What conversion, sampling, training and decoding cost on one GPU: one command of nine minutes at most.

    python benchmarks/gpu.py --out DIR                          # all parts, in order
    python benchmarks/gpu.py --out DIR --part distill           # one part, with all of the time
    python benchmarks/gpu.py --out DIR --smollm2 SMOLLM2 --text stories.txt --text wikitext.txt
    python benchmarks/gpu.py --out DIR --tiny                   # every part on a CPU, with tiny models

decode: tokens per second of a random bfloat16 model of Llama-2-7B's shape by KV heads, context and batch, as one CUDA
    graph per step and as transformers runs it. `roofline` is the share of the device's copy bandwidth that the bytes of
    the weights and of the cache take: 1 is the limit. `largest` is the largest batch whose cache fits.
convert: a model of 1.3 billion parameters with 4 of 16 KV heads by `calibrated` and `refined`, on text that it writes
    itself: seconds and peak memory of each stage (the first samples the text: its tokens per second are the sampler's).
uptrain: tokens per second of gqa-uptrain on a model of that size, with and without --compile and --checkpointing, with
    NCCL on one rank and with FSDP2 on one rank. `mfu` is 6 operations per parameter and token, of the rate of a matrix
    product on the device.
distill: the embedded model with 2 and 1 heads, distilled on 1 to 50 million tokens that it writes itself.
smollm2: SmolLM2 (a directory, --smollm2) with 1 head, distilled on 20 million: perplexity and recall on each --text.

Each part is a process with a time limit. Each measurement is written to DIR/PART.json at once; what is there is not
measured again, so the same command continues after a limit or a failure. Models are written to --work.
Nothing needs a network. gqa need not be installed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from harness import EMBEDDED, ROOT, SHAPES, Shape, random_llama, run_command, write_random

LIMITS = {"decode": 110, "convert": 150, "uptrain": 110, "distill": 110, "smollm2": 60}  # seconds, if several parts run
LEAST = 5.0  # seconds that must be left for another measurement
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
    product: int = 8192
    converted: Shape = SHAPES["1.3b"]
    convert_heads: int = 4
    convert: tuple[str, ...] = ("--tokens", "65536")
    refine: tuple[str, ...] = ()
    compile: bool = True
    trained: Shape = SHAPES["1.3b"]
    train: tuple[str, ...] = (
        "--steps", "12", "--batch-size", "8", "--micro-batch", "4", "--context", "2048", "--precision", "bfloat16",
    )  # fmt: skip
    tokens: tuple[int, ...] = (1_000_000, 3_000_000, 10_000_000, 20_000_000, 50_000_000)
    distil: tuple[str, ...] = ("--context", "512", "--batch-size", "32", "--precision", "bfloat16")
    heads: tuple[int, ...] = (2, 1)
    method: tuple[str, ...] = ("--method", "refined")
    smollm2_tokens: int = 20_000_000
    evaluate: tuple[str, ...] = ("--tokens", "100000", "--context", "512")
    recall: tuple[str, ...] = ("--recall",)


_LITTLE = ("--method", "calibrated", "--tokens", "512", "--context", "32")
TINY = Scale(
    shape=Shape(64, 128, 2, 8, 8, 4096), kv_heads=(8, 2), contexts=(32,), batches=(1, None), largest=4, steps=2,
    copy_bytes=1 << 20, product=64, converted=Shape(64, 128, 2, 8, 8, 4096), convert_heads=2,
    convert=("--tokens", "512", "--context", "32"), refine=("--refine-steps", "4"), compile=False,
    trained=Shape(64, 128, 2, 8, 8, 4096),
    train=("--steps", "4", "--batch-size", "2", "--micro-batch", "1", "--context", "32", "--heldout-tokens", "128"),
    tokens=(256, 512), distil=("--context", "32", "--batch-size", "2", "--heldout-tokens", "512"),
    heads=(1,), method=_LITTLE, smollm2_tokens=256, evaluate=("--tokens", "500", "--context", "64"), recall=(),
)  # fmt: skip


@dataclass
class Results:
    """The measurements of one part by name, in a file that is written after each. `deadline` is by time.monotonic."""

    file: Path
    work: Path
    scale: Scale
    deadline: float = float("inf")
    smollm2: Path | None = None
    texts: Sequence[str] = ()
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file.exists():
            self.rows = json.loads(self.file.read_text())["rows"]

    def missing(self, *names: str) -> bool:
        """Whether one of them was not measured, or failed."""
        return any("error" in self.rows.get(name, {"error": ""}) for name in names)

    def measure(self, name: str, function: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Store what `function` returns, or why it failed, unless `name` was measured. Raises TimeoutError."""
        if not self.missing(name):
            return
        if time.monotonic() > self.deadline - LEAST:
            raise TimeoutError(f"no time left for {name}")
        started = time.monotonic()
        try:
            row = function(*arguments)
        except Exception as error:  # one measurement that fails must not cost the others
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
        self.rows[name] = row | {"took": round(time.monotonic() - started, 2)}
        self.write(False)
        print(f"{self.file.stem:8} {name}: {json.dumps(self.rows[name])[:160]}", flush=True)
        free_memory()

    def write(self, complete: bool) -> None:
        """`complete`: all of the part was measured, without an error."""
        complete = complete and not any("error" in row for row in self.rows.values())
        device = f"{torch.cuda.get_device_name() if CUDA else 'cpu'}, torch {torch.__version__}"
        text = json.dumps({"complete": complete, "device": device, "rows": self.rows}, indent=1)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self.file)


def is_complete(file: Path) -> bool:
    return file.exists() and bool(json.loads(file.read_text())["complete"])


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
        found = re.search(r"^\s*([^:\r\n|]+?):? +\d+%\|?", text) or re.search(r"\r([^:\r\n|]+):", text)
        training = re.match(r"step \d+/", text)  # a status line of gqa-uptrain
        self.next("training" if training else found[1] if found else self._name)
        return super().write(text)

    def next(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        if CUDA:
            self.peaks[self._name] = max(self.peaks.get(self._name, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        self._name, self._since = name, now


def command(module: str, *words: str) -> dict[str, Any]:
    """Run the command gqa-MODULE in this process. Returns seconds and peak bytes by stage, and its JSON as `record`."""
    stages, output = Stages(), io.StringIO()
    try:
        with contextlib.redirect_stderr(stages), contextlib.redirect_stdout(output):
            run_command(module, *words, "--json")
    except (RuntimeError, TimeoutError) as error:
        raise RuntimeError(f"{error} after {stages.seconds}: {stages.getvalue()[-1500:]}") from error
    stages.next("end")
    seconds = {name: round(value, 2) for name, value in stages.seconds.items()}
    record = json.loads(output.getvalue().splitlines()[-1])
    return {"seconds": seconds, "peak_bytes": stages.peaks, "record": record}


# ------------------------------------------------------------------------------------------------- decode


def bandwidth(size: int) -> dict[str, Any]:
    """Bytes read and written per second by copies on the device."""
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return {"bytes_per_second": 2 * size / seconds_of(lambda: target.copy_(source), 5)}


def product_rate(size: int) -> dict[str, Any]:
    """Operations per second of a product of two bfloat16 matrices (size, size)."""
    one, other = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return {"flops_per_second": 2 * size**3 / seconds_of(lambda: one @ other, 20)}


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

        inputs = {"input_ids": self.ids, "position_ids": self.positions, cache_name(self.model): self.cache}
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
    from transformers.utils import is_flash_attn_2_available

    scale = results.scale
    results.measure("bandwidth", bandwidth, scale.copy_bytes)
    copied = float(results.rows["bandwidth"]["bytes_per_second"])
    attentions = ["sdpa", *(["flash_attention_2"] if CUDA and is_flash_attn_2_available() else [])]
    for attention in attentions:
        for heads in scale.kv_heads:
            names = {
                f"{attention} {heads} heads {context} context {batch or 'largest'} batch": (batch, context)
                for context in scale.contexts for batch in scale.batches
            }  # fmt: skip
            if not results.missing(*names):
                continue
            shape = scale.shape._replace(kv_heads=heads, positions=max(scale.contexts))
            model = random_llama(shape, "bfloat16", DEVICE, attn_implementation=attention).eval()
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

    def run(method: str) -> dict[str, Any]:
        words = ["--groups", str(scale.convert_heads), "--method", method, *scale.convert, *more[method]]
        row = command("convert", model, *words, "-o", str(results.work / f"large-{method}"), "--overwrite")
        return {name: row[name] for name in ("seconds", "peak_bytes")}

    for method in more:
        results.measure(method, run, method)


def metrics(state: Path) -> dict[str, Any]:
    """The last record of a run: its speed and memory."""
    return dict(json.loads((state / "metrics.jsonl").read_text().splitlines()[-1]))


def trained(results: Results, model: str, launcher: Sequence[str], more: Sequence[str]) -> dict[str, Any]:
    """gqa-uptrain on the library's own text, in this process or by a launcher."""
    out = results.work / "trained"
    words = [model, "--data", "stdlib:train", "--teacher", "none", "--train", "all", *results.scale.train, *more]
    words += ["-o", str(out), "--keep-state", "--overwrite"]
    state = out.with_name(f"{out.name}-state")
    shutil.rmtree(state, ignore_errors=True)
    if not launcher:
        command("uptrain", *words)
        return metrics(state)
    words = [sys.executable, "-m", *launcher, "-m", "gqa.uptrain", *words]
    environment = os.environ | {"NCCL_DEBUG": "VERSION"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return metrics(state) | {"nccl": "NCCL version" in done.stdout + done.stderr}


def uptrain(results: Results) -> None:
    shape = results.scale.trained
    model = random_model(results, "trained-from", shape._replace(kv_heads=max(1, shape.heads // 4)), "float32")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    fsdp2 = ["accelerate.commands.launch", "--config_file", str(ROOT / "examples" / "accelerate" / "fsdp2.yaml")]
    fsdp2 += [*([] if CUDA else ["--mixed_precision", "no"]), "--num_processes", "1", "--main_process_port", "0"]
    runs: dict[str, tuple[list[str], list[str]]] = {
        "plain": ([], []), "checkpointing": ([], ["--checkpointing"]),
        "one rank": (torchrun, []), "one rank fsdp2": (fsdp2, []),
    }  # fmt: skip
    if results.scale.compile:
        runs |= {f"compile {name}": ([], ["--compile", *runs[name][1]]) for name in ("plain", "checkpointing")}
    results.measure("matrix product", product_rate, results.scale.product)
    parameters = random_llama(shape, "bfloat16", "meta").num_parameters()
    needed = 6 * parameters / float(results.rows["matrix product"]["flops_per_second"])

    def run(launcher: Sequence[str], more: Sequence[str]) -> dict[str, Any]:
        row = trained(results, model, launcher, more)
        return row | {"mfu": needed * row["tokens_per_second"]}

    for name, words in runs.items():
        results.measure(name, run, *words)


def distilled(
    results: Results, base: Path, heads: int, tokens: int, texts: Sequence[str], *more: str
) -> dict[str, Any]:
    """A converted model distilled on so much of its base model's own text, and how both predict `texts`."""
    start, out = results.work / f"{base.name}-{heads}", results.work / f"{base.name}-{heads}-{tokens}"
    if not (start / "config.json").exists():
        command("convert", str(base), "--groups", str(heads), *results.scale.method, "-o", str(start), "--overwrite")
    words = ["--data", f"self:{tokens}", "--tokens", str(tokens), *results.scale.distil, "--teacher", str(base)]
    words += ["--overwrite"] if out.exists() else []  # a run that was stopped continues
    run = command("uptrain", str(start), *words, "-o", str(out), "--keep-state")
    row = {"tokens": tokens, "losses": run["record"]["losses"], "seconds": run["seconds"]}
    last = metrics(out.with_name(f"{out.name}-state"))
    row |= {name: last[name] for name in ("tokens_per_second", "memory_bytes") if name in last}
    for text in texts:
        words = [str(base), str(start), str(out), "--data", text, "--kl", *results.scale.evaluate, *more]
        models = command("eval", *words)["record"]["models"]
        row[Path(text).name] = [{key: model.get(key) for key in ("name", "quality", "recall")} for model in models]
    return row


def distill(results: Results) -> None:
    for tokens in results.scale.tokens:
        for heads in results.scale.heads:
            results.measure(
                f"{heads} heads {tokens} tokens", distilled, results, EMBEDDED, heads, tokens, results.texts[:1]
            )


def smollm2(results: Results) -> None:
    if not results.smollm2:
        raise click.UsageError("the part smollm2 needs --smollm2")
    tokens = results.scale.smollm2_tokens
    results.measure("1 head", distilled, results, results.smollm2, 1, tokens, results.texts, *results.scale.recall)


PARTS: dict[str, Callable[[Results], None]] = {
    "decode": decode, "convert": convert, "uptrain": uptrain, "distill": distill, "smollm2": smollm2,
}  # fmt: skip


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


def stop(number: int, frame: object) -> None:
    """The limit of a part: what is under way is recorded as failed, with the progress that it showed last."""
    raise TimeoutError("stopped at the time limit")


def run_part(name: str, seconds: float, environment: dict[str, str]) -> None:
    """The part in a process of its own, with the options of this one, for so many seconds at most."""
    words = [sys.executable, *sys.argv, "--alone", name, "--minutes", str(seconds / 60)]
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {seconds:.0f} seconds; the same command continues it", flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):  # launchers end their workers, which are not of the group
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(LEAST)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), envvar="OUT", required=True, help="For results.")
@click.option("--work", type=click.Path(path_type=Path), default=f"{tempfile.gettempdir()}/gqa-gpu", help="For models.")
@click.option("--part", "parts", multiple=True, type=click.Choice([*PARTS]), help="Several times for several.")
@click.option("--minutes", default=9.0, help="For all parts together.")
@click.option("--smollm2", type=click.Path(exists=True, path_type=Path), help="SmolLM2's checkpoint.")
@click.option("--text", "texts", multiple=True, default=("stdlib:heldout",), help="For perplexity; several times.")
@click.option("--tiny", is_flag=True, help="Tiny models, for a CPU.")
@click.option("--alone", hidden=True, type=click.Choice([*PARTS]), help="Run this part in this process.")
def main(
    out: Path, work: Path, parts: tuple[str, ...], minutes: float, smollm2: Path | None, texts: tuple[str, ...],
    tiny: bool, alone: str | None,
) -> None:  # fmt: skip
    deadline = time.monotonic() + 60 * minutes
    for directory in (out, work):
        directory.mkdir(parents=True, exist_ok=True)
    if alone:
        signal.signal(signal.SIGTERM, stop)
        scale = TINY if tiny else Scale()
        results = Results(out / f"{alone}.json", work, scale, deadline, smollm2, texts)
        with contextlib.suppress(TimeoutError):
            PARTS[alone](results)
            results.write(True)
        return
    with importable() as path:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([path, *os.environ.get("PYTHONPATH", "").split()])}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf"), "TOKENIZERS_PARALLELISM": "false"}
        for name in parts or [name for name in PARTS if name != "smollm2" or smollm2]:
            left = deadline - time.monotonic() - LEAST
            if is_complete(out / f"{name}.json"):
                print(f"{name}: complete in {out}", flush=True)
            elif left > LEAST:
                limit = left if len(parts) == 1 else min(left, LIMITS[name])
                run_part(name, limit, environment)


if __name__ == "__main__":
    main()
