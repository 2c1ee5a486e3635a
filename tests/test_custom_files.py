"""Custom modelling code: its files, what transformers makes of them, and what our commands do with them."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import run
from test_custom_code import OURS, THEIRS, TOLERANCE, tiny_of
from test_families import error, load, write_checkpoint
from tiny_models import QUERY_HEADS, build, inputs, logits

from gqa.checkpoint import custom_code, modelling
from gqa.checkpoint.custom_code import BY_LAYER, MODEL_TYPES, config_class
from gqa.checkpoint.loading import load_model, load_tokenizer
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import convert_checkpoint

FILES = sorted(Path(modelling.__path__[0]).glob("modeling_*.py"))


def file_of(name: str) -> str:
    return custom_code.file_of(f"gqa_{name}")[0]


def write_tokenizer(directory: Path) -> None:
    """Of GPT-2's kind, one token a character, and nothing that names its class: as the first GPT-2 checkpoints."""
    letters = ["Ġ", *(chr(code) for code in range(33, 122))]
    vocabulary = {"<pad>": 0, "<s>": 1, "<|endoftext|>": 2} | {letter: 3 + i for i, letter in enumerate(letters)}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every source with two key/value heads; GPT-2 with a tokenizer."""
    made = {}
    for name, tiny in THEIRS.items():
        place = tmp_path_factory.mktemp(name)
        directory = write_checkpoint(build(tiny, QUERY_HEADS), place / "source")
        if name == "gpt2":
            write_tokenizer(directory)
        made[name] = convert_checkpoint(directory, 2, place / "out", method="mean").out
    return made


def test_every_file_has_a_tiny_model() -> None:
    assert {f"gqa_{name}" for name in (*THEIRS, *BY_LAYER)} == MODEL_TYPES
    assert {path.name for path in FILES} == {file_of(name) for name in (*THEIRS, *BY_LAYER)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_need_nothing_else(path: Path) -> None:
    """Imports of the standard library, torch and transformers, all of them used; small enough to be read."""
    text, allowed = path.read_text(), {"collections", "types", "typing", "torch", "transformers"}
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            assert {module.split(".")[0] for module in modules} <= allowed
            assert {alias.asname or alias.name for alias in node.names} <= used
    assert len(text.splitlines()) < 230


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_configs_have_the_defaults_of_transformers(model_type: str) -> None:
    new = {"model_type", "num_key_value_heads"}
    theirs, ours = config_class(model_type.removeprefix("gqa_"))().to_dict(), config_class(model_type)().to_dict()
    assert {key: ours[key] for key in ours.keys() - new} == {key: theirs[key] for key in theirs.keys() - new}


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_written(name: str, converted: dict[str, Path]) -> None:
    """The installed file, byte for byte; every Auto class of the source is in the config."""
    installed = Path(modelling.__path__[0]) / file_of(name)
    assert (converted[name] / file_of(name)).read_bytes() == installed.read_bytes()
    config = json.loads((converted[name] / "config.json").read_text())
    assert config["model_type"] == f"gqa_{name}"
    assert config["architectures"] == [f"GQA{THEIRS[name].model_class}"]
    assert config["num_key_value_heads"] == 2
    assert {"AutoConfig", "AutoModel"} < set(config["auto_map"])
    assert config["auto_map"]["AutoConfig"].startswith("modeling_gqa.GQA")


# ------------------------------------------------------------------------------- transformers, in another process

LOADING = """
import json, sys, torch, transformers
from pathlib import Path
whole = json.loads(sys.argv[1])
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2])
    raise AssertionError("it ran without trust")
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
assert not list(Path("modules").rglob("modeling_gqa*"))
for place in map(Path, sys.argv[2:]):
    config = json.loads((place / "config.json").read_text())
    given, main = torch.load(place.parent / "given.pt"), config["architectures"][0]
    for auto, name in config["auto_map"].items():
        if config["model_type"].removeprefix("gqa_") not in whole and not name.endswith(main):
            continue
        made = getattr(transformers, auto).from_pretrained(place, trust_remote_code=True)
        assert "transformers_modules" in type(made).__module__, type(made)
        if type(made).__name__ == main:
            with torch.no_grad():
                torch.save(made.float().eval()(**given).logits, place.parent / f"{auto}.pt")
            made.save_pretrained(place.parent / "saved")
assert not [name for name in sys.modules if name == "gqa" or name.startswith("gqa.")]
"""


def test_every_auto_class_in_a_fresh_process(converted: dict[str, Path], tmp_path: Path) -> None:
    """Without trust nothing is run: no class of transformers takes the weights for its own and computes something else.
    With trust_remote_code alone, from the file beside the weights: our logits. (Of most model types, the one class.)
    """
    for name, out in converted.items():
        torch.save(inputs(THEIRS[name]), out.parent / "given.pt")
    words = [json.dumps(["gpt2", "bart"]), *map(str, converted.values())]
    subprocess.run(
        [sys.executable, "-c", LOADING, *words], check=True, cwd=tmp_path, input="n\n", text=True,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    for name, out in converted.items():
        expected = logits(OURS[name], load(OURS[name], out), inputs(THEIRS[name]))
        found = [torch.load(path) for path in out.parent.glob("Auto*.pt")]
        assert found
        assert all(error(one, expected) < TOLERANCE for one in found), name
        assert (out.parent / "saved" / file_of(name)).is_file()
        saved = json.loads((out.parent / "saved" / "config.json").read_text())
        assert {auto: made.rpartition("--")[2] for auto, made in saved["auto_map"].items()} == json.loads(
            (out / "config.json").read_text()
        )["auto_map"]


def test_our_commands_need_no_trust(converted: dict[str, Path], tmp_path: Path) -> None:
    """Evaluate, train and convert again, verified by loading, all without --trust-remote-code; the tokenizer is carried
    along, and where only the model type said which it is, the config says it now.
    """
    two = converted["gpt2"]
    before, after = (
        load_tokenizer(read_checkpoint(place))("a dog").input_ids for place in (two.with_name("source"), two)
    )
    assert before == after != []
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    data, trained = ("--data", tmp_path / "text.txt"), tmp_path / "trained"
    done = run(two, *data, "--json", program="gqa-eval")
    assert done.code == 0, done.err
    done = run(two, *data, "--steps", 1, "--context", 16, "-o", trained, program="gqa-uptrain")
    assert done.code == 0, done.err
    assert (trained / "modeling_gqa.py").is_file()
    assert "loads with trust_remote_code=True, verified" in done.said
    done = run("--groups", 1, "--method", "mean", "-o", tmp_path / "one", trained)
    assert (done.code, tiny_of(tmp_path / "one").name) == (0, "gqa_gpt2"), done.err
    assert "trust_remote_code=True" in done.err


def test_the_installed_code_runs(converted: dict[str, Path], tmp_path: Path) -> None:
    """Not the file beside the weights, whatever that says."""
    out = shutil.copytree(converted["gpt2"], tmp_path / "out")
    (out / "modeling_gqa.py").write_text("raise RuntimeError('run')")
    assert type(load_model(str(out))).__module__ == "gqa.checkpoint.modelling.modeling_gqa"
    assert load_tokenizer(read_checkpoint(out))("a dog").input_ids
