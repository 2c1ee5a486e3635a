"""gqa-eval's scoring beside a bare forward pass and lm-evaluation-harness: time and peak memory in one run.

    python benchmarks/evaluate.py                       # a random model of SmolLM2-135M's shape, 49,152 tokens wide
    python benchmarks/evaluate.py --model examples/stdlib-mha --pieces 40

All score the same pieces of held-out text, a batch of windows each, with the same model and number of threads. Each is
a process of its own; they take turns of one piece, in an order that changes from piece to piece, the others waiting
meanwhile, so that whatever else the machine does hits all alike; ratios are medians over pieces. The first piece is not
timed. `bare forward` computes logits and throws them away: what no evaluator can be faster than while it uses that
forward. Memory is the highest resident set while scoring, above what it was with the model loaded.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from harness import JSON_OPTION, MIB, Contestant, serve, write_json, write_random


def make_pieces(options: dict[str, Any]) -> list[tuple[str, Any]]:
    """Pieces of held-out text, each with its windows: at most a batch of them."""
    from transformers import AutoTokenizer

    from gqa.corpus.stdlib import stdlib_documents
    from gqa.eval.text import make_text

    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    joined = "\n\n".join(document.text for document in stdlib_documents("heldout"))
    pieces, start = [], 0
    for _ in range(options["pieces"] + 1):
        length = options["batch_size"] * options["context"] * 4  # more than a token a character is rare
        while True:
            text = joined[start : start + length]
            cut = make_text([text], tokenizer, protocol="rolling", context=options["context"])
            if len(cut.windows) <= options["batch_size"]:
                break
            length = length * 9 // 10
        pieces.append((text, cut))
        start += length
    return pieces


def bare_forward(model: Any, options: dict[str, Any]) -> Callable[[int], float]:
    import torch

    pieces = make_pieces(options)

    @torch.inference_mode()
    def run(piece: int) -> float:
        windows = pieces[piece][1].windows
        longest = max(len(window.ids) for window in windows)
        rows = [[*window.ids, *[0] * longest][: longest - 1] for window in windows]
        model(input_ids=torch.tensor(rows), use_cache=False)
        return float("nan")

    return run


def ours(model: Any, options: dict[str, Any]) -> Callable[[int], float]:
    from gqa.corpus.likelihood import ChunkedHead
    from gqa.eval.scoring import score

    pieces, head = make_pieces(options), ChunkedHead(model)

    def run(piece: int) -> float:
        return float(score(head, pieces[piece][1].windows, batch_size=options["batch_size"]).nats.sum(dtype="float64"))

    return run


def harness(model: Any, options: dict[str, Any], batch_size: int | None = None) -> Callable[[int], float]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    pieces = make_pieces(options)
    size = batch_size or options["batch_size"]
    evaluator = HFLM(pretrained=model, tokenizer=tokenizer, max_length=options["context"], batch_size=size)

    def run(piece: int) -> float:
        request = Instance("loglikelihood_rolling", {}, (pieces[piece][0],), 0)
        return -sum(evaluator.loglikelihood_rolling([request], disable_tqdm=True))

    return run


def harness_default(model: Any, options: dict[str, Any]) -> Callable[[int], float]:
    return harness(model, options, batch_size=1)  # what lm_eval takes when no --batch_size is given


CONTESTANTS = {
    "bare forward": bare_forward, "gqa-eval": ours, "lm_eval, same batch": harness, "lm_eval, default": harness_default
}  # fmt: skip


def contestant(name: str, options: dict[str, Any]) -> Callable[[int], float]:
    os.environ["TQDM_DISABLE"] = "1"  # lm_eval has a bar for every batch
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"])).eval()
    return CONTESTANTS[name](model, options)


def compare(options: dict[str, Any]) -> dict[str, Any]:
    running = {name: Contestant(serve, contestant, name, options) for name in CONTESTANTS}
    turns: dict[str, list[Any]] = {name: [] for name in CONTESTANTS}
    names, order = list(CONTESTANTS), random.Random(0)
    for piece in range(options["pieces"] + 1):
        for name in order.sample(names, len(names)):
            time.sleep(0.3)  # the threads of the one before still wait for work, on a processor
            turns[name].append(running[name].turn(piece))
        print(f"  piece {piece}  " + "  ".join(f"{name} {turns[name][-1].seconds:.2f} s" for name in names), flush=True)
    pieces = make_pieces(options)[1:]
    rows = {
        name: {
            "seconds": [turn.seconds for turn in found[1:]],
            "nats": sum(turn.value for turn in found[1:]),
            "memory_bytes": running[name].end(),
        }
        for name, found in turns.items()
    }
    tokens, windows = sum(cut.tokens for _, cut in pieces), sum(len(cut.windows) for _, cut in pieces)
    return {"options": options, "tokens": tokens, "windows": windows, "runs": rows}


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Time of one over that of the other: the median over pieces."""
    return statistics.median(a / b for a, b in zip(one["seconds"], other["seconds"], strict=True))


def report(figures: dict[str, Any]) -> None:
    rows = figures["runs"]
    bare, own = rows["bare forward"], rows["gqa-eval"]
    print(f"\n{figures['tokens']:,} tokens in {figures['windows']} windows, {figures['options']['dtype']}")
    print(f"{'':22}{'time':>10}{'of bare':>10}{'tokens/s':>10}{'memory':>12}{'nats':>14}")
    for name, row in rows.items():
        nats = "" if row["nats"] != row["nats"] else f"{row['nats']:,.2f}"
        seconds = sum(row["seconds"])
        print(
            f"{name:22}{seconds:8.2f} s{ratio(row, bare):10.3f}{figures['tokens'] / seconds:10,.0f}"
            f"{row['memory_bytes'] / MIB:8,.0f} MiB{nats:>14}"
        )
    same, default = rows["lm_eval, same batch"], rows["lm_eval, default"]
    print(f"""
over a bare forward pass    {ratio(own, bare) - 1:+.1%} (at most +5 % asked)
lm_eval, equal batch size   {ratio(same, own):.2f} x our time (at least 1.0 asked)
lm_eval, default            {ratio(default, own):.2f} x our time (at least 1.2 asked)
peak memory                 {own["memory_bytes"] / same["memory_bytes"]:.2f} of lm_eval's (below 1 asked)
nats agree to               {abs(own["nats"] / same["nats"] - 1):.1e}""")


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), help="A checkpoint.  [default: a random one]")
@click.option("--pieces", type=int, default=9, help="Pieces of text to score, a batch of windows each.")
@click.option("--context", type=int, default=512)
@click.option("--batch-size", type=int, default=8, help="Windows.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--threads", type=int, default=2)
@JSON_OPTION
def main(json_file: Path | None, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        options["model"] = str(options["model"] or write_random(Path(scratch), "135m-mha"))
        figures = compare(options)
    report(figures)
    write_json(figures, json_file)


if __name__ == "__main__":
    main()
