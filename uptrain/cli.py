"""gqa-uptrain: options, output and exit codes. torch is imported inside the command."""

from __future__ import annotations

import sys

from gqa.core.console import Watcher, print_json, print_lines
from gqa.core.console import run as run_command
from gqa.core.options import command as command_of
from gqa.uptrain.options import UptrainOptions

_EPILOG = """\
COUNT may end in K, M, B or T (powers of 1,000): 64K is 64,000.

Examples:
  gqa-uptrain examples/stdlib-mha-gqa2-refined
  gqa-uptrain examples/stdlib-mha-gqa2-refined --dry-run
  gqa-uptrain examples/stdlib-mha-gqa2-refined --data stdlib:train \\
      --alpha 0.05
  torchrun --nproc_per_node 8 -m gqa.uptrain examples/stdlib-mha-gqa2-refined \\
      --data HuggingFaceFW/fineweb-edu --streaming --tokens 1B
  accelerate launch -m gqa.uptrain examples/stdlib-mha-gqa2-refined \\
      --data train.jsonl

Documentation: docs/uptraining.md in the repository
"""


@command_of(UptrainOptions, _EPILOG)
def command(options: UptrainOptions) -> None:
    """Train the converted checkpoint MODEL further, and write an ordinary checkpoint.

    By default MODEL learns to predict what its base model (the teacher) predicts, on text that the
    base model generates. The weights of the step with the lowest loss on validation text are
    written. This loss is the KL divergence from the teacher, or the cross-entropy without a
    teacher. If no step lowers it, MODEL is written unchanged. The same command continues a run that
    was stopped.

    For several processes, use `accelerate launch -m gqa.uptrain` or `torchrun -m gqa.uptrain`.
    """
    import transformers

    from gqa.core.devices import ranks
    from gqa.uptrain.run import uptrain
    from gqa.uptrain.setup import load_unless_trained, open_run
    from gqa.uptrain.summary import opened_lines, ready_lines, result_lines

    transformers.utils.logging.set_verbosity_error()
    quiet = options.quiet or not ranks().is_main_process
    if options.dry_run:
        _dry_run(options, quiet)
        return

    with Watcher(quiet) as watcher:
        opened = open_run(options, sys.argv[1:], watcher)

        # Before text is generated, which may take hours
        if not quiet:
            print_lines(opened_lines(opened), err=options.json)
        run = load_unless_trained(opened, watcher)

    if not quiet:
        print_lines(ready_lines(run), err=options.json)

    with watcher:
        progress, record = uptrain(run, watcher)

    if not quiet:
        print_lines(result_lines(run, progress), err=options.json)
    if options.json and run.accelerator.is_main_process:
        print_json(record)


def _dry_run(options: UptrainOptions, quiet: bool) -> None:
    """Print what a run would train and need."""
    from gqa.core.devices import ranks
    from gqa.uptrain.dry_run import dry_run
    from gqa.uptrain.summary import dry_run_lines, dry_run_record

    with Watcher(quiet) as watcher:
        plan = dry_run(options, watcher)
        if ranks().is_main_process:
            for warning in plan.warnings:
                watcher.warn(warning)

    if not quiet:
        print_lines(dry_run_lines(plan), err=options.json)
    if options.json and ranks().is_main_process:
        print_json(dry_run_record(plan))


def main() -> None:
    """Entry point; `gqa.core.console.run` documents the exit codes."""
    run_command(
        command,
        "gqa-uptrain",
        "saved states and finished batches of generated text are kept; the same command continues",
    )
