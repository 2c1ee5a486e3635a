"""A result survives a power cut as soon as it has its name; weights leave the page cache as they
are written.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import llama
from support.training import options_for, tiny_checkpoint, trained

from gqa.checkpoint import output_directory, write, writer
from gqa.convert.api import convert_checkpoint
from gqa.core.run_directory import MARK
from gqa.uptrain import state_files

Rename = Callable[[Any, Any], None]


class Disk:
    """Records what is durable: a file with the contents, a directory with the names that it had
    when fsync was last called for it. Only below `root`, not in caches.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._durable: dict[int, object] = {}
        self.named_too_early: list[str] = []  # what was not durable when it got its name
        # What would survive a power cut is seen only here
        patch.setattr(os, "fsync", self._fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, self._checked(getattr(os, name)))

    def _fsync(self, handle: int) -> None:
        self._durable[os.fstat(handle).st_ino] = contents_of(handle)

    def _checked(self, rename: Rename) -> Rename:
        def checked(source: Any, target: Any) -> None:
            path = Path(source)
            if path.is_relative_to(self._root):
                self.named_too_early += [
                    f"{part.name} in {Path(target).name}"
                    for part in (path, *path.rglob("*"))
                    if not self.is_durable(part)
                ]
            rename(source, target)

        return checked

    def is_durable(self, path: Path) -> bool:
        """Whether a file has the contents, or a directory the names, for which fsync was called."""
        return self._durable.get(path.stat().st_ino) == contents_of(path)

    def durable_names(self, directory: Path) -> Any:
        """The names in a directory after a power cut."""
        return self._durable.get(directory.stat().st_ino, ())


def contents_of(path: int | Path) -> object:
    """What changes whenever a file is written, or a directory gets or loses a name of ours.

    The mark is removed just before a result gets its name, and may come back after a power cut.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        return {*os.listdir(path)} - {MARK}
    return status.st_size, status.st_mtime_ns


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def convert(directory: Path) -> Path:
    """A conversion with several shards and a side file in a directory of its own."""
    model = llama(directory / "m", shards=2)
    (model / "more").mkdir()
    (model / "more" / "notes.txt").write_text("mine")
    return convert_checkpoint(model, 2, directory / "out", method="mean").out


def train(directory: Path) -> Path:
    """A training that saves a state at every step."""
    source = tiny_checkpoint(directory / "source", "llama")
    trained(options_for(source, directory / "out", steps=2, save_every=1))
    return directory / "out"


MAKERS = {"converted": convert, "trained": train}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_has_its_name_before_it_is_durable(disk: Disk, tmp_path: Path, maker: str) -> None:
    """Neither a result nor a state of a training. The names themselves are durable at the end."""
    out = MAKERS[maker](tmp_path)
    assert disk.named_too_early == []
    assert disk.is_durable(out)
    assert out.name in disk.durable_names(out.parent)


def after_the_rename(directory: Path) -> None:
    """fsync of directories, but only once the result has its name: when its parent's turn comes."""
    if directory.name.startswith("."):
        return
    for path in (directory, *(part for part in directory.rglob("*") if part.is_dir())):
        write.fsync_directory(path)


def unsynced_text(path: Path, text: str) -> None:
    path.write_text(text)


WRONG: dict[str, tuple[str, object, str, Callable[..., None]]] = {
    "directories too late": (
        "converted",
        output_directory,
        "fsync_directory",
        after_the_rename,
    ),
    "no directories": ("converted", output_directory, "fsync_directory", lambda path: None),
    "no texts": ("converted", writer, "write_text", unsynced_text),
    "no record": ("converted", output_directory, "write_text", unsynced_text),
    "no directories of states": ("trained", state_files, "fsync_directory", lambda path: None),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", WRONG)
def test_control_a_wrong_order_is_noticed(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    maker, module, name, wrong = WRONG[case]
    # A wrong order of ours
    monkeypatch.setattr(module, name, wrong)
    MAKERS[maker](tmp_path)
    assert disk.named_too_early


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="only Linux has posix_fadvise")
@pytest.mark.parametrize("drops", [True, False])
def test_weights_leave_the_page_cache_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """Copied and merged tensors of all shards; the control is a writer that keeps them there."""
    dropped: set[int] = set()

    def advise(handle: int, offset: int, length: int, advice: int) -> None:
        whole_file = (offset, length) == (0, 0)
        if whole_file and advice == os.POSIX_FADV_DONTNEED:
            dropped.add(os.fstat(handle).st_ino)

    # Notes which files the kernel is asked to forget
    monkeypatch.setattr(os, "posix_fadvise", advise)
    if not drops:
        # The control: nothing is forgotten
        monkeypatch.setattr(write, "drop_written", lambda stream: None)
    model = llama(tmp_path / "m", shards=2)
    out = convert_checkpoint(model, 2, tmp_path / "out", method="mean").out
    weights = {path.stat().st_ino for path in out.glob("*.safetensors")}
    assert len(weights) > 1
    assert (weights <= dropped) == drops
