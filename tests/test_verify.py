"""What is written wrong is noticed before it is published: bytes are damaged on their way to the disk."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MERGED, llama, run, weights
from test_edges import save_bin
from torch import Tensor

from gqa.checkpoint.errors import OutputError, RefusedError
from gqa.checkpoint.write import write_tensor
from gqa.convert import rewrite
from gqa.convert.api import convert_checkpoint, plan_conversion


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        (-(1 << 20), "z.weight is not as it was in the source"),  # at the start, in the middle, at the end
        (-(1 << 19) - 1, "z.weight is not as it was in the source"),
        (-1, "z.weight is not as it was in the source"),
        (12, "the result does not verify"),  # in the header
        (-(1 << 18), None),  # between two sampled blocks of a tensor of 1 MiB
    ],
)
def test_a_damaged_copy_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, says: str | None
) -> None:
    """After the shard is written and before it is verified, one bit of it is changed."""
    monkeypatch.setattr(rewrite, "BLOCK", 1 << 10)
    source = llama(tmp_path / "m", tensors=weights() | {"z.weight": torch.randn(4096, 64)}, shards=1)
    verify_shard = rewrite.verify_shard

    def damage_and_verify(plan: Any, path: Path, *rest: Any) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        verify_shard(plan, path, *rest)

    monkeypatch.setattr(rewrite, "verify_shard", damage_and_verify)
    with pytest.raises(OutputError, match=re.escape(says)) if says else contextlib.nullcontext():
        convert_checkpoint(source, 2, tmp_path / "out", method="mean")
    assert (tmp_path / "out").exists() == (says is None)


@pytest.mark.parametrize(
    ("stored", "wrong", "says"),
    [
        ("bin", lambda tensor: tensor + 1, "is not as it was in the source"),
        ("safetensors", lambda tensor: tensor * float("nan"), "NaN or Inf though its source has none"),
    ],
)
def test_tensors_that_are_written_wrong_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, wrong: Callable[[Tensor], Tensor], says: str
) -> None:
    source = llama(tmp_path / "m")
    if stored == "bin":
        save_bin(source, weights(), 1)
    monkeypatch.setattr(
        rewrite, "write_tensor", lambda target, tensor, *rest: write_tensor(target, wrong(tensor), *rest)
    )
    with pytest.raises(OutputError, match=says):
        convert_checkpoint(source, 2, tmp_path / "out", method="mean")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


Tensors = dict[str, Tensor]


def drop(pattern: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)}


def narrow(pattern: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: torch.zeros(shape) if re.search(pattern, n) else t for n, t in tensors.items()}


QWEN3 = {"model_type": "qwen3", "head_dim": 4, "architectures": ["Qwen3ForCausalLM"]}
UNLOADABLE: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "another prefix": (
        lambda tensors: {f"student.{name}": tensor for name, tensor in tensors.items()}, {},
        r"are not stored \(but student\.",
    ),
    "ZeRO-3": (narrow("mlp.up_proj", 0), {}, r"mlp.up_proj.weight is stored as \[0\], .*zero_to_fp32.py"),
    "a pruned MLP": (narrow("mlp.up_proj", 8, 32), {}, r"as \[8, 32\], by config.json it is \[16, 32\] \(and 1 m"),
    "more layers in the config": (dict, {"num_hidden_layers": 3}, "layers.2.*are not stored, and LlamaForCausalLM"),
    "an untied head": (drop("lm_head"), {}, "lm_head.weight is not stored, and LlamaForCausalLM would initialise"),
    "a model type of another model": (dict, QWEN3, "q_norm"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLOADABLE)
def test_what_transformers_would_initialise_at_random_is_refused(case: str, tmp_path: Path) -> None:
    """It only warns of that. Refused with the plan, so in a dry run too."""
    change, settings, says = UNLOADABLE[case]
    with pytest.raises(RefusedError, match=says):
        plan_conversion(llama(tmp_path / "m", tensors=change(weights()), **settings), 2, method="mean")


@pytest.mark.parametrize("odd", [3, [None], "LlamaModel"])
def test_what_names_no_class_is_as_if_nothing_were_named(odd: object, tmp_path: Path) -> None:
    """`architectures` of config.json may be anything: the result is of the class that its model type stands for."""
    result = run(*MERGED, "-o", tmp_path / "out", llama(tmp_path / "m", architectures=odd))
    assert (result.code, result.err) == (0, "")
    assert "next " in result.out


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"architectures": ["LlamaForReward"]}, "Llama"),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "Llama"),
        ({"model_type": "olmo2", "architectures": ["Llama"]}, "Olmo2"),
    ],
)
def test_classes_of_others_are_not_tried(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    """Code of a checkpoint is not run: what was not checked is a warning."""
    plan = plan_conversion(llama(tmp_path / "m", tensors=drop("lm_head")(weights()), **settings), 2, method="mean")
    says = f"{name}ForCausalLM does not load the result, other classes were not tried"
    assert any(says in warning for warning in plan.warnings), plan.warnings
