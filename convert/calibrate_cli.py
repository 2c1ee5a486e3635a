"""gqa-calibrate, and the options that it shares with gqa-convert: what maps are found on and how."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gqa.checkpoint.console import (
    CONTEXT_SETTINGS,
    Choice,
    Command,
    Count,
    Decorator,
    Option,
    Precision,
    option,
    progress_bar,
    run,
    say_device,
    version_option,
    with_options,
)
from gqa.checkpoint.errors import RefusedError, one_line
from gqa.convert.align.options import CalibrationText, MapsOptions, Refinement, Watcher
from gqa.convert.methods import ALIGNING, GROUPINGS, LAYERWISE, METHODS, Method

if TYPE_CHECKING:
    from gqa.convert.recast.targets import Target

_LOG_SECONDS = 30.0  # between two lines


class MethodOption(Option):
    """An option that not every method uses: `used_by` says of one whether it does."""

    def __init__(self, *names: Any, used_by: Callable[[Method], bool], **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.used_by = used_by


def option_of(used_by: Callable[[Method], bool], *names: str, **attributes: Any) -> Decorator:
    """An option that only those methods use."""
    return option(*names, cls=MethodOption, used_by=used_by, **attributes)


def is_given(name: str) -> bool:
    """Whether a parameter of the command that runs was given, rather than left at its default."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse_unused(methods: Iterable[str], where: str) -> None:
    """Raises RefusedError for an option of the command that is given and that none of `methods` uses; `where` says in
    words what was asked for instead.
    """
    known = [METHODS[name] for name in methods]
    for found in click.get_current_context().command.params:
        if isinstance(found, MethodOption) and is_given(str(found.name)) and not any(map(found.used_by, known)):
            users = ", ".join(name for name, method in METHODS.items() if found.used_by(method))
            told = f"it goes with --method {users}" if known else "leave one of the two out"
            raise RefusedError(f"{found.opts[0]} is not used by {where}; {told}")


of_text = partial(option_of, lambda method: method.reads_text)
of_maps = partial(option_of, lambda method: method.aligns)
of_draws = partial(option_of, lambda method: method.draws)
_of_refined = partial(option_of, lambda method: method.refines)

_TEXT = [
    of_text("--data", "calibration", aliases="--calibration", default=("self",), help="Text for calibrated and "
            "refined: self (sampled from the model), self:TOKENS, self:plain, a file, a hub data set, stdlib:train; "
            "several times, or with commas, for a mixture (SOURCE@WEIGHT)."),
]  # fmt: skip
_DEVICE = [of_maps("--device")]
_TARGET = [
    option("--remote-code/--no-remote-code", default=None, help="Whether a model whose class cannot have fewer heads "
           "gets custom modelling code.  [default: where no class of transformers will do]"),
    option("--attention", metavar="KIND[,...]", help="Whose heads become fewer, in an encoder-decoder that gets such a "
           "class: decoder-self, cross, encoder.  [default: decoder-self,cross]"),
]  # fmt: skip


def _search(prefix: str) -> list[Decorator]:
    """How maps are found. `prefix` is for a command whose --tokens, --context ... are of something else."""

    def own(name: str, old: str, no: str = "", **how: Any) -> Decorator:
        names, aliases = (f"--{word}{no and '/--no-'}{no and word}" for word in (prefix + name, f"calibration-{old}"))
        return of_text(names, f"calibration_{name}", aliases=aliases, **how)

    return [
        own("tokens", "tokens", type=Count(), default="65536", metavar="COUNT",
            help="Tokens of text in all, shared by SOURCE@WEIGHT."),
        own("context", "length", type=Count(2), default="256", metavar="COUNT", help="Tokens of one block of text."),
        own("repeats", "repeats", "no", default=True, help="Let half of the blocks repeat themselves, which keeps a "
            "model able to look things up; not those of self:plain."),
        of_maps("--grouping", type=Choice(GROUPINGS), default="contiguous",
               help="Which heads share: neighbours, or those that lose least by it."),
        of_text("--ridge", type=click.FloatRange(min=0), default=0.03, help="How strongly the refit of the "
                "output projection is held to the original."),
        _of_refined("--refine-steps", type=click.IntRange(min=1), default=200, help="Training steps "
                    "of each layer."),
        _of_refined("--refine-batch", type=click.IntRange(min=1), default=16, help="Blocks of one such step."),
        _of_refined("--refine-learning-rate", type=click.FloatRange(min=0, min_open=True), default=0.02,
               help="Their learning rate, relative to the size of each tensor; it falls linearly to zero."),
        _of_refined("--refine-precision", type=Precision("float32", "bfloat16"), help="What they multiply in.  "
               "[default: bfloat16 where the device multiplies it natively]"),
        own("precision", "dtype", type=Precision("float32", "bfloat16", "float16"), default="float32",
            help="What layers are run in; 16 bits blur what the converted layers lack."),
    ]  # fmt: skip


def read_target(options: dict[str, Any]) -> Target:
    """What the options say. Raises RefusedError for a kind of attention that does not exist."""
    from gqa.convert.heads.family import KINDS
    from gqa.convert.recast.targets import Target

    named = tuple(kind.strip() for kind in (options["attention"] or "").split(",") if kind.strip())
    if options["attention"] is not None and not (named and set(named) <= set(KINDS)):
        raise RefusedError(f"--attention {options['attention']!r} is not known; choose {', '.join(KINDS)}")
    return Target(options["remote_code"], tuple(kind for kind in KINDS if kind in named) or None)


maps_options = with_options(_TEXT, _search(""), _DEVICE)  # of finding maps
search_options = with_options(_search("calibration-"))  # those of them that say neither on which text nor where
target_options = with_options(_TARGET)  # about the class that a model is written for


def read_options(options: dict[str, Any]) -> MapsOptions:
    """What the options say."""
    from gqa.checkpoint.devices import find_device

    seed, field, tokens = options["seed"], options.get("field", "text"), options["calibration_tokens"]
    precision = options["refine_precision"]
    return MapsOptions(
        CalibrationText(
            options["calibration"], tokens, options["calibration_context"], seed, field, options["calibration_repeats"]
        ),
        ridge=options["ridge"],
        refinement=Refinement(
            options["refine_steps"], options["refine_batch"], options["refine_learning_rate"],
            autocast=None if precision is None else precision == "bfloat16", seed=seed,
        ),
        device=find_device(options["device"]),
        dtype=options["calibration_precision"],
        grouping=options["grouping"],
    )  # fmt: skip


class Bar(Watcher):
    """Progress of finding maps on stderr, and the `errors` of layers: what of its output each lost.

    A bar where a person looks at it, and a line now and then in the log of a job.
    """

    def __init__(self, quiet: bool, output_bytes: int = 0) -> None:
        self._quiet, self._output_bytes = quiet, output_bytes
        self._bar: Any = None
        self._writing, self._layers = False, 0
        self.errors: dict[int, float] = {}
        self._state, self._tokens, self._began, self._told = "sampling", 0, time.monotonic(), time.monotonic()

    def stage(self, name: str, tokens: int) -> None:
        self.close()
        self._bar, self._layers = progress_bar(tokens, "tok", name, self._quiet), 0
        self._state, self._tokens, self._began = name, 0, time.monotonic()

    def update(self, tokens: int) -> None:
        if self._bar is None:
            self._bar = progress_bar(0, "tok", self._state, self._quiet)
        self._bar.update(tokens)
        self._tokens, now = self._tokens + tokens, time.monotonic()
        if self._bar.disable and not self._quiet and now - self._told >= _LOG_SECONDS:
            self._told, rate = now, self._tokens / (now - self._began)
            click.echo(f"{self._state} | {self._tokens:,} tokens | {rate:,.0f} tok/s", err=True)

    def written(self, count: int) -> None:
        """Told of bytes of the output, from any thread."""
        if not self._writing:
            self.close()
            self._writing, self._bar = True, progress_bar(self._output_bytes, "B", "converting", self._quiet)
        self._bar.update(count)

    def layer(self, index: int, layers: int, error: float) -> None:
        if error == error:
            self.errors[index - 1] = error
        self._layers += 1
        self._state = f"layer {index}/{layers}, error {error:.3g}"
        if self._bar is not None:
            if self._tokens:  # layers of which nothing is merged are not trained: what is left is as what was
                self._bar.total = self._tokens + self._tokens * (layers - index) // self._layers
            self._bar.set_postfix_str(self._state)

    def warn(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        click.echo(one_line(f"warning: {text}"), err=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def table(self) -> str:
        """Squared error of each layer's attention output relative to the source's, on the calibration text."""
        if not self.errors:
            return ""
        errors = list(self.errors.items())
        rows = [errors[start : start + 8] for start in range(0, len(errors), 8)]
        title = "layers      squared error of attention outputs, relative to the source's on the calibration text\n"
        return title + "\n".join("            " + "  ".join(f"{i:3d} {error:.4f}" for i, error in row) for row in rows)


_EPILOG = """\b
Examples:
  gqa-calibrate ./Llama-2-7b-hf --groups 8 -o maps.safetensors
  gqa-convert ./Llama-2-7b-hf --groups 8 --maps maps.safetensors
"""


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("model", metavar="MODEL")
@option("--groups", help="How many key/value heads to keep.")
@option("-o", "--output", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The file to write.")
@option("--method", type=Choice(ALIGNING), default="calibrated", help="How the heads of a group become one.")
@maps_options
@target_options
@of_draws("--seed", help="The seed of random draws and samples.")
@option("--revision")
@option("--overwrite", help="Replace FILE, and forget an unfinished run of other options.")
@option("--verbose")
@option("--quiet")
@version_option
def command(model: str, groups: int, output: Path, **options: Any) -> None:
    """Find out how the heads of MODEL are best merged into G, and write that as maps that gqa-convert applies.

    Finished layers of calibrated and refined are kept: the same command continues a run that was stopped. Methods that
    look at weights alone start over.
    """
    from gqa.checkpoint.hub import open_model
    from gqa.convert.align.find_maps import find_maps
    from gqa.convert.plan import make_plan

    refuse_unused([options["method"]], f"--method {options['method']}")
    source = open_model(model, options["revision"])
    plan = make_plan(source, groups, options["method"], options["seed"], target=read_target(options))
    if groups >= plan.config.main.kv:
        raise RefusedError(
            f"--groups {groups} of the {plan.config.main.kv} key/value heads of {model}: nothing is merged"
        )
    if not output.resolve().parent.is_dir():
        raise RefusedError(f"{output.parent} is no directory; give a file in one that exists")
    start = time.monotonic()
    with Bar(options["quiet"]) as bar:
        how = read_options(options)
        say_device(how.device, options["quiet"])
        find_maps(plan, output, how, bar, overwrite=options["overwrite"])
    if not options["quiet"]:
        click.echo(bar.table() or "from the weights alone")
        click.echo(f"written     {output} in {time.monotonic() - start:.1f} s")


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says."""
    goes_on = f"the same command continues after the last finished layer of {' and '.join(LAYERWISE)}"
    run(command, "gqa-calibrate", f"{goes_on}; other methods start over")


if __name__ == "__main__":
    main()
