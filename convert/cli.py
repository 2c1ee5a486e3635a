"""gqa-convert: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint import console
from gqa.checkpoint.console import CONTEXT_SETTINGS, ByteSize, Command, FloatRange, option, version_option, with_options
from gqa.checkpoint.errors import RefusedError, one_line
from gqa.checkpoint.write import DEFAULT_JOBS, OutputDirectory
from gqa.convert.align.watcher import Bar
from gqa.convert.cli_options import MAPS, TARGET, read_maps, read_target
from gqa.convert.method_option import OF_DRAWS, is_given, only_for, refuse_unused
from gqa.convert.methods import ALIGNING, AUTO, AUTOMATIC, MEASURING, METHODS

if TYPE_CHECKING:
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
    option("--kv-budget", type=FloatRange(0, 1, min_open=True, max_open=True), metavar="SHARE",
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
    from gqa.checkpoint.loading import quiet_transformers

    method = MEASURING if options["method"] == AUTO and not groups else options["method"]
    refuse_unused(_methods_used(method, groups), f"--method {method}")
    console.check_alone()
    options |= {"model": model, "groups": groups, "method": method}
    with quiet_transformers():  # what matters of its hints is in our errors
        plan, allotment = _plan_groups(options) if groups else _plan_budget(options)
        _announce(plan, options)
        if options["dry_run"]:
            _report_dry_run(plan, options)
        else:
            _convert(plan, allotment, options)


def _methods_used(method: str, groups: Groups | None) -> Iterable[str]:
    """The methods whose options have an effect: text runs through the model where layers are measured."""
    return (*(AUTOMATIC if method == AUTO else (method,)), *(() if groups else (MEASURING,)))


def _plan_options(options: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: options[name] for name in ("method", "seed", "dtype", "revision")}
    return named | {"max_shard_bytes": options["max_shard_size"], "target": read_target(options)}


def _plan_groups(options: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan for --groups."""
    from gqa.convert.api import plan_conversion

    def check(plan: Plan) -> None:
        OutputDirectory(_output(plan, options), None, options["overwrite"])

    plan = plan_conversion(
        options["model"], options["groups"], grouping=options["grouping"], headers_only=options["dry_run"], check=check,
        **_plan_options(options),
    )  # fmt: skip
    return plan, {}


def _plan_budget(options: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan for --kv-budget, and the heads and losses of its layers, JSON-ready."""
    from gqa.convert.api import plan_within
    from gqa.convert.summary import allotment_text

    if options["dry_run"]:
        raise RefusedError("--kv-budget measures the layers of a model, --dry-run runs none; leave one of them out")
    maps = read_maps(options)
    console.say_device(maps.device, options["quiet"])
    with Bar(options["quiet"]) as bar:
        plan, heads, losses = plan_within(
            options["model"], options["kv_budget"], maps, ranks=options["tensor_parallel"] or 1, layers=bar,
            out=options["output"], overwrite=options["overwrite"], **_plan_options(options),
        )  # fmt: skip
    _say(allotment_text(heads, losses), options)
    return plan, {"allotment": {"kv_budget": options["kv_budget"], "heads": heads, "nats": losses}}


def _output(plan: Plan, options: Mapping[str, Any]) -> Path:
    from gqa.convert.api import default_output

    return Path(options["output"] or default_output(plan.checkpoint.hub_id or options["model"], plan))


def _announce(plan: Plan, options: Mapping[str, Any]) -> None:
    """Print what is known before anything is done: the method that was chosen and why, and what it lacks."""
    _warn(plan.warnings if plan.why or options["dry_run"] else ())
    if is_given("method") and plan.method not in METHODS:
        _say(f"note        --method is not used: none of the {plan.config.main.kv} heads are merged", options)
    if plan.why:
        _say(f"method      {plan.method} (--method {AUTO}): {plan.why}", options)


def _convert(plan: Plan, allotment: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from gqa.convert.api import convert_plan
    from gqa.convert.summary import size

    quiet, start = options["quiet"], time.monotonic()
    # What finds maps runs models, whose imports take seconds.
    maps = read_maps(options) if plan.lacks_maps else None
    if maps:
        console.say_device(maps.device, quiet)
    with Bar(quiet, plan.total_bytes) as bar:
        result = convert_plan(
            plan, _output(plan, options), calibration=maps, layers=bar, overwrite=options["overwrite"],
            checksums=options["checksums"], load=options["verify_load"], jobs=options["jobs"], progress=bar.written,
            argv=sys.argv[1:],
        )  # fmt: skip
    if table := bar.table():
        _say(table, options)
    record = _report_plan(plan, options) | allotment
    _warn(result.warnings[len(plan.warnings) if plan.why else 0 :])
    seconds = time.monotonic() - start
    _say(f"written     {result.out}: {size(plan.total_bytes)} in {seconds:.1f} s, verified", options)
    if plan.method in METHODS and not quiet:
        _say_next(plan, result, options)
    record |= {"output": str(result.out), "warnings": list(result.warnings), "sha256": result.checksums}
    _say_record(record | {"dry_run": False}, options)


def _report_dry_run(plan: Plan, options: Mapping[str, Any]) -> None:
    """Print the plan, and time and memory of every method that the model allows."""
    from gqa.convert.estimate import duration, estimates
    from gqa.convert.summary import size

    record = _report_plan(plan, options)
    if plan.method in METHODS and (options["as_json"] or not options["quiet"]):
        maps, record["estimates"] = read_maps(options), {}
        for each in estimates(plan, maps):
            cost = f"{duration(each.seconds)} on {maps.device}, {size(each.memory)} of memory"
            _say(f"estimate    {each.method.name:12}{cost}", options)
            found = {"seconds": round(each.seconds, 1), "memory_bytes": each.memory}
            record["estimates"][each.method.name] = found
    _say("dry run     nothing was written", options)
    _say_record(record | {"dry_run": True}, options)


def _report_plan(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Print a plan, and return it JSON-ready."""
    from gqa.convert.summary import plan_record, plan_text, tensor_parallel

    _say(plan_text(plan, tensors=options["verbose"]), options)
    record = plan_record(plan)
    if ranks := options["tensor_parallel"]:
        fits, text = tensor_parallel(plan.groups, plan.config.main.query, ranks)
        record["tensor_parallel"] = {"ranks": ranks, "possible": fits, "text": text}
        _say(text, options)
    return record


def _say_next(plan: Plan, result: Conversion, options: Mapping[str, Any]) -> None:
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


def _say(text: str, options: Mapping[str, Any]) -> None:
    if not options["quiet"]:
        click.echo(console.labelled(text), err=options["as_json"])


def _say_record(record: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    if options["as_json"]:
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
