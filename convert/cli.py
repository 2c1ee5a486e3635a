"""gqa-convert: options, what is printed, exit codes. Nothing here imports torch before it is needed."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from gqa.checkpoint.console import (
    CONTEXT_SETTINGS,
    ByteSize,
    Choice,
    Command,
    check_pushing,
    option,
    push_result,
    run,
    version_option,
    with_options,
)
from gqa.checkpoint.errors import one_line
from gqa.checkpoint.write import DEFAULT_JOBS
from gqa.convert.calibrate_cli import (
    Bar,
    is_given,
    maps_options,
    of_draws,
    option_of,
    read_options,
    read_target,
    refuse_unused,
    target_options,
)
from gqa.convert.methods import LAYERWISE, METHODS, best

if TYPE_CHECKING:
    from gqa.convert.api import Conversion, Plan


def _show_families(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from gqa.convert.support import families_text

        click.echo(families_text())
        ctx.exit()


_EPILOG = """\b
Examples:
  gqa-convert --groups 8 ./Llama-2-7b-hf
  gqa-convert --groups 8 --dry-run meta-llama/Llama-2-7b-hf
  gqa-convert --groups 8 --method refined ./Llama-2-7b-hf
  gqa-convert --groups 1 --method first -o ./mqa ./Llama-2-7b-hf
"""


_MERGING = [
    option("--groups", help="Key/value heads of the result: a divisor of the model's own, or a multiple to expand."),
    option("-o", "--output", type=click.Path(), metavar="DIR", help="The directory to make.  [default: "
           "MODEL-gqa<G>-<METHOD> beside MODEL, MODEL-mqa-<METHOD> for 1]"),
    option_of(lambda method: True, "--method", type=Choice(list(METHODS)), default="mean", help="How the heads of a "
              "group become one."),
    option("--maps", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Apply what gqa-calibrate "
           "wrote, instead of --method."),
]  # fmt: skip
_WRITING = [
    of_draws("--seed", help="The seed of random draws and samples."),
    option("--dtype", type=Choice(["float32", "float16", "bfloat16", "float64"]), help="Store all weights so.  "
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
    option("--push-to-hub"),
    option("--public"),
    option("--verbose", help="List every changed tensor."),
    option("--quiet"),
    option("--families", is_flag=True, is_eager=True, expose_value=False, callback=_show_families,
           help="Print what is supported and exit."),
]  # fmt: skip


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("model", metavar="MODEL")
@with_options(_MERGING)
@maps_options
@target_options
@with_options(_WRITING)
@version_option
def command(model: str, groups: int, **options: Any) -> None:
    """Rewrite the checkpoint MODEL (a directory or a hub id) with G key/value heads.

    Keys and values of neighbouring heads are merged (or, upwards, repeated), everything else is copied byte for byte;
    the result loads with plain transformers and its KV cache shrinks with the number of heads.
    """
    from gqa.convert.api import plan_conversion

    if options["maps"]:
        refuse_unused([], f"--maps {options['maps']}, which holds what a method found")
    refuse_unused([options["method"]], f"--method {options['method']}")
    check_pushing(options["push_to_hub"], options["public"], options["dry_run"])
    plan = plan_conversion(
        model, groups, method=options["method"], seed=options["seed"], dtype=options["dtype"],
        max_shard_bytes=options["max_shard_size"], revision=options["revision"], maps=options["maps"],
        target=read_target(options), grouping=options["grouping"], headers_only=options["dry_run"],
    )  # fmt: skip
    if options["dry_run"]:
        _report(plan, None, options)
    else:
        _convert(plan, model, options)


def _convert(plan: Plan, model: str, options: dict[str, Any]) -> None:
    from gqa.convert.api import convert_plan, default_output

    out = options["output"] or default_output(plan.checkpoint.hub_id or model, plan)
    quiet, start = options["quiet"], time.monotonic()
    # What finds maps runs models, whose imports take seconds.
    calibration = read_options(options) if plan.lacks_maps else None
    with Bar(quiet, plan.total_bytes) as bar:
        result = convert_plan(
            plan, out, calibration=calibration, layers=bar, overwrite=options["overwrite"],
            checksums=options["checksums"], load=options["verify_load"], jobs=options["jobs"], progress=bar.written,
        )  # fmt: skip
    if table := bar.table():
        _say(table, options)
    _report(result.plan, result, options, time.monotonic() - start)
    if options["push_to_hub"]:
        _say(push_result("gqa-convert", result.out, options["push_to_hub"], options["public"]), options)


def _say(text: str, options: dict[str, Any]) -> None:
    if not options["quiet"]:
        click.echo(text, err=options["as_json"])


def _report(plan: Plan, result: Conversion | None, options: dict[str, Any], seconds: float = 0.0) -> None:
    from gqa.convert.summary import plan_record, plan_text, size, tensor_parallel

    _say(plan_text(plan, tensors=options["dry_run"] or options["verbose"]), options)
    record = plan_record(plan)
    if ranks := options["tensor_parallel"]:
        fits, text = tensor_parallel(plan.groups, plan.config.main.query, ranks)
        record["tensor_parallel"] = {"ranks": ranks, "possible": fits, "text": text}
        _say(text, options)
    warnings = list(result.warnings if result else plan.warnings)
    if is_given("method") and plan.method not in METHODS:
        warnings.append(f"--method {options['method']} is not used: no heads of the {plan.config.main.kv} are merged")
    for warning in warnings:
        click.echo(one_line(f"warning: {warning}"), err=True)
    if result:
        record |= {"output": str(result.out), "warnings": list(result.warnings), "sha256": result.checksums}
        _say(f"written     {result.out}: {size(plan.total_bytes)} in {seconds:.1f} s, verified", options)
        if plan.groups < plan.config.main.kv and not plan.merging.how.redraws and plan.merging.how.needs != "text":
            advised = ", ".join(best(lambda other: other.needs == "text"))
            _say(f"advice      --method {advised} loses far less than {plan.method}, and needs no data", options)
    else:
        _say("dry run     nothing was written", options)
    if options["as_json"]:
        click.echo(json.dumps(record | {"dry_run": result is None}))


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    kept = f"finished layers of {' and '.join(LAYERWISE)} are kept"
    run(command, "gqa-convert", f"nothing half-written is left, {kept}")


if __name__ == "__main__":
    main()
