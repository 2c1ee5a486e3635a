"""Devices: float64, what has no memory left, and a model that is larger than it."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import torch
from torch._subclasses import FakeTensorMode
from training import tiny_checkpoint

from gqa.checkpoint.console import run
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import as_float64, find_device, load_model, out_of_memory


@pytest.mark.parametrize(("device", "where"), [("cpu", "cpu"), ("cuda", "cuda"), ("mps", "cpu")])
def test_float64_is_on_the_device_if_it_has_it(device: str, where: str) -> None:
    with FakeTensorMode():
        found = as_float64(torch.empty(3, 2, dtype=torch.bfloat16, device=device))
    assert (found.device.type, found.dtype, tuple(found.shape)) == (where, torch.float64, (3, 2))
    assert as_float64(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)).tolist() == [1.5, -2.0]


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RefusedError, match=r"^--device \w+ cannot be used: .*; \w+ can$"):
        find_device("xpu" if torch.cuda.is_available() else "cuda")


def test_what_running_out_of_memory_looks_like(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has a class for a GPU's memory alone; the machine's is known by words. A command says it in one line."""
    monkeypatch.setattr("sys.argv", ["gqa-test"])
    with pytest.raises(SystemExit, match=r"^1$"):
        run(click.Command("test", callback=lambda: torch.empty(1 << 46)), "gqa-test", "nothing was written")
    assert capsys.readouterr().err.startswith("gqa-test: out of memory: ")
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(ValueError("out of memory"))


def test_a_model_larger_than_memory_is_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` no more weights are in memory than it may hold, the rest on the disk: the same logits."""
    directory = tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=8, intermediate_size=2048)
    limit, ids = 4_000_000, torch.arange(8)[None]
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": limit})
    whole, spread = load_model(str(directory)), load_model(str(directory), device="auto")
    size, resident = (
        sum(part.numel() * part.element_size() for part in model.parameters() if not part.is_meta)
        for model in (whole, spread)
    )
    assert 0 < resident <= limit < size
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, spread(input_ids=ids).logits)
