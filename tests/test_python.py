"""`import gqa`: the functions do what the commands do, on models in places and in memory, and leave theirs alone."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import contents, run
from training import fresh_accelerator, write_corpus

import gqa


@pytest.fixture
def loaded(place: Path) -> Any:
    """The teacher (4 key/value heads) as a caller holds it: trained further, so that no place has its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place / "teacher")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.125
    return model


def state(model: Any) -> tuple[Any, ...]:
    """Everything of a model in memory that somebody could notice to have changed."""
    settings = [copy.deepcopy(vars(part)) for part in (model.config, model.generation_config)]
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return id(model.config), settings, model.training, tensors.keys(), [t.sum().item() for t in tensors.values()]


def test_importing_is_quick_and_shows_what_is_public() -> None:
    told = "import sys, gqa; print(dir(gqa)); print(sorted({'torch', 'transformers', 'numpy'} & {*sys.modules}))"
    shown, heavy = subprocess.check_output([sys.executable, "-c", told], text=True).splitlines()
    assert shown == str(sorted(gqa.__all__))
    assert heavy == "[]"
    found = {name: getattr(gqa, name) for name in gqa.__all__}
    assert all(value.__doc__ for name, value in found.items() if name != "__version__")
    assert dir(gqa) == sorted(gqa.__all__)  # though all of it is imported now
    with pytest.raises(AttributeError, match="no attribute 'convert_mdoel'"):
        _ = gqa.convert_mdoel  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["mean", "aligned"])
def test_a_place_is_converted_as_the_command_converts_it(place: Path, tmp_path: Path, method: str) -> None:
    made = gqa.convert_model(place / "teacher", 2, method, out=tmp_path / "ours", progress=False)
    assert run("-g", 2, "--method", method, place / "teacher", "-o", tmp_path / "theirs", "-q").code == 0
    assert contents(made.path) == contents(tmp_path / "theirs")
    assert made.path == tmp_path / "ours"
    assert repr(made) == f"<ConvertedModel {made.path}: 4 -> 2 KV heads ({method}), KV cache 2x smaller>"


def test_a_model_in_memory_gives_another_and_stays_as_it_is(loaded: Any, tmp_path: Path) -> None:
    before = state(loaded)
    made = gqa.convert_model(loaded, kv_heads=2, method="mean", progress=False)
    assert state(loaded) == before
    loaded.save_pretrained(tmp_path / "saved")
    assert state(loaded) != before  # the control: saving alone writes into its config
    assert run("-g", 2, "--method", "mean", tmp_path / "saved", "-o", tmp_path / "out", "-q").code == 0
    ours, theirs = (gqa.convert_model(at, 2, progress=False).load().state_dict() for at in (made, tmp_path / "out"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert made.load().config.num_key_value_heads == 2


def test_what_is_in_a_temporary_place_goes_with_the_result(loaded: Any, tmp_path: Path) -> None:
    made = gqa.convert_model(loaded, 2, "mean", progress=False)
    place, model = made.path, made.load()
    assert place.is_dir()
    assert [path.name for path in place.parent.iterdir()] == ["teacher-gqa2-mean"]  # the model was removed again
    del made
    gc.collect()
    assert not place.exists()
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    kept = gqa.convert_model(loaded, 2, "mean", out=tmp_path / "kept", progress=False)
    del kept
    gc.collect()
    assert (tmp_path / "kept" / "config.json").is_file()


def test_errors_of_layers_are_returned(place: Path, tmp_path: Path) -> None:
    options = gqa.MapsOptions(text=gqa.CalibrationText(tokens=512, length=32), device="cpu")
    how = {"data": str(write_corpus(tmp_path / "text.jsonl", 8)), "options": options, "progress": False}
    made = gqa.convert_model(place / "teacher", 2, "calibrated", out=tmp_path / "out", **how)
    assert sorted(made.layer_errors) == [0, 1]


def test_training_is_that_of_the_command(place: Path, tmp_path: Path, alone: None) -> None:
    how = {"steps": 2, "batch_size": 2, "learning_rate": 1e-2, "block_size": 32}
    words = [word for name, value in how.items() for word in (f"--{name.replace('_', '-')}", value)]
    words[words.index("--block-size")] = "--context"
    data = place / "data.jsonl"
    with fresh_accelerator():
        assert run(place / "model", "--data", data, "-o", tmp_path / "b", *words, "-q", program="gqa-uptrain").code == 0
    with fresh_accelerator():
        from accelerate import Accelerator

        theirs = Accelerator(mixed_precision="bf16")  # what a caller has made is as it was
        made = gqa.uptrain_model(
            place / "model", str(data), teacher=None, out=tmp_path / "a", progress=False, precision="no", **how
        )
        assert theirs.mixed_precision == "bf16"
    assert contents(made.path).keys() == contents(tmp_path / "b").keys()
    ours, other = made.load().state_dict(), gqa.TrainedModel(path=tmp_path / "b", record={}).load().state_dict()
    assert all(torch.equal(ours[name], other[name]) for name in ours)
    assert made.record["options"]["learning_rate"] == 1e-2
    assert "2 steps" in repr(made)


def test_models_in_memory_are_trained_and_compared(place: Path, loaded: Any, tmp_path: Path, tokenizer: Any) -> None:
    how = {"steps": 1, "batch_size": 2, "block_size": 32, "heldout_fraction": 0.2, "heldout_tokens": 64}
    data = str(place / "data.jsonl")
    before = state(loaded)
    with fresh_accelerator():
        made = gqa.uptrain_model(loaded, data, teacher=loaded, tokenizer=tokenizer, progress=False, **how)
    assert made.heldout[0] is not None
    assert state(loaded) == before
    found = gqa.evaluate(
        loaded, made, data=data, tokenizer=tokenizer, context=32, tokens=200, progress=False, recall=False,
        out=tmp_path / "report",
    )  # fmt: skip
    assert [model["name"] for model in found.models] == ["teacher", made.path.name]
    assert found.path is not None
    assert (found.path / "results.json").is_file()
    loaded.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    words = ("--data", data, "--context", 32, "--tokens", 200)
    shown = run(tmp_path / "teacher", made.path, *words, program="gqa-eval")
    assert found.text() == shown.out.rstrip("\n")
    assert found.results["argv"] == []
    assert repr(found).startswith("<Evaluation perplexity of teacher ")


def test_a_study_is_that_of_the_command(place: Path, tmp_path: Path, alone: None) -> None:
    rows = write_corpus(tmp_path / "text.jsonl", 8)
    heldout = write_corpus(tmp_path / "heldout.jsonl", 2, first=8)
    how = {"methods": ["mean", "first"], "groups": [1], "alphas": [0], "batch_size": 2, "device": "cpu"}
    how |= {"heldout": str(heldout), "decode": False, "recall": False, "kl": False, "context": 32}
    found = gqa.ablate(place / "teacher", str(rows), tmp_path / "study", progress=False, **how)
    assert repr(found) == f"<Study {tmp_path}/study: 3 combinations>"
    assert {(row["method"], row["groups"]) for row in found.rows} == {("none", 4), ("mean", 1), ("first", 1)}
    shown = run("-o", tmp_path / "study", "--recommend", "--max-loss-increase", 9, program="gqa-ablate").out
    assert shown.startswith(found.text())
    assert shown.rstrip().endswith(found.recommend(max_loss_increase=9).rstrip())
    least = run("-o", tmp_path / "study", "--recommend", "--kv-bytes", 99, program="gqa-ablate").out
    assert least.rstrip().endswith(found.recommend(kv_bytes=99).rstrip())
    assert "none has a KV cache of at most 99 bytes" in least
    again = gqa.ablate(place / "teacher", str(rows), tmp_path / "study", progress=False, **how)
    assert again.rows == found.rows
    with pytest.raises(TypeError, match="'dry_run' is no option"):
        gqa.ablate(place / "teacher", str(rows), tmp_path / "other", dry_run=True)
    with pytest.raises(gqa.RefusedError, match="--refine-steps is not used by --methods mean"):
        gqa.ablate(place / "teacher", str(rows), tmp_path / "other", methods=["mean"], refine_steps=3)


def adapted(model: Any) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)


REFUSED: dict[str, tuple[Callable[[Path, Any], object], str]] = {
    "groups": (lambda at, m: gqa.convert_model(m, 3), "--groups 3 is not possible for the 4 key/value heads"),
    "text for a number": (lambda at, m: gqa.convert_model(at, "2"), "kv_heads is '2'; give a whole number"),  # type: ignore[arg-type]
    "no heads": (lambda at, m: gqa.convert_model(at, 0), "kv_heads is 0; give a whole number"),
    "no method": (lambda at, m: gqa.convert_model(at, 2, "median"), "unknown method 'median'; choose"),
    "no model": (lambda at, m: gqa.convert_model({}, 2), "the model is a dict; give a directory, a hub id or"),  # type: ignore[arg-type]
    "no place": (lambda at, m: gqa.convert_model("./nowhere", 2), "there is no directory ./nowhere"),
    "adapter": (lambda at, m: gqa.convert_model(adapted(m), 2), "holds an adapter, which would be saved alone"),
    "peft": (lambda at, m: gqa.convert_model(SimpleNamespace(merge_and_unload=1), 2), "merge its adapter first"),  # type: ignore[arg-type]
    "data": (lambda at, m: gqa.convert_model(at, 2, "mean", data="self"), "data means nothing to method mean"),
    "seed": (lambda at, m: gqa.convert_model(at, 2, "mean", seed=1), "seed means nothing to method mean"),
    "options": (
        lambda at, m: gqa.convert_model(at, 2, "mean", options=gqa.MapsOptions()),
        "options mean nothing to method mean",
    ),
    "tokenizer": (lambda at, m: gqa.convert_model(at, 2, tokenizer=1), "tokenizer is for models in memory"),
    "tokenizers": (lambda at, m: gqa.evaluate(at, at, memory="1GB", tokenizer=1), "tokenizer is for models in memory"),
    "inside": (lambda at, m: gqa.convert_model(at, 2, out=at / "x"), "is the model itself or inside it"),
    "fraction": (lambda at, m: gqa.uptrain_model(at, "x", steps=2.5), "Invalid value for '--steps': '2.5'"),
    "flag": (lambda at, m: gqa.uptrain_model(at, "x", steps=2, resume=1), "1 is neither True nor False"),
    "choice": (lambda at, m: gqa.uptrain_model(at, "x", steps=2, train="heads"), "'heads' is not one of"),
    "nothing to measure": (lambda at, m: gqa.evaluate(at), "nothing to measure: give text with --data"),
    "dtype": (lambda at, m: gqa.convert_model(at, 2, dtype="int8"), "dtype 'int8' is not known; choose float64"),
    "shard": (lambda at, m: gqa.convert_model(at, 2, max_shard_bytes=0), "max_shard_bytes is 0; give a whole number"),
    "jobs": (lambda at, m: gqa.convert_model(at, 2, jobs=True), "jobs is True; give a whole number"),
    "maps options": (lambda at, m: gqa.MapsOptions(dtype="int8"), "dtype 'int8' is not known; choose float32"),
    "ridge": (lambda at, m: gqa.MapsOptions(ridge=float("nan")), "ridge nan and batch 8: give one from 0 on"),
    "text": (lambda at, m: gqa.CalibrationText(length=1), "in blocks of 1: give at least"),
    "no data": (lambda at, m: gqa.convert_model(at, 2, "calibrated", data=[]), "data names nothing; give one source"),
    "device": (
        lambda at, m: gqa.convert_model(at, 2, "calibrated", options=gqa.MapsOptions(device="tpu9")),
        "--device tpu9 cannot be used",
    ),
    "several": (lambda at, m: gqa.evaluate(at, data=["x", "y"]), "are several, and one is meant"),  # type: ignore[arg-type]
    "alone": (lambda at, m: gqa.evaluate(at, data="x", kl=True), "--kl compares checkpoints: give at least two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(name: str, place: Path, loaded: Any) -> None:
    call, words = REFUSED[name]
    before = sorted(place.rglob("*"))
    with pytest.raises(gqa.RefusedError) as caught:
        call(place / "teacher", loaded)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(place.rglob("*")) == before


def test_training_options_say_everything(place: Path, tmp_path: Path, alone: None) -> None:
    data = (str(place / "data.jsonl"),)
    how: dict[str, Any] = {"steps": 1, "batch_size": 2, "block_size": 32, "weight_decay": 0.0, "warmup": 0}
    options = gqa.TrainOptions(str(place / "model"), tmp_path / "out", data=data, **how)
    record = gqa.uptrain_model(options, progress=False).record
    assert (record["steps"], record["options"]["weight_decay"], record["options"]["warmup"]) == (1, 0.0, 0)
    assert record["options"]["block_size"] == 32
    with pytest.raises(TypeError, match="TrainOptions say everything"):
        gqa.uptrain_model(options, steps=2)
    with pytest.raises(gqa.RefusedError, match="Invalid value for '--batch-size'"):
        gqa.uptrain_model(gqa.TrainOptions(str(place / "model"), tmp_path / "two", batch_size=0))


def test_evaluation_options_say_everything(place: Path, tmp_path: Path) -> None:
    data = str(place / "data.jsonl")
    told = gqa.EvaluateOptions(data=data, context=32, tokens=200, recall=False, output=tmp_path / "out", quiet=True)
    found = gqa.evaluate(place / "teacher", options=told)
    named = gqa.evaluate(place / "teacher", data=data, context=32, tokens=200, recall=False, progress=False)
    assert found.models[0]["quality"] == named.models[0]["quality"]
    assert (found.results["text"], found.path) == (named.results["text"], tmp_path / "out")
    assert found.results["text"]["context"] == 32
    for beside in ({"data": data}, {"out": tmp_path}, {"context": 64}):
        with pytest.raises(TypeError, match="EvaluateOptions say everything"):
            gqa.evaluate(place / "teacher", options=told, **beside)


def test_ranks_share_the_heads_that_a_budget_leaves(place: Path, tmp_path: Path) -> None:
    options = gqa.MapsOptions(gqa.CalibrationText((str(place / "data.jsonl"),), tokens=256, length=16))
    how: dict[str, Any] = {"kv_budget": 0.8, "options": options, "progress": False}
    free, shared = (
        gqa.convert_model(place / "teacher", out=tmp_path / str(ranks), tensor_parallel=ranks, **how).plan.groups
        for ranks in (1, 2)
    )
    assert isinstance(free, tuple)
    assert isinstance(shared, tuple)
    assert all(heads % 2 == 0 for heads in shared)
    with pytest.raises(gqa.RefusedError, match="tensor_parallel is 0; give a whole number from 1 on"):
        gqa.convert_model(place / "teacher", 2, tensor_parallel=0)


def test_options_that_are_none_are_told(place: Path) -> None:
    """Among them what only a terminal can do, and where a result goes, which is `out`."""
    for name in ("contxt", "quiet", "json"):
        with pytest.raises(TypeError, match=f"'{name}' is no option; choose .*context"):
            gqa.evaluate(place / "teacher", data="stdlib:heldout", **{name: 3})
    with pytest.raises(TypeError, match="'output' is no option"):
        gqa.uptrain_model(place / "teacher", "stdlib:train", steps=1, output="mine")


def test_the_callers_logging_stays(place: Path, tmp_path: Path) -> None:
    from transformers.utils import logging

    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        gqa.convert_model(place / "teacher", 2, "mean", out=tmp_path / "out", progress=False, verify_load=True).load()
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


def test_a_notebook_shows_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    from gqa.checkpoint.console import watched

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not watched()
    for config, shown in (({"IPKernelApp": {}}, True), ({"TerminalIPythonApp": {}}, False)):
        shell = SimpleNamespace(config=config)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert watched() == shown
