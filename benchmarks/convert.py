"""gqa-convert beside `cp -r` and the obvious script with transformers: time and memory, measured side by side.

    python benchmarks/convert.py                   # a random checkpoint of 4.5 GB, five rounds
    python benchmarks/convert.py --layers 4 --repeats 3

Every run is a process of its own. Its clock starts after the imports and stops when every output file is fsynced.
Before each run the last output is deleted and the source is read once, so that all start with the source in the page
cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from harness import EMBEDDED, MIB, SHAPES, random_llama, report, rounds, run_command


def fsync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory, directory.parent]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def copy(source: Path, out: Path, groups: int) -> Callable[[], None]:
    def run() -> None:
        subprocess.run(["cp", "-r", source, out], check=True)
        fsync_tree(out)

    return run


def convert(source: Path, out: Path, groups: int) -> Callable[[], None]:
    words = "--method", "mean", "--quiet", "--overwrite", "--groups"
    run_command("convert", str(EMBEDDED), *words, "2", "-o", str(out.with_name("small")))  # imports what it needs
    return lambda: run_command("convert", str(source), *words, str(groups), "-o", str(out))


def script(source: Path, out: Path, groups: int) -> Callable[[], None]:
    """What one writes without a converter: load, average the heads, save."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        for layer in model.model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = linear.weight.detach().float().unflatten(0, (groups, -1, layer.self_attn.head_dim))
                linear.weight = torch.nn.Parameter(heads.mean(1).flatten(0, 1).to(torch.bfloat16), requires_grad=False)
        model.config.num_key_value_heads = groups
        model.save_pretrained(out, max_shard_size="1GB")
        fsync_tree(out)

    return run


def check_equal(first: Path, second: Path) -> None:
    """Raise AssertionError unless all tensors of two results have the same bits."""
    from gqa.checkpoint.read import read_checkpoint

    left, right = read_checkpoint(first), read_checkpoint(second)
    assert left.tensors.keys() == right.tensors.keys()
    for name, spec in left.tensors.items():
        assert left.read(spec).equal(right.read(right.tensors[name])), name


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--layers", default=10, help="Layers of Llama-2-7B's shape.")
@click.option("--groups", default=8)
@click.option("--repeats", default=5)
def main(layers: int, groups: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory(prefix=".gqa-benchmark-", dir=Path.cwd()) as scratch:  # /tmp may be memory
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        model = random_llama(SHAPES["llama-7b"]._replace(layers=layers), "bfloat16")
        model.save_pretrained(source, max_shard_size="1GB")
        del model

        def settle() -> None:
            shutil.rmtree(out, ignore_errors=True)
            os.sync()
            for path in source.iterdir():
                with path.open("rb", buffering=0) as stream:
                    while stream.read(8 * MIB):
                        pass

        def store_first(name: str) -> None:
            if not out.with_name(name).exists():
                out.rename(out.with_name(name))

        functions = {"cp -r": copy, "gqa-convert": convert, "transformers": script}
        contestants = {name: (function, source, out, groups) for name, function in functions.items()}
        report(rounds(contestants, repeats, settle, store_first), "cp -r")
        check_equal(out.with_name("gqa-convert"), out.with_name("transformers"))
    print("both results are bit-identical")


if __name__ == "__main__":
    main()
