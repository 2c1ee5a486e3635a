"""`import gqa`: functions do what the commands do, and leave the caller's models, logging and
accelerator alone.
"""

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
from support.checkpoints import NEEDS_TRAINING, contents, load, run
from support.repository import SCRIPTS
from support.training import fresh_accelerator, words_for, write_corpus

import gqa


@pytest.fixture
def loaded(place: Path) -> Any:
    """The teacher (4 key/value heads) in memory, with weights that no directory has."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place / "teacher")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.125
    return model


def state(model: Any) -> tuple[Any, ...]:
    """Everything of a model in memory whose change a caller could notice."""
    configs = [copy.deepcopy(vars(part)) for part in (model.config, model.generation_config)]
    tensors = model.state_dict()
    return (
        id(model.config),
        configs,
        model.training,
        tensors.keys(),
        [t.sum().item() for t in tensors.values()],
    )


def test_importing_is_quick() -> None:
    words = [sys.executable, SCRIPTS / "import_gqa.py"]
    assert subprocess.check_output(words, text=True) == "[]\n"
    assert all(getattr(gqa, name).__doc__ for name in gqa.__all__ if name != "__version__")


@pytest.mark.parametrize("method", ["mean", "aligned"])
def test_a_conversion_is_that_of_the_command(place: Path, tmp_path: Path, method: str) -> None:
    """Its record has the options, and no arguments of a command."""
    result = gqa.convert_model(
        place / "teacher", kv_heads=2, method=method, output=tmp_path / "ours", quiet=True
    )
    assert (
        run("-g", 2, "--method", method, place / "teacher", "-o", tmp_path / "theirs", "-q").code
        == 0
    )
    assert contents(result.path) == contents(tmp_path / "theirs")
    other = json.loads((tmp_path / "theirs/gqa_conversion.json").read_text())
    assert other["argv"][:5] == ["-g", "2", "--method", method, "teacher"]
    assert result.record["options"] | {"output": "theirs"} == other["options"]
    same = gqa.ConvertOptions(
        str(place / "teacher"), kv_heads=2, method=method, output=tmp_path / "same", quiet=True
    )
    assert contents(gqa.convert_model(same).path) == contents(result.path)


def test_a_model_in_memory_is_converted_and_unchanged(
    loaded: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a temporary directory that is removed with the result; quietly, which saving alone is
    not.
    """
    before = state(loaded)
    capsys.readouterr()
    result = gqa.convert_model(loaded, kv_heads=2, method="mean", quiet=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert NEEDS_TRAINING.sub("", printed.err) == ""
    assert state(loaded) == before
    loaded.save_pretrained(tmp_path / "saved")
    assert "Writing model shards" in capsys.readouterr().err
    assert state(loaded) != before  # the control: saving alone changes its config
    assert (
        run("-g", 2, "--method", "mean", tmp_path / "saved", "-o", tmp_path / "out", "-q").code == 0
    )
    ours, theirs = load(result.path), load(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    directory, model = result.path, result.load()
    with pytest.raises(
        gqa.RefusedError, match=r"^device cuda:99 cannot be used: .*pass --device \w+$"
    ):
        result.load(device="cuda:99")
    assert model.config.num_key_value_heads == 2
    # The saved model is removed
    assert [path.name for path in directory.parent.iterdir()] == ["teacher-gqa2-mean"]
    # Beside the first one
    result = gqa.convert_model(result, kv_heads=1, method="mean", quiet=True)
    assert result.load().config.num_key_value_heads == 1
    del result
    gc.collect()
    assert not directory.exists()
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    gqa.convert_model(loaded, kv_heads=2, method="mean", output=tmp_path / "kept", quiet=True)
    gc.collect()
    assert (tmp_path / "kept" / "config.json").is_file()


def test_a_budget_chooses_heads(place: Path, tmp_path: Path) -> None:
    text: dict[str, Any] = {
        "data": write_corpus(tmp_path / "text.jsonl", 8),
        "tokens": 256,
        "context": 16,
    }
    options: dict[str, Any] = {"kv_budget": 0.8, "output": tmp_path / "out", "quiet": True}
    result = gqa.convert_model(place / "teacher", **options, **text)
    assert len(result.record["options"]["kv_heads"]) == 2


def test_a_training_is_that_of_the_command(place: Path, tmp_path: Path, alone: None) -> None:
    options: dict[str, Any] = {
        "steps": 2,
        "batch_size": 2,
        "learning_rate": 1e-2,
        "context": 32,
        "weight_decay": 0.0,
    }
    words = words_for(
        place / "model", place / "data.jsonl", tmp_path / "b", **options | {"weight_decay": None}
    )
    with fresh_accelerator():
        assert run(*words, program="gqa-uptrain").code == 0
    with fresh_accelerator():
        from accelerate import Accelerator

        theirs = Accelerator(mixed_precision="bf16")
        options |= {
            "data": (str(place / "data.jsonl"),),
            "output": tmp_path / "a",
            "weight_decay": 0.1,
            "quiet": True,
        }
        result = gqa.uptrain_model(place / "model", precision="float32", **options)
        assert theirs.mixed_precision == "bf16"
    assert contents(result.path).keys() == contents(tmp_path / "b").keys()
    ours, other = load(result.path), load(tmp_path / "b")
    assert all(torch.equal(ours[name], other[name]) for name in ours)
    with fresh_accelerator():
        record = gqa.uptrain_model(
            gqa.UptrainOptions(str(place / "model"), **options | {"overwrite": True})
        ).record
    assert record["steps"] == 2
    assert record["options"]["weight_decay"] == 0.1


def test_models_in_memory_are_trained_and_compared(
    place: Path, loaded: Any, tmp_path: Path, tokenizer: Any
) -> None:
    options: dict[str, Any] = {
        "steps": 1,
        "batch_size": 2,
        "context": 32,
        "validation_fraction": 0.2,
    }
    data = str(place / "data.jsonl")
    before = state(loaded)
    with fresh_accelerator():
        result = gqa.uptrain_model(
            loaded,
            data=data,
            teacher=loaded,
            tokenizer=tokenizer,
            validation_tokens=64,
            quiet=True,
            **options,
        )
    assert result.record["losses"]["validation_before"] is not None
    assert state(loaded) == before
    text: dict[str, Any] = {
        "data": data,
        "context": 32,
        "tokens": 200,
        "recall": False,
        "quiet": True,
    }
    evaluation = gqa.evaluate_models(
        loaded, result, tokenizer=tokenizer, output=tmp_path / "report", **text
    )
    assert [model["name"] for model in evaluation.record["models"]] == ["teacher", result.path.name]
    assert evaluation.path == tmp_path / "report"
    assert (evaluation.path / "results.json").is_file()
    loaded.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    words = ("--data", data, "--context", 32, "--tokens", 200)
    shown = run(tmp_path / "teacher", result.path, *words, program="gqa-eval")
    assert str(evaluation) == shown.out.rstrip("\n")
    same = gqa.evaluate_models(
        gqa.EvaluateOptions((str(tmp_path / "teacher"), str(result.path)), **text)
    )
    assert same.record["models"][1]["quality"] == evaluation.record["models"][1]["quality"]


def adapted(model: Any) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)


REFUSED: dict[str, tuple[Callable[[Path, Any], object], str]] = {
    "groups": (
        lambda at, m: gqa.convert_model(m, kv_heads=3),
        "kv_heads=3 does not divide the 4 KV heads",
    ),
    "two numbers": (
        lambda at, m: gqa.convert_model(at, kv_heads=2, kv_budget=0.5),
        "kv_heads and kv_budget cannot be combined",
    ),
    "no model": (
        lambda at, m: gqa.convert_model({}, kv_heads=2),
        "the model is a dict; pass a directory, a model id or",
    ),  # type: ignore[arg-type]
    "adapter": (
        lambda at, m: gqa.convert_model(adapted(m), kv_heads=2),
        "q_proj.base_layer.weight",
    ),
    "tokenizer": (
        lambda at, m: gqa.convert_model(at, kv_heads=2, tokenizer=1),
        "tokenizer is only for loaded models",
    ),
    "inside": (
        lambda at, m: gqa.convert_model(at, kv_heads=2, output=at / "x"),
        "; choose another directory with output",
    ),
    "exists": (
        lambda at, m: gqa.convert_model(m, kv_heads=2, output=at),
        "exists; choose another directory with output",
    ),
    "no place": (
        lambda at, m: gqa.convert_model(at, kv_heads=2, output="/proc/x"),
        "directory with output",
    ),
    "fraction": (
        lambda at, m: gqa.uptrain_model(at, data="x", steps=2.5),
        "steps: 2.5 is not a whole number",
    ),
    "two lengths": (
        lambda at, m: gqa.uptrain_model(at, data="x", steps=2, alpha=0.5),
        "alpha and steps cannot be combined, because each sets the length; pass one",
    ),
    "dry run": (
        lambda at, m: gqa.convert_model(at, kv_heads=2, dry_run=True),
        "dry_run is only for the command line",
    ),
    "no base model": (
        lambda at, m: gqa.ablate_model(gqa.AblateOptions(output="s")),
        "no model was passed",
    ),
    "method": (
        lambda at, m: gqa.convert_model(at, kv_heads=2, method="mean", data="x"),
        "data is not used by method",
    ),
    "study": (
        lambda at, m: gqa.ablate_model(at, data="x", output="s", methods=["mean"], refine_steps=3),
        "by methods mean;",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_parameter_in_one_line(name: str, place: Path, loaded: Any) -> None:
    call, words = REFUSED[name]
    before = sorted(place.rglob("*"))
    with pytest.raises((gqa.RefusedError, gqa.OutputError)) as caught:
        call(place / "teacher", loaded)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(place.rglob("*")) == before


def test_options_are_an_object_or_keywords() -> None:
    options: Any = gqa.EvaluateOptions(("model",), data="text")
    with pytest.raises(TypeError, match="EvaluateOptions holds all options"):
        gqa.evaluate_models(options, context=64)
    with pytest.raises(
        TypeError,
        match=("UptrainOptions holds all options; change it instead of passing teacher too"),
    ):
        gqa.uptrain_model(gqa.UptrainOptions("model"), teacher="teacher")
    with pytest.raises(
        gqa.RefusedError, match=("the model is a EvaluateOptions; pass a directory")
    ):
        gqa.evaluate_models(options, "another")
    with pytest.raises(
        TypeError, match=r"^evaluate_models\(\) has no option contxt; did you mean context\?$"
    ):
        gqa.evaluate_models("model", data="text", contxt=3)
    with pytest.raises(
        TypeError, match=r"^convert_model\(\) has no option zzz; it has .*, kv_heads, "
    ):
        gqa.convert_model("model", zzz=3)


def test_none_is_an_option_that_is_not_given() -> None:
    """As on the command line."""
    given: dict[str, Any] = {"seed": None, "learning_rate": None, "data": None}
    assert gqa.UptrainOptions("model", **given) == gqa.UptrainOptions("model")
    with pytest.raises(gqa.RefusedError, match="model is missing; pass a value"):
        gqa.UptrainOptions(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "tokens"), [("1.5K", 1500), ("2M", 2 * 10**6), ("1.7", None), ("1.0005K", None)]
)
def test_numbers_of_tokens_are_whole(text: str, tokens: int | None) -> None:
    if tokens is None:
        with pytest.raises(gqa.RefusedError, match=f"'{text}' is not a number of tokens"):
            gqa.UptrainOptions("model", tokens=text)  # type: ignore[arg-type]
    else:
        assert gqa.UptrainOptions("model", tokens=text).tokens == tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "size"), [("79.6GiB", 85_469_849_190), ("5GB", 5 * 10**9)])
def test_sizes_are_rounded_to_bytes(text: str, size: int) -> None:
    options = gqa.EvaluateOptions(("a", "b"), memory=text)  # type: ignore[arg-type]
    assert options.memory == size


def test_groups_are_kv_heads(place: Path, tmp_path: Path) -> None:
    """As on the command line."""
    result = gqa.convert_model(
        place / "teacher", groups=2, method="mean", output=tmp_path / "out", quiet=True
    )
    assert result.record["options"]["kv_heads"] == 2
    with pytest.raises(
        TypeError, match=r"^convert_model\(\) got both kv_heads and groups, which are the same"
    ):
        gqa.convert_model(place / "teacher", groups=2, kv_heads=2)


def test_several_texts_are_evaluated_like_one_of_their_documents(
    small: Path, tmp_path: Path
) -> None:
    """A list, as calibration and training take it."""
    texts = ["one two three " * 99, "red green blue " * 99]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "both.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    model, files = small, [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    records = [
        gqa.evaluate_models(model, data=data, context=32).record
        for data in (files, str(tmp_path / "both.jsonl"))
    ]
    assert records[0]["models"][0]["quality"] == records[1]["models"][0]["quality"]
    assert records[0]["text"]["data"] == ", ".join(files)
    one = gqa.evaluate_models(model, data=files[:1], context=64).record
    assert one["models"][0]["quality"] != records[0]["models"][0]["quality"]
    with pytest.raises(gqa.TextError, match=r"names \S+ 2 times"):
        gqa.evaluate_models(model, data=files * 2)


def test_the_callers_logging_stays(place: Path, tmp_path: Path) -> None:
    import huggingface_hub
    from transformers.utils import logging

    for enabled in (True, False):  # also where the caller wants no bars
        logging.set_verbosity_info()
        (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()
        out = tmp_path / str(enabled)
        try:
            gqa.convert_model(
                place / "teacher", kv_heads=2, method="mean", output=out, quiet=True
            ).load()
            assert logging.get_verbosity() == logging.INFO
            assert logging.is_progress_bar_enabled() == enabled
            assert huggingface_hub.utils.are_progress_bars_disabled() != enabled
        finally:
            logging.set_verbosity_warning()
            logging.enable_progress_bar()


def test_a_notebook_shows_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    from gqa.core.console import is_interactive

    # As in a notebook, whose stderr is no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    for config, shown in (({"IPKernelApp": {}}, True), ({"TerminalIPythonApp": {}}, False)):
        shell = SimpleNamespace(get_ipython=lambda config=config: SimpleNamespace(config=config))
        monkeypatch.setitem(sys.modules, "IPython", shell)
        assert is_interactive() == shown
