"""gqa-eval: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gqa.convert.console import CONTEXT_SETTINGS, ByteSize, fail, progress_bar, run, version_option
from gqa.convert.errors import RefusedError

if TYPE_CHECKING:
    from gqa.eval.perplexity import Text
    from gqa.eval.subjects import Subject

_EPILOG = """\b
Examples:
  gqa-eval SRC SRC-gqa2 --data heldout.jsonl
  gqa-eval SRC SRC-gqa8 SRC-mqa --data stdlib:heldout --kl --decode -o report
  gqa-eval SRC SRC-gqa8 --data wiki.test.txt --protocol llama.cpp --context 512
  gqa-eval SRC SRC-gqa8 --memory 80GB --tensor-parallel 4
  gqa-eval SRC SRC-gqa8 --tasks arc_easy,hellaswag --fail-above 1.05 --data heldout.jsonl
"""
_ABOVE = 3


class Numbers(click.ParamType[tuple[int, ...]]):
    """`1,8,32`."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of positive numbers; give them like 1,8,32", param, ctx)
        return tuple(int(part) for part in parts)


def _text_options(command: Any) -> Any:
    for option in reversed(
        [
            click.option("--data", metavar="SOURCE", help="Text: a file (txt, jsonl, csv, parquet, arrow), a directory "
                         "or glob of them, stdlib:heldout, or a hub data set."),
            click.option("--field", default="text", show_default=True, help="Of jsonl, csv, parquet and data sets."),
            click.option("--target-field", help="Of encoder-decoders: the text to predict from --field."),
            click.option("--data-config", metavar="NAME", help="Configuration of a hub data set."),
            click.option("--split", help="Split of a hub data set.  [default: test]"),
            click.option("--protocol", type=click.Choice(["rolling", "strided", "llama.cpp"]),
                         help="How text is cut into windows: as lm-evaluation-harness does, overlapping (needs "
                         "--stride), or as llama-perplexity does.  [default: rolling, strided with --stride]"),
            click.option("--context", type=click.IntRange(min=2), help="Tokens of a window.  [default: the model's "
                         "positions, 2048 at most; 512 for llama.cpp]"),
            click.option("--stride", type=click.IntRange(min=1), help="Tokens from one window to the next."),
            click.option("--max-tokens", type=click.IntRange(min=1), help="Stop after the document that reaches it."),
            click.option("--beyond-positions", is_flag=True, help="Allow a context longer than the model's."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def _measure_options(command: Any) -> Any:
    for option in reversed(
        [
            click.option("--kl", "compare", is_flag=True, help="Compare next-token distributions and attention outputs "
                         "with the baseline's, in lockstep."),
            click.option("--baseline-cache", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
                         help="With --kl: keep the baseline's distributions here (2 bytes x vocabulary x tokens)."),
            click.option("--decode", is_flag=True, help="Time prefill and decoding."),
            click.option("--batches", type=Numbers(), default="1,8", show_default=True, help="Of --decode."),
            click.option("--contexts", type=Numbers(), help="Of --decode.  [default: a half, all of the positions, "
                         "4096 at most]"),
            click.option("--steps", type=click.IntRange(min=1), default=32, show_default=True, help="Of --decode."),
            click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Of --decode."),
            click.option("--memory", type=ByteSize(), metavar="SIZE", help="Say what fits into it, of one device."),
            click.option("--tensor-parallel", type=click.IntRange(min=1), default=1, show_default=True,
                         metavar="N", help="Of --memory: devices that share one model."),
            click.option("--tasks", metavar="NAMES", help="Tasks of lm-evaluation-harness, separated by commas."),
            click.option("--shots", type=click.IntRange(min=0), help="Of --tasks."),
            click.option("--limit", type=click.IntRange(min=1), help="Of --tasks: documents of each."),
            click.option("--include-tasks", type=click.Path(path_type=Path, exists=True), metavar="DIR",
                         help="Directory of task definitions of your own."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def _run_options(command: Any) -> Any:
    for option in reversed(
        [
            click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Windows."),
            click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
                         show_default=True, help="To compute in; auto: as stored."),
            click.option("--device", help="cpu, cuda, cuda:1 ...  [default: a GPU if there is one]"),
            click.option("--attention", default="sdpa", show_default=True, help="sdpa, eager, flash_attention_2 ..."),
            click.option("--compile", is_flag=True, help="Compile the models with torch.compile."),
            click.option("--revision", help="Branch, tag or commit of hub ids."),
            click.option("--trust-remote-code", is_flag=True, help="Run code that a checkpoint brings (dangerous)."),
            click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
                         help="Write results.json, report.md and plots here."),
            click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, the rest on stderr."),
            click.option("--fail-above", type=click.FloatRange(min=0), metavar="RATIO",
                         help="Exit with 3 where a perplexity is more than RATIO x the baseline's."),
            click.option("-v", "--verbose", is_flag=True, help="Every table; tracebacks of defects."),
            click.option("-q", "--quiet", is_flag=True, help="No progress, no tables."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


@click.command(context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("baseline", metavar="BASELINE")
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@_text_options
@_measure_options
@_run_options
@version_option("gqa-eval")
def command(baseline: str, models: tuple[str, ...], **options: Any) -> None:
    """Compare checkpoints on the same text: quality, memory and speed side by side.

    BASELINE and each MODEL are directories or hub ids; every MODEL is shown with its difference from BASELINE.
    """
    _check(options, len(models))
    results = evaluate((baseline, *models), options)
    if not results:  # another rank reports
        return
    from gqa.eval.report import tables, write_report

    if not options["quiet"]:
        shown = [table.text() for table in tables(results, every=options["verbose"])]
        click.echo("\n\n".join(shown), err=options["as_json"])
    if options["output"]:
        written = write_report(results, options["output"])
        click.echo(f"\nwritten to {options['output']}: {', '.join(written)}", err=options["as_json"])
    if options["as_json"]:
        click.echo(json.dumps(results))
    _gate(results, options["fail_above"])


def _check(options: dict[str, Any], others: int) -> None:
    if not (options["data"] or options["decode"] or options["memory"] or options["tasks"]):
        raise RefusedError("nothing to measure: give text with --data, or --decode, --memory or --tasks")
    for name in ("compare", "fail_above"):
        if options[name] and not (options["data"] and others):
            flag = "--kl" if name == "compare" else "--fail-above"
            raise RefusedError(f"{flag} compares on text: give --data and at least two checkpoints")
    if options["stride"] and options["protocol"] not in (None, "strided"):
        raise RefusedError(f"--stride does not go with --protocol {options['protocol']}, whose windows are fixed")
    if options["protocol"] == "strided" and not options["stride"]:
        raise RefusedError("--protocol strided needs --stride")
    if options["baseline_cache"] and not options["compare"]:
        raise RefusedError("--baseline-cache keeps what --kl compares with: give both")
    options["protocol"] = options["protocol"] or ("strided" if options["stride"] else "rolling")


def evaluate(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Everything that was asked for, as one JSON-ready object; empty on all ranks but the first."""
    import transformers

    from gqa.convert.loading import ranks
    from gqa.eval.evaluate import Options, environment
    from gqa.eval.subjects import open_subjects

    transformers.utils.logging.set_verbosity_error()
    state = ranks()
    how = Options(
        batch_size=options["batch_size"],
        dtype=options["dtype"],
        device=options["device"] or str(state.device),
        attention=options["attention"],
        compile=options["compile"],
        trust_remote_code=options["trust_remote_code"],
        revision=options["revision"],
        compare=options["compare"],
        baseline_cache=options["baseline_cache"],
    )
    subjects = open_subjects(names, how.trust_remote_code, how.revision)
    records = [subject.record() for subject in subjects]
    results: dict[str, Any] = {
        "command": shlex.join(["gqa-eval", *sys.argv[1:]]),
        **environment(how.device),
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in options.items()},
        "models": records,
    }
    quiet = options["quiet"] or not state.is_main_process
    if options["data"]:
        text = _read_text(subjects, options)
        _quality(subjects, records, text, how, quiet)
        results["text"] = {"data": options["data"], **text.record()}
    if not state.is_main_process:  # the rest is not split
        return {}
    if options["memory"]:
        results["memory"] = _memory(subjects, records, options)
    if options["decode"] or options["tasks"]:
        _run_loaded(subjects, records, how, options)
    return results


def _read_text(subjects: list[Subject], options: dict[str, Any]) -> Text:
    from gqa.corpus.sources import parse_source
    from gqa.eval.evaluate import check_models_agree, choose_context
    from gqa.eval.perplexity import make_pairs, make_text

    def texts(field: str) -> Any:
        split = options["split"] or ("test" if ":" not in options["data"] else None)
        source = parse_source(options["data"], field=field, config=options["data_config"], split=split)
        return (document.text for document in source.documents())

    first = subjects[0]
    wanted = options["context"] or (512 if options["protocol"] == "llama.cpp" else None)
    context = choose_context(subjects, wanted, options["beyond_positions"])
    check_models_agree(subjects, next(iter(texts(options["field"])))[:2000])
    if first.config.is_encoder_decoder != bool(options["target_field"]):
        raise RefusedError(
            f"{first.name} is an encoder-decoder: name the text to predict with --target-field"
            if first.config.is_encoder_decoder
            else f"--target-field is for encoder-decoders, {first.name} is none"
        )
    if options["target_field"]:
        pairs = zip(texts(options["field"]), texts(options["target_field"]), strict=True)
        start = first.config.decoder_start_token_id
        return make_pairs(pairs, first.tokenizer, start, context)
    return make_text(
        texts(options["field"]), first.tokenizer, protocol=options["protocol"], context=context,
        stride=options["stride"], max_tokens=options["max_tokens"],
    )  # fmt: skip


def _quality(subjects: list[Subject], records: list[dict[str, Any]], text: Text, how: Any, quiet: bool) -> None:
    from contextlib import ExitStack

    from gqa.eval.evaluate import measure_quality

    with ExitStack() as stack:

        def bar(name: str) -> Any:
            return stack.enter_context(progress_bar(text.tokens, "tok", name, quiet)).update

        for row, record in zip(measure_quality(subjects, text, how, bar), records, strict=True):
            record |= row.record


def _memory(subjects: list[Subject], records: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    from gqa.eval.evaluate import choose_context
    from gqa.eval.memory import largest_batch, largest_context

    context = choose_context(subjects, options["context"], options["beyond_positions"])
    memory, ranks = options["memory"], options["tensor_parallel"]
    for subject, record in zip(subjects, records, strict=True):
        if subject.cache:
            record["kv_cache"]["fits"] = {
                "batch": largest_batch(subject.cache, subject.weight_bytes, memory, context, ranks),
                "longest": largest_context(subject.cache, subject.weight_bytes, memory, ranks),
            }
    return {"bytes": memory, "ranks": ranks, "context": context}


def _run_loaded(subjects: list[Subject], records: list[dict[str, Any]], how: Any, options: dict[str, Any]) -> None:
    """What needs every model in memory at once (decoding takes turns), or a loaded model for another tool."""
    from dataclasses import asdict

    from gqa.eval.decode import measure_decode
    from gqa.eval.evaluate import load
    from gqa.eval.memory import measured_cache_bytes, model_cache
    from gqa.eval.tasks import run_tasks

    models = {subject.name: load(subject, how) for subject in subjects}
    if options["decode"]:
        contexts = options["contexts"] or _contexts(subjects, options["steps"])
        points = measure_decode(models, options["batches"], contexts, options["steps"], options["repeats"])
        for record in records:
            model = models[record["name"]]
            found = [asdict(point) for point in points[record["name"]]]
            record["decode"] = {"steps": options["steps"], "repeats": options["repeats"], "points": found}
            record["kv_cache"]["measured"] = {
                "tokens": contexts[0],
                "bytes": measured_cache_bytes(model, contexts[0], 1),
                "formula": model_cache(model).bytes_at(contexts[0]),
            }
    if options["tasks"]:
        for subject, record in zip(subjects, records, strict=True):
            record["tasks"] = run_tasks(
                models[subject.name], subject.tokenizer, options["tasks"].split(","), batch_size=how.batch_size,
                shots=options["shots"], limit=options["limit"], include=options["include_tasks"],
            )  # fmt: skip


def _contexts(subjects: list[Subject], steps: int) -> tuple[int, ...]:
    longest = min([subject.positions or 4096 for subject in subjects] + [4096])
    return tuple(dict.fromkeys(max(1, share - steps) for share in (longest // 2, longest)))


def _gate(results: dict[str, Any], limit: float | None) -> None:
    if limit is None:
        return
    for model in results["models"][1:]:
        if not model["against_baseline"]["ratio"] <= limit:
            ratio = model["against_baseline"]["ratio"]
            fail("gqa-eval", f"{model['name']}: {ratio:.4g} x the baseline's perplexity, above {limit}", _ABOVE)


def main() -> None:
    """Entry point; exit codes as `gqa.convert.console.run` says, 3 where --fail-above finds more."""
    run(command, "gqa-eval", "no report was written")


if __name__ == "__main__":
    main()
