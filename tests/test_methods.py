"""The arithmetic of merging: what each method yields, in which precision, rounded how often."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import all_tensors, write_checkpoint
from tiny_models import TINY, build
from torch import Tensor

from gqa.convert import methods
from gqa.convert.api import convert_checkpoint
from gqa.convert.methods import METHODS, HeadMaps

DIM = 8
K = "model.layers.0.self_attn.k_proj.weight"
V_BIAS = "model.layers.1.self_attn.v_proj.bias"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(build(TINY["llama+bias"], 4), tmp_path_factory.mktemp("source") / "model")


def converted(source: Path, groups: int, place: Path, method: str = "mean", **options: Any) -> dict[str, Tensor]:
    """The tensors of a conversion."""
    return all_tensors(convert_checkpoint(source, groups, place / "out", method=method, overwrite=True, **options).out)


def grouped(tensor: Tensor, groups: int) -> Tensor:
    """(Hk * d, ...) -> (G, m, d, ...)."""
    return tensor.view(groups, 4 // groups, DIM, *tensor.shape[1:])


@pytest.mark.parametrize("groups", [1, 2])
def test_mean_and_first(source: Path, tmp_path: Path, groups: int) -> None:
    before = all_tensors(source)
    mean, first = (converted(source, groups, tmp_path, method) for method in ("mean", "first"))
    for name in (K, V_BIAS):
        expected = grouped(before[name].double(), groups).mean(1).flatten(0, 1)
        assert torch.allclose(mean[name].double(), expected, atol=1e-6, rtol=0)
        assert torch.equal(first[name], grouped(before[name], groups)[:, 0].flatten(0, 1))
    untouched = [n for n in before if "k_proj" not in n and "v_proj" not in n]
    assert len(untouched) > 10
    assert all(torch.equal(before[n], mean[n]) for n in untouched)


def test_random_is_drawn_once_per_seed_and_tensor(source: Path, tmp_path: Path) -> None:
    ways: tuple[dict[str, int], ...] = ({"seed": 1}, {"seed": 1, "jobs": 3}, {"seed": 2})
    one, again, other = (converted(source, 2, tmp_path, "random", **way) for way in ways)
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not torch.equal(one[K], other[K])
    assert not torch.equal(one[K], one[K.replace("layers.0", "layers.1")])
    assert not torch.equal(one[K], one[K.replace("k_proj", "v_proj")])
    assert torch.count_nonzero(one[V_BIAS]) == 0
    draws = torch.cat([one[n].flatten() for n in one if "k_proj.weight" in n or "v_proj.weight" in n])
    assert abs(float(draws.std()) / 0.02 - 1) < 0.1
    assert abs(float(draws.mean())) < 0.002


def stored_as(dtype: torch.dtype, place: Path) -> Path:
    """A model with all tensors cast."""
    source = write_checkpoint(build(TINY["llama"], 4), place)
    for file in source.glob("*.safetensors"):
        save_file({k: v.to(dtype) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    return source


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pooling_rounds_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """Averages of stored numbers are exact in float32 (float64) up to one rounding to the stored dtype."""
    source = stored_as(dtype, tmp_path / "source")
    before = all_tensors(source)[K]
    after = converted(source, 1, tmp_path)[K]
    exact = grouped(before.double(), 1).mean(1).flatten(0, 1)
    assert after.dtype == dtype
    if dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(after, exact.to(dtype))
        rounded_often = (sum(grouped(before, 1)[:, a] for a in range(4)) / 4).flatten(0, 1)
        assert not torch.equal(rounded_often, after), "the control: rounding at every step shows"
    else:
        assert torch.allclose(after.double(), exact, atol=1e-7 if dtype == torch.float32 else 1e-15, rtol=0)


def test_a_method_is_one_entry(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another function in an entry of the table: it converts, and the card has the entry's words."""

    def last(kv: int, groups: int) -> HeadMaps:
        weights = torch.zeros(groups, kv // groups, dtype=torch.float64)
        weights[:, -1] = 1.0
        return HeadMaps(key=weights, value=weights)

    monkeypatch.setitem(METHODS, "first", methods.Method("first", "nothing", "seconds", "the last of each group", last))
    tensors = converted(source, 2, tmp_path, "first")
    assert torch.equal(tensors[K].view(2, DIM, -1), grouped(all_tensors(source)[K], 2)[:, 1])
    assert "the last of each group (method first)" in (tmp_path / "out" / "README.md").read_text()
