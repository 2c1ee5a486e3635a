"""benchmarks/gpu.py: every part runs with tiny models on a CPU, and a run that was stopped continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

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
for name in [*gpu.PARTS] if not launchers else ["uptrain"]:
    scale = replace(gpu.TINY, launchers=launchers)
    results = gpu.Results(out / f"{name}.json", out / "work", scale, 1e12, gpu.EMBEDDED, ("stdlib:heldout",))
    gpu.PARTS[name](results)
    results.write(True)
"""


def run(out: Path, what: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    environment |= {"PYTHONPATH": str(ROOT / "benchmarks"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hf")}
    (out / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PARTS, str(out), what], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def rows(out: Path, part: str) -> dict[str, dict[str, Any]]:
    written = json.loads((out / f"{part}.json").read_text())
    assert written["complete"], written
    return dict(written["rows"])


@pytest.mark.scale  # every part of it, in 20 seconds
def test_every_part(tmp_path: Path) -> None:
    run(tmp_path, "parts")
    decode = rows(tmp_path, "decode")
    assert decode["sdpa 2 heads 32 context 1 batch"]["bytes"] < decode["sdpa 8 heads 32 context 1 batch"]["bytes"]
    assert decode["sdpa 8 heads 32 context largest batch"]["batch"] == 3  # of the 4 that are free, with some to spare
    assert all(row["eager_tokens_per_second"] > 0 for name, row in decode.items() if name != "bandwidth")
    convert = rows(tmp_path, "convert")
    assert [*convert] == ["calibrated", "refined"]
    assert len(convert["calibrated"]["seconds"]) > 2  # stages
    assert [*rows(tmp_path, "uptrain")] == ["matrix product", "plain", "checkpointing"]
    for part, name in (("distill", "1 heads 512 tokens"), ("smollm2", "1 head")):
        row = rows(tmp_path, part)[name]
        assert row["losses"]["distillation_after"] < row["losses"]["distillation_before"]
        assert [model["quality"]["tokens"] > 0 for model in row["stdlib:heldout"]] == [True] * 3


@pytest.mark.scale  # launchers
def test_launchers_of_one_rank(tmp_path: Path) -> None:
    run(tmp_path, "launchers")
    assert {"one rank", "one rank fsdp2"} <= {*rows(tmp_path, "uptrain")}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu as module  # type: ignore[import-not-found]

    return module  # type: ignore[no-any-return]


def test_what_is_measured_is_not_measured_again(gpu: ModuleType, tmp_path: Path) -> None:
    """A row that failed is, and the others of its part do not fail with it; without time nothing begins."""

    def fail() -> dict[str, Any]:
        raise ValueError("no")

    file, calls = tmp_path / "part.json", list[str]()
    first = gpu.Results(file, tmp_path, gpu.TINY)
    first.measure("a", lambda: {"value": 1})
    first.measure("b", fail)
    first.write(True)
    assert "no" in first.rows["b"]["error"]
    assert not gpu.is_complete(file)
    with pytest.raises(TimeoutError):
        gpu.Results(file, tmp_path, gpu.TINY, deadline=0.0).measure("b", fail)
    second = gpu.Results(file, tmp_path, gpu.TINY)
    for name in ("a", "b"):
        second.measure(name, lambda: calls.append("called") or {"value": 2})
    second.write(True)
    assert (calls, second.rows["a"]["value"], second.rows["b"]["value"]) == (["called"], 1, 2)
    assert gpu.is_complete(file)


def test_parts_have_limits_and_complete_ones_are_skipped(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}

    def part(name: str, seconds: float, words: list[str], environment: Mapping[str, str]) -> None:
        limits[name] = seconds
        assert environment["HF_HUB_OFFLINE"] == "1"
        path = environment["PYTHONPATH"].split(os.pathsep)[:1]
        assert [found.name for found in distributions(name="gqa", path=path)] == ["gqa"]
        assert (Path(path[0]) / "gqa" / "convert" / "cli.py").exists()

    monkeypatch.setattr(gpu, "run_part", part)
    gpu.Results(tmp_path / "decode.json", tmp_path, gpu.TINY).write(True)
    words = ["--out", str(tmp_path), "--work", str(tmp_path / "work")]
    for more in ([], ["--part", "distill"]):
        done = CliRunner().invoke(gpu.main, [*words, *more], catch_exceptions=False)
        assert "decode: complete" in done.output or more
    assert [*limits] == ["convert", "uptrain", "distill"]
    assert limits["convert"] == gpu.LIMITS["convert"]
    assert 500 < limits["distill"] < 540  # alone it has all of the time
