"""What gqa-uptrain's defaults gain: nats per token before and after training, for each method, G and alpha.

    python benchmarks/uptraining.py                             # the table of docs/uptraining.md
    python benchmarks/uptraining.py --groups 1 --method refined --alpha 0.01 --learning-rate 1e-3
    python benchmarks/uptraining.py --data self                 # the base model writes the text, alpha x as much of it

Every cell is a run of its own, `gqa-uptrain CONVERTED --data DATA --alpha ALPHA --precision bfloat16` with the options
given here. Measured are the same windows of the text for all, evenly spaced, in float32. --scratch keeps conversions
and cells with their options, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
from harness import EMBEDDED, JSON_OPTION, write_json
from quality import nats, windows_of

METHODS = ("mean", "first", "aligned", "calibrated", "refined")
_GIVEN = ("batch_size", "block_size", "learning_rate", "schedule", "train", "optimizer", "teacher", "repeats")
TRAINED_ON = 2_669_449  # tokens of stdlib:train with the embedded tokenizer, of which alpha is a share with `self`


def converted(model: str, method: str, groups: int, scratch: Path) -> Path:
    from gqa.convert import convert_checkpoint

    out = scratch / f"{str(Path(model).resolve()).strip('/').replace('/', '-')}-{method}-{groups}"
    if not out.exists():
        convert_checkpoint(model, groups, out, method=method)
    return out


def trained(start: Path, options: dict[str, Any], alpha: float, out: Path) -> dict[str, Any]:
    """The record of a run."""
    from accelerate.state import AcceleratorState

    from gqa.uptrain.options import TrainOptions
    from gqa.uptrain.run import uptrain
    from gqa.uptrain.setup import prepare

    AcceleratorState._reset_state(reset_partial_state=True)
    given = {name: options[name] for name in _GIVEN}
    data, length = options["data"], {"alpha": alpha}
    if data == "self":
        length = {"tokens": int(alpha * TRAINED_ON)}
    chosen = TrainOptions(
        str(start), out, (data,), precision="bf16", overwrite=True,
        **length, **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    shutil.rmtree(out.with_name(f"{out.name}-state"), ignore_errors=True)  # of one that was stopped
    return uptrain(prepare(chosen))[1]


def cells(options: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """One after another, each told as soon as it is there. Those that are kept of other options are not these."""
    model, kept = options["model"], scratch / "cells.jsonl"
    given = {name: value for name, value in options.items() if name not in ("methods", "groups", "alphas")}
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    windows, before = windows_of(options["text"], model, options["windows"], options["length"]), dict[Path, float]()
    for alpha in options["alphas"]:
        for groups in options["groups"]:
            for method in options["methods"]:
                cell = given | {"method": method, "groups": groups, "alpha": alpha}
                if any(cell.items() <= other.items() for other in found):
                    continue
                start = converted(model, method, groups, scratch)
                if start not in before:
                    before[start] = nats(start, windows)
                record = trained(start, options, alpha, scratch / "trained")
                cell |= {"before": before[start], "after": nats(scratch / "trained", windows)}
                cell |= {"tokens": record["tokens"], "best_step": record["losses"]["best_step"]}
                shutil.rmtree(scratch / "trained")
                found.append(cell)
                with kept.open("a") as stream:
                    stream.write(json.dumps(cell) + "\n")
                print(f"  {method:12}{groups:3}{alpha:7g}{cell['before']:9.4f} -> {cell['after']:.4f}", flush=True)
    return [cell for cell in found if given.items() <= cell.items()]


def report(options: dict[str, Any], found: list[dict[str, Any]], base: float) -> None:
    """A line for each conversion: perplexity as it is and after each alpha."""
    heads = "".join(f"{f'alpha {alpha:g}':>12}" for alpha in options["alphas"])
    print(f"\nperplexity of {options['text']}; the base model's is {math.exp(base):.2f}\n")
    print(f"{'method':12}{'G':>3}{'converted':>12}{heads}")
    worse = []
    for groups in options["groups"]:
        for method in options["methods"]:
            own = [cell for cell in found if (cell["method"], cell["groups"]) == (method, groups)]
            by_alpha = {cell["alpha"]: cell for cell in own}
            row = [by_alpha[alpha] for alpha in options["alphas"]]
            worse += [cell for cell in row if cell["after"] >= cell["before"]]
            after = "".join(f"{math.exp(cell['after']):12.2f}" for cell in row)
            print(f"{method:12}{groups:3}{math.exp(row[0]['before']):12.2f}{after}")
    told = "; ".join(f"{cell['method']} {cell['groups']} alpha {cell['alpha']:g}" for cell in worse)
    print(f"\n{f'no gain: {told}' if worse else 'every cell gains'}")


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), default=str(EMBEDDED), show_default=False)
@click.option("--method", "methods", multiple=True, default=METHODS)
@click.option("--groups", type=int, multiple=True, default=(4, 2, 1))
@click.option("--alpha", "alphas", type=float, multiple=True, default=(0.01, 0.05, 0.1))
@click.option("--data", default="stdlib:train", help="To train on.")
@click.option("--text", default="stdlib:heldout", help="To measure on.")
@click.option("--windows", type=int, default=24)
@click.option("--length", type=int, default=512, help="Tokens of a window.")
@click.option("--batch-size", type=int)
@click.option("--block-size", type=int)
@click.option("--learning-rate", type=float, help="As the others here: gqa-uptrain's own unless given.")
@click.option("--schedule")
@click.option("--train")
@click.option("--optimizer")
@click.option("--teacher")
@click.option("--repeats/--no-repeats", default=None)
@click.option("--scratch", type=click.Path(path_type=Path, file_okay=False), help="Keep everything here.")
@JSON_OPTION
def main(json_file: Path | None, scratch: Path | None, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = scratch or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        found = cells(options, place)
    base = nats(options["model"], windows_of(options["text"], options["model"], options["windows"], options["length"]))
    report(options, found, base)
    write_json({"options": options, "base": base, "cells": found}, json_file)


if __name__ == "__main__":
    main()
