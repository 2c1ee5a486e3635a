"""`import gqa`: the functions do what the commands do, on models in places and in memory, and leave theirs alone."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import contents, load, run
from training import fresh_accelerator, words_for, write_corpus

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
def test_a_checkpoint_is_converted_as_the_command_converts_it(place: Path, tmp_path: Path, method: str) -> None:
    """Its record has the options, and no arguments of a command."""
    made = gqa.convert_model(place / "teacher", groups=2, method=method, output=tmp_path / "ours", quiet=True)
    words = ("-g", 2, "--method", method, place / "teacher", "-o", tmp_path / "theirs", "-q")
    assert run(*words).code == 0
    assert contents(made.path) == contents(tmp_path / "theirs")
    other = json.loads((tmp_path / "theirs/gqa_conversion.json").read_text())
    assert other["argv"][:5] == ["-g", "2", "--method", method, "teacher"]
    assert made.record["options"] | {"output": "theirs"} == other["options"]
    assert repr(made) == f"<ConvertedModel {made.path}: 4 -> 2 KV heads ({method})>"
    same = gqa.ConvertOptions(str(place / "teacher"), groups=2, method=method, output=tmp_path / "same", quiet=True)
    assert contents(gqa.convert_model(same).path) == contents(made.path)


def test_a_model_in_memory_gives_another_and_stays_as_it_is(loaded: Any, tmp_path: Path) -> None:
    before = state(loaded)
    made = gqa.convert_model(loaded, groups=2, method="mean", quiet=True)
    assert state(loaded) == before
    loaded.save_pretrained(tmp_path / "saved")
    assert state(loaded) != before  # the control: saving alone writes into its config
    assert run("-g", 2, "--method", "mean", tmp_path / "saved", "-o", tmp_path / "out", "-q").code == 0
    ours, theirs = load(made.path), load(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert made.load().config.num_key_value_heads == 2


def test_what_is_in_a_temporary_place_goes_with_the_result(loaded: Any, tmp_path: Path) -> None:
    made = gqa.convert_model(loaded, groups=2, method="mean", quiet=True)
    place, model = made.path, made.load()
    assert place.is_dir()
    assert [path.name for path in place.parent.iterdir()] == ["teacher-gqa2-mean"]  # the model was removed again
    del made
    gc.collect()
    assert not place.exists()
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    kept = gqa.convert_model(loaded, groups=2, method="mean", output=tmp_path / "kept", quiet=True)
    del kept
    gc.collect()
    assert (tmp_path / "kept" / "config.json").is_file()


def test_calibration_has_an_error_of_each_layer(place: Path, tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "text.jsonl", 8)
    how: dict[str, Any] = {"groups": 2, "method": "calibrated", "tokens": 512, "context": 32, "quiet": True}
    made = gqa.convert_model(place / "teacher", data=data, output=tmp_path / "out", device="cpu", **how)
    assert sorted(made.layer_errors) == [0, 1]
    free, shared = (
        gqa.convert_model(
            place / "teacher", kv_budget=0.8, data=data, tokens=256, context=16, output=tmp_path / str(ranks),
            tensor_parallel=ranks, quiet=True,
        ).record["options"]["groups"]
        for ranks in (1, 2)
    )  # fmt: skip
    assert len(free) == 2
    assert all(heads % 2 == 0 for heads in shared)


def test_training_is_that_of_the_command(place: Path, tmp_path: Path, alone: None) -> None:
    how: dict[str, Any] = {"steps": 2, "batch_size": 2, "learning_rate": 1e-2, "context": 32}
    words = words_for(place / "model", place / "data.jsonl", tmp_path / "b", **how)
    with fresh_accelerator():
        assert run(*words, program="gqa-uptrain").code == 0
    with fresh_accelerator():
        from accelerate import Accelerator

        theirs = Accelerator(mixed_precision="bf16")  # what a caller has made is as it was
        made = gqa.uptrain_model(
            place / "model", data=place / "data.jsonl", output=tmp_path / "a", precision="float32", quiet=True, **how
        )
        assert theirs.mixed_precision == "bf16"
    assert contents(made.path).keys() == contents(tmp_path / "b").keys()
    ours, other = load(made.path), load(tmp_path / "b")
    assert all(torch.equal(ours[name], other[name]) for name in ours)
    assert made.record["options"]["learning_rate"] == 1e-2
    assert "2 steps" in repr(made)


def test_models_in_memory_are_trained_and_compared(place: Path, loaded: Any, tmp_path: Path, tokenizer: Any) -> None:
    how: dict[str, Any] = {"steps": 1, "batch_size": 2, "context": 32, "heldout_fraction": 0.2, "heldout_tokens": 64}
    data = str(place / "data.jsonl")
    before = state(loaded)
    with fresh_accelerator():
        made = gqa.uptrain_model(loaded, data=data, teacher=loaded, tokenizer=tokenizer, quiet=True, **how)
    assert made.record["losses"]["heldout_before"] is not None
    assert state(loaded) == before
    how = {"context": 32, "tokens": 200, "recall": False, "output": tmp_path / "report"}
    found = gqa.evaluate(loaded, made, data=data, tokenizer=tokenizer, quiet=True, **how)
    assert [model["name"] for model in found.models] == ["teacher", made.path.name]
    assert found.path == tmp_path / "report"
    assert (found.path / "results.json").is_file()
    loaded.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    words = ("--data", data, "--context", 32, "--tokens", 200)
    shown = run(tmp_path / "teacher", made.path, *words, program="gqa-eval")
    assert found.text() == shown.out.rstrip("\n")
    assert found.record["argv"] == []
    assert repr(found).startswith("<Evaluation perplexity of teacher ")


def test_a_study_is_that_of_the_command(place: Path, tmp_path: Path, alone: None) -> None:
    data, heldout = write_corpus(tmp_path / "text.jsonl", 8), write_corpus(tmp_path / "heldout.jsonl", 2, first=8)
    how: dict[str, Any] = {"methods": ["mean", "first"], "groups": [1], "alphas": [0], "batch_size": 2, "device": "cpu"}
    how |= {"heldout": heldout, "skip": ["kl", "recall"], "context": 32, "data": data, "quiet": True}
    found = gqa.ablate(place / "teacher", output=tmp_path / "study", **how)
    assert {(row["method"], row["groups"]) for row in found.rows} == {("none", 4), ("mean", 1), ("first", 1)}
    shown = run("-o", tmp_path / "study", "--max-loss-increase", 9, program="gqa-ablate").out
    assert shown.startswith(found.text())
    assert " ".join(shown.split()).endswith(" ".join(found.recommend(max_loss_increase=9).split()))
    assert gqa.ablate(place / "teacher", output=tmp_path / "study", **how).rows == found.rows
    with pytest.raises(gqa.RefusedError, match=r"^refine_steps is not used by methods mean"):
        gqa.ablate(place / "teacher", data=data, output=tmp_path / "other", methods=["mean"], refine_steps=3)


def adapted(model: Any) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)


REFUSED: dict[str, tuple[Callable[[Path, Any], object], str]] = {
    "groups": (lambda at, m: gqa.convert_model(m, groups=3), "groups 3 is not possible for the 4 key/value heads"),
    "no heads": (lambda at, m: gqa.convert_model(at, groups=0), "groups: 0 is no number of heads"),
    "no method": (lambda at, m: gqa.convert_model(at, groups=2, method="median"), "method: 'median' is not one of"),
    "no model": (lambda at, m: gqa.convert_model({}, groups=2), "the model is a dict; give a directory, a hub id or"),  # type: ignore[arg-type]
    "no place": (lambda at, m: gqa.convert_model("./nowhere", groups=2), "there is no directory ./nowhere"),
    "adapter": (lambda at, m: gqa.convert_model(adapted(m), groups=2), "holds an adapter, which would be saved alone"),
    "peft": (lambda at, m: gqa.convert_model(SimpleNamespace(merge_and_unload=1), groups=2), "merge its adapter first"),  # type: ignore[arg-type]
    "data": (
        lambda at, m: gqa.convert_model(at, groups=2, method="mean", data="self:1K"), "data is not used by method mean"
    ),
    "tokenizer": (lambda at, m: gqa.convert_model(at, groups=2, tokenizer=1), "tokenizer is for models in memory"),
    "tokenizers": (lambda at, m: gqa.evaluate(at, at, memory="1GB", tokenizer=1), "tokenizer is for models in memory"),
    "inside": (lambda at, m: gqa.convert_model(at, groups=2, output=at / "x"), "is the model itself or inside it"),
    "fraction": (lambda at, m: gqa.uptrain_model(at, data="x", steps=2.5), "steps: 2.5 is not a whole number"),
    "flag": (lambda at, m: gqa.uptrain_model(at, data="x", resume=1), "resume: 1 is neither True nor False"),
    "choice": (lambda at, m: gqa.uptrain_model(at, data="x", train="heads"), "train: 'heads' is not one of"),
    "two lengths": (lambda at, m: gqa.uptrain_model(at, data="x", steps=2, alpha=0.5), "by alpha and steps; give one"),
    "nothing to measure": (lambda at, m: gqa.evaluate(at), "nothing to measure: give text with data, or recall"),
    "nothing at all": (lambda at, m: gqa.evaluate(), "no model is named"),
    "no data": (lambda at, m: gqa.convert_model(at, groups=2, method="calibrated", data=[]), "data: [] names nothing"),
    "device": (
        lambda at, m: gqa.convert_model(at, groups=2, method="calibrated", device="tpu9"), "device tpu9 cannot be used"
    ),
    "several": (lambda at, m: gqa.evaluate(at, data=["x", "y"]), "data: ['x', 'y'] is no name"),
    "alone": (lambda at, m: gqa.evaluate(at, data="x", kl=True), "kl compares checkpoints: give at least two"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(name: str, place: Path, loaded: Any) -> None:
    call, words = REFUSED[name]
    before = sorted(place.rglob("*"))
    with pytest.raises(gqa.RefusedError) as caught:
        call(place / "teacher", loaded)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(place.rglob("*")) == before


def test_options_say_everything(place: Path, tmp_path: Path, alone: None) -> None:
    data = str(place / "data.jsonl")
    options = gqa.TrainOptions(
        str(place / "model"), tmp_path / "out", (data,), steps=1, batch_size=2, context=32, weight_decay=0.0, quiet=True
    )
    with fresh_accelerator():
        record = gqa.uptrain_model(options).record
    assert (record["steps"], record["options"]["weight_decay"], record["options"]["context"]) == (1, 0.0, 32)
    measured = gqa.EvaluateOptions((str(place / "teacher"),), data=data, context=32, tokens=200, quiet=True)
    named = gqa.evaluate(place / "teacher", data=data, context=32, tokens=200, quiet=True)
    assert gqa.evaluate(measured).models[0]["quality"] == named.models[0]["quality"]
    calls: list[Callable[..., Any]] = [
        lambda: gqa.uptrain_model(options, steps=2), lambda: gqa.evaluate(measured, context=64),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match="Options holds all options"):
            call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'contxt'"):
        gqa.evaluate(place / "teacher", data=data, contxt=3)


def test_the_callers_logging_stays(place: Path, tmp_path: Path) -> None:
    from transformers.utils import logging

    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        gqa.convert_model(place / "teacher", groups=2, method="mean", output=tmp_path / "out", quiet=True).load()
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


def test_a_notebook_shows_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    from gqa.checkpoint.console import is_interactive

    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert not is_interactive()
    for config, shown in (({"IPKernelApp": {}}, True), ({"TerminalIPythonApp": {}}, False)):
        shell = SimpleNamespace(config=config)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert is_interactive() == shown
