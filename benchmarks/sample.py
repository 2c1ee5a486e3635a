"""How fast a model writes the text that it is calibrated on, beside transformers' `generate(do_sample=True)`.

    python benchmarks/sample.py                                   # the embedded model, about a minute on one thread

Both have the same weights, batch and dtype, temperature 1, and neither top-k nor top-p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from harness import EMBEDDED, report, rounds


def load(model: str) -> Any:
    import torch

    from gqa.checkpoint.loading import default_device, load_model, native_bfloat16

    torch.set_num_threads(1)
    device = default_device()
    return load_model(model, dtype="bfloat16" if native_bfloat16(device) else "float32", device=device)


def ours(name: str, length: int, batch: int) -> Callable[[], int]:
    from gqa.convert.merge.self_samples import samples

    model = load(name)
    return lambda: len(samples(model, length, seeds=[0], batch=batch))


def generate(name: str, length: int, batch: int) -> Callable[[], int]:
    import torch

    model = load(name)
    prompt = torch.full((batch, 1), 1, device=model.device)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "attention_mask": torch.ones_like(prompt)}
    return lambda: len(model.generate(prompt, max_new_tokens=length - 1, min_new_tokens=length - 1, **options))


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", default=str(EMBEDDED), show_default=False)
@click.option("--length", default=512, help="Tokens of a sequence.")
@click.option("--batch", default=64, help="Sequences.")
@click.option("--repeats", default=3)
def main(model: str, length: int, batch: int, repeats: int) -> None:
    contestants = {"gqa": (ours, model, length, batch), "transformers": (generate, model, length, batch)}
    report(rounds(contestants, repeats), "gqa", batch * (length - 1))


if __name__ == "__main__":
    main()
