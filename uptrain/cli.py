"""gqa-uptrain: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from gqa.checkpoint.console import CONTEXT_SETTINGS, fail, run, version_option, with_options

_EPILOG = """\b
Examples:
  gqa-uptrain MODEL-gqa8 --data corpus.jsonl --alpha 0.05 -o MODEL-gqa8-uptrained
  gqa-uptrain MODEL-gqa8 --data corpus.jsonl --alpha 0.05 --teacher MODEL -o OUT
  accelerate launch -m gqa.uptrain MODEL-gqa8 --data HuggingFaceFW/fineweb-edu --streaming --tokens 1B -o OUT
  torchrun --nproc_per_node 8 -m gqa.uptrain MODEL-gqa8 --data 'shards/*.parquet' --tokens 1B --precision bf16 -o OUT
"""
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Count(click.ParamType[int]):
    """`500M`, `1B`."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", str(value).strip().upper())
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a number of tokens; give one like 65536, 500M or 1B", param, ctx)
        return int(float(match[1]) * _COUNTS[match[2]])


_DATA = [
    click.option("--data", multiple=True, required=True, metavar="SOURCE", help="stdlib:train, a file, a directory or "
                 "glob of them, a hub data set; several times for a mixture, with SOURCE@WEIGHT."),
    click.option("--field", default="text", show_default=True, help="Of jsonl, csv, parquet and data sets."),
    click.option("--data-config", metavar="NAME", help="Configuration of a hub data set."),
    click.option("--split", help="Split of a hub data set.  [default: train]"),
    click.option("--separator", metavar="TEXT", help="Between the documents of a text file, like '<|endoftext|>'."),
    click.option("--streaming", is_flag=True, help="Read a hub data set as it comes, keep nothing."),
    click.option("--alpha", type=float, help="Train on this fraction of the data (0.05 in the GQA paper)."),
    click.option("--tokens", type=Count(), help="Train on so many tokens, like 1B."),
    click.option("--steps", type=click.IntRange(min=1), help="Train for so many steps."),
    click.option("--pretraining-tokens", type=Count(), help="That alpha is a fraction of.  [default: the data's]"),
    click.option("--block-size", type=click.IntRange(min=2), help="Tokens of one sequence.  [default: the model's "
                 "positions, 2048 at most]"),
    click.option("--mask-documents", is_flag=True, help="Keep attention inside documents."),
    click.option("--heldout", metavar="SOURCE", help="Text to report the loss on.  [default: stdlib:heldout with "
                 "stdlib:train]"),
    click.option("--heldout-fraction", type=click.FloatRange(0, 1), default=0.0, show_default=True,
                 help="Hold out this share of the documents."),
    click.option("--heldout-tokens", type=Count(), default="65536", show_default=True, help="Of them, at most."),
]  # fmt: skip
_TRAINING = [
    click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True,
                 help="Blocks of one step, over all processes."),
    click.option("--micro-batch", type=click.IntRange(min=1), help="Blocks of one forward pass on one process.  "
                 "[default: its share of the batch]"),
    click.option("--train", type=click.Choice(["all", "attention", "kv", "lora"]), default="all", show_default=True,
                 help="What trains. kv: projections to keys and values (where they are fused, to queries too); lora: "
                 "these, and adapters elsewhere that are merged at the end."),
    click.option("--lora-rank", type=click.IntRange(min=1), default=16, show_default=True, help="Of --train lora."),
    click.option("--keep-adapter", is_flag=True, help="Of --train lora: also keep it, in DIR/adapter, for peft."),
    click.option("--optimizer", type=click.Choice(["adamw", "adafactor"]), default="adamw", show_default=True),
    click.option("--learning-rate", "--lr", type=click.FloatRange(min=0, min_open=True), default=3e-4,
                 show_default=True),
    click.option("--schedule", type=click.Choice(["constant", "linear", "cosine", "wsd"]), default="constant",
                 show_default=True, help="Of the learning rate, after the warm-up."),
    click.option("--warmup", type=click.IntRange(min=0), help="Steps.  [default: none with constant, else 5 %, 100 at "
                 "most]"),
    click.option("--decay", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="Share of the steps in "
                 "which wsd decays."),
    click.option("--weight-decay", type=click.FloatRange(min=0), default=0.1, show_default=True),
    click.option("--clip", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
                 help="Norm of the gradient, at most."),
    click.option("--precision", type=click.Choice(["no", "bf16", "fp16"]), default="no", show_default=True,
                 envvar="ACCELERATE_MIXED_PRECISION", help="Of the computation; weights and optimiser stay in float32. "
                 "As the launcher says, unless given."),
    click.option("--checkpointing", is_flag=True, help="Compute activations twice instead of keeping them."),
    click.option("--compile", is_flag=True, help="Compile the model with torch.compile."),
    click.option("--attention", default="sdpa", show_default=True, help="sdpa, eager, flash_attention_2 ..."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the order of the data."),
]  # fmt: skip
_TEACHER = [
    click.option("--teacher", metavar="MODEL", help="The checkpoint before conversion: learn its predictions."),
    click.option("--distill", type=click.FloatRange(0, 1), default=1.0, show_default=True,
                 help="Share of the teacher in the loss; the rest is cross-entropy."),
    click.option("--temperature", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True),
    click.option("--match", type=click.Choice(["attention", "hidden"]), help="Also match the teacher's attention "
                 "outputs, or the outputs of its layers."),
    click.option("--match-weight", type=click.FloatRange(min=0), default=1.0, show_default=True),
]  # fmt: skip
_RUN = [
    click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
                 help="The trained checkpoint; DIR-state holds the run until it is done."),
    click.option("--overwrite", is_flag=True, help="Replace the checkpoint at DIR once the new one is complete."),
    click.option("--save-every", type=click.IntRange(min=1), metavar="STEPS"),
    click.option("--save-minutes", type=click.FloatRange(min=0, min_open=True), metavar="MINUTES"),
    click.option("--keep-last", type=click.IntRange(min=1), default=2, show_default=True, help="States."),
    click.option("--keep-state", is_flag=True, help="Keep DIR-state after the end."),
    click.option("--resume", is_flag=True, help="Continue from the last state in DIR-state."),
    click.option("--eval-every", type=click.IntRange(min=1), metavar="STEPS", help="Held-out loss.  [default: at the "
                 "start and the end]"),
    click.option("--patience", type=click.IntRange(min=1), default=10, show_default=True,
                 help="Give up after so many steps in a row that are not finite."),
    click.option("--report-to", multiple=True, help="tensorboard (in DIR-logs), wandb, trackio ...; several times for "
                 "several."),
    click.option("--revision", help="Branch, tag or commit of a hub id."),
    click.option("--trust-remote-code", is_flag=True, help="Run code that a checkpoint brings (dangerous)."),
    click.option("--dry-run", is_flag=True, help="Print what would be trained on what, and stop."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, the rest on stderr."),
    click.option("-v", "--verbose", is_flag=True, help="Tracebacks of defects."),
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
]  # fmt: skip


@click.command(context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("model", metavar="MODEL")
@with_options(_DATA, _TRAINING, _TEACHER, _RUN)
@version_option("gqa-uptrain")
def command(resume: bool, dry_run: bool, as_json: bool, quiet: bool, verbose: bool, **options: Any) -> None:
    """Train the converted checkpoint MODEL further, on a fraction of the data, and write a plain checkpoint.

    Runs on one CPU or GPU as it is, on many through `accelerate launch -m gqa.uptrain` or `torchrun -m gqa.uptrain`.
    """
    import transformers

    from gqa.uptrain import run as steps
    from gqa.uptrain.loop import DivergedError, StoppedError
    from gqa.uptrain.options import TrainOptions
    from gqa.uptrain.summary import plan_record, plan_text, result_text

    transformers.utils.logging.set_verbosity_error()
    setup = steps.prepare(TrainOptions(**options), resume)
    main = setup.accelerator.is_main_process

    def say(text: str) -> None:
        if main and not quiet:
            click.echo(text, err=as_json)

    say(plan_text(setup))
    if dry_run:
        record = plan_record(setup)
    else:
        try:
            progress, record = steps.run(setup, resume=resume, quiet=quiet, words=sys.argv[1:])
        except StoppedError as stopped:
            told = f"stopped; step {stopped.step} is saved in {setup.states.directory}, continue with --resume"
            _leave(main, told, 128 + stopped.number)
        except DivergedError as error:
            _leave(main, str(error), 1)
        say(result_text(setup, progress))
    if main and as_json:
        click.echo(json.dumps(record))


def _leave(main: bool, message: str, code: int) -> NoReturn:
    """One process tells for all."""
    if main:
        fail("gqa-uptrain", message, code)
    sys.exit(code)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    run(command, "gqa-uptrain", "nothing half-written is left")


if __name__ == "__main__":
    main()
