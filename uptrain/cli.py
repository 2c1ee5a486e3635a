"""gqa-uptrain: options, output and exit codes. torch is imported inside the command."""

from __future__ import annotations

import json
import sys

import click

from gqa.checkpoint.console import Watcher, run
from gqa.checkpoint.options import command as command_of
from gqa.uptrain.options import TrainOptions

_EPILOG = """\b
Examples:
  gqa-uptrain MODEL-gqa8
  gqa-uptrain MODEL-gqa8 --data corpus.jsonl --alpha 0.05 -o OUT
  accelerate launch -m gqa.uptrain MODEL-gqa8 --data HuggingFaceFW/fineweb-edu --streaming --tokens 1B -o OUT
  torchrun --nproc_per_node 8 -m gqa.uptrain MODEL-gqa8 --data 'shards/*.parquet' --tokens 1B -o OUT
"""


@command_of(TrainOptions, _EPILOG)
def command(options: TrainOptions) -> None:
    """Train the converted checkpoint MODEL further and write a plain checkpoint.

    By default it is distilled from its base model, on text that the base model generates. The result has the lowest
    held-out loss of the run; it may be MODEL unchanged. The same command continues a run that was stopped.

    For several processes use `accelerate launch -m gqa.uptrain` or `torchrun -m gqa.uptrain`.
    """
    import transformers

    from gqa.checkpoint.loading import ranks
    from gqa.uptrain.run import plan_text, result_text, uptrain
    from gqa.uptrain.setup import prepare

    transformers.utils.logging.set_verbosity_error()
    quiet = options.quiet or not ranks().is_main_process
    with Watcher(quiet) as watcher:
        setup = prepare(options, sys.argv[1:], watcher=watcher)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=options.json)

    say(plan_text(setup))
    with watcher:
        progress, record = uptrain(setup, watcher)
    say(result_text(setup, progress))
    if options.json and setup.accelerator.is_main_process:
        click.echo(json.dumps(record))


def main() -> None:
    """Entry point; `gqa.checkpoint.console.run` documents the exit codes."""
    run(
        command,
        "gqa-uptrain",
        "saved states and generated text are kept; the same command continues",
    )
