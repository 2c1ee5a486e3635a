"""Quality against minutes, for a checkpoint and nothing else: closed form, layer-wise, whole-model, and both.

    python benchmarks/minutes.py --plot docs/minutes.svg            # examples/stdlib-mha, 8 -> 1 KV heads
    python benchmarks/minutes.py --model SmolLM2-135M-Instruct --text wiki.txt --text stories.txt --windows 24 \
        --calibration-tokens 131072 --refine-steps 200 --train-steps 60 --train-steps 120 --precision bf16

All text is the source's own. `layer-wise` is --method refined with so many steps a layer, `whole-model` is gqa-uptrain
with the source as teacher on Q, K, V and O (8 blocks a step, linear decay) from the closed form, `both` from the
longest layer-wise run. Every figure has a run of its own; its minutes are those of everything before it, sampling
included.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from harness import EMBEDDED, JSON_OPTION, write_json
from quality import convert, nats, windows_of

BATCH = 8  # blocks of a whole-model step
RECALLED = ("text", "random")


@dataclass(frozen=True)
class Point:
    """One way of converting: seconds in all, nats per token on each text, and the shares of second copies that are
    recalled, of 64 and more tokens of the first text and of random ones (docs/recall.md).
    """

    stage: str
    steps: int
    precision: str
    seconds: float
    nats: dict[str, float]
    recall: dict[str, float]


def sample(options: dict[str, Any], tokens: int) -> float:
    """Seconds of writing the text; what is kept from an earlier run counts as nothing."""
    from gqa.checkpoint.hub import open_model
    from gqa.convert.align.options import CalibrationText
    from gqa.convert.align.watcher import SILENT

    started = time.perf_counter()
    text = CalibrationText(("self",), tokens, options["length"])
    text.blocks(open_model(options["model"]), "cpu", SILENT)
    return time.perf_counter() - started


def recalled(model: str, text: str) -> Callable[[str | Path], dict[str, float]]:
    """What measures the recall of a directory."""
    import numpy as np
    from transformers import AutoTokenizer

    from gqa.checkpoint.loading import load_model
    from gqa.corpus.likelihood import ChunkedHead
    from gqa.eval.recall import make_questions, recall
    from gqa.eval.scoring import score

    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = windows_of(text, model, 32, 512)[:, 1:].flatten().numpy()  # without BOS
    asked = make_questions({"text": stream}, tokenizer, len(tokenizer), 512, tokenizer.bos_token_id)
    asked = [one for one in asked if one.kind in RECALLED]

    def measured(directory: str | Path) -> dict[str, float]:
        head = ChunkedHead(load_model(str(directory), dtype="float32"))
        found = recall(asked, score(head, [window for one in asked for window in one.windows], batch_size=8))
        return {kind: float(np.mean([r["accuracy"] for r in found if r["kind"] == kind])) for kind in RECALLED}

    return measured


def layer_wise(options: dict[str, Any], out: Path, steps: int, precision: str) -> float:
    """Seconds of converting, layer-wise where there are steps."""
    how = {
        "calibration": "self", "calibration_length": options["length"], "grouping": "auto",
        "refine_steps": max(steps, 1), "refine_batch": 16, "refine_learning_rate": 0.02,
        "autocast": precision == "bf16",
    }  # fmt: skip
    return convert(options | how, "refined" if steps else "calibrated", options["groups"], out)


def train(options: dict[str, Any], start: Path, out: Path, steps: int, precision: str) -> float:
    """Seconds of training the whole model."""
    from accelerate.state import AcceleratorState

    from gqa.uptrain.options import TrainOptions
    from gqa.uptrain.run import uptrain
    from gqa.uptrain.setup import prepare

    AcceleratorState._reset_state(reset_partial_state=True)  # the run before had another precision
    started = time.perf_counter()
    uptrain(prepare(TrainOptions(
        model=str(start), output=out, data=(f"self:{options['train_tokens']}",), steps=steps, teacher=options["model"],
        train="attention", block_size=options["length"], batch_size=BATCH, learning_rate=options["learning_rate"],
        schedule="linear", warmup=5, precision=precision, overwrite=True,
    )))  # fmt: skip
    return time.perf_counter() - started


def points(options: dict[str, Any], scratch: Path) -> Iterator[Point]:
    texts = {
        text: windows_of(text, options["model"], options["windows"], options["length"]) for text in options["texts"]
    }

    recall = recalled(options["model"], options["texts"][0])

    def measured(stage: str, steps: int, precision: str, seconds: float, directory: str | Path) -> Point:
        losses = {text: nats(directory, ids) for text, ids in texts.items()}
        return Point(stage, steps, precision, seconds, losses, recall(directory))

    yield measured("source", 0, "", 0.0, options["model"])
    sampling = sample(options, options["calibration_tokens"])
    closed = sampling + layer_wise(options, scratch / "closed", 0, "no")
    yield measured("closed form", 0, "", closed, scratch / "closed")
    starts = {}
    for precision in options["precisions"]:
        for steps in options["refine_steps"]:
            out = scratch / f"layerwise-{precision}"
            starts[precision] = sampling + layer_wise(options, out, steps, precision)
            yield measured("layer-wise", steps, precision, starts[precision], out)
    options["train_tokens"] = max(options["train_steps"], default=0) * BATCH * options["length"]
    fresh = sample(options, max(options["train_tokens"], options["calibration_tokens"]))  # beyond those before
    for precision in options["precisions"]:
        starting = {"whole-model": (scratch / "closed", closed)}
        if precision in starts:
            starting["both"] = (scratch / f"layerwise-{precision}", starts[precision])
        for stage, (start, before) in starting.items():
            for steps in options["train_steps"]:
                share = max(0.0, steps * BATCH * options["length"] - options["calibration_tokens"])
                drawn = fresh * share / max(1.0, options["train_tokens"] - options["calibration_tokens"])
                seconds = before + drawn + train(options, start, scratch / "trained", steps, precision)
                yield measured(stage, steps, precision, seconds, scratch / "trained")


def plot(found: list[Point], texts: tuple[str, ...], path: Path) -> None:
    """Nats above the base model against minutes, one panel a text, and what is recalled of the first in another."""
    from matplotlib import pyplot

    colours = {"closed form": "#000000", "layer-wise": "#0072B2", "whole-model": "#D55E00", "both": "#009E73"}
    figure, panels = pyplot.subplots(
        1, len(texts) + 1, figsize=(6.5 * (len(texts) + 1), 4.2), layout="constrained", squeeze=False
    )
    for text, axes in zip((*texts, None), panels[0], strict=True):
        for stage, colour in colours.items():
            for precision in dict.fromkeys(point.precision for point in found if point.stage == stage):
                chosen = [point for point in found if (point.stage, point.precision) == (stage, precision)]
                shown = [
                    point.nats[text] - found[0].nats[text] if text else 100 * point.recall["text"] for point in chosen
                ]
                axes.plot(
                    [point.seconds / 60 for point in chosen], shown,
                    "o-" if precision != "no" else "s--", color=colour, markersize=5,
                    label=stage + {"bf16": ", bfloat16", "no": ", float32"}.get(precision, ""),
                )  # fmt: skip
        axes.set_xlabel("minutes")
        axes.set_ylabel("nats a token above the base model" if text else "second copies recalled (%)")
        axes.set_ylim(0, None if text else 100)
        axes.set_xlim(left=0)
        axes.set_title(Path(text or texts[0]).name, fontsize=10)
        if text is None:
            share = 100 * found[0].recall["text"]
            axes.axhline(share, color="#808080", linestyle=":", linewidth=1)
            axes.annotate("base model", (0, share), xytext=(4, 4), textcoords="offset points", color="#808080")
    panels[0][0].legend(fontsize=8)
    figure.savefig(path)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), default=str(EMBEDDED), show_default=False, help="The source.")
@click.option("--groups", type=int, default=1)
@click.option("--text", "texts", multiple=True, default=("stdlib:heldout",), help="To measure on; several times.")
@click.option("--windows", type=int, default=48)
@click.option("--length", type=int, default=256, help="Tokens of a window and of a block.")
@click.option("--calibration-tokens", type=int, default=65_536)
@click.option("--refine-steps", type=int, multiple=True, default=(25, 50, 100, 200), help="A layer.")
@click.option("--train-steps", type=int, multiple=True, default=(30, 60, 120), help="Of the whole model.")
@click.option("--learning-rate", type=float, default=1e-3, help="Of the whole model.")
@click.option("--precision", "precisions", multiple=True, default=("bf16", "no"), help="bf16, no, or both.")
@JSON_OPTION
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Draw them (.svg, .png, .pdf).")
def main(json_file: Path | None, plot_file: Path | None, **options: Any) -> None:
    texts, found = options["texts"], []
    print(
        f"{'':12}{'steps':>6}{'':>6}{'minutes':>9}"
        + "".join(f"{Path(text).name[:22]:>24}" for text in texts)
        + "  recalled: text, random"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for point in points(options, Path(scratch)):
            found.append(point)
            cells = "".join(f"{f'{nats:.4f} ({math.exp(nats):,.2f})':>24}" for nats in point.nats.values())
            print(f"{point.stage:12}{point.steps:6}{point.precision:>6}{point.seconds / 60:9.1f}{cells}"
                  + "".join(f"{100 * share:12.1f}" for share in point.recall.values()), flush=True)  # fmt: skip
            write_json([asdict(point) for point in found], json_file)
    if plot_file:
        plot(found, texts, plot_file)


if __name__ == "__main__":
    main()
