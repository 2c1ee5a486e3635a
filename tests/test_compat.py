"""Private names of libraries: all are in one file, few, and there."""

import ast
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
COMPAT = "checkpoint/compat.py"
PRODUCT = [path for folder in ("checkpoint", "convert", "corpus", "eval", "package", "uptrain")
           for path in (ROOT / folder).rglob("*.py")]  # fmt: skip
_WITHOUT_PACKAGE = "_attn_implementation"  # files beside weights read it themselves
_PYTHON = {"_asdict", "_fields"}  # public names of namedtuples


def private_names(tree: ast.AST) -> set[str]:
    """Names with a leading underscore that a module reads or sets as attributes, in any way, or imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names |= {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
        if isinstance(node, ast.ImportFrom):
            names |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
    return {name for name in names if re.match("_[a-zA-Z]", name)} - _PYTHON


def own_names(tree: ast.AST) -> set[str]:
    """Names with a leading underscore that a module defines: functions, classes, variables and attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in PRODUCT}
PRIVATE = private_names(TREES[COMPAT])


def test_one_file_touches_private_names() -> None:
    """At most 15, each with a comment or a sentence beside it; the control finds the file that may."""
    own = set().union(*(own_names(tree) for file, tree in TREES.items() if file != COMPAT)) - PRIVATE
    touching = {file: private_names(tree) - own for file, tree in TREES.items()}
    for file, names in touching.items():
        allowed = {_WITHOUT_PACKAGE} if file.startswith("checkpoint/modelling/") else set()
        assert file == COMPAT or names <= allowed, (file, names)
    assert touching[COMPAT] == PRIVATE
    assert len(PRIVATE) <= 15


def owners() -> list[object]:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=8))
    return [
        model, model.config, AttentionInterface, AttentionMaskInterface, torch.utils, Accelerator(cpu=True),
        AcceleratorState, GradientState, Dataset.from_dict({"text": ["a"]}),
    ]  # fmt: skip


# Set by transformers while it loads, and read by it later.
SET_BY_LOADING = {"_weight_conversions", "_is_hf_initialized"}


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_private_names_are_there(name: str, tmp_path: Path) -> None:
    if name in SET_BY_LOADING:
        model = LlamaForCausalLM(LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=8))
        model.save_pretrained(tmp_path)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path)
        assert hasattr(loaded, name)
    else:
        assert any(hasattr(owner, name) for owner in owners()), f"no library has {name}"
