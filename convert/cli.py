"""gqa-convert: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint import console
from gqa.checkpoint.errors import one_line
from gqa.checkpoint.options import command as command_of
from gqa.convert.merge.watcher import Watcher
from gqa.convert.methods import ALIGNING, AUTO, METHODS
from gqa.convert.options import ConvertOptions

if TYPE_CHECKING:
    from gqa.convert.api import Conversion, Plan


def _methods() -> str:
    """One line for each, with what it needs and costs."""
    lines = [f"  {AUTO:12}weights; seconds to minutes: the best that reads no text"]
    lines += [f"  {name:12}{how.needs}; {how.cost}: {how.result}" for name, how in METHODS.items()]
    return "\n".join(lines)


_EPILOG = f"""\b
Methods, what they need (text: --data, or the model's own), cost and do:
{_methods()}
\b
Examples:
  gqa-convert --groups 8 ./Llama-2-7b-hf
  gqa-convert --groups 8 --dry-run meta-llama/Llama-2-7b-hf
  gqa-convert --groups 8 --method refined ./Llama-2-7b-hf
  gqa-convert --groups 8 --method mean ./Llama-2-7b-hf    (as in the GQA paper; it needs training)
"""


@command_of(ConvertOptions, _EPILOG)
def command(options: ConvertOptions) -> None:
    """Rewrite the checkpoint MODEL (a directory or a hub id) with G key/value heads.

    Keys and values of neighbouring heads are merged (or, upwards, repeated), everything else is copied byte for byte;
    the result loads with plain transformers and its KV cache shrinks with the number of heads. Without --method it is
    the best that needs only the weights; the GQA paper's mean pooling is --method mean.
    """
    from gqa.checkpoint.loading import quiet_transformers

    options.check()
    console.check_alone()
    with quiet_transformers():  # what matters of its hints is in our errors
        plan, allotment = _plan(options)
        _announce(plan, options)
        if options.dry_run:
            _report_dry_run(plan, options)
        else:
            _convert(plan, allotment, options)


def _plan(options: ConvertOptions) -> tuple[Plan, dict[str, Any]]:
    """The plan; of --kv-budget also the heads and losses of its layers, JSON-ready."""
    from gqa.convert.api import plan_for
    from gqa.convert.summary import allotment_text

    if options.kv_budget:
        console.say_device(options.maps().device, options.quiet)
    with Watcher(options.quiet) as bar:
        plan, allotment = plan_for(options, bar)
    if not allotment:
        return plan, {}
    heads, losses = allotment
    _say(allotment_text(heads, losses), options)
    return plan, {"allotment": {"kv_budget": options.kv_budget, "heads": heads, "nats": losses}}


def _announce(plan: Plan, options: ConvertOptions) -> None:
    """Print what is known before anything is done: the method that was chosen and why, and what it lacks."""
    _warn(plan.warnings if plan.why or options.dry_run else ())
    if options.given("method") and plan.method not in METHODS:
        _say(f"note        --method is not used: none of the {plan.config.main.kv} heads are merged", options)
    if plan.why:
        _say(f"method      {plan.method} (--method {AUTO}): {plan.why}", options)


def _convert(plan: Plan, allotment: Mapping[str, Any], options: ConvertOptions) -> None:
    from gqa.convert.api import convert_as
    from gqa.convert.summary import size

    quiet, start = options.quiet, time.monotonic()
    if plan.lacks_maps:
        console.say_device(options.maps().device, quiet)
    with Watcher(quiet, plan.total_bytes) as bar:
        result = convert_as(options, plan, bar, sys.argv[1:])
    if table := bar.table():
        _say(table, options)
    record = _report_plan(plan, options) | dict(allotment)
    _warn(result.warnings[len(plan.warnings) if plan.why else 0 :])
    seconds = time.monotonic() - start
    _say(f"written     {result.out}: {size(plan.total_bytes)} in {seconds:.1f} s, verified", options)
    if plan.method in METHODS and not quiet:
        _say_next(plan, result, options)
    record |= {"output": str(result.out), "warnings": list(result.warnings), "sha256": result.checksums}
    _say_record(record | {"dry_run": False}, options)


def _report_dry_run(plan: Plan, options: ConvertOptions) -> None:
    """Print the plan, and time and memory of every method that the model allows."""
    from gqa.convert.estimate import duration, estimates
    from gqa.convert.summary import size

    record = _report_plan(plan, options)
    if plan.method in METHODS and (options.json or not options.quiet):
        maps, record["estimates"] = options.maps(), {}
        for each in estimates(plan, maps):
            cost = f"{duration(each.seconds)} on {maps.device}, {size(each.memory)} of memory"
            _say(f"estimate    {each.method.name:12}{cost}", options)
            found = {"seconds": round(each.seconds, 1), "memory_bytes": each.memory}
            record["estimates"][each.method.name] = found
    _say("dry run     nothing was written", options)
    _say_record(record | {"dry_run": True}, options)


def _report_plan(plan: Plan, options: ConvertOptions) -> dict[str, Any]:
    """Print a plan, and return it JSON-ready."""
    from gqa.convert.summary import plan_record, plan_text, tensor_parallel

    _say(plan_text(plan, tensors=options.verbose), options)
    record = plan_record(plan)
    if ranks := options.tensor_parallel:
        fits, text = tensor_parallel(plan.groups, plan.config.main.query, ranks)
        record["tensor_parallel"] = {"ranks": ranks, "possible": fits, "text": text}
        _say(text, options)
    return record


def _say_next(plan: Plan, result: Conversion, options: ConvertOptions) -> None:
    """Print what improves the result: the best method that the model allows, or training. Nothing about a model without
    a head that predicts tokens.
    """
    from gqa.checkpoint.loading import predicts_tokens
    from gqa.convert.estimate import allowed
    from gqa.convert.heads.config import transformers_config

    if not predicts_tokens(transformers_config(plan.new_config)):
        return
    *_, best = allowed(plan)
    if not plan.merging.how.reads_text:
        until = f"{best.name} or training" if best.reads_text else "training"
        doubt = "with few heads, above all of a rotary model, text is often not sensible"
        _say(f"expect      {doubt} before {until}", options)
    what = f"--method {best.name} ({best.cost}): {best.result}"
    if best.name == plan.method:
        what = f"distil from the base model:\n            {shlex.join(['gqa-uptrain', str(result.out)])}"
    _say(f"next        {what}", options)


def _say(text: str, options: ConvertOptions) -> None:
    if not options.quiet:
        click.echo(console.labelled(text), err=options.json)


def _say_record(record: Mapping[str, Any], options: ConvertOptions) -> None:
    if options.json:
        click.echo(json.dumps(record))


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        click.echo(one_line(f"warning: {warning}"), err=True)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    kept = f"finished layers of {', '.join(ALIGNING[:-1])} and {ALIGNING[-1]} are kept"
    console.run(command, "gqa-convert", f"nothing half-written is left, {kept}")


if __name__ == "__main__":
    main()
