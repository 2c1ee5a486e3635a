"""benchmarks/gpu.py: every part runs with tiny models on a CPU, and a run that was stopped continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gqa.uptrain.cli import command

ROOT = Path(__file__).parents[1]
PARTS = """
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
import gpu
import gqa.corpus.sources as sources

stdlib_texts = sources.stdlib_texts
sources.stdlib_texts = lambda split: islice(stdlib_texts(split), 40)
out, launchers = Path(sys.argv[1]), sys.argv[2] == "launchers"
gpu.TINY = replace(gpu.TINY, launchers=launchers)
parts = ["--part", "uptrain"] if launchers else []
gpu.main(["--tiny", "--out", str(out), "--work", str(out / "work"), *parts])
"""


def run(out: Path, parts: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    environment |= {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run(
        [sys.executable, "-c", PARTS, str(out), parts], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def rows(out: Path, part: str) -> dict[str, dict[str, Any]]:
    """The measurements of a part, none of which failed."""
    measured = dict(json.loads((out / f"{part}.json").read_text())["rows"])
    assert not any("error" in row for row in measured.values()), measured
    return measured


def test_every_part(tmp_path: Path) -> None:
    run(tmp_path, "parts")
    decode = rows(tmp_path, "decode")
    assert decode["sdpa 2 heads 32 context 1 batch"]["bytes"] < decode["sdpa 8 heads 32 context 1 batch"]["bytes"]
    assert decode["sdpa 8 heads 32 context largest batch"]["batch"] == 3  # of the 4 that are free, with some to spare
    assert all(row["eager_tokens_per_second"] > 0 for name, row in decode.items() if name != "bandwidth")
    convert = rows(tmp_path, "convert")
    assert [*convert] == ["calibrated", "refined"]
    assert len(convert["calibrated"]["seconds"]) > 2  # stages
    assert {*rows(tmp_path, "uptrain")} == {"plain", "checkpointing"}


@pytest.mark.scale  # launchers
def test_launchers_of_one_rank(tmp_path: Path) -> None:
    run(tmp_path, "launchers")
    assert {"one rank", "one rank fsdp2"} <= {*rows(tmp_path, "uptrain")}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu as module  # type: ignore[import-not-found]

    return module  # type: ignore[no-any-return]


def test_training_is_timed_with_and_without_a_compiler(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TINY leaves the compiler out, which takes half a minute for each; the words are those of the command."""
    runs: list[dict[str, Any]] = []

    def parse(program: str, *words: str) -> None:
        assert program == "uptrain"
        runs.append(command.make_context("gqa-uptrain", [*words]).params)

    for name, stub in {"random_model": lambda *_: "model", "command": parse, "metrics": lambda state: {}}.items():
        monkeypatch.setattr(gpu, name, stub)
    gpu.uptrain(gpu.Results(tmp_path / "part.json", tmp_path, replace(gpu.TINY, compile=True, launchers=False)))
    assert [(bool(run["checkpointing"]), bool(run["compile"])) for run in runs] == [
        (False, False), (True, False), (False, True), (True, True),
    ]  # fmt: skip


def test_what_is_measured_is_not_measured_again(gpu: ModuleType, tmp_path: Path) -> None:
    """A row that failed is measured again; the others of its part do not fail with it."""

    def fail() -> dict[str, Any]:
        raise ValueError("no")

    file, calls = tmp_path / "part.json", list[str]()
    first = gpu.Results(file, tmp_path, gpu.TINY)
    first.measure("a", lambda: {"value": 1})
    first.measure("b", fail)
    assert "no" in first.rows["b"]["error"]
    second = gpu.Results(file, tmp_path, gpu.TINY)
    for name in ("a", "b"):
        second.measure(name, lambda: calls.append("called") or {"value": 2})
    assert (calls, second.rows["a"]["value"], second.rows["b"]["value"]) == (["called"], 1, 2)
