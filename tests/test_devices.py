"""Where numbers can be had in float64: everywhere but on MPS."""

from __future__ import annotations

import click
import pytest
import torch
from torch._subclasses import FakeTensorMode

from gqa.checkpoint.console import run
from gqa.checkpoint.devices import as_float64, find_device, out_of_memory
from gqa.convert import RefusedError


@pytest.mark.parametrize(("device", "where"), [("cpu", "cpu"), ("cuda", "cuda"), ("mps", "cpu")])
def test_float64_is_on_the_device_if_it_has_it(device: str, where: str) -> None:
    with FakeTensorMode():
        found = as_float64(torch.empty(3, 2, dtype=torch.bfloat16, device=device))
    assert (found.device.type, found.dtype, tuple(found.shape)) == (where, torch.float64, (3, 2))
    assert as_float64(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)).tolist() == [1.5, -2.0]


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RefusedError, match=r"^--device \w+ cannot be used: .*; \w+ can$"):
        find_device("xpu" if torch.cuda.is_available() else "cuda")


def test_what_running_out_of_memory_looks_like() -> None:
    """torch has a class for a GPU's memory alone; the machine's is told in words."""
    with pytest.raises(RuntimeError) as told:
        torch.empty(1 << 46)
    assert out_of_memory(told.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(ValueError("out of memory"))


def test_a_command_that_runs_out_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing tells what took it: this is no defect to be reported."""

    @click.command()
    def command() -> None:
        torch.empty(1 << 46)

    monkeypatch.setattr("sys.argv", ["gqa-test"])
    with pytest.raises(SystemExit, match=r"^1$"):
        run(command, "gqa-test", "nothing was written")
    told = capsys.readouterr().err
    assert told.startswith("gqa-test: out of memory: ")
    assert "report it" not in told
