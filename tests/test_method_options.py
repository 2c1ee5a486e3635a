"""What a method does not use is refused, whatever the command; the method is in the name of what it makes."""

from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import leftovers, llama, run

from gqa.checkpoint.console import Count, FloatRange
from gqa.convert import cli, convert_checkpoint
from gqa.convert.method_option import MethodOption
from gqa.convert.methods import METHODS

OPTIONS = {option.opts[0]: option for option in cli.command.params if isinstance(option, MethodOption)}
VALUES = {Count: "64", click.types.IntRange: "7", FloatRange: "0.5", click.types.IntParamType: "3"}
USED = {  # by hand, once: the declarations beside the options must say the same
    "mean": {"--method"},
    "random": {"--method", "--seed"},
    "aligned": {"--method", "--grouping", "--device"},
    "calibrated": OPTIONS.keys() - {name for name in OPTIONS if name.startswith("--refine")},
    "refined": OPTIONS.keys(),
}


def words(option: MethodOption) -> tuple[str, ...]:
    """The option with some value that it takes."""
    if option.is_flag:
        return (option.opts[0],)
    kind: Any = option.type
    return option.opts[0], kind.choices[-1] if isinstance(kind, click.Choice) else VALUES.get(type(kind), "nofile.txt")


@pytest.mark.parametrize("method", USED)
def test_an_option_is_refused_by_the_methods_that_do_not_use_it(method: str, tmp_path: Path) -> None:
    """One that is used gets as far as the model, which is not there. Without any option nothing is refused; one with
    its default in so many words was asked for, too.
    """
    for name, option in OPTIONS.items():
        given = words(option) if name != "--method" else ()
        said = run("--groups", 2, "--method", method, *given, tmp_path / "nothing").err
        if name in USED[method]:
            assert "is not used by" not in said
            assert "nothing" in said
        else:
            users = ", ".join(name_of for name_of in METHODS if option.used_by(METHODS[name_of]))
            assert said == f"gqa-convert: {name} is not used by --method {method}; it goes with --method {users}\n"
    assert "--refine-steps is not used" in run("--groups", 2, "--refine-steps", 200, tmp_path / "nothing").err


def test_studies_refuse_the_same(tmp_path: Path) -> None:
    study = ("--data", "text", "-o", tmp_path / "study", "--methods", "mean,aligned", "--refine-batch", 2, "nothing")
    said = run(*study, program="gqa-ablate").err
    assert "--refine-batch is not used by --methods mean,aligned; it goes with --method refined" in said


@pytest.mark.parametrize(("groups", "name"), [(2, "m-gqa2-first"), (1, "m-mqa-first"), (8, "m-gqa8"), (4, "m-gqa4")])
def test_the_name_says_the_method_if_there_is_any(groups: int, name: str, tmp_path: Path) -> None:
    """4 heads become fewer, stay, or are repeated; a method that has nothing to do is told of."""
    model = llama(tmp_path / "m")
    done = run("--groups", groups, "--method", "first", model)
    assert (done.code, leftovers(tmp_path)) == (0, [])
    assert (tmp_path / name / "config.json").is_file()
    assert ("--method is not used: none of the 4 heads are merged" in done.out) == (groups >= 4)
    assert convert_checkpoint(model, groups, method="first", overwrite=True).out == tmp_path / name
