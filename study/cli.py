"""gqa-ablate: options, output, exit codes. Imports torch only when needed."""

from __future__ import annotations

import sys

from gqa.core.console import fail, print_lines, run
from gqa.core.options import command as command_of
from gqa.study.options import ADVICE, AblateOptions, Cell

_EPILOG = """\
COUNT may end in K, M, B or T (powers of 1,000): 64K is 64,000.

Examples:
  gqa-ablate examples/stdlib-mha --data stdlib:train \\
      --validation stdlib:heldout -o study
  gqa-ablate examples/stdlib-mha --data stdlib:train \\
      --validation stdlib:heldout --methods mean,refined --kv-heads 1,2,4 \\
      --alphas 0,0.01,0.05 -o study
  gqa-ablate -o study --max-loss-increase 0.048

Documentation: docs/ablations.md in the repository
"""


@command_of(AblateOptions, _EPILOG)
def command(options: AblateOptions) -> None:
    """Compare methods, numbers of KV heads and amounts of training for MODEL. For each combination
    of these, MODEL is converted, trained and measured.

    The numbers of a combination are saved as soon as it is measured; the report is written at the
    end. Without MODEL, the command only rewrites the report in DIR.
    """
    import transformers

    from gqa.study.ablation import Ablation
    from gqa.study.report import short_table, write_study_report

    transformers.utils.logging.set_verbosity_error()
    options.refuse_conflicts()
    study = None
    if options.model:
        study = Ablation(options)
        study.run(sys.argv[1:])

    rows, recommendation, names = write_study_report(options.output, options.max_loss_increase)
    print_lines(short_table(rows).text().split("\n"))
    if not options.quiet:
        print_lines(["", f"written to {options.output}: {', '.join(names)}"])
    print_lines(recommendation.split("\n"))

    if study:
        failed = sum(bool(row["error"]) for row in rows if Cell.of(row) in study.cells)
        if failed:
            combinations = f"{failed} of {len(study.cells) - 1} combinations failed"
            fail(
                "gqa-ablate",
                f"{combinations} (see {options.output}/report.html); repeat the command without "
                "--overwrite to try them again",
                1,
            )


def main() -> None:
    """Entry point; exit codes of `gqa.core.console.run`, and 1 if cells failed."""
    run(command, "gqa-ablate", ADVICE)
