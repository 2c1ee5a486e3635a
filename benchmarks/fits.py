"""How many GPUs hold a run of gqa-uptrain under FSDP2: the table of docs/scale.md, by the sum that --dry-run prints.

    python benchmarks/fits.py
    python benchmarks/fits.py --gpu 40GB --activations 10GB
    python benchmarks/fits.py --flops 312e12 --mfu 0.35     # hours of the plans on other GPUs

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
WAYS = {"all weights, AdamW": True, "attention, AdamW": False}  # whether all weights train
# Of docs/scale.md: GPUs, how, tokens.
PLANS = {
    "Llama-2-7B, 32 -> 8": [(1, "attention, AdamW", 100_000_000), (8, "all weights, AdamW", 1_000_000_000)],
    "a Llama of 70B with 64 heads -> 8": [(8, "attention, AdamW", 1_000_000_000)],
    "OPT-66B, 72 -> 8": [(16, "attention, AdamW", 1_000_000_000)],
}


def sizes(
    width: int, heads: int, kv: int, inner: int, matrices: int, layers: int, words: int, tied: bool
) -> tuple[int, int, int]:
    """Parameters of the base model, of the converted one, and of the attention of that; biases and norms left out."""
    outside = layers * matrices * width * inner + (1 if tied else 2) * words * width
    before, after = 4 * width * width, 2 * width * width + 2 * width * width * kv // heads
    return outside + layers * before, outside + layers * after, layers * after


def operations(base: int, after: int, trained: int) -> int:
    """Of one token with checkpointing: 2 a weight for each pass forward (the model twice, its teacher once) and for the
    gradient that goes back, and 2 for each that trains; of attention scores nothing.
    """
    return 2 * base + 6 * after + 2 * trained


@click.command()
@click.option("--gpu", type=ByteSize(), default="80GB", help="Memory of one.")
@click.option("--activations", type=ByteSize(), default="20GB", help="Of it, what is left for them.")
@click.option("--flops", type=float, default=989e12, show_default=True, help="Of one in bfloat16, as an H100 has.")
@click.option("--mfu", type=float, default=0.4, show_default=True, help="The share of them that is reached.")
@JSON_OPTION
def main(gpu: int, activations: int, flops: float, mfu: float, json_file: Any) -> None:
    found = []
    for name, shape in SHAPES.items():
        base, after, attention = sizes(*shape)
        for way, whole in WAYS.items():
            given = after, after if whole else attention, "adamw", 2 * base
            gpus = next(n for n in count(1) if memory_bytes(*given, n) <= gpu - activations)
            total, each = memory_bytes(*given, 1), memory_bytes(*given, gpus)
            found.append({"model": name, "parameters": after, "way": way, "bytes": total, "gpus": gpus})
            click.echo(f"{name:36}{way:24}{total / 1e9:6,.0f} GB in all, {each / 1e9:3.0f} GB on each of {gpus}")
        for gpus, way, tokens in PLANS.get(name, ()):
            trained = after if WAYS[way] else attention
            each = memory_bytes(after, trained, "adamw", 2 * base, gpus)
            hours = tokens * operations(base, after, trained) / (gpus * mfu * flops) / 3600
            found.append({"model": name, "way": way, "gpus": gpus, "bytes": each, "tokens": tokens, "hours": hours})
            told = f"{each / 1e9:.0f} GB on each of {gpus}, {tokens / 1e6:,.0f}M tokens in {hours:.1f} h"
            click.echo(f"{'':36}{way:24}plan: {told}")
    write_json(found, json_file)


if __name__ == "__main__":
    main()
