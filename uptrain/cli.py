"""gqa-uptrain: options, output and exit codes. torch is imported inside the command."""

from __future__ import annotations

import json
import sys
import traceback
from typing import NoReturn

import click

from gqa.checkpoint.console import Watcher, fail, print_device, run
from gqa.checkpoint.errors import DivergedError, StoppedError
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

    By default it is distilled from its base model, on text that the base model generates. The result is the state with
    the lowest held-out loss, which may be MODEL unchanged.

    Runs on one CPU or GPU, on several through `accelerate launch -m gqa.uptrain` or `torchrun -m gqa.uptrain`.
    """
    import transformers

    from gqa.checkpoint.loading import ranks
    from gqa.uptrain.run import plan_text, result_text, uptrain
    from gqa.uptrain.setup import prepare

    transformers.utils.logging.set_verbosity_error()
    main = ranks().is_main_process
    quiet = options.quiet or not main
    with Watcher(quiet) as watcher:
        setup = prepare(options, sys.argv[1:], watcher=watcher)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=options.json)

    print_device(setup.accelerator.device, quiet)
    say(plan_text(setup))
    try:
        with watcher:
            progress, record = uptrain(setup, watcher)
    except StoppedError as stopped:
        message = f"stopped; step {stopped.step} is saved in {setup.states.directory}; the same command continues"
        _leave(main, message, 128 + stopped.number)
    except DivergedError as error:
        if options.verbose and main:
            traceback.print_exc()
        _leave(main, str(error), 1)
    say(result_text(setup, progress))
    if main and options.json:
        click.echo(json.dumps(record))


def _leave(main: bool, message: str, code: int) -> NoReturn:
    """End all processes; the main one prints the message."""
    if main:
        fail("gqa-uptrain", message, code)
    sys.exit(code)


def main() -> None:
    """Entry point; `gqa.checkpoint.console.run` documents the exit codes."""
    run(command, "gqa-uptrain", "nothing half-written is left")
