"""gqa-ablate: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint.console import (
    CONTEXT_SETTINGS,
    SHARED,
    ByteSize,
    Command,
    FloatRange,
    Precision,
    fail,
    option,
    progress_bar,
    run,
    say_device,
    version_option,
    with_options,
)
from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.options import OptionsOf
from gqa.convert.cli_options import MapsWords
from gqa.convert.method_option import OF_TEXT, is_given, refuse_unused
from gqa.convert.methods import AUTO, AUTOMATIC, MEASURING
from gqa.eval.study.study import GRID, STUDY, TRAINING
from gqa.uptrain.options import TrainOptions

if TYPE_CHECKING:
    from gqa.eval.study.ablation import Study
    from gqa.eval.study.directory import Rows
    from gqa.eval.study.study import Grid, StudyOptions
    from gqa.eval.study.tradeoff import Bounds

_EPILOG = """\b
Examples:
  gqa-ablate ./Llama-2-7b-hf --data corpus.jsonl --heldout-fraction 0.01 -o study
  gqa-ablate MODEL --data stdlib:train --methods mean,first,refined --groups 1,2,4,8 \\
      --alphas 0,0.01,0.05,0.1 -o study
  gqa-ablate -o study --recommend --max-loss-increase 0.05
  gqa-ablate -o study --recommend --kv-bytes 512
"""


_DATA = [
    option("--data", help="Text to train on, as for gqa-uptrain; several times, or with commas, for several."),
    option("--precision", default="float32", type=Precision("float32", "bfloat16", "float16", accelerate=True),
           help="What training computes in; weights and optimiser stay in float32."),
    option("--calibration", **SHARED["--data"], **OF_TEXT, help="Text for calibrated and refined, as gqa-convert's "
           "--data.  [default: the data]"),
]  # fmt: skip
_TRAINED = {*TRAINING, "micro_batch", "trust_remote_code"} - {"data", "precision"}
_UPTRAIN = OptionsOf(TrainOptions, _TRAINED, block_size="--train-context")
_MAPS = MapsWords("calibration-")
_RUN = [
    option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
           help="The study; the same command continues one that was stopped."),
    option("--save-minutes", type=FloatRange(min=0, min_open=True), metavar="MINUTES", help="Save the "
           "state of a training so often.  [default: only when it is stopped]"),
    option("--recommend", is_flag=True, help="Name the smallest KV cache within --max-loss-increase and "
           "--max-recall-loss, or what loses least within --kv-bytes."),
    option("--kv-bytes", type=ByteSize(), metavar="SIZE", help="At most so much KV cache a token."),
    option("--max-loss-increase", type=FloatRange(min=0), default=0.1,
           help="Nats per token above MODEL's."),
    option("--max-recall-loss", type=FloatRange(min=0), default=5.0, help="Points of the second copies of text "
           "that MODEL gets right and the result does not, where MODEL recalls them."),
    option("--dry-run", help="List the cells, and stop."),
    option("--overwrite", help="Remove the study at DIR first."),
    option("--verbose"),
    option("--quiet"),
]  # fmt: skip
_OF_REPORTS = {"output", "recommend", "kv_bytes", "max_loss_increase", "max_recall_loss", "verbose", "quiet"}


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("model", metavar="[MODEL]", required=False)
@with_options(GRID.decorators(), _UPTRAIN.decorators(), _DATA, _MAPS.decorators, STUDY.decorators(), _RUN)
@version_option
def command(model: str | None, output: Path, quiet: bool, **options: Any) -> None:
    """Which method, how many groups, how much further training? Measures every combination for MODEL.

    Each cell is converted, trained, evaluated and written to DIR at once; the end is a report with pictures. Without
    MODEL the report of what is in DIR is written anew.
    """
    import transformers

    from gqa.eval.study.ablation import open_study, plan_table
    from gqa.eval.study.directory import forget
    from gqa.uptrain.loop import StoppedError

    transformers.utils.logging.set_verbosity_error()
    failed, bounds = 0, read_bounds(options)
    if model is None:
        _refuse_without_model()
    else:
        how = {"strict": is_given("methods"), "anew": options["overwrite"]}
        study = open_study(*read_study(model, output, options), **how)
        if options["overwrite"] and not options["dry_run"]:
            forget(output)
        if not quiet:
            for method, reason in study.left_out.items():
                click.echo(one_line(f"without {method}: {reason}"), err=True)
        if options["dry_run"]:
            click.echo(plan_table(study).text())
            return
        try:
            say_device(study.options.run_device, quiet)
            rows = measure(study, quiet, sys.argv[1:])
        except StoppedError as stopped:
            fail("gqa-ablate", "stopped; the same command continues", 128 + stopped.number)
        failed = sum(bool(row["error"]) for row in rows)
    _report(output, bounds, options["recommend"], quiet)
    if failed:
        told = f"{failed} of {len(rows)} cells failed, as {output}/report.html says; the same command tries them again"
        fail("gqa-ablate", told, 1)


def _refuse_without_model() -> None:
    """Raises RefusedError for an option of the command that runs that a report alone does not need."""
    for found in click.get_current_context().command.params:
        if found.name not in _OF_REPORTS and is_given(str(found.name)):
            flag = "/".join([found.opts[-1], *found.secondary_opts])
            raise RefusedError(f"{flag} is for a study that is made: name its MODEL, or leave the option out")


def read_study(model: str, output: Path, options: dict[str, Any]) -> tuple[StudyOptions, Grid]:
    """What the options of the command that runs say. Raises RefusedError for what no method of them uses."""
    methods = options["methods"]
    known = {*methods} - {AUTO} | ({*AUTOMATIC} if AUTO in methods else set())
    known |= {MEASURING} if options["kv_budgets"] else set()
    refuse_unused(known, f"--methods {','.join(methods)}")
    text = {name: options[name] for name in ("field", "target_field", "trust_remote_code")}
    text |= {"sources": options["calibration"] or options["data"]}
    maps = _MAPS.read(options, seed=0, device=None, **text)  # each cell has its own
    more = {name: options[name] for name in ("data", "precision", "save_minutes")}
    training = _UPTRAIN.read(options, model=model, output=output, **more)
    return STUDY.read(options, training=training, maps=maps), GRID.read(options)


def measure(study: Study, quiet: bool, argv: Sequence[str]) -> Rows:
    """All cells that are left, with progress over them: a bar where a person looks at it, a
    line for each elsewhere.
    """
    from gqa.eval.study.ablation import run_study

    def show(row: dict[str, Any]) -> None:
        bar.update()
        name = f"{row['method']}, {row['groups']:.3g} heads, alpha {row['alpha']:g}"
        name += f", int{row['bits']} cache" if row["bits"] else ""
        text = f"{name}: {row['error'] or format(row['loss'], '.4f')}"
        bar.set_postfix_str(text)
        if not quiet and bar.disable:
            click.echo(text, err=True)

    with progress_bar(len(study.left), "cell", study.subject.name, quiet) as bar:
        return run_study(study, argv=argv, report=show)


def read_bounds(options: dict[str, Any]) -> Bounds:
    """What is recommended within, of the command that runs. Raises RefusedError."""
    from gqa.eval.study.tradeoff import Bounds

    of_losses = ("max_loss_increase", "max_recall_loss")
    if options["kv_bytes"] and (given := [name for name in of_losses if is_given(name)]):
        flag = f"--{given[0].replace('_', '-')}"
        raise RefusedError(f"--kv-bytes asks for what loses least within it, {flag} for the smallest cache: give one")
    return Bounds(*(options[name] for name in (*of_losses, "kv_bytes")))


def _report(output: Path, bounds: Bounds, recommends: bool, quiet: bool) -> None:
    from gqa.eval.study.report import open_results, short_table, write_study_report
    from gqa.eval.study.tradeoff import recommend

    results = open_results(output)
    written = write_study_report(results, bounds)
    if not quiet:
        click.echo(short_table(results).text())
        click.echo(f"\nwritten to {output}: {', '.join(written)}")
    if recommends:
        click.echo(recommend(results.points, results.source, bounds).text)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says, 1 also where cells failed."""
    run(command, "gqa-ablate", "rows that were measured are kept; the same command continues")
