"""gqa-ablate: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint.console import fail, progress_bar, run, say_device
from gqa.checkpoint.errors import one_line
from gqa.checkpoint.options import command as command_of
from gqa.eval.study.study import AblateOptions

if TYPE_CHECKING:
    from gqa.eval.study.ablation import Study
    from gqa.eval.study.directory import Rows

_EPILOG = """\b
Examples:
  gqa-ablate ./Llama-2-7b-hf --data corpus.jsonl --heldout-fraction 0.01 -o study
  gqa-ablate MODEL --data stdlib:train --methods mean,first,refined --groups 1,2,4,8 \\
      --alphas 0,0.01,0.05,0.1 -o study
  gqa-ablate -o study --max-loss-increase 0.05
  gqa-ablate -o study --kv-bytes 512
"""


@command_of(AblateOptions, _EPILOG)
def command(options: AblateOptions) -> None:
    """Which method, how many groups, how much further training? Measures every combination for MODEL.

    Each cell is converted, trained, evaluated and written to DIR at once; the end is a report with pictures. Without
    MODEL the report of what is in DIR is written anew.
    """
    import transformers

    from gqa.eval.study.ablation import open_study, plan_table
    from gqa.eval.study.directory import forget
    from gqa.uptrain.loop import StoppedError

    transformers.utils.logging.set_verbosity_error()
    failed, quiet = 0, options.quiet
    if options.model is None:
        options.check()
    else:
        study = open_study(options)
        if options.overwrite and not options.dry_run:
            forget(options.output)
        if not quiet:
            for method, reason in study.left_out.items():
                click.echo(one_line(f"without {method}: {reason}"), err=True)
        if options.dry_run:
            click.echo(plan_table(study).text())
            return
        try:
            say_device(study.options.run_device, quiet)
            rows = measure(study, quiet, sys.argv[1:])
        except StoppedError as stopped:
            fail("gqa-ablate", "stopped; the same command continues", 128 + stopped.number)
        failed = sum(bool(row["error"]) for row in rows)
    _report(options)
    if failed:
        message = f"{failed} of {len(rows)} cells failed, as {options.output}/report.html says"
        fail("gqa-ablate", f"{message}; the same command tries them again", 1)


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

    with progress_bar(len(study.unmeasured), "cell", study.subject.name, quiet) as bar:
        return run_study(study, argv=argv, report=show)


def _report(options: AblateOptions) -> None:
    from gqa.eval.study.report import open_results, short_table, write_study_report
    from gqa.eval.study.tradeoff import Bounds, recommend

    results = open_results(options.output)
    bounds = Bounds(options.max_loss_increase, options.max_recall_loss, options.kv_bytes)
    written = write_study_report(results, bounds)
    if not options.quiet:
        click.echo(short_table(results).text())
        click.echo(f"\nwritten to {options.output}: {', '.join(written)}")
        click.echo(recommend(results.points, results.source, bounds).text)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says, 1 also where cells failed."""
    run(command, "gqa-ablate", "rows that were measured are kept; the same command continues")
