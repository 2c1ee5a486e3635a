"""gqa-eval's scoring beside a bare forward pass and lm-evaluation-harness: time and peak memory in one run.

    python benchmarks/evaluate.py                       # a random model of SmolLM2-135M's shape, 49,152 tokens wide
    python benchmarks/evaluate.py --model examples/stdlib-mha --windows 160

All score the same held-out text with the same model in float32, batch and two threads, each as a process of its own in
every round. `bare forward` computes logits and drops them: no evaluator that uses that forward can be faster. Memory
is above what it was with the model loaded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from harness import SHAPES, report, rounds, write_random


def load(options: dict[str, Any]) -> tuple[Any, Any, str, Any]:
    """The model, its tokenizer, a text, and the text's windows."""
    os.environ["TQDM_DISABLE"] = "1"  # lm_eval has a bar for every batch
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gqa.corpus.stdlib import stdlib_texts
    from gqa.eval.text import make_text, text_windows

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()
    tokenizer, context = AutoTokenizer.from_pretrained(options["model"]), options["context"]
    joined = "\n\n".join(stdlib_texts("heldout"))
    ids = tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"]
    text = tokenizer.decode(ids[: options["windows"] * context])
    return model, tokenizer, text, make_text(text_windows([text], tokenizer, context), "rolling", context).windows


def bare_forward(options: dict[str, Any]) -> Callable[[], None]:
    import torch

    model, _, _, windows = load(options)
    size = options["batch_size"]

    @torch.inference_mode()
    def run() -> None:
        for start in range(0, len(windows), size):
            batch = windows[start : start + size]
            longest = max(len(window.ids) for window in batch)
            rows = [[*window.ids, *[0] * longest][: longest - 1] for window in batch]
            model(input_ids=torch.tensor(rows), use_cache=False)

    return run


def ours(options: dict[str, Any]) -> Callable[[], float]:
    from gqa.corpus.likelihood import ChunkedHead
    from gqa.eval.scoring import score

    model, _, _, windows = load(options)
    head = ChunkedHead(model)
    return lambda: float(score(head, windows, batch_size=options["batch_size"])["nats"].sum(dtype="float64"))


def harness(options: dict[str, Any], batch_size: int) -> Callable[[], float]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, text, _ = load(options)
    evaluator = HFLM(pretrained=model, tokenizer=tokenizer, max_length=options["context"], batch_size=batch_size)
    request = Instance("loglikelihood_rolling", {}, (text,), 0)
    return lambda: -sum(evaluator.loglikelihood_rolling([request], disable_tqdm=True))


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), help="A checkpoint.  [default: a random one]")
@click.option("--windows", default=64, help="Windows of text to score.")
@click.option("--context", default=512)
@click.option("--batch-size", default=8, help="Windows.")
@click.option("--repeats", default=5)
def main(repeats: int, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        options["model"] = str(options["model"] or write_random(Path(scratch), SHAPES["135m"]))
        contestants = {
            "gqa-eval": (ours, options), "bare forward": (bare_forward, options),
            "lm_eval, same batch": (harness, options, options["batch_size"]), "lm_eval, default": (harness, options, 1),
        }  # fmt: skip
        runs = rounds(contestants, repeats)
    report(runs, "gqa-eval", options["windows"] * options["context"])
    nats = [runs[name][0].value for name in ("gqa-eval", "lm_eval, same batch")]
    print(f"nats agree to {abs(nats[0] / nats[1] - 1):.1e}")


if __name__ == "__main__":
    main()
