"""gqa-convert: options, what is printed, exit codes.

Nothing here imports torch before it is needed.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.write import finite
from gqa.convert.methods.table import METHODS
from gqa.convert.options import ConvertOptions
from gqa.core import console
from gqa.core.console import Watcher, print_json, print_lines
from gqa.core.errors import OutputError, RefusedError
from gqa.core.options import command as command_of

if TYPE_CHECKING:
    from gqa.convert.api import Plan
    from gqa.convert.methods.base import Method


_LONG = 15 * 60  # seconds
_QUICK = METHODS["aligned"]
_QUICK_LOSS = "with 1 of 3 KV heads, SmolLM2-135M's perplexity rises x12.2 (calibrated: x2.10)"


def _method_lines(method: Method) -> str:
    """What --help says of a method, in lines that fit a narrow terminal."""
    text = f"{method.name:12}reads {method.reads}; takes {method.cost}; heads are {method.result}"
    return textwrap.fill(text, 78, initial_indent=2 * " ", subsequent_indent=14 * " ")


_METHODS = "\n".join(_method_lines(method) for method in METHODS.values())
_EPILOG = f"""\
Methods, and what each reads (text: --data, or self-generated):
{_METHODS}

Examples:
  gqa-convert --kv-heads 2 examples/stdlib-mha
  gqa-convert --kv-heads 2 --method refined examples/stdlib-mha
  gqa-convert --kv-heads 2 --method mean examples/stdlib-mha  # as in the paper
  gqa-convert --kv-heads 1 --dry-run HuggingFaceTB/SmolLM2-135M-Instruct
"""


@command_of(ConvertOptions, _EPILOG)
def command(options: ConvertOptions) -> None:
    """Rewrite the checkpoint MODEL (a directory or a hub id) with G key/value heads.

    KV heads are merged (or repeated, if G is larger); the rest is copied byte for byte. The KV
    cache shrinks with the number of heads. No data is needed: the default method calibrates on text
    that the model generates. The GQA paper's mean pooling is --method mean.
    """
    from gqa.convert.api import prepare
    from gqa.convert.summary import plan_record
    from gqa.models.loading import quiet_transformers

    with quiet_transformers():  # what matters of its hints is in our errors
        with Watcher(options.quiet) as bar:
            plan = prepare(options, bar)
        if options.dry_run:  # else they are printed with those of the result
            _warn(plan.warnings)
        if options.is_set("method") and plan.merge_method is None:
            _say(
                f"note        --method is not used: none of the {plan.config.main.kv} heads are "
                "merged",
                options,
            )

        record = plan_record(plan, options.kv_budget) | {"dry_run": options.dry_run}
        if options.dry_run:
            record |= _dry_run(plan, options)
        else:
            record |= _convert(plan, options)
        if options.json:
            print_json(finite(record))


def _convert(plan: Plan, options: ConvertOptions) -> dict[str, Any]:
    """Convert, print the result, and return its part of the record, JSON-ready."""
    from gqa.convert.advice import next_line, quality_line
    from gqa.convert.api import convert, open_output
    from gqa.convert.summary import error_lines, plan_lines, size

    start = time.monotonic()
    open_output(options, plan)  # a bad output is refused before anything is printed
    if plan.merge_method is not None and plan.needs_maps:
        _say_cost(plan, plan.merge_method, options)
    with Watcher(options.quiet) as bar:
        result = convert(plan, options, bar, sys.argv[1:])

    _say_lines(plan_lines(plan, tensors=options.verbose), options)
    _say_lines(error_lines(result.maps), options)
    seconds = time.monotonic() - start
    _say(
        f"written     {result.out}: {size(plan.total_bytes)} in {seconds:.1f} s, verified", options
    )
    if plan.merge_method is not None and not options.quiet:
        quality = quality_line(plan, result.maps, options, result.out)
        _say(f"quality     {quality}", options)
        advice = next_line(plan, result.maps, options, result.out, result.record["source"])
        if advice:
            _say(f"next        {advice}", options)
    _warn(result.warnings)

    measured = {
        name: value for name, value in result.record.items() if name in ("quality", "layer_errors")
    }
    return {"output": str(result.out), **measured, "warnings": list(result.warnings)}


def _say_cost(plan: Plan, method: Method, options: ConvertOptions) -> None:
    """Print the estimated time of a method that reads the model and, if it is long, the name of a
    faster method.
    """
    from gqa.convert.estimate import duration, estimate

    device = options.maps.device
    seconds, memory = estimate(plan, method, options.maps)
    text = f"estimate    about {duration(seconds)} on {device}"
    has_quick = _QUICK in plan.available_methods
    if seconds > _LONG and plan.reads_text and has_quick:
        quick_seconds, _ = estimate(plan, _QUICK, options.maps)
        text += (
            f"; --method {_QUICK.name} reads only the weights and takes about "
            f"{duration(quick_seconds)}, but loses more: {_QUICK_LOSS}"
        )
    _say(text, options)
    _warn(_memory_warnings(plan, options, device, memory))


def _memory_warnings(plan: Plan, options: ConvertOptions, device: str, memory: int) -> list[str]:
    """A warning if the plan's method takes more memory than there is."""
    from gqa.convert.summary import size
    from gqa.core.devices import total_memory

    total = total_memory(device)
    if total is None or memory <= total:
        return []
    advice = ""
    generates_text = plan.reads_text and not options.is_set("data")
    if generates_text:
        advice = "; --data takes less, because nothing is sampled"
    return [
        f"--method {plan.method_name} takes about {size(memory)} of memory; {device} has "
        f"{size(total)}{advice}"
    ]


def _dry_run(plan: Plan, options: ConvertOptions) -> dict[str, Any]:
    """Print the plan, and time and memory of every method that the model allows.

    Returns time and memory, JSON-ready.
    """
    from gqa.convert.api import open_output
    from gqa.convert.estimate import duration, estimate
    from gqa.convert.summary import plan_lines, size

    _say_lines(plan_lines(plan, tensors=options.verbose), options)

    warnings: list[str] = []
    try:
        open_output(options, plan)
    except (RefusedError, OutputError) as error:
        warnings.append(str(error))

    costs = {}
    for method in plan.available_methods:
        device = options.maps.device
        seconds, memory = estimate(plan, method, options.maps)
        cost = f"about {duration(seconds)} on {device}, {size(memory)} of memory"
        _say(f"estimate    {method.name:12}{cost}", options)
        costs[method.name] = {"seconds": round(seconds, 1), "memory_bytes": memory}
        if method == plan.merge_method:
            warnings += _memory_warnings(plan, options, device, memory)

    _warn(warnings)
    _say("dry run     nothing was written", options)
    if not costs:  # no heads are merged
        return {}
    return {"estimates": costs}


def _say(line: str, options: ConvertOptions) -> None:
    _say_lines([line], options)


def _say_lines(lines: Iterable[str], options: ConvertOptions) -> None:
    if not options.quiet:
        print_lines(lines, err=options.json)


def _warn(warnings: Sequence[str]) -> None:
    print_lines((f"warning: {warning}" for warning in warnings), err=True)


def main() -> None:
    """Entry point; exit codes as `gqa.core.console.run` says."""
    progress_note = (
        "stored layers and finished batches of generated text are kept, the same command continues "
        "after them"
    )
    console.run(command, "gqa-convert", f"no partial result is left; {progress_note}")
