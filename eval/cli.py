"""gqa-eval: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import math
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gqa.checkpoint.console import (
    CONTEXT_SETTINGS,
    ByteSize,
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
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.provenance import asked

if TYPE_CHECKING:
    from gqa.eval.subjects import Subject
    from gqa.eval.tasks import Harness

_EPILOG = """\b
Examples:
  gqa-eval SRC SRC-gqa2 --data heldout.jsonl
  gqa-eval SRC SRC-gqa8 SRC-mqa --data stdlib:heldout --kl --decode -o report
  gqa-eval SRC SRC-gqa8 --data wiki.test.txt --protocol llama.cpp --context 512
  gqa-eval SRC SRC-gqa8 --memory 80GB --tensor-parallel 4
  gqa-eval SRC SRC-gqa8 --tasks arc_easy,hellaswag --fail-above 1.05 --data heldout.jsonl
  torchrun --nproc_per_node 8 -m gqa.eval SRC SRC-gqa8 --data heldout.jsonl
"""
_ABOVE = 3
_LENGTHS = tuple(4096 << n for n in range(6))  # that RULER's tasks have metrics for


def ratio(text: str) -> float:
    """A finite number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise click.BadParameter(f"{text!r} is not a ratio; give one like 1.05")
    return found


_POSITIVE = click.IntRange(min=1)
_TEXT = [
    option("--data", multiple=False, callback=None, metavar="SOURCE", help="The text to measure on: a file (txt, "
           "jsonl, csv, parquet, arrow), a directory or glob of them, stdlib:heldout, or a hub data set."),
    option("--field"),
    option("--target-field", metavar="NAME", help="The column to predict from --field, of encoder-decoders."),
    option("--data-config"),
    option("--split", metavar="NAME", help="The split of a hub data set.  [default: test]"),
    option("--protocol", type=Choice(["rolling", "strided", "llama.cpp"]), help="How text is cut into windows: as "
           "lm-evaluation-harness does, overlapping (needs --stride), or as llama-perplexity does.  [default: rolling, "
           "strided with --stride]"),
    option("--context", type=Count(4), help="Tokens of a window.  [default: the model's positions, 2048 at most; 512 "
           "at most for llama.cpp]"),
    option("--stride", type=Count(), help="Tokens from one window to the next."),
    option("--tokens", aliases="--max-tokens", help="Stop after the document that reaches so many tokens."),
    option("--beyond-positions", is_flag=True, help="Allow a context longer than the model's."),
]  # fmt: skip
_MEASURE = [
    option("--kl", is_flag=True, help="Compare next-token distributions and attention outputs with the baseline's, in "
           "lockstep."),
    option("--baseline-cache", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Keep the "
           "baseline's distributions of --kl here (2 bytes x vocabulary x tokens), so that it runs once for many "
           "commands; attention outputs are not compared then."),
    option("--recall/--no-recall", default=None, help="Ask for what stands in the context: second copies of text, of "
           "samples and of random tokens, values by their keys, passkeys.  [default: with -o]"),
    option("--decode", is_flag=True, help="Time prefill and decoding."),
    option("--decode-batches", aliases="--batches", type=Several(_POSITIVE), default="1,8", help="How many sequences "
           "--decode times at once."),
    option("--decode-contexts", aliases="--contexts", type=Several(Count()), help="How long the prompts of "
           "--decode are.  [default: a half, all "
           "of the positions, 4096 at most]"),
    option("--decode-steps", aliases="--steps", type=_POSITIVE, default=32, help="How many tokens "
           "--decode writes."),
    option("--decode-repeats", aliases="--repeats", type=_POSITIVE, default=5, help="How often "
           "--decode times each."),
    option("--memory", type=ByteSize(), metavar="SIZE", help="Say what fits into so much memory of a device."),
    option("--tensor-parallel", default=1, help="How many devices share a model, of --memory."),
    option("--tasks", metavar="NAMES", help="Measure tasks of lm-evaluation-harness, separated by commas."),
    option("--shots", type=click.IntRange(min=0), help="How many examples --tasks shows.  [default: each task's own]"),
    option("--limit", type=_POSITIVE, help="How many documents of each task --tasks takes."),
    option("--include-tasks", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
           help="A directory with definitions of tasks of your own."),
    option("--fail-above", type=ratio, metavar="RATIO", help="Exit with 3 where a perplexity is more than RATIO x the "
           "baseline's."),
]  # fmt: skip
_RUN = [
    option("--batch-size", type=_POSITIVE, default=8, help="How many windows are scored at a time."),
    option("--precision", aliases="--dtype", type=Precision("auto", "float32", "bfloat16", "float16"), default="auto",
           help="What is computed in; auto: as stored."),
    option("--device"),
    option("--attn-implementation"),
    option("--compile", is_flag=True, help="Score text with models compiled by torch.compile."),
    option("--revision", help="The branch, tag or commit of hub ids."),
    option("--trust-remote-code"),
    option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write "
           "results.json, report.html and pictures here."),
    option("--overwrite", help="Replace the report at DIR."),
    option("--json"),
    option("--verbose", help="Show every table, and where an unexpected error comes from."),
    option("--quiet", help="Show no progress and no tables."),
]  # fmt: skip
# Options that mean nothing without another.
_NEEDS = {
    "data": ("kl", "fail_above", "field", "target_field", "data_config", "split", "protocol", "stride", "tokens"),
    "kl": ("baseline_cache",),
    "decode": ("decode_batches", "decode_contexts", "decode_steps", "decode_repeats"),
    "memory": ("tensor_parallel",),
    "tasks": ("shots", "limit", "include_tasks"),
    "output": ("overwrite",),
}


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("baseline", metavar="BASELINE")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@with_options(_TEXT, _MEASURE, _RUN)
@version_option
def command(baseline: str, models: tuple[str, ...], **options: Any) -> None:
    """Compare checkpoints on the same text: quality, memory and speed side by side.

    BASELINE and each MODEL are directories or hub ids; every MODEL is shown with its difference from BASELINE.
    """
    from gqa.eval.page import no_pictures
    from gqa.eval.report import as_json, check_output, tables, verdicts, write_report
    from gqa.eval.tables import wrapped

    ctx = click.get_current_context()
    given = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    check(options, given, len(models))
    if options["output"]:
        check_output(options["output"], options["overwrite"])
    results = measure((baseline, *models), options, shlex.join(["gqa-eval", *sys.argv[1:]]))
    if not results:  # another rank reports
        return
    if not options["quiet"]:
        lead = "\n".join(click.style(wrapped(line, "  "), bold=True) for line in verdicts(results))
        parts = [table.text().partition("\n") for table in tables(results, every=options["verbose"])]
        shown = [f"{click.style(title, bold=True)}\n{rest}" for title, _, rest in parts]
        click.echo("\n\n".join(filter(None, [lead, *shown])), err=options["json"])
    if options["output"]:
        written = [*write_report(results, options["output"]), *filter(None, [no_pictures()])]
        if not options["quiet"]:
            click.echo(f"\nwritten to {options['output']}: {', '.join(written)}", err=options["json"])
    if options["json"]:
        click.echo(as_json(results))
    _gate(results, options["fail_above"])


def check(options: dict[str, Any], given: set[str], others: int) -> None:
    """Raise RefusedError where options do not go together; `given` are those that somebody said."""
    if not any(options[name] for name in ("data", "recall", "decode", "memory", "tasks")):
        raise RefusedError("nothing to measure: give text with --data, or --recall, --decode, --memory or --tasks")
    for leader, followers in _NEEDS.items():
        if not options[leader] and (alone := [name for name in followers if name in given]):
            raise RefusedError(f"{_flag(alone[0])} means nothing without {_flag(leader)}: give both or none")
    for name in ("kl", "fail_above"):
        if options[name] and not others:
            raise RefusedError(f"{_flag(name)} compares checkpoints: give at least two")
    protocol, stride = options["protocol"], options["stride"]
    if stride and protocol not in (None, "strided"):
        raise RefusedError(f"--stride does not go with --protocol {protocol}, whose windows are fixed")
    if protocol == "strided" and not stride:
        raise RefusedError("--protocol strided needs --stride")
    if options["target_field"] and (protocol or stride):
        raise RefusedError("--target-field gives pairs of texts, which are not cut into windows: leave --protocol out")
    options["protocol"] = protocol or ("strided" if stride else "rolling")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def measure(names: tuple[str, ...], options: dict[str, Any], words: str) -> dict[str, Any]:
    """Everything that was asked for in `words`, as one JSON-ready object; empty on all ranks but the first.

    What can be refused without running a model is refused first.
    """
    import transformers

    from gqa.checkpoint.loading import ranks
    from gqa.eval import evaluate
    from gqa.eval.subjects import open_subjects
    from gqa.eval.text import choose_context, read_text

    transformers.utils.logging.set_verbosity_error()
    main, share = ranks().is_main_process, ranks().num_processes
    quiet = options["quiet"] or not main
    how = evaluate.Options(
        device=evaluate.usable_device(options["device"]), compare=options["kl"],
        dtype=options["precision"], attention=options["attn_implementation"],
        **{name: options[name] for name in ("batch_size", "compile", "baseline_cache")},
    )  # fmt: skip
    say_device(how.device, quiet)
    subjects = open_subjects(names, options["trust_remote_code"], options["revision"])
    harness = _find_tasks(subjects, options, quiet) if options["tasks"] else None
    results: dict[str, Any] = {
        "command": words,
        "recipe": asked(),
        **evaluate.environment(how.device, ["lm_eval"] if options["tasks"] else []),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        "models": [subject.record for subject in subjects],
    }
    recall_context = _recall_context(subjects, options)
    batches, steps, repeats = (options[f"decode_{name}"] for name in ("batches", "steps", "repeats"))
    contexts = evaluate.decode_contexts(subjects, options["decode_contexts"], steps) if options["decode"] else ()
    if options["memory"]:
        context = choose_context(subjects, options["context"], options["beyond_positions"])
        results["memory"] = evaluate.fit(subjects, options["memory"], options["tensor_parallel"], context)
    with ExitStack() as stack:

        def bar(total: int, unit: str, name: str) -> Any:
            return stack.enter_context(progress_bar(total, unit, name, quiet)).update

        text = None
        if options["data"]:
            text = read_text(subjects, options)
            results["text"] = {"data": options["data"], **text.record()}
            tokens = text.tokens // share
            evaluate.measure_quality(subjects, text, how, lambda name: bar(tokens, "tok", name))
        if recall_context:
            results["recall"] = {"context": recall_context}
            try:
                evaluate.measure_recall(
                    subjects, text, recall_context, how,
                    lambda name, tokens: bar(tokens // share, "tok", f"{name}, recall"), options["context"] is None,
                )  # fmt: skip
            except RefusedError as error:  # what a report has by itself does not cost what was asked for
                if options["recall"]:
                    raise
                results["recall"]["refused"] = str(error)
        if not main:  # the rest is not split
            return {}
        if contexts:
            runs = bar(len(subjects) * len(batches) * len(contexts) * repeats, "run", "decoding")
            evaluate.time_decoding(subjects, how, batches, contexts, steps, repeats, runs)
    if harness:
        evaluate.run_tasks(subjects, how, harness)
    return results


def _recall_context(subjects: list[Subject], options: dict[str, Any]) -> int | None:
    """Tokens in which recall is measured: where it is asked for, and in reports where it can be and is not declined."""
    from gqa.eval.evaluate import check_recall
    from gqa.eval.text import choose_context

    asked = options["recall"]
    if not (options["output"] if asked is None else asked):
        return None
    context = choose_context(subjects, options["context"], options["beyond_positions"])
    try:
        check_recall(subjects[0], context)
    except RefusedError:
        if asked:
            raise
        return None
    return context


def _find_tasks(subjects: list[Subject], options: dict[str, Any], quiet: bool) -> Harness:
    from gqa.eval.tasks import Harness

    names = [name.strip() for name in options["tasks"].split(",") if name.strip()]
    if not names:
        raise RefusedError("--tasks names no task; `lm-eval ls tasks` lists them")
    for subject in subjects:
        _ = subject.tokenizer
    quiet = quiet or not sys.stderr.isatty()
    limits = [subject.positions for subject in subjects if subject.positions]
    lengths = [length for length in _LENGTHS if not limits or length <= min(limits)]
    told = {"tokenizer": subjects[0].path, "max_seq_lengths": lengths or [_LENGTHS[0]]}
    return Harness(names, options["include_tasks"], options["shots"], options["limit"], quiet, told)


def _gate(results: dict[str, Any], limit: float | None) -> None:
    if limit is None:
        return
    found = {model["name"]: model["against_baseline"]["ratio"] for model in results["models"][1:]}
    above = [f"{name} {times:.4g} x" for name, times in found.items() if not times <= limit]
    if above:
        fail("gqa-eval", f"{', '.join(above)} the baseline's perplexity, above {limit:g} x", _ABOVE)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says, 3 where --fail-above finds more."""
    run(command, "gqa-eval", "no report was written")
