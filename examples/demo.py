"""Every method of conversion on the embedded checkpoint, trained a little and measured: a small study, and what a model
says before and after.

    make demo

Every number is computed here and now, without a network: the text is Python's standard library, measured on modules
that the checkpoint was never trained on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from gqa.checkpoint.console import progress_bar
from gqa.convert import convert_checkpoint
from gqa.convert.align.options import CalibrationText, MapsOptions, Refinement
from gqa.convert.methods import METHODS
from gqa.eval.study.ablation import open_study, run_study
from gqa.eval.study.directory import forget
from gqa.eval.study.report import open_results, short_table, write_study_report
from gqa.eval.study.study import Grid, StudyOptions
from gqa.eval.study.tradeoff import Bounds
from gqa.uptrain.options import TrainOptions

SOURCE = Path(__file__).parent / "stdlib-mha"
TEXT = ("stdlib:train",)
PROMPT = 'def read_lines(path):\n    """'


def study_options(output: Path) -> StudyOptions:
    """Calibrated on 16,384 tokens, refined for 50 steps a layer: a fraction of the defaults, as is the training."""
    maps = MapsOptions(CalibrationText(TEXT, tokens=16_384), refinement=Refinement(steps=50))
    training = TrainOptions(str(SOURCE), output, TEXT, batch_size=4, precision="bf16")
    return StudyOptions(training, maps, eval_tokens=16_384)


def run(options: StudyOptions, grid: Grid) -> None:
    """Measure, with a line for each cell."""
    study = open_study(options, grid)
    print(f"{len(study.cells)} cells: {', '.join(grid.methods)}; 8 heads to {', '.join(map(str, grid.groups))}\n")
    with progress_bar(len(study.cells), "cell", SOURCE.name, quiet=False) as bar:

        def told(row: dict[str, Any]) -> None:
            bar.update()
            if bar.disable:
                print(
                    f"  {row['method']:11}alpha {row['alpha']:<5g} {row['error'] or format(row['loss'], '.4f')}",
                    flush=True,
                )

        run_study(study, command="make demo", told=told)


@torch.no_grad()
def continuation(directory: Path) -> str:
    """What plain transformers gives."""
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    given = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**given, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def compare_words(groups: int) -> None:
    """The source, and two untrained conversions: averaged heads, and aligned ones."""
    with tempfile.TemporaryDirectory() as scratch:
        models = {"the source": SOURCE}
        for method in ("mean", "aligned"):
            models[f"{method}, {groups} heads, untrained"] = Path(scratch) / method
            convert_checkpoint(SOURCE, groups, Path(scratch) / method, method=method)
        for name, directory in models.items():
            print(f"\n--- {name} continues ---\n{continuation(directory)}")


def verdict(rows: list[dict[str, Any]], groups: int) -> str:
    """What untrained conversions lose for how much cache, in a line: the best of them, and the paper's."""
    untrained = {row["method"]: row for row in rows if row["alpha"] == 0 and not row["error"]}
    best = min(untrained.values(), key=lambda row: float(row["loss"]))
    mean = untrained["mean"]["perplexity_ratio"]
    return (
        f"{groups} of {round(groups / best['kv_share'])} KV heads, cache {1 / best['kv_share']:.0f}x smaller: "
        f"{best['method']} x{best['perplexity_ratio']:.2f} the base model's perplexity, mean x{mean:.3g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("examples/stdlib-mha-study"), help="the study, made anew")
    args = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    start = time.perf_counter()
    forget(args.output)
    run(study_options(args.output), Grid(dict.fromkeys(METHODS, 1), (args.groups,), (0.0, 0.01)))
    results = open_results(args.output)
    write_study_report(results, Bounds())
    print(f"\n{short_table(results).text()}")
    compare_words(args.groups)
    print(f"\nThe report: {args.output / 'report.html'} ({time.perf_counter() - start:.0f} s)")
    print(verdict(results.rows, args.groups))


if __name__ == "__main__":
    main()
