"""gqa run: a file that names commands and their options, run one after another.

    convert: {model: MODEL, groups: 2, method: refined}
    uptrain: {data: "self:1M"}
    eval: {data: "stdlib:heldout"}

A step is one of the commands, with its long options as keys. It works on what the step before made unless it names its
model. Records of results hold such a file too, under `recipe`: `gqa run OUT/gqa_conversion.json` makes the same again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import yaml

from gqa.checkpoint.console import CONTEXT_SETTINGS, Command, near, option, run, version_option
from gqa.checkpoint.errors import RefusedError, explain, one_line
from gqa.checkpoint.provenance import PROVENANCE, UPTRAINING, asked, key_of
from gqa.convert.estimate import duration
from gqa.convert.summary import size
from gqa.uptrain.options import differences

from .cli import COMMANDS, call
from .given import words_of

# What each command leaves beside its result, and where that goes unless the recipe says.
_STEPS = {
    "convert": (PROVENANCE, "converted"),
    "uptrain": (UPTRAINING, "uptrained"),
    "eval": ("results.json", "report"),
}
_EPILOG = """\b
Examples:
  gqa run examples/recipes/seconds.yaml
  gqa run recipe.yaml --dry-run
  gqa run MODEL-gqa2-refined/gqa_conversion.json -o again
"""


@dataclass(frozen=True)
class Step:
    """One command. `options`: all that it is given; `out`: where its result goes; `recipe`: as records hold it."""

    name: str
    command: click.Command
    options: Mapping[str, Any]
    out: Path
    recipe: Mapping[str, Any]

    def words(self, **changes: Any) -> list[str]:
        """The command line, with some options changed."""
        return words_of(self.command, {**self.options, **changes})

    def recorded(self) -> Mapping[str, Any] | None:
        """The recipe of what lies at `out`: None where there is no result, empty where it does not say."""
        try:
            record = json.loads((self.out / _STEPS[self.name][0]).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            record = {}
        found = record.get("recipe") if isinstance(record, dict) else None
        step = found.get(self.name) if isinstance(found, dict) else None
        return step if isinstance(step, dict) else {}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A key that stands twice in a mapping, of which the first would be ignored, is a ValueError."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise ValueError(f"{twice[0]} is there twice")
        return super().construct_mapping(node, deep)


def read_recipe(path: Path) -> dict[str, dict[str, Any]]:
    """The steps of a file, in its order. Raises RefusedError for what is no recipe."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RefusedError(f"{path} cannot be read: {explain(error)}") from None
    except RecursionError:
        raise RefusedError(f"{path} is nested too deeply; give options as NAME: VALUE") from None
    if isinstance(found, dict) and "command" in found:  # a record of a result
        found = found.get("recipe")
    if not isinstance(found, dict) or not found:
        raise RefusedError(f"{path} is no recipe; give steps ({', '.join(_STEPS)}), each with its options")
    for name, options in found.items():
        if name not in _STEPS:
            told = near(str(name), _STEPS) or f"; choose {', '.join(_STEPS)}"
            raise RefusedError(f"{path}: there is no step {name}{told}")
        if not isinstance(options, dict | None):
            raise RefusedError(f"{path}: {name} is {options!r}; give options as NAME: VALUE")
    return {str(name): options or {} for name, options in found.items()}


def make_steps(recipe: Mapping[str, Mapping[str, Any]], directory: Path, told: str) -> list[Step]:
    """Steps with all options checked, each with the result of the one before as its model. Raises RefusedError, with
    `told` in front.
    """
    steps: list[Step] = []
    made: list[str] = []  # the base model and what becomes of it
    for name, given in recipe.items():
        command: click.Command = import_module(COMMANDS[name][0]).command
        known = {key_of(found) for found in command.params if found.expose_value}
        options = {str(key).replace("_", "-"): value for key, value in given.items() if value is not None}
        for key in options:
            if key not in known:
                raise RefusedError(f"{told}: {name} has no option {key}{near(key, known)}")
        if made:
            before = {"baseline": made[0], "models": made[1:]} if name == "eval" else {"model": made[-1]}
            options = before | options
        options = {"output": str(directory / _STEPS[name][1])} | options
        try:
            with command.make_context(f"gqa-{name}", words_of(command, options)) as ctx:
                found = asked(ctx)[name]
        except click.UsageError as error:
            raise RefusedError(f"{told}: {name}: {error.format_message().rstrip('.')}") from None
        steps.append(Step(name, command, options, Path(str(options["output"])), found))
        if name != "eval":
            made = [*(made or [str(options.get("model", ""))]), str(options["output"])]
    return steps


def left_to_do(steps: list[Step], overwrite: bool) -> list[Step]:
    """Steps without those at the beginning whose results are there. Raises RefusedError where the result of another
    recipe would have to be replaced, unless that is allowed, here or by the step.
    """
    left: list[Step] = []
    for step in steps:
        found = step.recorded()
        if found == step.recipe and not left:
            continue
        if found is not None and not (overwrite or step.options.get("overwrite")):
            why = "; ".join(differences(step.recipe, found)) or f"{left[0].name} is run again before it"
            raise RefusedError(f"{step.out} holds a result of another recipe ({why}); give --overwrite to replace it")
        left.append(step)
    return left


@click.command(cls=Command, context_settings=CONTEXT_SETTINGS, epilog=_EPILOG)
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="RECIPE")
@option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Directory for results "
        "that the recipe names no output of.  [default: the recipe's name without its suffix]")  # fmt: skip
@option("--dry-run", help="Check everything, say what each step would do and take, and stop.")
@option("--overwrite", help="Replace results of another recipe.")
@option("--verbose")
@option("--quiet")
@version_option
def command(recipe: Path, output: Path | None, dry_run: bool, overwrite: bool, verbose: bool, quiet: bool) -> None:
    """Convert, train and evaluate as the file RECIPE says (YAML, or the JSON record of a result).

    All of it is checked before anything starts. A step whose result is there is not run again, so the same command
    continues a run that was stopped.
    """
    steps = make_steps(read_recipe(recipe), output or Path(recipe.stem), str(recipe))
    left = left_to_do(steps, overwrite or dry_run)
    flags, taken = {"verbose": verbose, "quiet": quiet, "overwrite": overwrite}, list[tuple[float, int]]()
    for number, step in enumerate(steps, 1):
        options: dict[str, Any] = {name: True for name, given in flags.items() if given}
        if step not in left:
            told = f"{step.out} is there"
        elif dry_run:
            options |= {"dry-run": True} | _instead(step, left)
            told = "gqa " + shlex.join([step.name, *step.words()])
        else:
            options |= {"resume": True} if step.name == "uptrain" and _stopped(step.out) else {}
            told = "gqa " + shlex.join([step.name, *step.words(**options)])
        if not quiet:
            click.echo(one_line(f"recipe      {number} of {len(steps)}: {told}"), err=True)
        if step in left and not dry_run:
            call(step.name, step.words(**options))
        elif step in left:
            taken.append(_estimated(step, options))
    if dry_run and not quiet:
        seconds, disk = (sum(each[index] for each in taken) for index in (0, 1))
        click.echo(f"recipe      all of it: about {duration(seconds)} here, {size(disk)} of disk", err=True)


def _estimated(step: Step, options: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds and bytes on the disk that it would take, after what it says of itself."""
    if step.name == "eval":  # which has nothing to say before it reads the text
        from gqa.eval.estimate import seconds
        from gqa.eval.options import EVALUATION

        context = step.command.make_context("gqa-eval", step.words())
        read, models = EVALUATION.read(context.params), context.params["models"]
        takes = seconds(context.params["baseline"], models, read)
        if not {**step.options, **options}.get("quiet"):
            click.echo(f"time        about {duration(takes)}")
        return takes, 0
    record = step.command.main(step.words(**options), f"gqa-{step.name}", standalone_mode=False)
    found = record.get("estimates", {}).get(record["method"], {}) if step.name == "convert" else record
    return found.get("seconds", 0.0), found.get("disk_bytes", 0)


def _instead(step: Step, left: list[Step]) -> dict[str, Any]:
    """What a dry run looks at where the model is not made yet: the one that it is made of, which is as large, and
    which is the teacher where none is named.
    """
    named = model = step.options.get("model")
    for before in reversed(left[: left.index(step)]):
        if before.name != "eval" and before.out == Path(str(model)):
            model = before.options.get("model")
    return {} if model == named else {"model": model, "teacher": step.options.get("teacher") or model}


def _stopped(out: Path) -> bool:
    """Whether a training that was stopped left a state to continue from."""
    from gqa.uptrain.state import States

    return bool(States(Path(f"{out}-state"), 0).all())


def main() -> None:
    """Entry point; exit codes as `gqa.checkpoint.console.run` says, those of a step that fails are its own."""
    run(command, "gqa run", "finished steps are kept; the same command continues")
