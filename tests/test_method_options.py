"""What a method does not use is refused, whatever the command; the method is in the name of what it makes."""

from pathlib import Path

import pytest
from checkpoints import leftovers, llama, run

from gqa.convert import convert_checkpoint
from gqa.convert.methods import METHODS
from gqa.convert.options import ConvertOptions

USED_BY = {  # by hand, once: the declarations beside the options must say the same
    "data": ("notes.txt", "text"), "tokens": ("64", "text"), "context": ("64", "text"), "field": ("body", "text"),
    "target_field": ("body", "text"), "precision": ("bfloat16", "text"), "trust_remote_code": (None, "text"),
    "grouping": ("search", "maps"), "device": ("cpu", "maps"), "seed": ("3", "draws"), "refine_steps": ("7", "refined"),
}  # fmt: skip
KINDS = {
    "mean": (), "random": ("draws",), "aligned": ("maps",), "calibrated": ("text", "maps", "draws"),
    "refined": ("text", "maps", "draws", "refined"),
}  # fmt: skip


def test_every_option_of_methods_is_tested() -> None:
    fields = ConvertOptions.__dataclass_fields__.values()
    assert {one.name for one in fields if one.metadata["methods"] and not one.metadata["expert"]} == USED_BY.keys()


@pytest.mark.parametrize("method", KINDS)
def test_an_option_is_refused_by_the_methods_that_do_not_use_it(method: str, tmp_path: Path) -> None:
    """One that is used gets as far as the model, which is not there."""
    for name, (value, kind) in USED_BY.items():
        flag = "--" + name.replace("_", "-")
        said = run("--groups", 2, "--method", method, flag, *filter(None, [value]), tmp_path / "nothing").err
        if kind in KINDS[method]:
            assert "there is no directory" in said, (name, said)
        else:
            assert f"gqa-convert: {flag} is not used by --method {method}; it goes with --method " in said
            assert {*said.strip().split("--method ")[-1].split(", ")} <= METHODS.keys()


def test_studies_refuse_the_same(tmp_path: Path) -> None:
    study = ("--data", "text", "-o", tmp_path / "study", "--methods", "mean,aligned", "--refine-steps", 2, "nothing")
    said = run(*study, program="gqa-ablate").err
    assert "--refine-steps is not used by --methods mean,aligned; it goes with --method refined" in said


@pytest.mark.parametrize(("groups", "name"), [(2, "m-gqa2-first"), (1, "m-mqa-first"), (8, "m-gqa8"), (4, "m-gqa4")])
def test_the_name_says_the_method_if_there_is_any(groups: int, name: str, tmp_path: Path) -> None:
    """4 heads become fewer, stay, or are repeated; a method that has nothing to do is told of."""
    model = llama(tmp_path / "m")
    done = run("--groups", groups, "--method", "first", model)
    assert (done.code, leftovers(tmp_path)) == (0, [])
    assert (tmp_path / name / "config.json").is_file()
    assert ("--method is not used: none of the 4 heads are merged" in done.out) == (groups >= 4)
    assert convert_checkpoint(model, groups, method="first", overwrite=True).out == tmp_path / name
