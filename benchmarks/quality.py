"""What each way of merging heads loses and takes: nats per token, seconds and forward passes, for several KV heads.

    python benchmarks/quality.py                            # examples/stdlib-mha -> 4, 2, 1 heads, by all methods
    python benchmarks/quality.py --model DIR --groups 1 --text stories.txt --text wikitext.txt --options '--tokens 128k'

Each conversion is by gqa-convert with the --options given here. Measured are the same windows for all, in float32: the
first of a file, evenly spaced ones of stdlib:heldout, or samples of the model (self), for one without a tokenizer. A
pass is a forward pass of the base model over 65,536 tokens.
"""

from __future__ import annotations

import itertools
import math
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from harness import EMBEDDED, run_command

TOKENS = 65_536  # of a pass: as many as gqa-convert reads by default
METHODS = ("mean", "first", "procrustes", "aligned", "calibrated", "refined")


def windows_of(text: str, model: str, count: int, length: int) -> Any:
    """(count, length) token ids. Raises UsageError where the text has not so many windows."""
    import torch
    from transformers import AutoTokenizer

    from gqa.checkpoint.loading import load_model
    from gqa.convert.merge.self_samples import samples
    from gqa.corpus.stdlib import stdlib_texts

    if text == "self":
        return samples(load_model(model, dtype="float32"), length, seeds=[1], batch=count)
    tokenizer, spread = AutoTokenizer.from_pretrained(model), text == "stdlib:heldout"
    content = "\n\n".join(stdlib_texts("heldout")) if spread else Path(text).read_text("utf-8")
    windows = torch.tensor(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])
    windows = windows[: len(windows) // length * length].view(-1, length)
    if len(windows) < count:
        raise click.UsageError(f"{text} has {len(windows)} windows of {length} tokens; give fewer --windows")
    return windows[torch.linspace(0, len(windows) - 1, count).long()] if spread else windows[:count]


def nats(directory: str, windows: Any) -> float:
    """Nats per predicted token."""
    import torch

    from gqa.checkpoint.loading import load_model

    model, losses = load_model(directory, dtype="float32"), []
    with torch.inference_mode():
        for batch in windows.to(model.device).split(4):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1)
            losses.append(torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).double().mean())


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), default=str(EMBEDDED), show_default=False, help="The source.")
@click.option("--groups", type=int, multiple=True, default=(4, 2, 1), help="Several times for several.")
@click.option("--method", "methods", multiple=True, default=METHODS, help="Several times for several.")
@click.option("--text", "texts", multiple=True, default=("stdlib:heldout",), help="To measure on; several times.")
@click.option("--windows", default=48)
@click.option("--length", default=512, help="Tokens of a window.")
@click.option("--options", default="", help="For gqa-convert, as one word, where the method reads text.")
def main(
    model: str, groups: tuple[int, ...], methods: tuple[str, ...], texts: tuple[str, ...], windows: int, length: int,
    options: str,
) -> None:  # fmt: skip
    windows_by_text = {text: windows_of(text, model, windows, length) for text in texts}

    def measure(directory: str) -> dict[str, float]:
        return {text: nats(directory, ids) for text, ids in windows_by_text.items()}

    started = time.perf_counter()
    base = measure(model)
    tokens = sum(ids.numel() for ids in windows_by_text.values())
    one_pass = (time.perf_counter() - started) / tokens * TOKENS
    for text, value in base.items():
        print(f"{text}: base model {value:.4f} nats, perplexity {math.exp(value):.2f}")
    with tempfile.TemporaryDirectory() as scratch:
        for kv_heads, method in itertools.product(groups, methods):
            words = [model, "--groups", str(kv_heads), "--method", method, "--dtype", "float32", "-o", f"{scratch}/out"]
            words += shlex.split(options) if method in ("calibrated", "refined") else []
            started = time.perf_counter()
            run_command("convert", *words, "--overwrite", "--quiet")
            seconds, losses = time.perf_counter() - started, measure(f"{scratch}/out")
            ratios = "".join(f"{math.exp(losses[t]):10,.2f} (x{math.exp(losses[t] - base[t]):.3g})" for t in losses)
            print(
                f"{kv_heads:3} heads  {method:12}{seconds:8.1f} s{seconds / one_pass:7.1f} passes{ratios}", flush=True
            )


if __name__ == "__main__":
    main()
