"""Where the directory of a run is, by what the run is: a run that was stopped with -o A is
continued with -o B.

An *entry* says that the states of the run are in A-state. It is a marked directory on a *shelf*, a
directory of this user that outlives a run; its name begins with the fingerprint of the run. If the
disk of A is full, the trained weights lie in the entry itself.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gqa.core.errors import RefusedError
from gqa.core.run_directory import RunDirectory, read_mark

_ENTRY = "where training states are"  # the purpose of entries
# Temporary caches of this process, which stand in for a cache that cannot be written
# (gqa.corpus.cache).
REMOVED_AT_EXIT: set[Path] = set()


def shelves() -> Iterator[Path]:
    """Directories of this user that outlive a run and lie neither next to its model nor next to its
    output, the best first: the cache of `datasets` (HF_DATASETS_CACHE or HF_HOME), and a private
    one for temporary files, for users without a home directory that they can write to. They need
    not exist.
    """
    from datasets.config import HF_DATASETS_CACHE

    user = os.getuid() if hasattr(os, "getuid") else "user"
    cache = Path(HF_DATASETS_CACHE)
    if cache not in REMOVED_AT_EXIT:
        yield cache / "gqa-runs"
    yield Path(tempfile.gettempdir()) / f"gqa-runs-{user}"


def is_private(path: Path) -> bool:
    """Whether a path belongs to this user, and not everybody can write to it: states are read with
    pickle, so those that a stranger could have put there must not be. (The group of the path may
    write to it: a umask of 002 is usual.)
    """
    if not hasattr(os, "getuid"):
        return True
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & stat.S_IWOTH


def register(run: str, directory: Path) -> Path | None:
    """Make the entry of a run whose work is in `directory`, or renew it.

    Returns None if no shelf can be written, or without a `run`: then runs with other outputs do not
    find the directory.
    """
    if not run:
        return None
    with suppress(OSError, RefusedError):
        suffix = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
        entry = _open_entry(f"{run}-{suffix}")
        if entry is not None:
            RunDirectory(entry, _ENTRY, run).claim()
            point_to(entry, run, directory)
            return entry
    return None


def _open_entry(name: str) -> Path | None:
    """A directory of this name on the first of the `shelves` that can be written, or None."""
    for shelf in shelves():
        entry = shelf / name
        with suppress(OSError):
            shelf.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not is_private(shelf):
                continue
            entry.mkdir(exist_ok=True, mode=0o700)
            if os.access(entry, os.W_OK | os.X_OK):
                return entry
    return None


def point_to(entry: Path, run: str, directory: Path) -> None:
    """Let an entry of a run say that its work is in `directory`."""
    RunDirectory(entry, _ENTRY, run).mark(directory=str(directory))


def entries(run: str) -> list[Path]:
    """The entries of a run on all shelves, as far as only this user can write to them."""
    if not run:
        return []

    paths = list[Path]()
    for shelf in shelves():
        if is_private(shelf):
            paths += sorted(shelf.glob(f"{run}-*"))
    return [entry for entry in paths if is_private(entry)]


def directory_of(entry: Path) -> Path | None:
    """The directory of the run that an entry names; None if it names none."""
    content = read_mark(entry)
    if content is None or content["purpose"] != _ENTRY:
        return None
    name = content.get("directory")
    return Path(name) if isinstance(name, str) else None


def remove_entry(entry: Path) -> None:
    """Remove an entry and what lies in it; what cannot be removed stays."""
    with suppress(OSError, RefusedError):
        RunDirectory(entry, _ENTRY).remove()
