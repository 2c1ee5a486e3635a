"""gqa-ablate: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint.console import (
    CONTEXT_SETTINGS,
    SHARED,
    Choice,
    Command,
    Count,
    Precision,
    Several,
    fail,
    option,
    progress_bar,
    run,
    say_device,
    version_option,
    with_options,
)
from gqa.checkpoint.errors import one_line
from gqa.convert.calibrate_cli import MapsWords
from gqa.convert.method_option import OF_TEXT, is_given, refuse_unused
from gqa.convert.methods import METHODS
from gqa.eval.study.study import AUTO, SCOPES, TEACHERS
from gqa.uptrain.cli import command as uptrain_command

if TYPE_CHECKING:
    from gqa.eval.study.ablation import Study
    from gqa.eval.study.directory import Rows
    from gqa.eval.study.study import Grid, StudyOptions

_EPILOG = """\b
Examples:
  gqa-ablate ./Llama-2-7b-hf --data corpus.jsonl --heldout-fraction 0.01 -o study
  gqa-ablate MODEL --data stdlib:train --methods mean,first,random:3,refined --groups 1,2,4,8 \\
      --alphas 0,0.01,0.05,0.1 -o study
  gqa-ablate -o study --recommend --max-loss-increase 0.05
"""


class _Seeded(click.ParamType[tuple[str, int | None]]):
    """A method, and how many seeds of it where that is said: `random:3`."""

    name = "method"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int | None]:
        method, colon, count = str(value).partition(":")
        Choice(tuple(METHODS)).convert(method, param, ctx)
        if colon and not (count.isdigit() and int(count)):
            self.fail(f"{count!r} is no number of seeds; give them like random:3", param, ctx)
        return method, int(count) if colon else None


_POSITIVE = click.IntRange(min=1)
_GRID = [
    option("--methods", aliases="--method", type=Several(_Seeded()), metavar="METHOD[,...]",
           default="mean,first,aligned,calibrated,refined", help="How heads are merged: those of the default as far as "
           "MODEL can have them, or any; random is a control. METHOD:N for N seeds of one."),
    option("--groups", type=Several(_POSITIVE), metavar="G[,...]", required=False, help="How many key/value heads are "
           "kept.  [default: a half, a quarter and one of MODEL's; all, as the control, with --teachers none]"),
    option("--alphas", aliases="--alpha", type=Several(click.FloatRange(0, 1)), metavar="SHARE[,...]",
           default="0,0.05", help="Shares of the data to train on; 0: none."),
    option("--seeds", type=_POSITIVE, default=1, help="How many seeds of random and calibrated heads, and of the order "
           "of the data: 0 to N - 1."),
    option("--train", type=Several(Choice((AUTO, *SCOPES))), metavar="NAME[,...]", default=AUTO, help="Which weights "
           "train: all, attention, kv, lora; auto: attention where the method aligns heads, else all."),
    option("--teachers", aliases="--teacher", type=Several(Choice(TEACHERS)), metavar="NAME[,...]", default="source",
           help="source: learn MODEL's predictions; none: learn from text alone."),
]  # fmt: skip
_DATA = [
    option("--data", help="Text to train on, as for gqa-uptrain; several times, or with commas, for several."),
    option("--precision", default="float32", type=Precision("float32", "bfloat16", "float16", accelerate=True),
           help="What training computes in; weights and optimiser stay in float32."),
    option("--calibration", **SHARED["--data"], **OF_TEXT, help="Text for calibrated and refined, as gqa-convert's "
           "--data.  [default: the data]"),
]  # fmt: skip
_OF_UPTRAIN = ("field", "heldout", "heldout_fraction", "pretraining_tokens", "learning_rate", "schedule", "warmup",
               "batch_size",
               "micro_batch", "block_size", "optimizer", "weight_decay")  # fmt: skip
_MAPS = MapsWords("calibration-")
_MEASURE = [
    option("--eval-tokens", type=Count(), metavar="COUNT", help="Held-out tokens to measure on: whole "
           "documents, until they are so many.  [default: all]"),
    option("--context", type=Count(4), help="Tokens of a window.  [default: the model's positions, "
           "2048 at most]"),
    option("--eval-batch", type=_POSITIVE, default=8, help="How many windows are scored at a time."),
    option("--eval-precision", "dtype", aliases="--dtype", type=Precision("auto", "float32", "bfloat16", "float16"),
           default="auto", help="What is measured in; auto: as stored."),
    option("--kl/--no-kl", default=True, help="Compare predictions with MODEL's, which are kept meanwhile "
           "(2 bytes x vocabulary x tokens)."),
    option("--recall/--no-recall", default=None, help="Ask for what stands in the context, as gqa-eval does.  "
           "[default: where the model can be asked]"),
    option("--decode/--no-decode", default=True, help="Time decoding."),
    option("--decode-batch", type=_POSITIVE, default=8, help="How many sequences --decode times at once."),
    option("--decode-context", type=Count(), metavar="COUNT", help="How long the prompts of --decode are.  [default: "
           "the model's positions, 4096 at most]"),
]  # fmt: skip
_RUN = [
    option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
           help="The study; the same command continues one that was stopped."),
    option("--jobs", type=_POSITIVE, default=1, help="Conversions side by side."),
    option("--device", "devices", aliases="--devices", type=Several(str), metavar="NAME[,...]", help="cpu, or "
           "cuda:0,cuda:1 ...: jobs take them in turn.  [default: a GPU where there is one]"),
    option("--save-minutes", type=click.FloatRange(min=0, min_open=True), metavar="MINUTES", help="Save the "
           "state of a training so often.  [default: only when it is stopped]"),
    option("--recommend", is_flag=True, help="Name the smallest KV cache within --max-loss-increase and "
           "--max-recall-loss."),
    option("--max-loss-increase", type=click.FloatRange(min=0), default=0.1, help="Nats per token above MODEL's."),
    option("--max-recall-loss", type=click.FloatRange(min=0), default=5.0, help="Points of the second copies of text "
           "that MODEL gets right and the result does not, where MODEL recalls them."),
    option("--dry-run", help="List the cells and what they would cost, and stop."),
    option("--overwrite", help="Remove the study at DIR first."),
    option("--verbose"),
    option("--quiet"),
]  # fmt: skip


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("model", metavar="[MODEL]", required=False)
@with_options(_GRID, _DATA, _MAPS.decorators, _MEASURE, _RUN)
@version_option
def command(model: str | None, output: Path, quiet: bool, **options: Any) -> None:
    """Which method, how many groups, how much further training? Measures every combination for MODEL.

    Each cell is converted, trained, evaluated and written to DIR at once; the end is a report with pictures. Without
    MODEL the report of what is in DIR is written anew.
    """
    import transformers

    from gqa.eval.study.ablation import open_study
    from gqa.eval.study.cost import cost_table
    from gqa.eval.study.directory import forget
    from gqa.uptrain.loop import StoppedError

    transformers.utils.logging.set_verbosity_error()
    failed = 0
    if model is not None:
        if options["overwrite"] and not options["dry_run"]:
            forget(output)
        study = open_study(*read_study(model, output, options), strict=is_given("methods"))
        if not quiet:
            for method, reason in study.left_out.items():
                click.echo(one_line(f"without {method}: {reason}"), err=True)
        if options["dry_run"]:
            click.echo(cost_table(study).text())
            return
        try:
            say_device(", ".join(study.options.devices), quiet)
            rows = measure(study, quiet, shlex.join(["gqa-ablate", *sys.argv[1:]]))
        except StoppedError as stopped:
            fail("gqa-ablate", "stopped; the same command continues", 128 + stopped.number)
        failed = sum(bool(row["error"]) for row in rows)
    _report(output, options, quiet)
    if failed:
        told = f"{failed} of {len(rows)} cells failed, as {output}/report.html says; the same command tries them again"
        fail("gqa-ablate", told, 1)


_at = [found.name for found in command.params].index("precision")
command.params[_at:_at] = [copy(found) for found in uptrain_command.params if found.name in _OF_UPTRAIN]
for _found in command.params:
    if _found.name == "block_size":  # --context is that of measuring
        _found.opts = ["--train-context"]


def read_study(model: str, output: Path, options: dict[str, Any]) -> tuple[StudyOptions, Grid]:
    """What the options of the command that runs say. Raises RefusedError for what no method of them uses."""
    from gqa.eval.study.study import TRAINING, Grid, StudyOptions
    from gqa.uptrain.options import TrainOptions

    def of(names: Iterable[str]) -> dict[str, Any]:
        return {name: options[name] for name in names if name in options}

    methods = {method: seeds or options["seeds"] for method, seeds in options["methods"]}
    refuse_unused(methods, f"--methods {','.join(methods)}")
    grid = Grid(methods, **of(("groups", "alphas", "train", "teachers", "seeds")))
    text = options["calibration"] or options["data"]
    maps = _MAPS.read(options, seed=0, device=None, sources=text, field=options["field"])  # each cell has its own
    training = TrainOptions(model, output, **of((*TRAINING, "micro_batch", "save_minutes")))
    return StudyOptions(training, maps, **of(StudyOptions.__dataclass_fields__)), grid


def measure(study: Study, quiet: bool, words: str) -> Rows:
    """All cells that are left, as asked for in `words`, with progress over them: a bar where a person looks at it, a
    line for each elsewhere.
    """
    from gqa.eval.study.ablation import run_study

    def told(row: dict[str, Any]) -> None:
        bar.update()
        name = f"{row['method']}, {row['groups']} heads, alpha {row['alpha']:g}"
        text = f"{name}: {row['error'] or format(row['loss'], '.4f')}"
        bar.set_postfix_str(text)
        if not quiet and bar.disable:
            click.echo(text, err=True)

    with progress_bar(len(study.left), "cell", study.subject.name, quiet) as bar:
        return run_study(study, command=words, told=told)


def _report(output: Path, options: dict[str, Any], quiet: bool) -> None:
    from gqa.eval.study.report import open_results, short_table, write_study_report
    from gqa.eval.study.tradeoff import Bounds, recommend

    results, bounds = open_results(output), Bounds(options["max_loss_increase"], options["max_recall_loss"])
    written = write_study_report(results, bounds)
    if not quiet:
        click.echo(short_table(results).text())
        click.echo(f"\nwritten to {output}: {', '.join(written)}")
    if options["recommend"]:
        click.echo(recommend(results.points, results.source, bounds).text)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says, 1 also where cells failed."""
    run(command, "gqa-ablate", "rows that were measured are kept; the same command continues")


if __name__ == "__main__":
    main()
