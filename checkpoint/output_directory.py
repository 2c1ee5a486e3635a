"""The directory of a result: it appears complete or not at all.

Work happens in a hidden sibling of the output; a rename at the very end makes it visible. A run
that is killed leaves only the hidden directory, which the next run removes: a lock next to it tells
a dead run from a live one, and a mark in it (core/run_directory.py) our directory from that of
somebody else.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from gqa.checkpoint.write import finite, fsync_directory, system_errors, write_text
from gqa.core.errors import OutputError, RefusedError, listing
from gqa.core.run_directory import MARK, RunDirectory, locked


class OutputDirectory:
    """A directory that appears complete or not at all, and that one process writes at a time.

    with OutputDirectory(out, source, overwrite) as output:
        write_files(output.work)  # hidden next to `out`
        output.commit("record.json", record)

    Attributes:
        given: The output as it was passed, for what is printed.
        out: Its absolute path. It does not exist before `commit`, or is the result to be replaced.
        work: The hidden directory next to it, where the result is written.
    """

    def __init__(
        self, out: Path, source: Path | None, overwrite: bool = False, records: str = "gqa_*.json"
    ) -> None:
        """
        Args:
            out: The output.
            source: The directory of the model that the result is made of.
            overwrite: Replace a result of the same kind: a directory whose files are all listed in
                JSON files that match `records`.
            records: The names of such files, as a pattern.

        Raises:
            RefusedError: `out` must not be written.
            OutputError: It cannot be written.
        """
        self.given = out
        self.out = _absolute(out)
        self._partial = RunDirectory(self._sibling("partial"), "partial result", str(self.out))
        self._replaced = RunDirectory(self._sibling("replaced"), "replaced result")
        self.work = self._partial.path
        self._overwrite = overwrite
        self._records = records

        with self._system_errors():
            self._check_place(source)
            self._check_existing()

    def _sibling(self, purpose: str) -> Path:
        """A hidden name next to the output."""
        if not self.out.name:
            raise RefusedError(
                f"the output directory {self.out} is the root of a file system; choose a "
                "directory in it with -o"
            )
        return self.out.with_name(f".{self.out.name}.gqa-{purpose}")

    def _system_errors(self) -> AbstractContextManager[None]:
        """Turn errors of the system in the block into an OutputError."""
        return system_errors(f"cannot write beside {self.out}", "choose another directory with -o")

    # ------------------------------------------------------------- from the lock to the final name

    def __enter__(self) -> OutputDirectory:
        with ExitStack() as stack, self._system_errors():
            self.out.parent.mkdir(parents=True, exist_ok=True)
            busy = (
                f"another run is writing {self.out}; wait for it, or choose another directory "
                "with -o"
            )
            # A file of its own next to the hidden directory: in it, the lock would become a part
            # of the result.
            stack.enter_context(locked(self._sibling("lock"), busy))

            # While the lock is held no other run changes these names: put back or remove what
            # stopped runs have left under them.
            self._restore()
            self._check_existing()
            self._check_leftovers()
            self._partial.remove()
            self._remove_replaced()

            stack.callback(self._remove_partial)
            self._partial.claim()
            # The cleanup is left to `__exit__`; after an error above, it happens here.
            self._stack = stack.pop_all()
        return self

    def commit(self, name: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write the record and make the result visible under its final name, complete.

        Args:
            name: The file of the record.
            record: What is in it, JSON-ready. A list of all files is added.

        Returns:
            The record as it was written.
        """
        # 1. The record, with all files.
        written = {
            path.relative_to(self.work).as_posix()
            for path in self.work.rglob("*")
            if path.is_file()
        }
        files = sorted({name, *written} - {MARK})
        text = json.dumps({**finite(record), "files": files}, indent=2, ensure_ascii=False) + "\n"
        write_text(self.work / name, text)

        # 2. The contents of all files are on the disk already. Their names follow here, before the
        # directory is renamed: after a power cut the result is complete or absent.
        directories = [path for path in self.work.rglob("*") if path.is_dir()]
        for directory in (*directories, self.work):
            fsync_directory(directory)

        # 3. The final name. `out` may have been made while this run was writing.
        try:
            self._check_existing()
        except RefusedError as error:
            raise OutputError(str(error)) from error
        if self.out.exists():
            # From here to the second rename `out` is absent; `_restore` puts it back after a stop
            self.out.rename(self._replaced.path)
        # Later runs know the directory as ours without its mark: the record lists all files in it
        (self.work / MARK).unlink()
        self.work.rename(self.out)
        fsync_directory(self.out.parent)
        return dict(json.loads(text))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: object
    ) -> None:
        with self._stack:  # removes the hidden directory and unlocks
            self._restore()
            with suppress(OSError):  # the next run removes what cannot be removed now
                self._remove_replaced()

        is_full = isinstance(value, OSError) and value.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full and self._may_be_ours(value):
            raise OutputError(
                f"no space left for {self.out}: no partial result was kept; free some space, or "
                "choose another directory with -o"
            ) from value

    def _may_be_ours(self, error: BaseException | None) -> bool:
        """Whether an error may have happened while writing in the parent directory of the output.

        Not if it names a file elsewhere, such as in a cache.
        """
        name = getattr(error, "filename", None)
        if not isinstance(name, str):
            return True
        return Path(os.path.realpath(name)).is_relative_to(self.out.parent)

    # --------------------------------------------------------------------------- hidden directories

    def _remove_partial(self) -> None:
        """Remove the hidden directory of a run that did not come to the end of `commit`.

        After `commit` there is none. The next run removes what cannot be removed now.
        """
        with suppress(OSError, RefusedError):
            self._mark_whole_partial()
            self._partial.remove()

    def _remove_replaced(self) -> None:
        """Remove the result that another one has replaced."""
        if self._replaced.path.exists():
            # A mark is a file that no record lists: `_restore` leaves the directory alone from now
            # on, also if the removal is stopped half-way
            self._replaced.mark()
            self._replaced.remove()

    def _restore(self) -> None:
        """Give the replaced result its name back if a run was stopped between the two renames of
        `commit`.
        """
        if os.path.lexists(self.out) or not self._is_result(self._replaced.path):
            return
        self._replaced.path.rename(self.out)

    def _check_leftovers(self) -> None:
        """Raise RefusedError if one of the hidden names belongs to something that no run of gqa
        made.
        """
        for directory in (self._partial, self._replaced):
            if not self._is_result(directory.path):
                directory.refuse_foreign()
        self._mark_whole_partial()

    def _mark_whole_partial(self) -> None:
        """Mark the hidden directory again if it contains a complete result without a mark, so that
        it can be removed.

        A run that is stopped in `commit`, between the removal of the mark and the last rename,
        leaves such a directory.
        """
        if not self._partial.is_ours() and self._is_result(self.work):
            self._partial.mark()

    def _is_result(self, directory: Path) -> bool:
        """Whether a directory contains only files that the records in it list: a complete result,
        or nothing.
        """
        return (
            directory.is_dir()
            and not directory.is_symlink()
            and next(_unlisted_files(directory, self._records), None) is None
        )

    # ----------------------------------------------------------------------------- what is refused

    def _check_place(self, source: Path | None) -> None:
        """Check that a directory can be made under the name of the output.

        Raises:
            RefusedError: The output overlaps with the model `source`, or is a mount point.
            NotADirectoryError: Its parent is no directory that can be written to.
        """
        if source:
            self._check_apart(source)

        nearest = next(path for path in self.out.parents if os.path.lexists(path))
        may_write = os.access(nearest, os.W_OK | os.X_OK)
        if not nearest.is_dir() or not may_write:
            raise NotADirectoryError(
                errno.ENOTDIR, f"{nearest} is not a directory that you may write to"
            )

        if os.path.ismount(self.out):  # nothing can be renamed to it
            raise RefusedError(
                f"the output directory {self.out} is a mount point; choose a directory in it with "
                "-o"
            )

    def _check_apart(self, source: Path) -> None:
        """Raise RefusedError if the output is, contains or is in the model `source`."""
        real = Path(os.path.realpath(self.out))
        model = source.resolve()
        if real.is_relative_to(model):
            raise RefusedError(
                f"the output directory {self.out} is the model's directory or inside it; choose "
                "another directory with -o"
            )
        if model.is_relative_to(real):
            raise RefusedError(
                f"the output directory {self.out} contains the model {source}; choose another "
                "directory with -o"
            )

    def _check_existing(self) -> None:
        """Raise RefusedError unless the output does not exist, is an empty directory or, with
        `overwrite`, is a result.
        """
        if self.out.is_symlink():
            raise RefusedError(
                f"{self.out} is a symbolic link; pass the directory that it points to with -o"
            )
        if not self.out.exists():
            return
        if not self.out.is_dir():
            raise RefusedError(
                f"{self.out} exists and is not a directory; choose another directory with -o"
            )

        unlisted = _unlisted_files(self.out, self._records)
        if any(self.out.iterdir()) and not self._overwrite:
            can_be_replaced = next(unlisted, None) is None
            remedy = ", or replace it with --overwrite" if can_be_replaced else ""
            raise RefusedError(f"{self.out} exists; choose another directory with -o{remedy}")
        others = [*unlisted]
        if others:
            raise RefusedError(
                f"{self.out} holds {listing(others, 3)}, which --overwrite will not remove: no "
                f"{self._records} lists it as part of a result; move it away, or choose another "
                "directory with -o"
            )


def _absolute(out: Path) -> Path:
    """The absolute path of an output, with links and `..` in its parents resolved.

    So the path stays valid while the output is renamed; `x/../x` would not. The output itself is
    not resolved: if it is a link, `_check_existing` refuses it.
    """
    if out.name in ("", ".."):  # `.` and `..` are not names of directories
        return out.resolve()
    return Path(os.path.realpath(out.parent), out.name)


def _unlisted_files(directory: Path, records: str) -> Iterator[str]:
    """Files in a directory that the `records` in it do not list as parts of a result."""
    listed: set[str] = set()
    for path in directory.glob(records):
        # A file that does not have the form of a record is not ours, and lists nothing
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            listed |= set(json.loads(path.read_bytes())["files"])

    for path in directory.rglob("*"):
        is_file = path.is_symlink() or not path.is_dir()
        name = path.relative_to(directory).as_posix()
        if is_file and name not in listed:
            yield name


def free_space(out: Path) -> int:
    """Bytes that are free where `out` will be."""
    return shutil.disk_usage(existing_parent(out)).free


def existing_parent(out: Path) -> Path:
    """The nearest directory above `out` that exists; the root of a file system for itself."""
    absolute = out.absolute()
    return next((path for path in absolute.parents if path.is_dir()), absolute)


def require_space(needed: int, out: Path, what: str) -> None:
    """Raise OutputError unless that many bytes fit where `out` will be.

    what: What needs them, with its verb: "the result takes".
    """
    free = free_space(out)
    if free < needed:
        raise OutputError(
            f"no space left: {what} {needed:,} bytes, but only {free:,} are free at "
            f"{existing_parent(out)}; free some space, or choose another directory with -o"
        )
