"""What is wrong with a cache of the Hugging Face libraries is said of the cache, not of the text,
the model or OUT.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import MERGED, SINGLE, check_refused, llama, run
from support.embedded import counting
from support.hub_server import Hub, Machine
from support.patches import use_data_cache

from gqa.convert.generate import sample_store
from gqa.core.errors import CacheError
from gqa.core.shelves import shelves
from gqa.corpus.cache import datasets_cache

NAME = "lab/tiny-llama"
FULL = os.strerror(errno.ENOSPC)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(counting())
    return path


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of `datasets` is below a regular file: nobody may write there, not even root."""
    (tmp_path / "file").touch()
    cache = tmp_path / "file/datasets"
    use_data_cache(monkeypatch, cache)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return cache


def test_commands_work_without_the_cache_and_warn_once(
    small: Path, text: Path, tmp_path: Path, unwritable: Path
) -> None:
    """Text, generated text and streams."""
    data = ("--data", text, "--context", 16)
    commands: list[tuple[str, tuple[object, ...]]] = [
        ("gqa-eval", (small, *data)),
        ("gqa-convert", (small, "-g", 2, *data, "--tokens", 256, "-o", tmp_path / "a")),
        ("gqa-convert", (small, "-g", 2, "--context", 16, "--tokens", 256, "-o", tmp_path / "b")),
        (
            "gqa-uptrain",
            (
                small,
                "--teacher",
                "none",
                *data,
                "--steps",
                1,
                "--batch-size",
                1,
                "-o",
                tmp_path / "c",
            ),
        ),
    ]
    for program, words in commands:
        with pytest.MonkeyPatch.context() as patch:
            use_data_cache(patch, unwritable)
            result = run(*words, "-q", program=program)
        assert result.code == 0, result
        assert result.err.count("warning: ") == 1
        assert (
            f"warning: the cache {unwritable} cannot be written (Not a directory): tokens and "
            in result.err
        )
        assert "set HF_HOME to a directory" in result.err
    assert not unwritable.exists()


def test_what_must_outlive_the_run_is_not_stored_in_a_temporary_cache(unwritable: Path) -> None:
    """Trained weights, and where a run is: with the cache removed at exit they would be lost."""
    temporary = datasets_cache()
    assert temporary != unwritable
    places = list(shelves())
    assert places
    assert not any(place.is_relative_to(temporary) for place in places)


def test_several_processes_do_not_replace_the_cache_that_they_share(
    unwritable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        CacheError, match=rf"the cache {unwritable} cannot be written: Not a directory; .* HF_HOME"
    ):
        datasets_cache()


def fail(number: int) -> Callable[..., Any]:
    def raise_error(*words: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return raise_error


@pytest.mark.parametrize("program", ["gqa-convert", "gqa-uptrain"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_cache_is_not_a_full_output(
    small: Path,
    tmp_path: Path,
    program: str,
    number: int,
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the model writes text: the error names the cache, not OUT, and the way out."""
    use_data_cache(monkeypatch, tmp_path / "cache")
    # A disk that is full, or read-only, when generated text is kept
    monkeypatch.setattr(sample_store, "_append_batches", fail(number))
    teacher = shutil.copytree(small, tmp_path / "teacher")
    words = {
        "gqa-convert": ("-g", 2, "--context", 16, "--tokens", 256),
        "gqa-uptrain": (
            "--teacher",
            teacher,
            "--data",
            "self:1K",
            "--steps",
            1,
            "--context",
            16,
            "--batch-size",
            1,
        ),
    }
    result = run(small, *words[program], "-q", "-o", tmp_path / "out", program=program)
    expected = (
        f"{program}: the cache {tmp_path}/cache cannot be written: {os.strerror(number)}; "
        "free some space there, "
    )
    result.expect(1, err=f"{expected}or set HF_HOME to a directory that can be written\n")


def test_a_full_cache_of_tokens_is_not_a_fault_of_the_text(
    small: Path, text: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_data_cache(monkeypatch, tmp_path / "cache")
    # A disk that is full when tokens are kept: `datasets` writes in one of two ways
    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write_table", fail(errno.ENOSPC))
    monkeypatch.setattr(
        "datasets.arrow_writer.ArrowWriter.write_examples_on_file", fail(errno.ENOSPC)
    )
    words = ("--teacher", "none", "--data", text, "--steps", 1, "--context", 16, "--batch-size", 1)
    result = run(small, *words, "-q", "-o", tmp_path / "out", program="gqa-uptrain")
    says = f"the cache {tmp_path}/cache cannot be written: {FULL}"
    message = check_refused(result, says, code=1, program="gqa-uptrain")
    assert "text.txt" not in message


def test_an_unwritable_cache_of_the_hub_is_named(
    tmp_path: Path, hub: Hub, machine: Machine
) -> None:
    """HF_HOME is below a regular file."""
    hub.repo(NAME, llama(tmp_path / "source"))
    machine.home.touch()
    result = machine.run(*MERGED, "-q", NAME)
    check_refused(
        result,
        f"the cache {machine.home}/hub cannot be written: Not a directory; ",
        "HF_HOME",
        code=1,
    )


def test_a_full_cache_of_the_hub_is_named(
    tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo(NAME, llama(tmp_path / "source"))
    # A disk that is full when a model is fetched
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail(errno.ENOSPC))
    result = machine.run(*MERGED, "-q", NAME)
    check_refused(
        result, f"the cache {machine.home}/hub cannot be written: {FULL}; ", "HF_HOME", code=1
    )


# -------------------------------------------------------------------- a model in the cache, offline


def truncate(snapshot: Path) -> None:
    os.truncate((snapshot / SINGLE).resolve(), 2000)


def pointer(snapshot: Path) -> None:
    (snapshot / SINGLE).resolve().write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    )


def bad_json(snapshot: Path) -> None:
    (snapshot / "config.json").resolve().write_text('{"a": ')


def leaving(snapshot: Path) -> None:
    blob = (snapshot / "config.json").resolve()
    elsewhere = shutil.move(blob, snapshot.parents[3] / "elsewhere")
    blob.symlink_to(elsewhere)


BROKEN = {
    truncate: f"{SINGLE} is truncated or not a safetensors file",
    pointer: "git lfs pull",
    bad_json: "config.json is not JSON in UTF-8",
    leaving: "config.json is a link that leaves",
}


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_offline_a_broken_model_in_the_cache_is_refused_for_what_is_broken(
    breaks: Callable[[Path], None], tmp_path: Path, hub: Hub, machine: Machine
) -> None:
    """And not because the hub cannot be reached, which would not be asked."""
    commit = hub.repo(NAME, llama(tmp_path / "source", shards=1)).refs["main"]
    assert machine.run(*MERGED, "-o", "fine", NAME).code == 0
    entry = machine.home / "hub/models--lab--tiny-llama"
    breaks(entry / "snapshots" / commit)
    result = machine.run(*MERGED, NAME, HF_HUB_OFFLINE="1")
    message = check_refused(result, BROKEN[breaks], f"to download it again delete {entry}")
    assert "offline mode" not in message
    assert "there is no directory" not in message


def test_offline_an_incomplete_model_is_refused_for_what_it_lacks(
    tmp_path: Path, hub: Hub, machine: Machine
) -> None:
    commit = hub.repo(NAME, llama(tmp_path / "source", shards=1)).refs["main"]
    assert machine.run(*MERGED, "-o", "fine", NAME).code == 0
    (machine.home / "hub/models--lab--tiny-llama/snapshots" / commit / SINGLE).unlink()
    result = machine.run(*MERGED, NAME, HF_HUB_OFFLINE="1")
    check_refused(
        result,
        f"{NAME} is not complete in the cache of the hub",
        f"has neither {SINGLE}",
        "offline mode",
    )
