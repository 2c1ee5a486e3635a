"""What each way of merging heads loses: nats per token and seconds, for several numbers of key/value heads.

    python benchmarks/quality.py                            # examples/stdlib-mha -> 4, 2, 1, modules of stdlib:heldout
    python benchmarks/quality.py --method calibrated --calibration self
    python benchmarks/quality.py --model SmolLM2-135M-Instruct --groups 1 --text stories.txt --text wiki.txt \
        --windows 24 --length 256 --calibration self --calibration-tokens 131072
    python benchmarks/quality.py --model MODEL --text self --windows 64 --length 128 --calibration self

The same windows for all methods: the first of each text (of built-in text, evenly spaced; `self` samples them from the
model, otherwise than its calibration text, and needs no tokenizer). `gone` is the share of what
`mean` loses that a method does not lose. Everything is converted with the command's own defaults where nothing else is
said; the seconds are those of the whole conversion, calibration text included.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from harness import EMBEDDED, JSON_OPTION, write_json

METHODS = ("mean", "first", "procrustes", "aligned", "calibrated", "refined")


def sampled(model: str, count: int, length: int) -> Any:
    """(count, length) token ids that the model writes itself, at temperature 1."""
    from gqa.checkpoint.loading import load_model
    from gqa.convert.align.sampling import samples

    return samples(load_model(model, dtype="float32"), length, seed=1, batch=count)


def windows_of(text: str, model: str, count: int, length: int) -> Any:
    """(count, length) token ids: the first of a file's, evenly spaced ones of the built-in corpus. Raises UsageError
    where the text has not so many windows.
    """
    import numpy as np
    import torch
    from transformers import AutoTokenizer

    from gqa.corpus.sources import parse_source
    from gqa.corpus.tokens import Blocks, tokenise

    if text == "self":
        return sampled(model, count, length)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if Path(text).is_file():
        ids = tokenizer(Path(text).read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        starts, chosen = range(0, len(ids) - length + 1, length), np.arange(count)
        blocks: Any = [{"input_ids": np.array(ids[start : start + length])} for start in starts]
    else:
        found = tokenise(parse_source(text), tokenizer)
        blocks = Blocks(found, np.arange(len(found)), length)
        chosen = np.linspace(0, len(blocks) - 1, count).astype(int)
    if (have := len(blocks)) < count:
        raise click.UsageError(f"{text} has {have} windows of {length} tokens, not {count}; give fewer --windows")
    return torch.stack([torch.from_numpy(blocks[int(number)]["input_ids"]) for number in chosen])


def nats(directory: str | Path, windows: Any) -> float:
    """Nats per predicted token, in float32."""
    import torch

    from gqa.checkpoint.loading import load_model
    from gqa.corpus.likelihood import ChunkedHead, chunks
    from gqa.corpus.likelihood import nats as nats_of

    head, total, count = ChunkedHead(load_model(str(directory), dtype="float32")), 0.0, 0
    with torch.inference_mode():
        for batch in windows.split(8):
            hidden, targets = head.hidden(input_ids=batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            for piece in chunks(len(hidden), head.vocabulary):
                total += float(nats_of(head.logits(hidden[piece]).float(), targets[piece]).double().sum())
            count += len(targets)
    return total / count


def convert(options: dict[str, Any], method: str, groups: int, out: Path) -> float:
    """Seconds that it took."""
    from gqa.convert import convert_checkpoint
    from gqa.convert.align.options import CalibrationText, MapsOptions, Refinement
    from gqa.convert.methods import ALIGNING

    text = CalibrationText(
        tuple(options["calibration"].split(",")), options["calibration_tokens"], options["calibration_length"]
    )
    refinement = Refinement(
        options["refine_steps"], options["refine_batch"], options["refine_learning_rate"], autocast=options["autocast"]
    )
    grouping = options["grouping"] if method in ALIGNING else "contiguous"
    started = time.perf_counter()
    convert_checkpoint(
        options["model"], groups, out, method=method, dtype="float32", overwrite=True,
        calibration=MapsOptions(text, refinement=refinement, grouping=grouping),
    )  # fmt: skip
    return time.perf_counter() - started


def measure(options: dict[str, Any], scratch: Path) -> dict[str, Any]:
    size = (options["windows"], options["length"])
    texts = {text: windows_of(text, options["model"], *size) for text in options["texts"]}
    source = {text: nats(options["model"], windows) for text, windows in texts.items()}
    rows = []
    for groups in options["groups"]:
        for method in options["methods"]:
            seconds = convert(options, method, groups, scratch / "converted")
            found = {text: nats(scratch / "converted", windows) for text, windows in texts.items()}
            rows.append({"groups": groups, "method": method, "seconds": seconds, "nats": found})
            print(f"  {groups:3} {method:12}{seconds:8.1f} s  {json.dumps(found)}", flush=True)
    return {"options": options, "source": source, "rows": rows}


def report(figures: dict[str, Any]) -> None:
    import math

    options, source, rows = figures["options"], figures["source"], figures["rows"]
    print(f"\n{Path(options['model']).name}, calibrated on {options['calibration_tokens']:,} tokens of "
          f"{options['calibration']}; {options['windows']} windows of {options['length']} tokens")  # fmt: skip
    for text in options["texts"]:
        print(f"\n{Path(text).name}: source {source[text]:.4f} nats, perplexity {math.exp(source[text]):.2f}")
        print(f"{'KV heads':>8}  {'method':12}{'nats':>9}{'perplexity':>12}{'gone':>9}{'seconds':>10}")
        for row in rows:
            value = row["nats"][text]
            mean = next(
                (r["nats"][text] for r in rows if r["groups"] == row["groups"] and r["method"] == "mean"), math.nan
            )
            gone = 1 - (value - source[text]) / (mean - source[text])
            share = "" if gone != gone or row["method"] == "mean" else f"{gone:9.1%}"
            print(f"{row['groups']:8}  {row['method']:12}{value:9.4f}{math.exp(value):12,.2f}{share:>9}"
                  f"{row['seconds']:10.1f}")  # fmt: skip


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), default=str(EMBEDDED), show_default=False, help="The source.")
@click.option("--groups", type=int, multiple=True, default=(4, 2, 1), help="Several times for several.")
@click.option("--method", "methods", multiple=True, default=METHODS, help="Several times for several.")
@click.option("--text", "texts", multiple=True, default=("stdlib:heldout",), help="To measure on; several times.")
@click.option("--windows", type=int, default=48)
@click.option("--length", type=int, default=512, help="Tokens of a window.")
@click.option("--calibration", default="stdlib:train")
@click.option("--calibration-tokens", type=int, default=65_536)
@click.option("--calibration-length", type=int, default=256)
@click.option("--refine-steps", type=int, default=200)
@click.option("--refine-batch", type=int, default=16)
@click.option("--refine-learning-rate", type=float, default=0.02)
@click.option("--autocast/--no-autocast", default=None, help="Refine with products in bfloat16.")
@click.option("--grouping", default="auto")
@JSON_OPTION
def main(json_file: Path | None, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(options, Path(scratch))
    report(figures)
    write_json(figures, json_file)


if __name__ == "__main__":
    main()
