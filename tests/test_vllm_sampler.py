"""`--sampler vllm`, with a stand-in for vLLM: what it is told, and what becomes of what it writes."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from checkpoints import check_refused, run
from embedded import SOURCE, converted, load
from training import fresh_accelerator, tiny_checkpoint

import gqa.convert.align.self_samples as module
import gqa.convert.align.vllm_sampler as sampler
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_model
from gqa.checkpoint.read import read_checkpoint
from gqa.convert.align.self_samples import sampled_blocks, samples

SIZE = 12


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(module, "SAMPLED", 4)
    monkeypatch.setattr(module, "native_bfloat16", lambda device: False)
    return tmp_path / "cache" / "gqa-samples"


class OfVllm:
    """A stand-in for vLLM's `LLM`: the embedded model, of a sequence as its seed says. What it was told is kept."""

    made: ClassVar[list[dict[str, Any]]] = []
    drawn: ClassVar[list[Any]] = []

    def __init__(self, **told: Any) -> None:
        self.made.append(told)
        self._model = load_model(told["model"], dtype=told["dtype"])

    def generate(self, prompts: list[dict[str, list[int]]], drawn: list[Any], use_tqdm: bool) -> list[Any]:
        self.drawn.extend(drawn)
        assert not use_tqdm
        rows = samples(self._model, drawn[0].max_tokens + 1, seed=[how.seed for how in drawn], batch=1).tolist()
        assert prompts == [{"prompt_token_ids": row[:1]} for row in rows]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(row[1:]))]) for row in rows]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[OfVllm]:
    monkeypatch.setattr(OfVllm, "made", [])
    monkeypatch.setattr(OfVllm, "drawn", [])
    stand_in = ModuleType("vllm")
    stand_in.__dict__.update(LLM=OfVllm, SamplingParams=SimpleNamespace, __spec__=ModuleSpec("vllm", None))
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    return OfVllm


def test_vllm_writes(vllm: type[OfVllm], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence by a seed of its own, to its end; kept beside what transformers writes, and no model is loaded."""
    monkeypatch.setattr(module, "AT_ONCE", 8)

    def write(count: int, vllm: bool = True) -> np.ndarray:
        asked: list[str] = []

        def transformers_one(dtype: str) -> Any:
            asked.append(dtype)
            return load(SOURCE)

        found = sampled_blocks(transformers_one, "cpu", read_checkpoint(SOURCE), SIZE, count, 0, True, vllm=vllm)
        assert bool(asked) is not vllm
        return np.stack([found[index]["input_ids"] for index in range(count)])

    found = write(9)
    assert len({how.seed for how in vllm.drawn}) == len(vllm.drawn) == 12  # three batches of 4
    assert (vllm.made[0]["max_model_len"], vllm.made[0]["dtype"]) == (SIZE, "float32")
    told = [(how.temperature, how.top_p, how.top_k, how.ignore_eos, how.max_tokens) for how in vllm.drawn]
    assert set(told) == {(1.0, 1.0, -1, True, SIZE - 1)}
    expected = samples(load(SOURCE), SIZE, seed=[how.seed for how in vllm.drawn[:8]], batch=1)
    assert np.array_equal(found[:8], expected)
    assert np.array_equal(write(13)[:9], found)
    assert len(vllm.drawn) == 12 + 4, "a longer run goes on"
    assert not np.array_equal(write(9, vllm=False), found)
    assert len(list(cache.glob("*.int32"))) == 2
    monkeypatch.setattr(vllm, "generate", lambda *given, **how: 1 / 0)
    with pytest.raises(RefusedError, match=r"vLLM cannot sample from .*division by zero; leave --sampler out"):
        write(100)
    monkeypatch.setattr(vllm, "__init__", lambda *given, **how: 1 / 0)
    with pytest.raises(RefusedError, match=r"vLLM cannot load .*division by zero; leave --sampler out"):
        write(100)


def test_commands_write_by_vllm(vllm: type[OfVllm], tmp_path: Path) -> None:
    """What calibrates and what trains on text that a model writes."""
    how = ["--context", 16, "--device", "cpu", "--sampler", "vllm", "-q"]
    calibrate = [SOURCE, "--groups", 2, "--tokens", 64, "-o", tmp_path / "maps"]
    train = [converted(tmp_path, 2), "--data", "self:128", "--steps", 1, "--batch-size", 2, "--heldout-tokens", 64]
    for program, words in (("gqa-calibrate", calibrate), ("gqa-uptrain", [*train, "-o", tmp_path / "out"])):
        vllm.made.clear()
        with fresh_accelerator():
            done = run(*words, *how, program=program)
        assert done.code == 0, done.err
        assert len(vllm.made) == 1


def test_refused_before_anything_is_loaded(vllm: type[OfVllm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(t5 := tmp_path / "t5", "t5gemma", kv_heads=4)
    calibrate, train = ["--groups", 2, "--tokens", 64, "--context", 16], ["--teacher", SOURCE, "--steps", 1]
    seq2seq: list[object] = ["--teacher", t5, "--attn-implementation", "eager"]
    for program, more, also in (("gqa-calibrate", calibrate, []), ("gqa-uptrain", train, seq2seq)):
        given = [*more, "--sampler", "vllm", "-q", "-o", tmp_path / "out"]

        def refuse(
            says: str, *beside: object, model: Path = SOURCE, program: str = program, given: Any = given
        ) -> None:
            with fresh_accelerator():
                check_refused(run(model, *given, *beside, program=program), says, program=program)

        refuse("--sampler vllm writes the text of --data self, which is not asked for", "--data", "stdlib:train")
        refuse("--sampler vllm is for decoders", *also, model=t5)
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "vllm")
            refuse("--sampler vllm needs vLLM; install it with: pip install vllm")
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "ranks", lambda: SimpleNamespace(num_processes=2))
            refuse("--sampler vllm shares a model over all GPUs by itself; start it without a launcher")
    assert not vllm.made
