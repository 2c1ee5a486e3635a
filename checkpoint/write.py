"""Files that are durable when they are written, and bytes moved by the kernel."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gqa.core.errors import OutputError

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 32 << 20  # bytes written at a time
_READ_CHUNK = 8 << 20  # bytes that are read and written, where the kernel cannot copy
DEFAULT_JOBS = 2  # while one shard waits for the disk the other merges
Progress = Callable[[int], None]


def no_progress(count: int) -> None:
    """Progress that is not shown."""


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


def fsync_file(path: Path) -> None:
    """Make the contents of a file durable that a library has written."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


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
        fsync_file(temporary)
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
        rest = end - offset
        moved = 0
        # A system that cannot do this reads and writes below; there any other problem shows, too.
        with suppress(AttributeError, OSError):
            moved = os.copy_file_range(
                source.fileno(), target.fileno(), min(CHUNK, rest), offset_src=offset
            )

        if not moved:
            source.seek(offset)
            data = source.read(min(rest, _READ_CHUNK))
            write_bytes(target, data)
            moved = len(data)
        if not moved:
            raise OutputError(
                f"{source.name} became shorter while it was copied; repeat the command when "
                "nothing else writes to it"
            )

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
