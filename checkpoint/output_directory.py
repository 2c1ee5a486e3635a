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
from collections.abc import Mapping
from contextlib import ExitStack, suppress
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

    What keeps `out` from being written is refused when the object is made. `overwrite` replaces
    only results of the same kind: directories whose files the JSON files `records` list.
    """

    def __init__(
        self, out: Path, source: Path | None, overwrite: bool = False, records: str = "gqa_*.json"
    ) -> None:
        # The way to it shall not lead through itself, which is renamed
        has_name = out.name not in ("", "..")
        self.out = Path(os.path.realpath(out.parent), out.name) if has_name else out.resolve()
        self._partial = RunDirectory(self._sibling("partial"), "partial result", str(self.out))
        self._replaced = RunDirectory(self._sibling("replaced"), "replaced result")
        self.work = self._partial.path
        self._overwrite = overwrite
        self._records = records
        self._errors = f"cannot write beside {self.out}", "give another directory with -o"

        with system_errors(*self._errors):
            self._check_place(source)
            self._check_existing()

    def _sibling(self, purpose: str) -> Path:
        """A hidden name next to the output."""
        if not self.out.name:
            raise RefusedError(
                f"the output {self.out} is the root of a file system; give a directory in it with "
                "-o"
            )
        return self.out.with_name(f".{self.out.name}.gqa-{purpose}")

    # ------------------------------------------------------------- from the lock to the final name

    def __enter__(self) -> OutputDirectory:
        with ExitStack() as stack, system_errors(*self._errors):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            busy = f"another run is writing {self.out}; wait for it or give another -o"
            # Not in the hidden directory, which becomes the result
            stack.enter_context(locked(self._sibling("lock"), busy))

            self._restore()
            self._check_existing()  # now nobody else makes it
            self._check_leftovers()
            self._partial.remove()
            self._remove_replaced()

            stack.callback(self._remove_partial)
            self._partial.claim()
            self._stack = stack.pop_all()
        return self

    def commit(self, name: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Make everything durable and visible under the final name, with `record` and a list of the
        files as `name`. Returns what `name` has.

        Files are durable when they are written; here their names become durable, before the
        directory gets its own: after a power cut it is complete or not there.
        """
        written = {
            path.relative_to(self.work).as_posix()
            for path in self.work.rglob("*")
            if path.is_file()
        }
        files = sorted({name, *written} - {MARK})
        text = json.dumps({**finite(record), "files": files}, indent=2, ensure_ascii=False) + "\n"
        write_text(self.work / name, text)

        directories = [path for path in self.work.rglob("*") if path.is_dir()]
        for directory in (*directories, self.work):
            fsync_directory(directory)

        try:
            self._check_existing()
        except RefusedError as error:  # it was made while this run was writing
            raise OutputError(str(error)) from error
        if self.out.exists():
            self.out.rename(self._replaced.path)  # then OUT is absent for a moment: see _restore
        # It is ours without the mark too: the record lists all of its files
        (self.work / MARK).unlink()
        self.work.rename(self.out)
        fsync_directory(self.out.parent)
        return dict(json.loads(text))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: object
    ) -> None:
        with self._stack:
            self._restore()
            with suppress(OSError):  # what stays is removed by the next run
                self._remove_replaced()

        is_full = isinstance(value, OSError) and value.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full and self._is_near(value):
            raise OutputError(
                f"no space left for {self.out}: no partial result was kept; free some space or "
                "give another directory with -o"
            ) from value

    def _is_near(self, error: BaseException | None) -> bool:
        """Whether an error may be about a file next to the output: not if it names another place,
        such as a cache.
        """
        name = getattr(error, "filename", None)
        if not isinstance(name, str):
            return True
        return Path(os.path.realpath(name)).is_relative_to(self.out.parent)

    # --------------------------------------------------------------------------- hidden directories

    def _remove_partial(self) -> None:
        """Remove what this run has written, unless it is published.

        What stays is removed by the next run.
        """
        with suppress(OSError, RefusedError):
            self._mark_unpublished()
            self._partial.remove()

    def _remove_replaced(self) -> None:
        """Remove the result that another one has replaced."""
        if self._replaced.path.exists():
            self._replaced.mark()  # from now on it is not put back
            self._replaced.remove()

    def _restore(self) -> None:
        """Undo an --overwrite that was stopped between its two renames."""
        if os.path.lexists(self.out) or not self._is_result(self._replaced.path):
            return
        self._replaced.path.rename(self.out)

    def _check_leftovers(self) -> None:
        """Raise RefusedError if one of the hidden names is taken by something that no run of ours
        has left.
        """
        for directory in (self._partial, self._replaced):
            if not self._is_result(directory.path):
                directory.refuse_foreign()
        self._mark_unpublished()

    def _mark_unpublished(self) -> None:
        """Mark a whole result under the hidden name again, so that it can be removed: a run was
        stopped between the last two changes of `commit`.
        """
        if not self._partial.is_ours() and self._is_result(self.work):
            self._partial.mark()

    def _is_result(self, directory: Path) -> bool:
        """Whether it is a directory with nothing but a whole result, of which records list every
        file; or empty.
        """
        return (
            directory.is_dir()
            and not directory.is_symlink()
            and not _unlisted_files(directory, self._records)
        )

    # ----------------------------------------------------------------------------- what is refused

    def _check_place(self, source: Path | None) -> None:
        """Raise RefusedError for an output that is, contains or is in the model `source`, or cannot
        be renamed to; NotADirectoryError if its parent cannot be written.
        """
        if source:
            real = Path(os.path.realpath(self.out))
            model = source.resolve()
            if real.is_relative_to(model):
                raise RefusedError(
                    f"the output {self.out} is the model itself or inside it; give another with -o"
                )
            if model.is_relative_to(real):
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

    files = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(directory).as_posix() for path in files]
    return [name for name in names if name not in listed]


def require_space(needed: int, out: Path) -> None:
    """Raise OutputError unless so many bytes fit where `out` will be."""
    place = next(path for path in out.absolute().parents if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"no space left: the result takes {needed:,} bytes, {free:,} are free at {place}; free "
            "some space or give another directory with -o"
        )
