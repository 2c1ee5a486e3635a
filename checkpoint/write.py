"""Write side: a directory that appears complete or not at all, and bytes moved by the kernel.

Work happens in a hidden sibling of the output; a rename at the very end makes it visible. A run
that is killed leaves only the hidden directory, which the next run removes: a lock beside it tells
a dead run from a live one, and a mark in it (core/work.py) our directory from that of
somebody else.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gqa.core import work as unfinished
from gqa.core.errors import OutputError, RefusedError, listing

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 32 << 20
DEFAULT_JOBS = 2  # while one shard waits for the disk the other merges
_PARTIAL, _REPLACED = "partial result", "replaced result"  # purposes of hidden directories
Progress = Callable[[int], None]


def no_progress(count: int) -> None:
    """Progress that is not shown."""


class OutputDirectory:
    """A directory that appears complete or not at all, and that one process writes at a time.

    with OutputDirectory(out, source, overwrite) as output:
        write_files(output.work)  # hidden beside `out`
        output.commit("record.json", record)

    What keeps `out` from being written is refused when the object is made. `overwrite` replaces
    only results of the same kind: directories whose files the JSON files `records` list.
    """

    def __init__(
        self, out: Path, source: Path | None, overwrite: bool = False, records: str = "gqa_*.json"
    ) -> None:
        # The way to it shall not lead through itself, which is renamed
        has_name = out.name not in ("", "..")
        self.out = Path(os.path.realpath(out.parent), out.name) if has_name else out.resolve()
        self.work = self.sibling("partial")
        self._old = self.sibling("replaced")
        self._overwrite, self._records = overwrite, records
        self._errors = f"cannot write beside {self.out}", "give another directory with -o"
        with system_errors(*self._errors):
            self._check_place(source)
            self._check_existing()

    def sibling(self, purpose: str) -> Path:
        """A hidden name beside the output."""
        if not self.out.name:
            raise RefusedError(
                f"the output {self.out} is the root of a file system; give a directory in it with "
                "-o"
            )
        return self.out.with_name(f".{self.out.name}.gqa-{purpose}")

    def __enter__(self) -> OutputDirectory:
        with ExitStack() as stack, system_errors(*self._errors):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            busy = f"another run is writing {self.out}; wait for it or give another -o"
            stack.enter_context(locked(self.sibling("lock"), busy))

            self._restore()
            self._check_existing()  # now nobody else makes it
            self._check_leftovers()
            unfinished.remove(self.work, _PARTIAL)
            self._remove_old()

            stack.callback(self._remove_work)
            unfinished.claim(self.work, _PARTIAL, str(self.out))
            self._stack = stack.pop_all()
        return self

    def commit(self, name: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Make everything durable and visible under the final name, with `record` and a list of the
        files as `name`. Returns what `name` has.
        """
        written = {
            path.relative_to(self.work).as_posix()
            for path in self.work.rglob("*")
            if path.is_file()
        }
        files = sorted({name, *written} - {unfinished.MARK})
        text = json.dumps({**finite(record), "files": files}, indent=2, ensure_ascii=False) + "\n"
        write_text(self.work / name, text)
        for directory in {self.work, *(p for p in self.work.rglob("*") if p.is_dir())}:
            fsync_directory(directory)
        try:
            self._check_existing()
        except RefusedError as error:  # it was made while this run was writing
            raise OutputError(str(error)) from error
        if self.out.exists():
            self.out.rename(self._old)  # then OUT is absent for a moment: see _restore
        # It is ours without it too: the record lists all of its files
        (self.work / unfinished.MARK).unlink()
        self.work.rename(self.out)
        fsync_directory(self.out.parent)
        return dict(json.loads(text))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: object
    ) -> None:
        with self._stack:
            self._restore()
            with suppress(OSError):  # what stays is removed by the next run
                self._remove_old()
        if (
            isinstance(value, OSError)
            and value.errno in (errno.ENOSPC, errno.EDQUOT)
            and self._is_near(value)
        ):
            raise OutputError(
                f"no space left for {self.out}: no partial result was kept; free some space or "
                "give another directory with -o"
            ) from value

    def _is_near(self, error: OSError) -> bool:
        """Whether an error may be about a file beside the output: not if it names another place,
        such as a cache.
        """
        name = error.filename
        return not isinstance(name, str) or Path(os.path.realpath(name)).is_relative_to(
            self.out.parent
        )

    def _remove_work(self) -> None:
        """Remove what this run has written, unless it is published.

        What stays is removed by the next run.
        """
        with suppress(OSError, RefusedError):
            if not unfinished.is_ours(self.work, _PARTIAL) and self._is_result(self.work):
                # Stopped between the last two changes of `commit`
                unfinished.mark(self.work, _PARTIAL)
            unfinished.remove(self.work, _PARTIAL)

    def _remove_old(self) -> None:
        """Remove the result that another one has replaced."""
        if self._old.exists():
            unfinished.mark(self._old, _REPLACED)  # from now on it is not put back
            unfinished.remove(self._old, _REPLACED)

    def _restore(self) -> None:
        """Undo an --overwrite that was stopped between its two renames."""
        if os.path.lexists(self.out) or not self._is_result(self._old):
            return
        self._old.rename(self.out)

    def _is_result(self, directory: Path) -> bool:
        """Whether it is a directory with nothing but a whole result, of which records list every
        file; or empty.
        """
        return (
            directory.is_dir()
            and not directory.is_symlink()
            and not _unlisted_files(directory, self._records)
        )

    def _check_leftovers(self) -> None:
        """Raise RefusedError if one of the hidden names is taken by something that no run of ours
        has left.
        """
        for path, purpose in ((self.work, _PARTIAL), (self._old, _REPLACED)):
            if os.path.lexists(path) and not (
                unfinished.is_ours(path, purpose) or self._is_result(path)
            ):
                raise RefusedError(
                    f"{path} was not left by a run of gqa; move it away or give another directory "
                    "with -o"
                )
        if self._is_result(self.work) and not unfinished.is_ours(self.work, _PARTIAL):
            # A run was killed between the last two changes of `commit`
            unfinished.mark(self.work, _PARTIAL)

    def _check_place(self, source: Path | None) -> None:
        if source:
            real, inside = Path(os.path.realpath(self.out)), source.resolve()
            if real.is_relative_to(inside):
                raise RefusedError(
                    f"the output {self.out} is the model itself or inside it; give another with -o"
                )
            if inside.is_relative_to(real):
                raise RefusedError(
                    f"the output {self.out} contains the model {source}; give another with -o"
                )
        place = next(path for path in self.out.parents if os.path.lexists(path))
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise NotADirectoryError(
                errno.ENOTDIR, f"{place} is not a directory that you may write to"
            )
        if os.path.ismount(self.out):  # cannot be renamed to
            raise RefusedError(
                f"the output {self.out} is a mount point; give a directory in it with -o"
            )

    def _check_existing(self) -> None:
        """Raise RefusedError unless OUT is nothing, an empty directory or, with --overwrite, a
        result.
        """
        if self.out.is_symlink():
            raise RefusedError(f"{self.out} is a link; give the directory itself with -o")
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise RefusedError(
                f"{self.out} exists and is not a directory; give another directory with -o"
            )
        if any(self.out.iterdir()) and not self._overwrite:
            raise RefusedError(
                f"{self.out} exists; choose another directory with -o, or replace it with "
                "--overwrite"
            )
        if others := _unlisted_files(self.out, self._records):
            raise RefusedError(
                f"{self.out} holds {listing(others, 3)}, which --overwrite will not remove: "
                f"no {self._records} lists "
                "it as part of a result; move it away or give another directory with -o"
            )


def _unlisted_files(directory: Path, records: str) -> list[str]:
    """Files in a directory that the `records` in it do not list as parts of a result."""
    listed: set[str] = set()
    for path in directory.glob(records):
        # A record of another tool
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            listed |= set(json.loads(path.read_bytes())["files"])
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return [
        name for path in paths if (name := path.relative_to(directory).as_posix()) not in listed
    ]


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file, which the system releases when the process dies.

    Raises RefusedError if another holds it, or if it is a file of somebody else.
    """
    from filelock import FileLock, Timeout  # here: it imports asyncio, which --help does not need

    if path.is_file() and path.stat().st_size:  # it would be emptied, and removed at the end
        raise RefusedError(
            f"{path} was not left by a run of gqa, whose locks are empty files; move it away"
        )
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RefusedError(refusal) from error
    try:
        yield
    finally:
        # It is removed while it is held (a waiting run notices), where that is possible
        with suppress(OSError):
            path.unlink()
        lock.release()


def require_space(needed: int, out: Path) -> None:
    """Raise OutputError unless so many bytes fit where `out` will be."""
    place = next(path for path in out.absolute().parents if path.is_dir())
    if (free := shutil.disk_usage(place).free) < needed:
        raise OutputError(
            f"no space left: the result takes {needed:,} bytes, {free:,} are free at {place}; free "
            "some space or give another directory with -o"
        )


@contextmanager
def system_errors(problem: str, advice: str) -> Iterator[None]:
    """Turn errors of the system into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{problem}: {error.strerror or error}; {advice}") from error


def fsync_directory(directory: Path) -> None:
    """Make names durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a small file durably."""
    with path.open("w", encoding="utf-8", errors="replace", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, which replaces it durably when the block ends, and is removed
    if that fails.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask, for libraries that narrow it
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except Exception as error:  # libraries in Rust name what the system says in their own errors
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def finite(value: Any, infinity: Callable[[float], Any] = lambda number: None) -> Any:
    """A JSON-ready value with null for NaN, for which JSON has no word, and what `infinity` makes
    of the infinite.
    """
    if isinstance(value, dict):
        return {key: finite(part, infinity) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part, infinity) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else infinity(value)
    return value


def copy_file(source: Path, target: Path) -> None:
    """A side file: its bytes, durable; links are followed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb", buffering=0) as write:
        copy_range(read, write, 0, source.stat().st_size)
        os.fsync(write.fileno())


def copy_range(
    source: BinaryIO, target: BinaryIO, offset: int, count: int, progress: Progress = no_progress
) -> None:
    """Append `count` bytes of `source` from `offset` to `target`, in the kernel where the system
    can.
    """
    end = offset + count
    while offset < end:
        moved = 0
        # What is wrong, if it is not the system, shows when bytes are read
        with suppress(AttributeError, OSError):
            moved = os.copy_file_range(
                source.fileno(), target.fileno(), min(CHUNK, end - offset), offset_src=offset
            )
        if not moved:
            source.seek(offset)
            data = source.read(min(CHUNK, end - offset, 8 << 20))
            write_bytes(target, data)
            moved = len(data)
        if not moved:
            raise OutputError(f"{source.name} became shorter while it was copied")
        offset += moved
        drop_written(target)
        progress(moved)


def drop_written(stream: BinaryIO) -> None:
    """Let the disk write while the next bytes are copied, and drop from memory what it has.

    The page cache then holds no more of the output than the disk is behind: no fresh page is taken
    for every page written (half of the cost of a copy), nothing else is evicted, and what is
    verified later comes from the disk.
    """
    if sys.platform == "linux":
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_bytes(target: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of it: an unbuffered write may take less, as on a disk that is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[target.write(rest) or 0 :]


def write_tensor(target: BinaryIO, tensor: Tensor, progress: Progress = no_progress) -> None:
    """Append a tensor's bytes (row-major, little-endian as every system torch runs on)."""
    import torch

    data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(data), CHUNK):
        piece = data[start : start + CHUNK]
        write_bytes(target, piece)
        drop_written(target)
        progress(len(piece))
