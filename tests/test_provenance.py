"""The command that a result names makes the same weights again, whatever options made it."""

import json
import shlex
import shutil
from functools import cache
from pathlib import Path

import checkpoints
import pytest
import torch
from huggingface_hub import ModelCard
from test_families import all_tensors, write_checkpoint
from tiny_models import TINY, build
from torch import Tensor

from gqa.checkpoint.provenance import SOURCE_CARD
from gqa.convert.cli import command

CALIBRATED = ("--method", "calibrated", "--data", "self:256", "--context", 32)
REFINED = (
    *("--method", "refined", "--data", "self:512", "--context", 32),
    *("--refine-steps", 4, "--refine-batch", 4),
)
# Each option that changes weights: a conversion, and what the option adds to it.
CASES: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "groups": ((), ("--groups", 1, "--method", "mean")),
    "method": ((), ("--method", "first")),
    "seed": (("--method", "random"), ("--seed", 7)),
    "seed of samples": (CALIBRATED, ("--seed", 7)),
    "dtype": ((), ("--dtype", "bfloat16")),
    "data": (("--method", "calibrated", "--tokens", 256, "--context", 64), ("--data", "self:plain")),
    "tokens": (("--method", "calibrated", "--tokens", 256), ("--tokens", 512)),
    "context": (CALIBRATED, ("--context", 16)),
    "repeats": ((*CALIBRATED, "--context", 64), ("--no-repeats",)),
    "precision": (CALIBRATED, ("--precision", "bfloat16")),
    "grouping": (("--method", "aligned"), ("--grouping", "contiguous")),
    "ridge": (CALIBRATED, ("--ridge", 0.123456789)),
    "refine_steps": (REFINED, ("--refine-steps", 6)),
    "refine_batch": (REFINED, ("--refine-batch", 2)),
    "refine_learning_rate": (REFINED, ("--refine-learning-rate", 0.0123456789)),
    "refine_precision": ((*REFINED, "--refine-precision", "float32"), ("--refine-precision", "bfloat16")),
}
# What is computed is the same with and without them, but for rounding on another device; `maps` are made by options
# that are told, `revision`, trust and the two about the class are held against their own tests.
OTHERS = {
    "kv_budget",  # the record names the heads that it gave
    *("field", "target_field"),  # of data sets, which tests/test_pairs.py reads
    *("model", "output", "maps", "device", "remote_code", "attention", "max_shard_size", "revision", "dry_run"),
    *(
        "as_json",
        "overwrite",
        "checksums",
        "trust_remote_code",
        "verify_load",
        "tensor_parallel",
        "jobs",
    ),
    *("verbose", "quiet", "families", "version"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(build(TINY["llama"], 4), tmp_path_factory.mktemp("provenance") / "model")


@cache
def plainly(source: Path, words: tuple[object, ...]) -> dict[str, Tensor]:
    """What is made without the option that a case adds."""
    return convert(source, "-g", 2, *words, "-o", source.parent / "without")


def convert(*words: object) -> dict[str, Tensor]:
    done = checkpoints.run(*words, "-q", "--overwrite")
    assert done.code == 0, done.err
    return all_tensors(Path(str(words[words.index("-o") + 1])))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """To the bit, dtypes too; a bool, for pytest would print all weights."""
    if one.keys() != other.keys():
        return False
    return all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def test_every_option_is_known_here() -> None:
    options = {str(parameter.name) for parameter in command.params}
    assert options == {name for name in CASES if " " not in name} | OTHERS


def test_the_card_compares_the_base_model_with_the_result(source: Path, tmp_path: Path) -> None:
    """Counted from the files; where none are merged both columns say the same."""
    made = convert(source, "-g", 2, "--method", "mean", "-o", tmp_path / "2")
    assert checkpoints.run(source, "-g", 4, "-o", tmp_path / "4", "-q").code == 0
    rows = {}
    for groups in (2, 4):
        card = (tmp_path / str(groups) / "README.md").read_text()
        assert "\n- gqa\n" in card
        found = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
        assert found[0] == ["base model", "this model"]
        rows[groups] = {name: numbers for name, *numbers in found[1:]}
    (tmp_path / "2" / "README.md").open("a").write(f"{SOURCE_CARD}\n\nFirst words.\n")
    convert(tmp_path / "2", "-g", 1, "--method", "mean", "-o", tmp_path / "1")
    again = (tmp_path / "1" / "README.md").read_text()
    assert again.endswith(f"{SOURCE_CARD}\n\nFirst words.\n"), "cards do not grow with every step"
    assert again.count("key/value heads |") == 1
    before, after = (sum(t.numel() for t in tensors.values()) for tensors in (all_tensors(source), made))
    assert rows[2]["parameters"] == [f"{before:,}", f"{after:,}"]
    assert rows[2]["key/value heads"] == ["4", "2"]
    assert all(one != other for one, other in rows[2].values())
    assert all(one == other for one, other in rows[4].values())


def test_a_card_that_cannot_be_written_again_is_carried_along(source: Path, tmp_path: Path) -> None:
    metadata = f"license: {'[' * 400}{']' * 400}"
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model/README.md").write_text(f"---\n{metadata}\n---\n# Mine\n")
    convert(tmp_path / "model", "-g", 2, "--method", "mean", "-o", tmp_path / "out")
    assert (tmp_path / "out/README.md").read_text().endswith(f"{SOURCE_CARD}\n\n---\n{metadata}\n---\n# Mine\n")


@pytest.mark.parametrize(("tags", "kept"), [("mine", ["mine"]), ("[[mine], a, {b: 1}]", ["a"]), ("&a [*a]", [])])
def test_tags_of_a_card_are_words(source: Path, tmp_path: Path, tags: str, kept: list[str]) -> None:
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model/README.md").write_text(f"---\nlicense: mit\ntags: {tags}\n---\n# Mine\n")
    convert(tmp_path / "model", "-g", 2, "--method", "mean", "-o", tmp_path / "out")
    metadata = ModelCard.load(tmp_path / "out/README.md").data.to_dict()
    assert (metadata["license"], metadata["tags"]) == ("mit", [*kept, "gqa-convert", "grouped-query-attention", "gqa"])


@pytest.mark.parametrize("option", CASES)
def test_the_command_makes_the_same_weights(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Run where the model lies, for the command holds no place; without the option the weights are others."""
    plain, added = CASES[option]
    monkeypatch.chdir(source.parent)
    made = convert(source, "-g", 2, *plain, *added, "-o", tmp_path / "made")
    record = json.loads((tmp_path / "made" / "gqa_conversion.json").read_text())
    words = shlex.split(record["command"])
    assert words[0] == "gqa-convert"
    assert same(made, convert(*words[1:], "-o", tmp_path / "again")), record["command"]
    assert not same(made, plainly(source, plain))
