"""gqa-convert: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint import console
from gqa.checkpoint.console import CONTEXT_SETTINGS, ByteSize, Command, option, version_option, with_options
from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.write import DEFAULT_JOBS, OutputDirectory
from gqa.convert.align.watcher import Bar
from gqa.convert.cli_options import MAPS, TARGET, read_maps, read_target
from gqa.convert.method_option import OF_DRAWS, is_given, only_for, refuse_unused
from gqa.convert.methods import ALIGNING, AUTO, AUTOMATIC, MEASURING, METHODS

if TYPE_CHECKING:
    from gqa.convert.align.allot import Losses
    from gqa.convert.api import Conversion, Plan
    from gqa.convert.heads.layout import Groups


def _show_families(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from gqa.convert.support import families_text

        click.echo(families_text())
        ctx.exit()


def _one_of_both(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """--groups or --kv-budget, whichever comes first; the one that is read first does not know the other yet."""
    (other,) = {"groups", "kv_budget"} - {param.name}
    if other in ctx.params and (value is None) == (ctx.params[other] is None):
        raise click.UsageError("give --groups G, or --kv-budget SHARE for a share of the KV cache; one of them")
    return value


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


_MERGING = [
    option("--groups", required=False, callback=_one_of_both, help="Key/value heads of the result: a divisor of the "
           "model's own, or a multiple to expand; or one number for each layer, 3,1,1,3, or a file of them."),
    option("--kv-budget", type=click.FloatRange(0, 1, min_open=True, max_open=True), metavar="SHARE",
           callback=_one_of_both, help="Instead of --groups: the share of the KV cache that is left, like 0.5. Each "
           "layer keeps as many heads as it needs, which is measured on text that the model writes."),
    option("-o", "--output", type=click.Path(), metavar="DIR", help="The directory to make.  [default: "
           "MODEL-gqa<G>-<METHOD> beside MODEL, MODEL-mqa-<METHOD> for 1]"),
    option("--method",
        type=click.Choice((AUTO, *METHODS)), default=AUTO,
           help="How the heads of a group become one: see below.", **only_for(lambda method: True)),
]  # fmt: skip
_WRITING = [
    option("--seed", help="The seed of random draws and samples.", **OF_DRAWS),
    option("--dtype", type=click.Choice(["float32", "float16", "bfloat16", "float64"]), help="Store all weights so.  "
           "[default: as they are]"),
    option("--max-shard-size", type=ByteSize(), help="Bytes of one file at most, like 5GB.  [default: as MODEL]"),
    option("--revision"),
    option("--dry-run", help="Print the plan and write nothing; of a hub id only headers are fetched."),
    option("--json", "as_json"),
    option("--overwrite", help="Replace the checkpoint at DIR once the new one is complete."),
    option("--checksums", is_flag=True, help="Compare every untouched byte; record SHA-256 of all shards."),
    option("--verify-load", is_flag=True, help="Also load the result with transformers and run it once."),
    option("--tensor-parallel", help="Say whether N ranks can hold it."),
    option("--jobs", type=click.IntRange(min=1), default=DEFAULT_JOBS, help="Shards written at a time."),
    option("--verbose", help="List every changed tensor."),
    option("--quiet"),
    option("--families", is_flag=True, is_eager=True, expose_value=False, callback=_show_families,
           help="Print what is supported and exit."),
]  # fmt: skip


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("model", metavar="MODEL")
@with_options(_MERGING, MAPS.decorators, TARGET, _WRITING)
@version_option
def command(model: str, groups: Groups | None, **options: Any) -> None:
    """Rewrite the checkpoint MODEL (a directory or a hub id) with G key/value heads.

    Keys and values of neighbouring heads are merged (or, upwards, repeated), everything else is copied byte for byte;
    the result loads with plain transformers and its KV cache shrinks with the number of heads. Without --method it is
    the best that needs only the weights; the GQA paper's mean pooling is --method mean.
    """
    asked = AUTOMATIC if options["method"] == AUTO else (options["method"],)
    if not groups:  # text runs through the model anyway
        asked = (*asked, MEASURING)
        options["method"] = MEASURING if options["method"] == AUTO else options["method"]
    refuse_unused(asked, f"--method {options['method']}")
    console.check_alone()
    options |= {"model": model, "groups": groups}
    plan = _planned(options)
    _announce(plan, options)
    if options["dry_run"]:
        _report(plan, None, options)
    else:
        _convert(plan, options)


def _planned(options: dict[str, Any]) -> Plan:
    """For --groups, or for --kv-budget; what is told of its heads is added to the options as `allotment`."""
    from gqa.convert.api import plan_conversion, plan_within

    how = {name: options[name] for name in ("method", "seed", "dtype", "revision")}
    how |= {"max_shard_bytes": options["max_shard_size"], "target": read_target(options)}
    if options["groups"]:
        options["allotment"] = None
        return plan_conversion(
            options["model"], options["groups"], grouping=options["grouping"],
            headers_only=options["dry_run"], check=partial(_place, options), **how,
        )  # fmt: skip
    if options["dry_run"]:
        raise RefusedError("--kv-budget measures the layers of a model, --dry-run runs none; leave one of them out")
    measuring = read_maps(options)
    console.say_device(measuring.device, options["quiet"])
    with Bar(options["quiet"]) as bar:
        plan, heads, losses = plan_within(
            options["model"], options["kv_budget"], measuring, ranks=options["tensor_parallel"] or 1, layers=bar,
            out=options["output"], overwrite=options["overwrite"], **how,
        )  # fmt: skip
    options["allotment"] = _allotment(heads, losses, options)
    return plan


def _allotment(heads: Sequence[int], losses: Losses, options: dict[str, Any]) -> dict[str, Any]:
    """What is told of the heads of every layer by --kv-budget, once it is said."""
    from gqa.convert.summary import allotment_text

    _say(allotment_text(heads, losses), options)
    return {"kv_budget": options["kv_budget"], "heads": heads, "nats": losses}


def _place(options: dict[str, Any], plan: Plan) -> OutputDirectory:
    """Where a plan is going to be written, if it can be."""
    return OutputDirectory(_output(plan, options), None, options["overwrite"])


def _output(plan: Plan, options: dict[str, Any]) -> Path:
    from gqa.convert.api import default_output

    return Path(options["output"] or default_output(plan.checkpoint.hub_id or options["model"], plan))


def _convert(plan: Plan, options: dict[str, Any]) -> None:
    from gqa.convert.api import convert_plan

    out = _output(plan, options)
    quiet, start = options["quiet"], time.monotonic()
    # What finds maps runs models, whose imports take seconds.
    calibration = read_maps(options) if plan.lacks_maps else None
    if calibration:
        console.say_device(calibration.device, quiet)
    with Bar(quiet, plan.total_bytes) as bar:
        result = convert_plan(
            plan, out, calibration=calibration, layers=bar, overwrite=options["overwrite"],
            checksums=options["checksums"], load=options["verify_load"], jobs=options["jobs"], progress=bar.written,
            argv=sys.argv[1:],
        )  # fmt: skip
    if table := bar.table():
        _say(table, options)
    _report(result.plan, result, options, time.monotonic() - start)


def _say(text: str, options: dict[str, Any]) -> None:
    if not options["quiet"]:
        click.echo(console.labelled(text), err=options["as_json"])


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        click.echo(one_line(f"warning: {warning}"), err=True)


def _announce(plan: Plan, options: dict[str, Any]) -> None:
    """What is known before anything is done: which method was taken for which reason, and above all what it lacks."""
    _warn(plan.warnings if plan.why or options["dry_run"] else ())
    if is_given("method") and plan.method not in METHODS:
        _say(f"note        --method is not used: none of the {plan.config.main.kv} heads are merged", options)
    if plan.why:
        _say(f"method      {plan.method} (--method {AUTO}): {plan.why}", options)


def _report(plan: Plan, result: Conversion | None, options: dict[str, Any], seconds: float = 0.0) -> None:
    """Print what was done, or what a dry run would do."""
    from gqa.convert.summary import plan_record, plan_text, size, tensor_parallel

    _say(plan_text(plan, tensors=options["verbose"]), options)
    record = plan_record(plan) | ({"allotment": told} if (told := options["allotment"]) else {})
    if ranks := options["tensor_parallel"]:
        fits, text = tensor_parallel(plan.groups, plan.config.main.query, ranks)
        record["tensor_parallel"] = {"ranks": ranks, "possible": fits, "text": text}
        _say(text, options)
    if result:
        _warn(result.warnings[len(plan.warnings) if plan.why else 0 :])
        out = str(result.out)
        record |= {"output": out, "warnings": list(result.warnings), "sha256": result.checksums}
        _say(f"written     {out}: {size(plan.total_bytes)} in {seconds:.1f} s, verified", options)
        if plan.method in METHODS and not options["quiet"]:
            _say_next(plan, result, options)
    else:
        if plan.method in METHODS and (options["as_json"] or not options["quiet"]):
            record["estimates"] = _estimates(plan, options)
        _say("dry run     nothing was written", options)
    if options["as_json"]:
        click.echo(json.dumps(record | {"dry_run": result is None}))


def _estimates(plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    """Print time and memory of every method that the model allows, and return them by method."""
    from gqa.convert.estimate import duration, estimates
    from gqa.convert.summary import size

    maps = read_maps(options)
    record = {}
    for each in estimates(plan, maps):
        cost = f"{duration(each.seconds)} on {maps.device}, {size(each.memory)} of memory"
        _say(f"estimate    {each.method.name:12}{cost}", options)
        record[each.method.name] = {"seconds": round(each.seconds, 1), "memory_bytes": each.memory}
    return record


def _say_next(plan: Plan, result: Conversion, options: dict[str, Any]) -> None:
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
    if best.name == plan.method:
        _say(
            f"next        distil from the base model:\n            {shlex.join(['gqa-uptrain', str(result.out)])}",
            options,
        )
    else:
        _say(f"next        --method {best.name} ({best.cost}): {best.result}", options)


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    kept = f"finished layers of {', '.join(ALIGNING[:-1])} and {ALIGNING[-1]} are kept"
    console.run(command, "gqa-convert", f"nothing half-written is left, {kept}")


if __name__ == "__main__":
    main()
