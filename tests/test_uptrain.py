"""gqa-uptrain as a command: what it says and leaves behind, what it refuses, and that alpha is a prefix."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, patch

import checkpoints
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from checkpoints import SINGLE, Result, load, run, snapshot
from safetensors.torch import load_file, save_file
from training import (
    difference,
    expert_options,
    fresh_accelerator,
    infinite_gradient,
    material,
    metrics,
    options_for,
    state_weights,
    tiny_checkpoint,
    trained,
    words_for,
)
from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import ranks
from gqa.uptrain import log, loop, setup, summary
from gqa.uptrain.loop import TrainingProgress
from gqa.uptrain.options import TrainOptions

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("alone")


def command(out: Path, **options: Any) -> Result:
    """The command on the model and data of `material`, unless told otherwise."""
    model, data = options.pop("model", material() / "model"), options.pop("data", material() / "data.jsonl")
    with expert_options(options) as rest:
        return run(*words_for(model, data, out, **rest), program="gqa-uptrain")


def test_what_is_said(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command(out, alpha=0.5, teacher=place / "teacher", heldout_fraction=0.2, batch_size=4, quiet=False)
    assert done.code == 0, done.err
    lines = done.said.splitlines()
    starts = ["model", "teacher", "data", "steps", "rate", "memory", "held out", "held out", "written"]
    assert [line[:10].rstrip() for line in lines] == starts
    assert lines[1] == f"teacher     {place / 'teacher'}"
    assert lines[-1] == f"written     {out}: loads with plain transformers, verified"
    status = done.err.splitlines()[-1]
    steps = metrics(out / "gqa_uptraining.jsonl")
    assert status.startswith(f"step {len(steps)}/{len(steps)} | eta 0:00 | loss ")
    assert len(status) <= 80
    for part in ("| kl ", "| held-out ", " tok/s"):
        assert part in status
    assert "| held-out " in next(line for line in done.err.splitlines() if line.startswith("step 1/")), "as it came"
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert {"tokens", "loss", "distillation", "gradient_norm", "learning_rate", "skipped"} <= steps[0].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_json_is_all_of_stdout_and_overwriting(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for steps in (1, 2):
        done = command(out, steps=steps, overwrite=True, json=True, quiet=False)
        record = json.loads(done.out)
        written = json.loads((out / "gqa_uptraining.json").read_text())
        assert written.pop("files") == sorted(path.name for path in out.iterdir())
        assert record == written
        assert (record["steps"], record["tokens"]) == (steps, 512 * steps)
        assert (record["alpha"], record["ranks"]) == (None, 1)
        assert "written     " in done.err


def test_dry_run_writes_nothing(place: Path, tmp_path: Path) -> None:
    before = snapshot(place)
    done = command(tmp_path / "out", tokens="2.5K", train="kv", dry_run=True, json=True, quiet=False)
    record = json.loads(done.out)
    assert (done.code, record["steps"], record["tokens"], record["block_size"]) == (0, 4, 2048, 64)
    assert record["trained_parameters"] == 2 * 2 * 16 * 32  # layers, K and V, rows, width
    assert record["memory_bytes"] == 4 * record["parameters"] + 12 * record["trained_parameters"]
    assert "steps       4 of 8 blocks = 512 tokens (1 process x 1 x 8), 2,048 tokens in all" in done.err
    nested = command(tmp_path / "out", model=place / "nested", steps=1, train="attention", dry_run=True)
    assert nested.code == 0, nested.err
    assert list(tmp_path.iterdir()) == []
    assert snapshot(place) == before


def test_a_dry_run_estimates_time_and_disk(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the tokens take twice as long, a teacher and text that it writes longer; states take more of the disk."""
    monkeypatch.setattr(summary, "products_a_second", lambda device, width: 1e5)

    def estimated(**told: Any) -> tuple[float, int]:
        options = {"tokens": "16K", "heldout_tokens": 64, "dry_run": True, "json": True} | told
        done = command(tmp_path / "out", **options)
        assert done.code == 0, done.err
        record = json.loads(done.out)
        return record["seconds"], record["disk_bytes"]

    seconds, disk = estimated()
    assert estimated(tokens="32K")[0] == pytest.approx(2 * seconds, rel=0.05)
    taught = estimated(teacher=place / "teacher")[0]
    assert 1.2 * seconds < taught < 1.5 * seconds
    written = estimated(teacher=place / "teacher", data="self")[0]
    assert 1.3 * taught < written < 2 * taught
    kept = estimated(save_every=1, keep_last=3)[1]
    parameters = json.loads(command(tmp_path / "out", dry_run=True, json=True).out)["parameters"]
    stored = sum(path.stat().st_size for path in (place / "model").glob("*.safetensors"))
    assert disk == pytest.approx(stored + 4 * parameters, rel=0.1)
    assert kept - disk == 4 * 12 * parameters  # three and one that is written, of weights and two moments


@pytest.mark.parametrize("train", ["all", "attention", "lora"])
def test_dry_run_reads_no_weights(train: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has a teacher written text yet; the plan is that of a run that does both, which cannot do without."""
    plans = []
    for loads in (True, False):
        if not loads:
            monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
        told = {"data": "self", "teacher": place / "teacher", "tokens": "1K", "train": train, "heldout_tokens": 64}
        plans.append(command(tmp_path / f"{loads}", dry_run=not loads, quiet=False, seed=7, **told))
    run, plan = (done.out.splitlines() for done in plans)
    assert [done.code for done in plans] == [0, 0], plans[1].err
    assert plan[0].startswith("model ")
    *plan, time, disk = plan
    assert plan == run[: len(plan)]
    assert re.fullmatch(r"time        about \d+ s on cpu", time)
    assert disk.endswith("for the result and what a run keeps on its way")
    assert "cannot load" in command(tmp_path / "run", seed=7, **told).err


def train(out: Path, **options: Any) -> tuple[TrainingProgress, dict[int, dict[str, torch.Tensor]], list[Any]]:
    """Progress, the weights after each step, and the records."""
    weights: dict[int, dict[str, torch.Tensor]] = {}
    plain = loop.train_step

    def step_and_copy(accelerator: Any, model: Any, *arguments: Any) -> Any:
        result = plain(accelerator, model, *arguments)
        weights[len(weights) + 1] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return result

    with patch.object(loop, "train_step", step_and_copy):
        progress, _ = trained(options_for(material() / "model", out, **options))
    keys = ("step", "loss", "learning_rate", "gradient_norm")
    records = [{key: record[key] for key in keys} for record in metrics(out / "gqa_uptraining.jsonl")]
    return progress, weights, records


def test_alpha_is_a_prefix(tmp_path: Path) -> None:
    """With the constant schedule the smaller run is the beginning of the larger, losses and weights bit for bit."""
    small, few, told = train(tmp_path / "small", alpha=0.05, steps=None, schedule="constant")
    large, many, retold = train(tmp_path / "large", alpha=0.15, steps=None, schedule="constant")
    assert 1 < small.step < large.step
    assert retold[: small.step] == told
    for step, weights in few.items():
        assert all(torch.equal(tensor, many[step][name]) for name, tensor in weights.items()), step
    *_, reseeded = train(tmp_path / "reseeded", steps=1, seed=1)
    assert reseeded[0]["loss"] != told[0]["loss"], "another seed begins with other data"
    _, other, _ = train(tmp_path / "other", alpha=0.15, steps=None, schedule="cosine")
    assert any(not torch.equal(tensor, other[small.step][name]) for name, tensor in few[small.step].items())


def test_a_gradient_that_is_not_finite_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts and is told, weights and optimiser stay: afterwards the run is as if it had not been."""
    infinite_gradient(monkeypatch, 1, 3)
    progress, weights, records = train(tmp_path / "out", steps=4, batch_size=1)
    assert (progress.step, progress.skipped, progress.skipped_in_a_row) == (4, 2, 0)
    assert all(torch.equal(tensor, weights[3][name]) for name, tensor in weights[2].items())
    assert any(not torch.equal(tensor, weights[3][name]) for name, tensor in weights[4].items())
    told = metrics(tmp_path / "out" / "gqa_uptraining.jsonl")
    assert [record["gradient_norm"] is None for record in told] == [True, False, True, False]
    assert [record["skipped"] for record in told] == [1, 1, 2, 2]
    assert json.loads((tmp_path / "out" / "gqa_uptraining.json").read_text())["skipped_steps"] == 2
    assert len(records) == 4


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_divergence_stops_with_advice(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    import gqa.uptrain.training_model

    if what == "gradient":
        infinite_gradient(monkeypatch, *range(3, 99))
    else:  # nats that are infinite though the teacher's divergence, which is descended, is not
        plain, calls = gqa.uptrain.training_model.next_token_loss, [0]

        def spoil(*given: Any) -> Any:
            calls[0] += 1
            loss, told = plain(*given)
            return loss, told * (torch.inf if calls[0] > 3 else 1)  # the first is of held-out text

        monkeypatch.setattr(gqa.uptrain.training_model, "next_token_loss", spoil)
    verbose = what == "gradient"
    words = {"steps": 9, "save_every": 2, "patience": 3, "teacher": place / "teacher", "verbose": verbose}
    done = command(tmp_path / "out", **words)
    assert (done.code, done.err.count("\n") == 1, "Traceback" in done.err) == (1, not verbose, verbose), done.err
    assert "not finite 3 steps in a row, up to step 5; what was saved before is kept. Lower --learning-rate" in done.err
    states = sorted(path.name for path in (tmp_path / "out-state").glob("step-*"))
    assert states == ["step-00000002", "step-00000004"]
    kept = [state_weights(tmp_path / "out-state" / name) for name in states]
    assert all(torch.equal(tensor, kept[1][name]) for name, tensor in kept[0].items())
    assert not (tmp_path / "out").exists()


check_refused = partial(checkpoints.check_refused, program="gqa-uptrain", advice="")
Refusals = list[tuple[dict[str, Any], str]]  # options, and what is said of them


def bad_data(place: Path, root: Path) -> Refusals:
    def file(name: str, data: bytes) -> Path:
        (root / name).write_bytes(data)
        return root / name

    small = file("small.jsonl", b'{"text": "def f(x): pass"}\n')
    broken = file("broken.jsonl", (place / "data.jsonl").read_bytes() + b"{")
    alpha, stream = {"steps": None, "alpha": 1}, {"steps": None, "streaming": True}
    return [
        ({"data": small}, "tokens, less than one block of 64; use smaller blocks"),
        (alpha | {"batch_size": 999}, "less than one batch of 999; give more"),
        (alpha | {"alpha": 1e-4}, "less than one block of 64; give more, or use smaller"),
        ({"data": file("empty.jsonl", b"")}, "holds no text: it is empty or blank"),
        ({"data": root / "none.jsonl"}, "there is no file or directory"),
        ({"data": file("latin.txt", b"caf\xe9 " * 99)}, "is not UTF-8: "),
        ({"field": "body"}, "has no field 'body'; it has 'text'"),
        ({"data": broken}, "broken.jsonl cannot be read: "),
        ({"data": [place / "data.jsonl", place / "data.jsonl"]}, "is given twice"),
        ({"heldout": root / "none.jsonl"}, "there is no file or directory"),
        ({"heldout": broken}, "broken.jsonl cannot be read: "),
        ({"heldout": place / "data.jsonl"}, "all documents are held out"),
        ({"heldout": small}, "the held-out text has less than one block of 64 tokens"),
        ({"heldout_fraction": 1e-6}, "holds out no document of"),
        ({"heldout_fraction": 1.0}, "all documents are held out"),
        (stream | {"alpha": 0.1}, "--alpha of a stream, whose length is unknown; give pretraining_tokens too"),
        *(
            (stream | {"alpha": alpha, "pretraining_tokens": 9999}, f"'{alpha}' is not a number above 0 to 1")
            for alpha in (0.0, 2.0)
        ),
        ({"tokens": "1M"}, "the length is given by --tokens and --steps; give one"),
    ]


def bad_models(place: Path, root: Path) -> Refusals:
    narrow = tiny_checkpoint(root / "narrow", vocab_size=512)
    other = tiny_checkpoint(root / "other")
    added = json.loads((other / "tokenizer.json").read_text())
    added["model"] |= {"vocab": {f"{k}x": v for k, v in added["model"]["vocab"].items()}, "merges": []}
    (other / "tokenizer.json").write_text(json.dumps(added))
    bare = shutil.copytree(place / "model", root / "bare", ignore=shutil.ignore_patterns("*token*"))
    full = tiny_checkpoint(root / "full")
    packed = tiny_checkpoint(root / "packed")
    save_file({**load(packed), "a.qweight": torch.ones(2)}, packed / SINGLE, {"format": "pt"})
    headless, spoilt = tiny_checkpoint(root / "headless", "qwen3_vl_text"), tiny_checkpoint(root / "spoilt")
    weights = load_file(file := next(spoilt.glob("*00002-of*")))
    save_file(weights | {name: weights[name] * torch.nan for name in [*weights][:1]}, file, {"format": "pt"})
    return [
        ({"model": packed}, "packed has quantised weights, which are not trained; uptrain the original"),
        ({"model": narrow}, "the tokenizer of narrow has 4,096 tokens, its embedding only 512"),
        ({"teacher": narrow}, "the teacher narrow predicts 512 tokens, the model 4,104; give"),
        ({"teacher": other}, "the teacher other has other tokens than the model's"),
        ({"model": headless}, "headless is a Qwen3VLTextModel, which does not predict the next token of a text"),
        ({"model": spoilt}, "spoilt has weights that are NaN or infinite: "),
        ({"teacher": spoilt}, "spoilt has weights that are NaN or infinite: "),
        ({"model": bare}, "bare has no tokenizer; copy its base model's tokenizer files into"),
        ({"model": root / "nothing"}, "there is no directory"),
        ({"output": full}, "full exists; choose another output with -o"),
        ({"output": place / "model"}, "is the model itself or inside it"),
        ({"output": Path("/")}, "is the root of a file system"),
        ({"context": 65}, "--context 65 is more than the 64 positions of model"),
        ({"attn_implementation": "magic"}, "magic"),
        ({"precision": "float16"}, "--precision float16 needs a GPU; on a CPU use bfloat16"),
        ({"device": "nowhere"}, "--device nowhere cannot be used"),
        ({"report_to": "pigeons"}, "Unsupported logging capability: pigeons"),
        ({"report_to": "wandb"}, "--report-to wandb needs its package; install it with: pip"),
        ({"revision": "main"}, "--revision is for hub ids"),
        ({"resume": True}, "out-state has no saved state; start without --resume"),
    ]


@pytest.mark.parametrize("cases", [bad_data, bad_models])
def test_what_is_refused(place: Path, tmp_path: Path, cases: Callable[[Path, Path], Refusals]) -> None:
    """And nothing is written."""
    for options, says in cases(place, tmp_path):
        if options == {"report_to": "wandb"} and find_spec("wandb"):
            continue
        before = snapshot(tmp_path)
        with fresh_accelerator():
            check_refused(command(tmp_path / "out", **{"steps": 2} | options), says)
        assert snapshot(tmp_path) == before, says


def test_the_device_is_the_one_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process. Here there is but one device, and another that holds no numbers."""
    monkeypatch.setattr(setup, "find_device", str)
    options = TrainOptions(model="m", output=tmp_path / "out", device="meta")
    with fresh_accelerator():
        assert setup.make_accelerator(options, tmp_path / "out").device.type == "meta"
        assert ranks().device.type != "meta", "it is of this run alone"
    with fresh_accelerator():
        assert setup.make_accelerator(replace(options, device=None), tmp_path / "out").device.type != "meta"
    monkeypatch.setattr(setup, "ranks", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(RefusedError, match="--device meta is for one process"):
        setup.make_accelerator(options, tmp_path / "out")


def test_memory_is_that_of_the_device_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second GPU, and of the processor though there are GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: {"cuda:1": 7}.get(str(device), 9))
    assert log.memory(torch.device("cuda:1")) == 7
    assert log.memory(torch.device("cpu")) > 1 << 20


def test_the_peak_of_a_gpu_is_its_own() -> None:
    for name, peak in (("L4", 121e12), ("L40", 181e12), ("L40S", 362e12), ("A100-SXM4-80GB", 312e12),
                       ("H100 80GB HBM3", 989e12), ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("GH200 480GB", 989e12),
                       ("GeForce RTX 4090", 165e12), ("A10", None), ("L400", None)):  # fmt: skip
        assert log.peak_of(f"NVIDIA {name}") == peak, name


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*given: Any, **how: Any) -> Any:
        raise error

    return fail


def test_what_a_machine_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package, a compiler, space: known before anything is trained."""
    from torch._inductor.exc import InvalidCxxCompiler

    monkeypatch.setitem(sys.modules, "peft", None)
    needs = "--train lora needs peft; install it with: pip install 'gqa[lora]'"
    check_refused(command(tmp_path / "out", steps=1, train="lora"), needs)
    monkeypatch.setattr(torch, "compile", lambda function: failing(InvalidCxxCompiler()))
    done = command(tmp_path / "out", steps=1, compile=True)
    check_refused(done, "--compile: torch.compile does not work here")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    done = command(tmp_path / "deep" / "out", steps=1)
    check_refused(done, f"bytes, 1,000 are free at {tmp_path}; free some space or give another output", code=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of steps cannot be written: one line with its name, and what to do."""
    step = log.Log.step

    def full(self: log.Log, *given: Any) -> Any:
        self._path = Path("/dev/full")
        return step(self, *given)

    monkeypatch.setattr(log.Log, "step", full)
    done = command(tmp_path / "out", steps=2)
    check_refused(done, "/dev/full could not be written ([Errno 28] No space left on device); free some space", code=1)


def test_states_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is there and the exit code is 0; the lock is held until all else is gone."""
    states, remove = tmp_path / "out-state", shutil.rmtree

    def busy(path: Any, ignore_errors: bool = False) -> None:
        if Path(path).parent != states:
            remove(path, ignore_errors)
        elif not ignore_errors or not (states / "lock").exists():
            raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(shutil, "rmtree", busy)
    done = command(tmp_path / "out", steps=1, save_every=1, quiet=False)
    assert done.code == 0, done.err
    assert f"left        {states} could not be removed; the result does not need it" in done.said
    assert (tmp_path / "out" / "gqa_uptraining.json").exists()


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 9 bytes")
PREPARING = "preparing the model; see Memory"
TRAINING = "training, 2 blocks of 64 tokens at a time on cpu; lower --micro-batch (now 2) or --context (now 64), or"
ASKING = {  # for memory, what is raised and what is told
    "gqa.uptrain.setup.Accelerator": (GPU, "accelerate starts; free some"),
    "transformers.LlamaForCausalLM.from_pretrained": (CPU, PREPARING),
    "torch.compile": (CPU, PREPARING),
    "gqa.uptrain.training_model.next_token_loss": (GPU, TRAINING),
    "torch.save": (CPU, TRAINING),
}


@pytest.mark.parametrize("asking", ASKING)
def test_out_of_memory(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asking: str) -> None:
    """It is said as what it is, with the batch and what to lower, and not as a fault of a class, disk or compiler."""
    error, says = ASKING[asking]
    compiling, fail = asking == "torch.compile", failing(error)
    monkeypatch.setattr(asking, (lambda function: fail) if compiling else fail)
    done = command(tmp_path / "out", steps=1, batch_size=4, micro_batch=2, save_every=1, compile=compiling)
    check_refused(done, f"out of memory while {says}")
    assert not (tmp_path / "out").exists()


def test_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record goes to whatever accelerate knows, and the tracker is closed, also where the run stops."""
    notes = MagicMock(requires_logging_directory=True)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notes", notes)
    done = command(tmp_path / "out", steps=2, report_to="notes")
    assert done.code == 0, done.err
    made = notes.call_args.args
    *_, configuration, first, second, end = notes.return_value.method_calls
    assert (made[0], Path(made[1]).name) == ("gqa-uptrain", "out-logs")
    assert configuration.args[0]["steps"] == "2"
    names = {"gradient_norm", "learning_rate", "loss", "memory_bytes", "skipped", "step_tokens", "tokens"}
    names |= {"heldout_loss", "heldout_nats", "tokens_per_second"}
    assert [(name, {*given[0]}, how["step"]) for name, given, how in (first, second)] == [
        ("log", names, step) for step in (1, 2)
    ]
    assert end == call.finish()
    assert not (tmp_path / "out-state").exists()


def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation, which takes half a minute; the graph is the compiler's all the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for compiled in (False, True):
        assert command(tmp_path / f"{compiled}", steps=2, compile=compiled, batch_size=4, heldout_tokens=256).code == 0
    assert difference(tmp_path / "True", tmp_path / "False") < 1e-5


def test_the_documented_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the output is named by a dot: states are beside the directory that is meant, not in it."""
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "out")
        done = command(Path("."), steps=2, save_every=1, keep_state=True)
    assert done.code == 0, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-state"]
    page = (ROOT / "docs" / "uptraining.md").read_text(encoding="utf-8")
    named = {name.replace("step-N", "step-00000001") for name in re.findall(r"\| `OUT((?:-state)?/\S+)`", page)}
    assert named >= {"/README.md", "/gqa_uptraining.json", "-state/metrics.jsonl"}
    for name in named:
        assert (tmp_path / f"out{name}").exists(), name
