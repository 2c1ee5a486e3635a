"""How many GPUs hold a run of gqa-uptrain under FSDP2: the table of docs/scale.md, by the sum that --dry-run prints.

    python benchmarks/fits.py
    python benchmarks/fits.py --gpu 40GB --activations 10GB

Nothing is loaded: the shapes are those of the models' configs, and the teacher is the base model in bfloat16.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import click
from harness import JSON_OPTION, write_json

from gqa.checkpoint.console import ByteSize
from gqa.uptrain.summary import memory_bytes

# Width, query heads, KV heads after conversion, width of the MLP, its matrices, layers, vocabulary, tied or not.
SHAPES = {
    "Llama-2-7B, 32 -> 8": (4096, 32, 8, 11008, 3, 32, 32000, False),
    "Llama-2-13B, 40 -> 8": (5120, 40, 8, 13824, 3, 40, 32000, False),
    "OPT-66B, 72 -> 8": (9216, 72, 8, 36864, 2, 64, 50272, True),
    "a Llama of 70B with 64 heads -> 8": (8192, 64, 8, 22016, 3, 80, 32000, False),
}
WAYS = {
    "all weights, AdamW": (True, "adamw"),
    "all weights, Adafactor": (True, "adafactor"),
    "attention, AdamW": (False, "adamw"),
}


def sizes(
    width: int, heads: int, kv: int, inner: int, matrices: int, layers: int, words: int, tied: bool
) -> tuple[int, int, int]:
    """Parameters of the base model, of the converted one, and of the attention of that; biases and norms left out."""
    outside = layers * matrices * width * inner + (1 if tied else 2) * words * width
    before, after = 4 * width * width, 2 * width * width + 2 * width * width * kv // heads
    return outside + layers * before, outside + layers * after, layers * after


@click.command()
@click.option("--gpu", type=ByteSize(), default="80GB", help="Memory of one.")
@click.option("--activations", type=ByteSize(), default="20GB", help="Of it, what is left for them.")
@JSON_OPTION
def main(gpu: int, activations: int, json_file: Any) -> None:
    found = []
    for name, shape in SHAPES.items():
        base, after, attention = sizes(*shape)
        for way, (whole, optimizer) in WAYS.items():
            given = after, after if whole else attention, optimizer, 2 * base
            gpus = next(n for n in count(1) if memory_bytes(*given, n) <= gpu - activations)
            total, each = memory_bytes(*given), memory_bytes(*given, gpus)
            found.append({"model": name, "parameters": after, "way": way, "bytes": total, "gpus": gpus})
            click.echo(f"{name:36}{way:24}{total / 1e9:6,.0f} GB in all, {each / 1e9:3.0f} GB on each of {gpus}")
    write_json(found, json_file)


if __name__ == "__main__":
    main()
