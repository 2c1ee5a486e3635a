"""gqa-eval: what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import sys

import click

from gqa.checkpoint.console import fail, run
from gqa.checkpoint.options import command as command_of
from gqa.eval.options import EvaluateOptions

_EPILOG = """\b
Examples:
  gqa-eval SRC SRC-gqa2 --data heldout.jsonl
  gqa-eval SRC SRC-gqa8 SRC-mqa --data stdlib:heldout --kl --decode -o report
  gqa-eval SRC SRC-gqa8 --memory 80GB --tensor-parallel 4
  torchrun --nproc_per_node 8 -m gqa.eval SRC SRC-gqa8 --data heldout.jsonl
"""


@command_of(EvaluateOptions, _EPILOG)
def command(options: EvaluateOptions) -> None:
    """Compare checkpoints on the same text: quality, memory and speed side by side.

    BASELINE and each MODEL are directories or hub ids; every MODEL is shown with its difference from BASELINE.
    """
    from gqa.eval.evaluate import measure
    from gqa.eval.report import as_json, as_text, reserved, write_report

    options.check()
    with reserved(options.output, options.overwrite):
        results = measure(options, sys.argv[1:])
        if not results:  # another rank reports
            return
        if not options.quiet:
            click.echo(as_text(results, every=options.verbose), err=options.json)
        if options.output:
            files = write_report(results, options.output)
            if not options.quiet:
                click.echo(f"\nwritten to {options.output}: {', '.join(files)}", err=options.json)
    if options.json:
        click.echo(as_json(results))
    optional = ("recall", "decode") if options.recall else ("decode",)
    if refused := [results[part]["refused"] for part in optional if "refused" in results.get(part, {})]:
        fail("gqa-eval", f"{'; '.join(refused)}; the rest is measured", 1)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    run(command, "gqa-eval", "no report was written")
