"""gqa-eval: what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import sys
from typing import Any

from gqa.checkpoint.write import finite
from gqa.core.console import print_json, print_lines, run
from gqa.core.options import command as command_of
from gqa.eval.options import EvaluateOptions

_EPILOG = """\
COUNT may end in K, M, B or T (powers of 1,000): 64K is 64,000.
SIZE is like 80GB (10^9 bytes each) or 500MiB (2^20).

Examples:
  gqa-eval examples/stdlib-mha examples/stdlib-mha-gqa2-refined \\
      --data stdlib:heldout
  gqa-eval examples/stdlib-mha examples/stdlib-mha-gqa2-refined \\
      --data stdlib:heldout --kl --simulate-cache 8,4 -o report
  gqa-eval examples/stdlib-mha examples/stdlib-mha-gqa2-refined --memory 1GB
  torchrun --nproc_per_node 8 -m gqa.eval examples/stdlib-mha \\
      examples/stdlib-mha-gqa2-refined --data stdlib:heldout

Documentation: docs/evaluating.md in the repository
"""


@command_of(EvaluateOptions, _EPILOG)
def command(options: EvaluateOptions) -> None:
    """Compare checkpoints on the same text: quality, memory and speed side by side.

    BASELINE and each MODEL are directories or model ids; every MODEL is compared with BASELINE.
    Pass at least one of --data, --recall, --decode and --memory.
    """
    from gqa.eval.evaluate import Record, measure
    from gqa.eval.report import as_text, open_report, write_report

    options.refuse_conflicts()
    with open_report(options) as report:
        partial: Record = {}
        try:
            results = measure(options, sys.argv[1:], partial)
        except BaseException:
            _print_partial(partial)
            raise
        if not results:  # another rank reports
            return
        if not (options.json and options.quiet):
            stream = sys.stderr if options.json else sys.stdout
            print_lines(as_text(results, stream).split("\n"), err=options.json)
        if report:
            write_report(results, report)
    if options.output and not options.quiet:
        print_lines(
            ["", f"written to {options.output}: results.json, report.html"], err=options.json
        )
    if options.json:
        print_json(finite(results, infinity=str))


def _print_partial(results: dict[str, Any]) -> None:
    """Print what was measured before an error or an interruption, on stderr: stdout and reports
    have complete results only.
    """
    from gqa.core.devices import ranks
    from gqa.eval.report import as_text, is_measured

    is_any_measured = any(is_measured(model) for model in results.get("models", []))
    if is_any_measured and ranks().is_main_process:
        print_lines(["measured so far:", *as_text(results, sys.stderr).split("\n"), ""], err=True)


def main() -> None:
    """Entry point; exit codes as `gqa.core.console.run` says."""
    run(command, "gqa-eval", "no report was written")
