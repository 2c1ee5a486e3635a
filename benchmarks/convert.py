"""gqa-convert beside `cp -r` and the obvious script with transformers: time and memory, measured side by side.

    python benchmarks/convert.py                   # a synthetic checkpoint of 4.6 GB, five rounds
    python benchmarks/convert.py --gigabytes 8 --repeats 3 --json figures.json

Every run is a process of its own. Its clock starts after the imports and stops when every output file is fsynced.
Before each run the last output is deleted and the source is read once, so that all start with the source in the page
cache (caches cannot be dropped without privileges), and the order changes from round to round. Free memory is left as
it is: a virtual machine may have given it back to its host, and then every fresh page costs several times as much as
the copy into it. That is most of the time of `cp` there, and why its times spread.

Memory is that of anonymous pages (RssAnon) above what the imports left: what a process must have. Pages of files that
it reads or writes belong to the page cache, count only while they are mapped, and vanish when somebody needs memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import click
from harness import JSON_OPTION, MIB, Contestant, Turn, serve, write_json

HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 4096, 32, 128, 11008, 32000  # Llama-2-7B
SHARD_BYTES = 1 << 30


# ------------------------------------------------------------------------------------------------- checkpoints


def llama(layers: int, hidden: int = HIDDEN, heads: int = HEADS, intermediate: int = INTERMEDIATE) -> Any:
    """The config of a Llama checkpoint in bfloat16."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=4096, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def write_checkpoint(directory: Path, config: Any, shard_bytes: int, content: bool = True) -> None:
    """A sharded checkpoint in which K and V of a layer lie in different shards; without `content` sparse files."""
    import torch
    from transformers import LlamaForCausalLM

    from gqa.checkpoint.headers import byte_size, format_header

    directory.mkdir()
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, dims in shapes.items():
        shards[-1][name] = ("BF16", dims)
        size += byte_size("BF16", dims)
        if size > shard_bytes * 0.8 and ".k_proj" in name:  # the break falls between K and V
            shards.append({})
            size = 0
    weight_map = {}
    weights = _weights() if content else b""
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(tensors, file))
        header = format_header(tensors)
        with (directory / file).open("wb") as stream:
            stream.write(header)
            total = sum(byte_size(*entry) for entry in tensors.values())
            for position, entry in enumerate(tensors.values() if content else ()):
                _write_weights(stream, weights, byte_size(*entry), position)
            if not content:
                stream.truncate(len(header) + total)
    index = {"metadata": {"total_size": 2 * sum(map(math.prod, shapes.values()))}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}\n')
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}\n')
    vocabulary = {f"token{i}": i for i in range(VOCABULARY)}  # about as large as a real tokenizer.json
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}, indent=1))
    for path in directory.iterdir():
        fsync(path)


def _weights() -> bytes:
    """66 MiB of bfloat16 numbers from N(0, 0.02)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    numbers = torch.normal(0.0, 0.02, (33 * MIB,), generator=generator).to(torch.bfloat16)
    return bytes(numbers.view(torch.uint8).numpy())


def _write_weights(stream: BinaryIO, weights: bytes, count: int, seed: int) -> None:
    """Append `count` bytes of `weights`, from a place that depends on `seed`, around and around."""
    view, start = memoryview(weights), seed * 7_654_322 % len(weights)
    while count:
        written = stream.write(view[start : start + min(count, 8 * MIB)])
        count -= written
        start = (start + written) % len(weights)


# ------------------------------------------------------------------------------------------------- what is compared


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory, directory.parent]:
        fsync(path)


def cp(source: Path, out: Path, options: dict[str, Any]) -> Callable[[], object]:
    def run() -> None:
        subprocess.run(["cp", "-r", source, out], check=True)
        fsync_tree(out)

    return run


def gqa_convert(source: Path, out: Path, options: dict[str, Any]) -> Callable[[], object]:
    import torch  # noqa: F401

    from gqa.convert import verify  # noqa: F401
    from gqa.convert.api import convert_checkpoint
    from gqa.convert.heads.config import read_config

    read_config(json.loads((source / "config.json").read_text()), "imports what transformers imports lazily")
    return lambda: convert_checkpoint(
        source, options["groups"], out, jobs=options["jobs"], checksums=options["sums"], method="mean"
    )


def transformers_script(source: Path, out: Path, options: dict[str, Any]) -> Callable[[], object]:
    """What one writes without a converter: load, average the heads, save."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401
    from transformers.utils import logging

    logging.disable_progress_bar()

    def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        groups = options["groups"]
        for layer in model.model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = linear.weight.detach().float().view(groups, HEADS // groups, HEAD_DIM, HIDDEN)
                pooled = heads.mean(1).view(groups * HEAD_DIM, HIDDEN).to(torch.bfloat16)
                linear.weight = torch.nn.Parameter(pooled, requires_grad=False)
        model.config.num_key_value_heads = groups
        model.save_pretrained(out, max_shard_size="1GB")
        fsync_tree(out)

    return run


def dry_run(source: Path, out: Path, options: dict[str, Any]) -> Callable[[], object]:
    from gqa.convert.cli import command

    gqa_convert(source, out, options)
    arguments = ["--dry-run", "--groups", "8", str(source)]

    def run() -> None:
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
        try:
            command.main(arguments, standalone_mode=False)
        finally:
            sys.stdout = stdout

    return run


# ------------------------------------------------------------------------------------------------- measuring


def measure(make: Callable[..., Callable[[], object]], *arguments: Any, before: Callable[[], None]) -> tuple[Turn, int]:
    """Of a run in a fresh process, and the peak of its memory above what the imports left."""
    process = Contestant(serve, prepared, make, *arguments)
    before()
    return process.turn(sampled=True), process.end()


def prepared(make: Callable[..., Callable[[], object]], *arguments: Any) -> Callable[[object], None]:
    run = make(*arguments)

    def once(_: object) -> None:
        run()

    return once


def settle(source: Path) -> None:
    """The state from which every run starts: nothing left to write, the source in the page cache."""
    os.sync()
    buffer = bytearray(8 * MIB)
    for path in source.iterdir():
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def differences(one: Path, other: Path) -> str:
    """How the keys and values of two results compare, in words."""
    import torch

    from gqa.checkpoint.read import read_checkpoint

    results = read_checkpoint(one), read_checkpoint(other)  # of one shard or several
    ours, theirs = (
        {name: spec for name, spec in result.tensors.items() if ".k_proj" in name or ".v_proj" in name}
        for result in results
    )
    assert ours.keys() == theirs.keys(), "the results have different tensors"
    equal, furthest = 0, 0
    for name in ours:
        x, y = results[0].read(ours[name]), results[1].read(theirs[name])
        steps = (x.view(torch.int16).int() - y.view(torch.int16).int()).abs()  # neighbouring numbers differ by one
        equal += bool(steps.max() == 0)
        furthest = max(furthest, int(steps.max()))
    assert furthest <= 1, f"keys and values differ by {furthest} roundings"
    return f"{equal} of {len(ours)} bit-identical, the others within {furthest} bfloat16 rounding"


# ------------------------------------------------------------------------------------------------- report


@contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    """A directory on the disk of the working directory (/tmp may be memory), removed at the end."""
    with tempfile.TemporaryDirectory(prefix=".gqa-benchmark-", dir=directory or Path.cwd()) as path:
        yield Path(path)


def spread(samples: list[tuple[Turn, int]]) -> dict[str, Any]:
    turns = [turn for turn, _ in samples]
    seconds = [turn.seconds for turn in turns]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "processor_seconds": statistics.median(turn.processor for turn in turns),
        "anonymous_bytes": max(turn.anonymous for turn in turns),
        "resident_bytes": max(peak for _, peak in samples),
        "runs": [turn._asdict() for turn in turns],
    }


def report(figures: dict[str, Any]) -> None:
    runs = figures["runs"]
    print(f"\n{'':24}{'median':>9}{'min - max':>17}{'speed':>8}{'MB/s':>7}", end="")
    print(f"{'processor':>11}{'anonymous':>13}{'peak RSS':>12}")
    for name, row in runs.items():
        print(
            f"{name:24}{row['seconds']:8.2f}s{row['fastest']:8.2f} - {row['slowest']:5.2f}s"
            f"{row['speed_of_cp']:8.2f}{row['megabytes_per_second']:7.0f}{row['processor_seconds']:10.2f}s"
            f"{row['anonymous_bytes'] / MIB:9.0f} MiB{row['resident_bytes'] / MIB:8.0f} MiB"
        )
    bound, largest = figures["memory_bound"] / MIB, figures["largest_changed"] / MIB
    ours = max(row["anonymous_bytes"] for name, row in runs.items() if name.startswith("gqa-convert")) / MIB
    print(f"""
speed of gqa-convert      {runs["gqa-convert"]["speed_of_cp"]:.2f} of cp -r + fsync (0.90 asked)
transformers / ours       {figures["transformers_ratio"]:.1f} times the time (3.0 asked)
memory above imports      {ours:.0f} MiB of {bound:.0f} MiB = 512 + 4 x {largest:.0f} (largest changed tensor) x \
{figures["jobs"]} jobs: {"met" if ours <= bound else "EXCEEDED"}
K and V as transformers'  {figures["agreement"]}
dry run of a 70B shape    {figures["dry_run_seconds"]:.2f} s after imports""")


def compare(work: Path, config: Any, groups: int, jobs: int, repeats: int) -> dict[str, Any]:
    """All runs, round by round, so that whatever else the machine does hits all alike."""
    source = work / "source"
    write_checkpoint(source, config, SHARD_BYTES)
    size = sum(path.stat().st_size for path in source.iterdir())
    print(
        f"{size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards, {config.num_hidden_layers} layers",
        flush=True,
    )
    options = {"groups": groups, "jobs": jobs, "sums": False}
    contestants: dict[str, tuple[Callable[..., Callable[[], object]], dict[str, Any]]] = {
        "cp -r + fsync": (cp, options),
        "gqa-convert": (gqa_convert, options),
        "gqa-convert --checksums": (gqa_convert, options | {"sums": True}),
        "transformers": (transformers_script, options),
    }
    samples: dict[str, list[tuple[Turn, int]]] = {name: [] for name in contestants}
    agreement = ""
    for repeat in range(repeats):
        shift = repeat % len(contestants)
        order = [*contestants.items()][shift:] + [*contestants.items()][:shift]
        for name, (make, chosen) in order:
            out = work / "out"
            turn, peak = measure(make, source, out, chosen, before=lambda: settle(source))
            samples[name].append((turn, peak))
            print(f"  round {repeat + 1}  {name:24}{turn.seconds:7.2f} s", flush=True)
            if name == "transformers" and not repeat:
                gqa_convert(source, work / "ours", options)()
                agreement = differences(work / "ours", out)
                shutil.rmtree(work / "ours")
            shutil.rmtree(out)
    rows = {name: spread(runs) for name, runs in samples.items()}
    for row in rows.values():
        row["speed_of_cp"] = rows["cp -r + fsync"]["seconds"] / row["seconds"]
        row["megabytes_per_second"] = size / row["seconds"] / 1e6
    largest = 2 * HEADS * HEAD_DIM * HIDDEN
    return {
        "source_bytes": size,
        "groups": groups,
        "jobs": jobs,
        "processors": os.cpu_count(),
        "runs": rows,
        "transformers_ratio": rows["transformers"]["seconds"] / rows["gqa-convert"]["seconds"],
        "largest_changed": largest,
        "memory_bound": 512 * MIB + 4 * largest * jobs,
        "agreement": agreement,
    }


def time_dry_run(work: Path) -> float:
    """Seconds for a checkpoint of 70B proportions with 64 KV heads: real headers, sparse files."""
    write_checkpoint(work / "big", llama(80, 8192, 64, 28672), 5 << 30, content=False)
    return min(measure(dry_run, work / "big", None, {}, before=os.sync)[0].seconds for _ in range(3))


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False), help="Where to work; not in memory.")
@click.option("--gigabytes", type=float, default=4 * 1.073741824, help="Size of the checkpoint, at least.")
@click.option("--layers", type=int, help="Layers of the checkpoint, instead of its size.")
@click.option("--groups", type=int, default=8)
@click.option("--jobs", type=int, default=2)
@click.option("--repeats", type=int, default=5)
@JSON_OPTION
def main(
    directory: Path | None,
    gigabytes: float,
    layers: int | None,
    groups: int,
    jobs: int,
    repeats: int,
    json_file: Path | None,
) -> None:
    one = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
    config = llama(layers or math.ceil((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / one))
    with scratch(directory) as work:
        figures = compare(work, config, groups, jobs, repeats)
        figures["dry_run_seconds"] = time_dry_run(work)
    report(figures)
    write_json(figures, json_file)


if __name__ == "__main__":
    main()
