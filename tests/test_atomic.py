"""OUT appears complete or not at all: killed, interrupted, out of space, two at a time; and the
next run succeeds.
"""

import contextlib
import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.bin_files import save_bin
from support.checkpoints import (
    MERGED,
    Tensors,
    check_refused,
    contents,
    leftovers,
    llama,
    run,
    snapshot,
    weights,
)
from support.processes import die_at, small_disk
from support.training import Runs
from torch import Tensor

from gqa.checkpoint import output_directory, writer
from gqa.checkpoint.write import copy_range, replacing, write_tensor
from gqa.convert import rewrite
from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.convert.plan import Shard
from gqa.convert.rewrite import ConvertedCheckpoint
from gqa.core.errors import OutputError, RefusedError

KEPT = (
    "stored layers and finished batches of generated text are kept, the same command continues "
    "after them"
)
STOPPED = {
    signal.SIGINT: f"gqa-convert: interrupted; no partial result is left; {KEPT}",
    signal.SIGTERM: f"gqa-convert: terminated; no partial result is left; {KEPT}",
}


def small(directory: Path, seed: int = 0) -> Path:
    """A checkpoint of three files."""
    model = llama(directory, shards=1, side_files=False, seed=seed)
    (model / "tokenizer.json").write_text(f'{{"seed": {seed}}}')
    return model


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 120 MB in four shards."""
    size: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 6, "intermediate_size": 512}
    return llama(
        tmp_path_factory.mktemp("big") / "m",
        shards=4,
        tensors=weights(width=1024, layers=6),
        **size,
    )


def check_stopped(out: Path, *complete: dict[str, str]) -> str:
    """After a stop OUT is one of the complete results, or absent where that is allowed;
    says which.
    """
    visible = sorted(path.name for path in out.parent.iterdir() if not path.name.startswith("."))
    assert set(visible) <= {"m", "out"}
    if not out.exists():
        return "absent"
    found = contents(out)
    assert found in complete, "OUT is neither the old nor the new checkpoint"
    assert {"gqa_conversion.json", "README.md"} <= {path.name for path in out.iterdir()}
    return "new" if found == complete[0] else "old"


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_every_change_of_a_name(runs: Runs, tmp_path: Path, overwrite: bool) -> None:
    """Killed before the first, second ... last open, rename, mkdir, unlink: then the next run
    succeeds. Where OUT was there and is not, it puts the old one back.
    """
    model, out = small(tmp_path / "m"), tmp_path / "out"
    kept = tmp_path.with_name(tmp_path.name + "-kept")
    old, new = (
        contents(convert_checkpoint(model, groups, kept / str(groups), method="mean").out)
        for groups in (1, 2)
    )
    before = snapshot(model)
    words = [*MERGED, "-q", "-o", out, model, *(["--overwrite"] if overwrite else [])]
    states: list[str] = []
    for fatal in range(1, 400):
        if overwrite:
            shutil.copytree(kept / "1", out)
        killed = runs.begin(*words, before=[partial(die_at, fatal)])
        if killed.wait() == 0:
            break
        states.append(check_stopped(out, new, old))
        if overwrite and states[-1] == "absent":
            check_refused(
                run(*(word for word in words if word != "--overwrite")),
                "out exists; choose another directory",
            )
            assert check_stopped(out, new, old) == "old"
        again = words if overwrite or states[-1] == "absent" else [*words, "--overwrite"]
        following = run(*again)
        assert following.code == 0, (fatal, following.err)
        assert check_stopped(out, new) == "new"
        assert leftovers(tmp_path) == []
        assert snapshot(model) == before
        shutil.rmtree(out)
    assert len(states) > 12
    first = "old" if overwrite else "absent"
    moments = [states[0], *(b for a, b in pairwise(states) if a != b)]
    assert moments == [first, *(["absent"] if overwrite else []), "new"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(runs: Runs, big: Path, tmp_path: Path, number: int, code: int) -> None:
    """Soon over, nothing left, and one line that says so."""
    out = tmp_path / "out"
    words = [*MERGED, "-q", "-o", out, big]
    running = runs.begin(*words)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".out.gqa-partial/model-00001*")):  # now it is at work
        assert time.monotonic() < deadline
        time.sleep(0.001)
    start = time.monotonic()
    os.kill(running.pid, number)  # if it is done it is a zombie still: the server waits only now
    assert running.wait() in (code, 0), running.said()
    assert time.monotonic() - start < 5
    if not out.exists():
        assert sorted(tmp_path.iterdir()) == []
    assert "Traceback" not in running.said()
    if not out.exists():
        assert running.said().strip() == STOPPED[signal.Signals(number)]


def test_two_at_a_time(runs: Runs, big: Path, tmp_path: Path) -> None:
    """The second to come is refused and disturbs nothing."""
    out = tmp_path / "out"
    first = runs.begin(*MERGED, "-q", "-o", out, big)
    while not (tmp_path / ".out.gqa-partial").exists():
        time.sleep(0.001)
    os.kill(first.pid, signal.SIGSTOP)  # it is still writing when the second comes
    try:
        second = runs.begin("--kv-heads", 1, "--method", "mean", "-q", "-o", out, big)
        assert second.wait() == 2
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert "another run is writing" in second.said()
    assert first.wait() == 0, first.said()
    assert contents(out) == contents(
        convert_checkpoint(big, 2, tmp_path / "alone", method="mean").out
    )
    assert leftovers(tmp_path) == []


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB."""
    with small_disk(tmp_path / "disk", "400k") as made:
        yield made


def test_full_disk_under_a_file_that_is_replaced(disk: Path) -> None:
    """The old file stays; what the library says is the system's error."""
    (disk / "x").write_text("old")
    with (
        pytest.raises(OSError, match="No space left on device") as error,
        replacing(disk / "x") as temporary,
    ):
        save_file({"a": torch.zeros(1 << 20)}, temporary)
    assert error.value.errno == errno.ENOSPC
    assert {path.name: path.read_text() for path in disk.iterdir()} == {"x": "old"}


@pytest.mark.parametrize(("more", "says"), [(9, "are free at"), (0, "no partial result was kept")])
def test_full_disk(disk: Path, tmp_path: Path, more: int, says: str) -> None:
    """Refused at once where the weights cannot fit; where side files do not, all that was written
    is gone again.
    """
    # 48 KiB each
    tensors = weights() | {
        f"model.more.{n}": weights(width=512)["lm_head.weight"] for n in range(more)
    }
    model, out = llama(tmp_path / "m", tensors=tensors, shards=2), disk / "out"
    (model / "vocab.txt").write_bytes(bytes(500_000))
    assert run("--kv-heads", 1, "--method", "mean", "-o", out, small(tmp_path / "other")).code == 0
    before = snapshot(disk)
    result = run(*MERGED, "--overwrite", "-o", out, model)
    check_refused(result, "no space left", "free some", says, code=1)
    assert snapshot(disk) == before


PLACES = {
    "copy_range": rewrite,
    "write_tensor": rewrite,
    "copy_file": writer,
    "write_text": writer,
    "verify": ConvertedCheckpoint,
    "fsync_directory": output_directory,
}
ERRORS = [
    *((where, errno.ENOSPC) for where in PLACES),
    ("write_tensor", errno.EIO),
    ("verify", None),
]


@pytest.mark.parametrize(("where", "number"), ERRORS)
def test_error_anywhere(tmp_path: Path, monkeypatch: Any, where: str, number: int | None) -> None:
    """Of the disk or, without a number, our own mistake: a result that was there stays, and the
    next run succeeds.
    """

    def fail(*words: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number)) if number else ZeroDivisionError

    model, out = llama(tmp_path / "m"), tmp_path / "out"
    assert run("--kv-heads", 1, "--method", "mean", "-o", out, model).code == 0
    before = snapshot(tmp_path)
    # A disk that fails at each place where names or bytes are written
    monkeypatch.setattr(PLACES[where], where, fail)
    result = run(*MERGED, "--overwrite", "-o", out, model)
    result.expect(1, out="", err_lines=1)
    says = {errno.EIO: "Input/output error", errno.ENOSPC: "no space left"}.get(
        number, "unexpected ZeroDivisionError"
    )
    assert says in result.err
    assert snapshot(tmp_path) == before
    monkeypatch.undo()
    assert run(*MERGED, "--overwrite", "-o", out, model).code == 0


def test_an_error_in_one_shard_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def copy(source: Any, target: Any, offset: int, count: int, progress: Any) -> None:
        if "00001" in target.name:
            raise OSError(errno.EIO, "the disk is on fire")
        for _ in range(200):
            progress(0)  # raises when another shard has failed
            time.sleep(0.01)
        ended.append(target.name)

    # One shard fails while another is copied slowly
    monkeypatch.setattr(rewrite, "copy_range", copy)
    with pytest.raises(OSError, match="on fire"):
        convert_checkpoint(llama(tmp_path / "m", shards=2), 2, tmp_path / "out", method="mean")
    assert ended == []


def test_failed_second_rename_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the new one cannot be put in place, the old one is."""
    model, out = small(tmp_path / "m"), tmp_path / "out"
    assert run("--kv-heads", 1, "--method", "mean", "-o", out, model).code == 0
    before, rename = snapshot(tmp_path), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith("gqa-partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    # A disk that fails when the result gets its name
    monkeypatch.setattr(Path, "rename", fail)
    assert run(*MERGED, "--overwrite", "-o", out, model).code == 1
    assert snapshot(tmp_path) == before


def test_source_that_became_shorter(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    with (
        (tmp_path / "a").open("rb") as source,
        (tmp_path / "b").open("wb", buffering=0) as target,
        pytest.raises(OutputError, match="became shorter"),
    ):
        copy_range(source, target, 50, 100)


# ------------------------------------------ what is written wrong is noticed before it is published


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        (-(1 << 20), "z.weight differs from the source"),  # at the start, in the middle, at the end
        (-(1 << 19) - 1, "z.weight differs from the source"),
        (-1, "z.weight differs from the source"),
        (12, "the result failed verification"),  # in the header
        (-(1 << 18), None),  # between two sampled blocks of a tensor of 1 MiB
    ],
)
def test_a_damaged_copy_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, says: str | None
) -> None:
    """After the shard is written and before it is verified, one bit of it is changed."""
    # Small blocks, of which even this file has many
    monkeypatch.setattr(rewrite, "SAMPLED_BYTES", 1 << 10)
    source = llama(
        tmp_path / "m", tensors=weights() | {"z.weight": torch.randn(4096, 64)}, shards=1
    )
    verify_shard = ConvertedCheckpoint.verify_shard

    def damage_and_verify(writer: ConvertedCheckpoint, path: Path, shard: Shard) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        verify_shard(writer, path, shard)

    # A disk that returns other bytes than were written
    monkeypatch.setattr(ConvertedCheckpoint, "verify_shard", damage_and_verify)
    with pytest.raises(OutputError, match=re.escape(says)) if says else contextlib.nullcontext():
        convert_checkpoint(source, 2, tmp_path / "out", method="mean")
    assert (tmp_path / "out").exists() == (says is None)


@pytest.mark.parametrize(
    ("stored", "wrong", "says"),
    [
        ("bin", lambda tensor: tensor + 1, "differs from the source"),
        (
            "safetensors",
            lambda tensor: tensor * float("nan"),
            "NaN or Inf, but its source has none",
        ),
    ],
)
def test_tensors_that_are_written_wrong_are_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    wrong: Callable[[Tensor], Tensor],
    says: str,
) -> None:
    source = llama(tmp_path / "m")
    if stored == "bin":
        save_bin(source, weights(), 1)
    # A mistake of ours in what is written, which verifying has to notice
    monkeypatch.setattr(
        rewrite,
        "write_tensor",
        lambda target, tensor, *rest: write_tensor(target, wrong(tensor), *rest),
    )
    with pytest.raises(OutputError, match=says):
        convert_checkpoint(source, 2, tmp_path / "out", method="mean")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def drop(pattern: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not re.search(pattern, name)
    }


def narrow(pattern: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        n: torch.zeros(shape) if re.search(pattern, n) else t for n, t in tensors.items()
    }


QWEN3 = {"model_type": "qwen3", "head_dim": 4, "architectures": ["Qwen3ForCausalLM"]}
UNLOADABLE: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "another prefix": (
        lambda tensors: {f"student.{name}": tensor for name, tensor in tensors.items()},
        {},
        r"are not stored \(but student\.",
    ),
    "a pruned MLP": (
        narrow("mlp.up_proj", 8, 32),
        {},
        r"as \[8, 32\], but config.json implies \[16, 32\] \(and 1 m",
    ),
    "more layers in the config": (
        dict,
        {"num_hidden_layers": 3},
        "layers.2.*are not stored, and LlamaForCausalLM",
    ),
    "an untied head": (
        drop("lm_head"),
        {},
        "lm_head.weight is not stored, and LlamaForCausalLM would initialize",
    ),
    "a model type of another model": (dict, QWEN3, "q_norm"),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_what_transformers_would_initialize_at_random_is_refused(case: str, tmp_path: Path) -> None:
    """It only warns of that. Refused with the plan, so in a dry run too."""
    change, settings, says = UNLOADABLE[case]
    with pytest.raises(RefusedError, match=says):
        plan_conversion(
            llama(tmp_path / "m", tensors=change(weights()), **settings), 2, method="mean"
        )


@pytest.mark.parametrize("odd", [3, [None], "LlamaModel", ["LlamaConfig"]])
def test_what_names_no_class_is_as_if_nothing_were_named(odd: object, tmp_path: Path) -> None:
    """`architectures` of config.json may be anything: the result is of the class that its model
    type stands for.
    """
    result = run(*MERGED, "-o", tmp_path / "out", llama(tmp_path / "m", architectures=odd))
    result.expect(complaints="")
    assert "next " in result.out


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"architectures": ["LlamaForReward"]}, "Llama"),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "Llama"),
        ({"model_type": "olmo2", "architectures": ["Llama"]}, "Olmo2"),
    ],
)
def test_classes_of_others_are_not_tried(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    """Code of a checkpoint is not run: what was not checked is a warning."""
    plan = plan_conversion(
        llama(tmp_path / "m", tensors=drop("lm_head")(weights()), **settings), 2, method="mean"
    )
    says = f"{name}ForCausalLM does not load the result (other classes were not tried)"
    assert any(says in warning for warning in plan.warnings), plan.warnings
