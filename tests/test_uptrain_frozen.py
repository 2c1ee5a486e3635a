"""Frozen weights of linear layers are stored in bfloat16 under autocast, and once for model and
teacher: nothing that a run computes or writes changes by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import load, run
from support.patches import use_bfloat16
from support.training import (
    converted_beside_base,
    fresh_accelerator,
    options_for,
    tiny_checkpoint,
    trained,
)
from torch import nn

from gqa.checkpoint.read import read_checkpoint
from gqa.models.loading import load_model
from gqa.uptrain import setup
from gqa.uptrain.frozen_weights import frozen_linear_layers, layers_of_both, round_frozen_weights
from gqa.uptrain.models import loading_device
from gqa.uptrain.scope import freeze_parameters
from gqa.uptrain.setup import prepare

pytestmark = pytest.mark.usefixtures("alone")

# Plain; with biases; in other names; with experts; with Mamba mixers beside attention
RUNS = [
    ("llama", "attention"),
    ("llama", "kv"),
    ("llama", "lora"),
    ("qwen2", "attention"),
    ("phi", "lora"),
    ("mixtral", "attention"),
    ("jamba", "attention"),
]


def run_in_bfloat16(model: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Any]:
    """Stored tensors and held-out losses of two steps."""
    short = {"steps": 2, "validation_tokens": 64, "context": 32, "precision": "bfloat16"}
    with fresh_accelerator():
        progress, _ = trained(options_for(model, out, **short | options))
    return load(out), progress.lowest_validation


def keep_in_float32(patch: pytest.MonkeyPatch) -> None:
    """Training without what is tested here."""
    patch.setattr("gqa.uptrain.setup.round_frozen_weights", lambda *models: None)


@pytest.mark.parametrize(("family", "scope"), RUNS)
def test_a_run_has_the_bits_of_one_with_all_weights_in_float32(
    family: str, scope: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(tmp_path / "source", family, dtype="bfloat16")
    options = {"train": scope, "teacher": "none"}
    tensors, losses = run_in_bfloat16(source, tmp_path / "out", **options)
    with monkeypatch.context() as patch:
        keep_in_float32(patch)
        expected, expected_losses = run_in_bfloat16(source, tmp_path / "plain", **options)

    assert losses == expected_losses
    assert tensors.keys() == expected.keys()
    different = [name for name in tensors if not torch.equal(tensors[name], expected[name])]
    assert different == []
    changed = [name for name, one in load(source).items() if not torch.equal(one, tensors[name])]
    assert changed, "the steps changed something"


def models_of(converted: Path, **options: Any) -> tuple[Any, Any]:
    """Model and teacher of a run that is ready to start."""
    with fresh_accelerator():
        ready: Any = prepare(options_for(converted, converted.with_name("out"), **options))
    head = ready.training_model._teacher
    return ready.model, head.model


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """Next to its base model, which is its teacher."""
    return converted_beside_base(tmp_path)


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    return {path: one for path, one in model.named_modules() if type(one) is nn.Linear}


def test_frozen_linear_layers_are_in_bfloat16_and_shared_with_the_teacher(converted: Path) -> None:
    model, teacher = models_of(converted, precision="bfloat16", train="attention")
    of_teacher = linear_layers(teacher)
    for path, layer in linear_layers(model).items():
        if ".mlp." in path:
            assert layer.weight.dtype == torch.bfloat16
            assert of_teacher[path].weight.data_ptr() == layer.weight.data_ptr()
        elif "self_attn" in path:
            assert layer.weight.dtype == torch.float32
            assert layer.weight.requires_grad
    assert model.get_input_embeddings().weight.dtype == torch.float32


@pytest.mark.parametrize(
    "options", [{"precision": "float32", "train": "attention"}, {"train": "all"}]
)
def test_nothing_is_rounded_without_autocast_or_frozen_weights(
    converted: Path, options: dict[str, Any]
) -> None:
    model, _ = models_of(converted, **{"precision": "bfloat16"} | options)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.float32}


def test_a_teacher_with_other_weights_keeps_them(tmp_path: Path) -> None:
    """Shared are weights that are equal, not those of the same name."""
    source = tiny_checkpoint(tmp_path / "source")
    checkpoint = read_checkpoint(source)
    model = load_model(str(source), dtype="float32")
    freeze_parameters(model, checkpoint, "attention")
    teacher = load_model(str(source), dtype="float32")
    first, second = (path for path in linear_layers(teacher) if path.endswith("mlp.up_proj"))
    with torch.no_grad():
        teacher.get_submodule(first).weight.add_(1.0)
    before = teacher.get_submodule(first).weight.clone()

    round_frozen_weights(model, checkpoint, teacher)
    assert torch.equal(teacher.get_submodule(first).weight, before)
    assert teacher.get_submodule(second).weight is model.get_submodule(second).weight


def test_frozen_tensors_of_the_result_are_those_of_the_source(tmp_path: Path) -> None:
    """Of a checkpoint in float32, whose numbers bfloat16 does not have."""
    source = tiny_checkpoint(tmp_path / "source", dtype="float32")
    tensors, _ = run_in_bfloat16(source, tmp_path / "out", train="attention", teacher="none")
    kept = [name for name in tensors if "self_attn" not in name]
    original = load(source)
    assert kept
    assert all(torch.equal(tensors[name], original[name]) for name in kept)


@pytest.mark.parametrize(("dtype", "is_rounded"), [("float32", False), ("bfloat16", True)])
def test_a_weight_with_an_adapter_is_rounded_only_if_that_changes_nothing(
    tmp_path: Path, dtype: str, is_rounded: bool
) -> None:
    """Its numbers become part of the result when the adapter is merged."""
    source = tiny_checkpoint(tmp_path / "source", dtype=dtype)
    checkpoint = read_checkpoint(source)
    model = load_model(str(source), dtype="float32")
    freeze_parameters(model, checkpoint, "lora")
    rounded = frozen_linear_layers(model, checkpoint)
    assert any(path.endswith("mlp.up_proj.base_layer") for path in rounded) == is_rounded


def test_a_weight_that_an_embedding_uses_is_not_rounded(tmp_path: Path) -> None:
    """Autocast does not round embeddings."""
    source = tiny_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    checkpoint = read_checkpoint(source)
    model = load_model(str(source), dtype="float32")
    freeze_parameters(model, checkpoint, "attention")
    rounded = frozen_linear_layers(model, checkpoint)
    assert rounded
    assert "lm_head" not in rounded


@pytest.mark.parametrize(
    ("free", "expected"), [(lambda n: None, "cuda:1"), (lambda n: 2 * n, "cuda:1"), (int, "cpu")]
)
def test_models_that_fit_only_when_rounded_are_loaded_on_the_host(
    converted: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: Callable[[int], int | None],
    expected: str,
) -> None:
    """`free` bytes of the device, by those of both models as they are loaded: some must remain."""
    model = read_checkpoint(converted)
    base = read_checkpoint(converted.with_name("base"))
    loaded = 4 * sum(spec.numel for spec in model.tensors.values()) + base.nbytes
    monkeypatch.setattr("gqa.uptrain.models.free_memory", lambda device: free(loaded))
    accelerator: Any = SimpleNamespace(device=torch.device("cuda", 1))
    assert loading_device(model, base, accelerator) == expected


def test_models_on_another_device_still_share_weights(converted: Path) -> None:
    """`Module.to` replaces the numbers of a parameter, so the first of both models moves it."""
    model, teacher = models_of(converted, precision="bfloat16", train="attention")
    for one in (model, teacher):
        one.to(torch.float16)  # as to a device, it makes new tensors
    pairs = list(layers_of_both(linear_layers(model), teacher))
    shared = [layer.weight is other.weight for layer, other in pairs]
    assert any(shared)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (("self:2K",), ["cpu", "cpu", "text", "cpu", "cpu"]),
        (None, ["text", "cpu", "cpu"]),
    ],
)
def test_models_wait_on_the_host_while_the_teacher_generates(
    converted: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: tuple[str, ...] | None,
    expected: list[str],
) -> None:
    """Text is generated by a teacher that has the device to itself."""
    done = []
    build = setup.build_data

    def build_data(*arguments: Any) -> Any:
        done.append("text")
        return build(*arguments)

    monkeypatch.setattr(setup, "build_data", build_data)
    monkeypatch.setattr(setup, "_move", lambda models, place: done.extend(place for _ in models))
    options = {"data": data, "steps": None} if data else {}
    with fresh_accelerator():
        prepare(options_for(converted, converted.with_name("out"), **options))
    assert done == expected


# ---------------------------------------------------------------------------------------- the plan


def planned(converted: Path, *words: object) -> dict[str, Any]:
    """The record of a dry run."""
    done = run(str(converted), *map(str, words), "--dry-run", "--json", program="gqa-uptrain")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def bytes_of(*models: Any) -> int:
    """Of all parameters; those that two models share count once."""
    sizes = {
        parameter.data_ptr(): parameter.nbytes
        for model in models
        for parameter in model.parameters()
    }
    return sum(sizes.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("scope", ["attention", "all"])
def test_a_plan_counts_the_weights_that_a_run_holds(
    converted: Path, monkeypatch: pytest.MonkeyPatch, precision: str, scope: str
) -> None:
    use_bfloat16(monkeypatch, native=True)
    needs = planned(converted, "--precision", precision, "--train", scope)
    model, teacher = models_of(converted, precision=precision, train=scope)
    assert needs["weights"] == bytes_of(model)
    assert needs["weights"] + needs["teacher"] == bytes_of(model, teacher)
    assert needs["copies"] == (2 * needs["trained"] if precision == "bfloat16" else 0)


def test_a_plan_does_not_share_with_a_teacher_that_is_not_the_base_model(converted: Path) -> None:
    other = tiny_checkpoint(converted.with_name("other"), kv_heads=4)
    words = ("--precision", "bfloat16", "--train", "attention")
    of_base = planned(converted, *words)
    of_other = planned(converted, *words, "--teacher", other)
    assert of_base["teacher"] < of_other["teacher"]
    model = load_model(str(other), dtype="auto", weights=False)
    assert of_other["teacher"] == sum(parameter.nbytes for parameter in model.parameters())


def test_layers_of_both_are_those_of_one_name_and_shape(converted: Path) -> None:
    """Attention of the converted model has fewer heads."""
    model, teacher = models_of(converted, precision="bfloat16", train="attention")
    layers = linear_layers(model)
    shared = {id(layer) for layer, _ in layers_of_both(layers, teacher)}
    missing = {path.split(".")[-1] for path, one in layers.items() if id(one) not in shared}
    assert missing == {"k_proj", "v_proj"}
