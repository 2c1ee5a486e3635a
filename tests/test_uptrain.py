"""gqa-uptrain as a command: what it says and leaves behind, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from support import checkpoints
from support.checkpoints import SINGLE, Result, edit_tensors, load, run, snapshot
from support.faults import infinite_gradient
from support.patches import log_every_line
from support.training import (
    difference,
    expert_options,
    fresh_accelerator,
    material,
    metrics,
    options_for,
    tiny_checkpoint,
    trained,
    training_model,
    words_for,
    write_corpus,
)
from transformers import AutoModelForImageTextToText

from gqa.core.errors import RefusedError
from gqa.uptrain import setup
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.run import _is_of_compiler

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("alone")


def command(out: Path, **options: Any) -> Result:
    """The command on the model and data of `material`, unless options name others."""
    model, data = (
        options.pop("model", material() / "model"),
        options.pop("data", material() / "data.jsonl"),
    )
    with expert_options(options) as rest:
        return run(*words_for(model, data, out, **rest), program="gqa-uptrain")


def test_output(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_every_line(monkeypatch)
    out = tmp_path / "out"
    done = command(
        out,
        tokens="2.5K",
        train="kv",
        teacher=place / "teacher",
        validation_fraction=0.2,
        quiet=False,
    )
    assert done.code == 0, done.err
    lines = done.said.splitlines()
    assert not re.search(r"[ \t]$", done.out, re.MULTILINE)
    trained = 2 * 2 * 16 * 32  # layers, K and V, rows, width
    assert re.search(rf": {trained:,} of [\d,]+ parameters train \(kv\)$", lines[0])
    assert (
        lines[5] == "steps       4, each of 8 blocks (512 tokens); 2,048 tokens in all, with "
        "repeated passages"
    )
    starts = [
        "model",
        "teacher",
        "estimate",
        "output",
        "data",
        "steps",
        "optimizer",
        "precision",
        "validation",
        "validation",
        "written",
        "next",
    ]
    assert [line[:10].rstrip() for line in lines] == starts
    assert lines[1] == f"teacher     {place / 'teacher'}"
    assert lines[-2] == f"written     {out}: verified, loads in transformers"
    status = done.err.splitlines()[-1]
    steps = metrics(out / "gqa_uptraining.jsonl")
    assert re.fullmatch(
        rf"training: {len(steps)} of {len(steps)} steps, \S+ elapsed, about 00:00 left, "
        r"kl \S+, lowest validation kl \S+, \S+ tok/s",
        status,
    )
    assert "validation " in next(
        line for line in done.err.splitlines() if line.startswith("training: 1 of")
    )
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert {"tokens", "cross_entropy", "kl", "gradient_norm", "learning_rate"} <= steps[0].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_the_plan_is_printed_before_models_and_text_are_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To generate the text may take hours: until then a user has read what will be done."""

    def cannot_load(*_: object) -> NoReturn:
        raise RefusedError("the text cannot be generated")

    monkeypatch.setattr(setup, "load_run", cannot_load)
    options = {"tokens": "2.5K", "teacher": place / "teacher", "data": "self", "quiet": False}
    done = command(tmp_path / "out", **options)
    assert done.code == 2
    assert [line.split()[0] for line in done.out.splitlines()] == [
        "model",
        "teacher",
        "estimate",
        "output",
    ]


def test_json_is_all_of_stdout_and_overwriting(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for steps in (1, 2):
        done = command(out, steps=steps, overwrite=True, json=True, quiet=False)
        record, written = (
            json.loads(done.out),
            json.loads((out / "gqa_uptraining.json").read_text()),
        )
        assert written.pop("files") == sorted(path.name for path in out.iterdir())
        assert record == written
        assert record["steps"] == steps
        assert record["tokens"] == 512 * steps
        assert record["alpha"] is None
        assert record["ranks"] == 1
        assert "written     " in done.err


@pytest.mark.parametrize("verbose", [False, True])
def test_divergence_stops_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    infinite_gradient(monkeypatch, 5)
    done = command(tmp_path / "out", steps=9, save_every=2, verbose=verbose)
    done.expect(1)
    is_one_line = done.err.count("\n") == 1
    assert is_one_line is not verbose, done.err
    assert ("Traceback" in done.err) is verbose, done.err
    assert (
        "not finite in step 5; what was saved before is kept. Repeat the command with" in done.err
    )
    states = sorted((tmp_path / "out-state").glob("step-*"))
    assert [path.name for path in states] == ["step-00000002", "step-00000004"]
    assert not (tmp_path / "out").exists()


def test_a_diverged_run_is_repeated_as_its_error_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --overwrite: with another rate alone it is another run, whose states are in the way."""
    given = {"steps": 3, "save_every": 1, "warmup": 0}
    with monkeypatch.context() as patch:
        infinite_gradient(patch, 2)
        diverged = command(tmp_path / "out", **given)
    diverged.expect(1, says="with --overwrite and a lower --learning-rate or a longer --warmup")

    lower = given | {"learning_rate": 1e-5}
    with fresh_accelerator():
        command(tmp_path / "out", **lower).expect(2, says="holds another run")
    with fresh_accelerator():
        command(tmp_path / "out", **lower, overwrite=True).expect(0)


def test_a_run_that_diverges_with_nothing_saved_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not advise --overwrite: nothing is in the way of another rate."""
    given = {"steps": 3, "warmup": 0}
    with monkeypatch.context() as patch:
        infinite_gradient(patch, 2)
        diverged = command(tmp_path / "out", **given)
    diverged.expect(
        1,
        says="not finite in step 2; nothing was saved before. Repeat the command with a lower "
        "--learning-rate or a longer --warmup",
    )

    with fresh_accelerator():
        command(tmp_path / "out", **given, learning_rate=1e-5).expect(0)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EACCES, "Check that directory and its disk"),
    ],
)
def test_a_state_that_cannot_be_saved_needs_space_only_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(*given: Any) -> None:
        raise OSError(number, os.strerror(number))

    # There are disks that are full, and directories that nobody may write to; root may
    monkeypatch.setattr("gqa.uptrain.state.write_tensors", fail)
    done = command(tmp_path / "out", steps=2, save_every=1)
    assert done.code == 0, done.err
    assert f"{os.strerror(number)}); no state was saved before. {advice}. The run goes on" in (
        done.err
    )


def test_a_continued_run_goes_on_if_its_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        infinite_gradient(patch, 2)
        command(out, steps=3, save_every=1).expect(1)

    def fail(path: Path) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # A disk that is full while the log is written anew
    monkeypatch.setattr("gqa.uptrain.log.replacing", fail)
    with fresh_accelerator():
        done = command(out, steps=3, save_every=1)
    done.expect(
        err=f"warning: {out}-state/metrics.jsonl: No space left on device; steps that are repeated "
        "are in it twice. The run goes on\n"
    )
    assert json.loads((out / "gqa_uptraining.json").read_text())["steps"] == 3


check_refused = partial(checkpoints.check_refused, program="gqa-uptrain", advice="")
Refusals = list[tuple[dict[str, Any], str]]  # options, and what is said of them


def refusals(place: Path, root: Path) -> Refusals:
    small, empty = root / "small.jsonl", root / "empty.jsonl"
    small.write_text('{"text": "def f(x): pass"}\n')
    empty.write_bytes(b"")
    short = write_corpus(root / "short.jsonl", 2)  # of which nothing is held out
    alpha = {"steps": None, "alpha": 1}
    narrow, other = (
        tiny_checkpoint(root / "narrow", vocab_size=512),
        tiny_checkpoint(root / "other"),
    )
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"] |= {
        "vocab": {f"{k}x": v for k, v in tokenizer["model"]["vocab"].items()},
        "merges": [],
    }
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    bare = shutil.copytree(place / "model", root / "bare", ignore=shutil.ignore_patterns("*token*"))
    packed = tiny_checkpoint(root / "packed")
    save_file({**load(packed), "a.qweight": torch.ones(2)}, packed / SINGLE, {"format": "pt"})
    headless, spoilt = (
        tiny_checkpoint(root / "headless", "qwen3_vl_text"),
        tiny_checkpoint(root / "spoilt"),
    )
    edit_tensors(spoilt, lambda tensors: next(iter(tensors.values())).mul_(torch.nan))
    return [
        (
            {"data": small},
            "tokens, less than one block of 64 tokens; pass more data, or lower --context",
        ),
        (
            alpha | {"batch_size": 999},
            "less than one batch of 999; pass more data, or lower --batch-size",
        ),
        (
            alpha | {"alpha": 1e-4},
            "less than one block of 64 tokens; raise --alpha, or lower --context",
        ),
        ({"data": empty}, "has no text: all its files are empty"),
        ({"validation": place / "data.jsonl"}, "all documents are validation text"),
        ({"validation": small}, "the validation text has less than one block of 64 tokens"),
        (
            {"validation_fraction": 1e-6},
            "--validation-fraction 1e-06 holds out no document; raise it, or pass more data",
        ),
        (
            {"model": packed},
            "packed has quantized weights, which cannot be trained; train the unquantized model",
        ),
        (
            {"model": narrow},
            "the tokenizer gives token 4095, but the embedding of narrow has 512 rows",
        ),
        (
            {"teacher": narrow},
            "the embedding of the teacher narrow has only 512 of the 4,096 tokens of the model's "
            "tokenizer",
        ),
        ({"teacher": other}, "the teacher other has a different tokenizer from the model"),
        ({"teacher": place / "model"}, "is the model itself, so there is nothing to learn; pass"),
        ({"model": spoilt}, "spoilt or its teacher has weights that are NaN or infinite"),
        ({"teacher": spoilt, "data": short}, "infinite; pass intact checkpoints"),
        (
            {"model": headless},
            "headless is a Qwen3VLTextModel, which does not predict the next token of a text",
        ),
        ({"model": bare}, "bare has no tokenizer; copy its base model's tokenizer files into"),
        ({"output": packed}, "packed exists; choose another directory with -o"),
        ({"context": 1}, "--context 1 leaves nothing to predict; pass at least 2"),
        ({"context": 65}, "--context 65 is more than the 64 positions of model; pass at most 64"),
        ({"attn_implementation": "magic"}, "magic"),
        ({"device": "nowhere"}, "there is no device nowhere; pass cpu, cuda, cuda:1 or mps"),
    ]


def test_refusals(place: Path, tmp_path: Path) -> None:
    """And nothing is written."""
    for options, says in refusals(place, tmp_path):
        before = snapshot(tmp_path)
        with fresh_accelerator():
            check_refused(command(tmp_path / "out", **{"steps": 2} | options), says)
        assert snapshot(tmp_path) == before, says


def test_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device that is named, of one process.

    Here there is but one, and another that holds no numbers.
    """
    # A device that this machine need not have
    monkeypatch.setattr("gqa.uptrain.accelerator.find_device", str)
    options = UptrainOptions(model="m", output=tmp_path / "out", device="meta")
    with fresh_accelerator():
        accelerator = setup.make_accelerator(options)
        AcceleratorState()  # accelerate makes one with every optimizer, of the process's device
        assert accelerator.device.type == "meta"
        later = setup.make_accelerator(replace(options, device=None))
        assert later.device.type != "meta", "it is of this run alone"
    with fresh_accelerator():
        setup.make_accelerator(replace(options, device=None, precision="bfloat16"))
        # Not bfloat16 in silence
        with pytest.raises(RefusedError, match="has already been initialized"):
            setup.make_accelerator(replace(options, device=None))
    # As under a launcher of two processes
    monkeypatch.setattr("gqa.uptrain.accelerator.ranks", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(RefusedError, match="--device meta works with one process only"):
        setup.make_accelerator(options)


def test_lacks_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package, space: known before anything is trained.

    A log that cannot be written ends no training.
    """
    monkeypatch.setitem(sys.modules, "peft", None)
    needs = "--train lora needs peft; install it with: pip install peft"
    check_refused(command(tmp_path / "out", steps=1, train="lora"), needs)
    with monkeypatch.context() as disk:
        # A disk with 1,000 bytes left
        disk.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        done = command(tmp_path / "deep" / "out", steps=1)
    check_refused(
        done,
        f"bytes, but only 1,000 are free at {tmp_path}; free some space, or choose another "
        "directory",
        code=1,
    )
    assert list(tmp_path.iterdir()) == []
    # A file of metrics on a full disk
    monkeypatch.setattr(setup.OpenedRun, "log_path", Path("/dev/full"))
    done = command(tmp_path / "out", steps=2)
    warning = (
        "warning: /dev/full: No space left on device; steps are missing in it. The run goes on\n"
    )
    done.expect(err=warning)
    assert json.loads((tmp_path / "out" / "gqa_uptraining.json").read_text())["steps"] == 2


GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 9 bytes"
)
TRAINING = (
    "out of memory while training on cpu (--micro-batch 2, --context 64); pass "
    "--gradient-checkpointing, --optimizer adafactor or --train kv, or lower --micro-batch or "
    "--context"
)
MEMORY = {  # where memory ends: the error, the message and the exit code
    "gqa.uptrain.accelerator.Accelerator": (GPU, "out of memory: ", 1),
    "gqa.uptrain.training_model.next_token_loss": (GPU, TRAINING, 2),
    "torch.save": (CPU, TRAINING, 2),
}


@pytest.mark.parametrize("function", MEMORY)
def test_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """It is said as what it is, in training with what to lower, and not as a fault of a class or a
    disk.
    """
    error, says, code = MEMORY[function]

    def fail(*given: Any, **options: Any) -> Any:
        raise error

    # Memory runs out at a certain place
    monkeypatch.setattr(function, fail)
    done = command(tmp_path / "out", steps=1, batch_size=4, micro_batch=2, save_every=1)
    check_refused(done, says, code=code)
    assert not (tmp_path / "out").exists()


def test_out_of_memory_names_no_option_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise GPU

    monkeypatch.setattr("gqa.uptrain.training_model.next_token_loss", fail)
    done = command(
        tmp_path / "out",
        steps=1,
        batch_size=4,
        micro_batch=1,
        train="kv",
        optimizer="adafactor",
        gradient_checkpointing=True,
    )
    says = "out of memory while training on cpu (--micro-batch 1, --context 64); lower --context\n"
    check_refused(done, says, code=2)


def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without code generation, which takes half a minute; the graph is the compiler's all the
    same.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for compiled in (False, True):
        assert (
            command(
                tmp_path / f"{compiled}",
                steps=2,
                compile=compiled,
                batch_size=4,
                validation_tokens=256,
            ).code
            == 0
        )
    assert difference(tmp_path / "True", tmp_path / "False") < 1e-5

    def fail(*given: Any) -> None:
        raise RuntimeError("no compiler")

    # A machine without a compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fail))
    done = command(tmp_path / "out", steps=2, compile=True)
    check_refused(
        done, "training with --compile failed (backend='fail' raised: RuntimeError: no compiler"
    )


def test_errors_of_the_compiler_are_told_from_those_of_what_it_compiled() -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError) as of_compiler:
        torch.compile(lambda x: x + 1, backend=fail)(torch.ones(2))
    assert _is_of_compiler(of_compiler.value)
    assert not _is_of_compiler(RuntimeError("NCCL error"))


def test_the_documented_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the output is named by a dot: states are beside the directory that is meant, not
    in it.
    """
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "out")
        done = command(Path("."), steps=2, save_every=1, keep_state=True)
    assert done.code == 0, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out-state"]
    page = (ROOT / "docs" / "uptraining.md").read_text(encoding="utf-8")
    named = {
        name.replace("step-N", "step-00000001")
        for name in re.findall(r"\| `OUT((?:-state)?/\S+)`", page)
    }
    assert named >= {"/README.md", "/gqa_uptraining.json", "-state/metrics.jsonl"}
    for name in named:
        assert (tmp_path / f"out{name}").exists(), name


def test_a_model_whose_code_cannot_mix_dtypes_is_refused_in_bfloat16(tmp_path: Path) -> None:
    """DBRX adds outputs of experts, in bfloat16 under autocast, to sums in float32."""
    model = tiny_checkpoint(tmp_path / "dbrx", "dbrx")
    options = {"teacher": "none", "train": "all", "context": 32}
    refused = "DbrxForCausalLM does not compute in bfloat16 .*; pass --precision float32"
    with fresh_accelerator(), pytest.raises(RefusedError, match=refused):
        trained(options_for(model, tmp_path / "out", precision="bfloat16", **options))
    with fresh_accelerator():
        trained(options_for(model, tmp_path / "out", precision="float32", **options))


def test_a_class_that_fails_on_text_is_refused(tmp_path: Path) -> None:
    """Kyutai's model reads the codes of audio beside each token."""
    model = tiny_checkpoint(tmp_path / "kyutai", "kyutai_speech_to_text")
    refused = "KyutaiSpeechToTextForConditionalGeneration cannot be trained on text: it fails on 16"
    with fresh_accelerator(), pytest.raises(RefusedError, match=refused):
        trained(options_for(model, tmp_path / "out", teacher="none", train="all", context=32))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma", "granite_swa"])
def test_a_class_without_sdpa_trains_by_default(tmp_path: Path, family: str) -> None:
    model = tiny_checkpoint(tmp_path / "model", family)
    options = {"teacher": "none", "train": "all", "context": 32}
    with fresh_accelerator():
        progress, _ = trained(options_for(model, tmp_path / "out", **options))
    assert progress.step == 2


def test_a_class_with_sdpa_uses_it_by_default(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    with fresh_accelerator():
        ready: Any = setup.prepare(options_for(model, tmp_path / "out", teacher="none"))
    assert ready.model.config._attn_implementation == "sdpa"


def test_a_model_that_trains_only_with_types_of_tokens(tmp_path: Path) -> None:
    """Molmo 2: all tokens are text. The loss of the first step is transformers' own, without."""
    path = tiny_checkpoint(tmp_path / "molmo2", "molmo2")
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    ids = torch.arange(20, 50)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids, use_cache=False).loss
        summed, counts = training_model(model.train())(input_ids=ids)
    assert float(summed / counts[0]) == pytest.approx(float(expected), rel=1e-5)
