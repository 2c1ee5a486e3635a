"""How fast a model writes the text that it is calibrated on, beside transformers' own sampling: the same weights, batch
and dtype, by turns.

    python benchmarks/sample.py                                   # the embedded model, about two minutes on one thread
    python benchmarks/sample.py --shape 135m --length 256

`transformers` is `generate(do_sample=True)` at temperature 1 without top-k and top-p. A ratio is the median of the
rounds' own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import click
import torch
from harness import EMBEDDED, JSON_OPTION, SHAPES, write_json, write_random

from gqa.checkpoint.loading import default_device, load_model, native_bfloat16
from gqa.convert.merge.self_samples import samples


@click.command(help=__doc__)
@click.option("--model", default=str(EMBEDDED))
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model of this shape instead.")
@click.option("--length", default=512, show_default=True)
@click.option("--batch", default=64, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@JSON_OPTION
def main(model: str, shape: str | None, length: int, batch: int, rounds: int, json_file: Path | None) -> None:
    device = default_device()
    dtype = "bfloat16" if native_bfloat16(device) else "float32"
    with tempfile.TemporaryDirectory() as scratch:
        name = write_random(Path(scratch), shape) if shape else model
        loaded = load_model(name, dtype=dtype, device=device)
    prompt = torch.full((batch, 1), 1, device=device)
    seconds: dict[str, list[float]] = {"gqa": [], "transformers": []}
    for number in range(rounds):
        for who, taken in seconds.items():
            began = time.perf_counter()
            if who == "gqa":
                samples(loaded, length, seed=number, batch=batch)
            else:
                loaded.generate(
                    prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, top_p=1.0,
                    max_new_tokens=length - 1, min_new_tokens=length - 1,
                )  # fmt: skip
            taken.append(time.perf_counter() - began)
    speeds = {who: batch * (length - 1) / statistics.median(taken) for who, taken in seconds.items()}
    ratio = statistics.median(theirs / ours for ours, theirs in zip(*seconds.values(), strict=True))
    for who, speed in speeds.items():
        print(f"{who:12} {speed:9,.0f} tokens/s")
    print(f"{ratio:.2f} times as fast ({dtype}, {batch} samples of {length} tokens, {torch.get_num_threads()} threads)")
    write_json({"tokens_per_second": speeds, "ratio": ratio, "seconds": seconds}, json_file)


if __name__ == "__main__":
    main()
