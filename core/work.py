"""Directories for unfinished work: each has a mark, a small file that says which command made it
and for which run.

Only what has a mark is removed. A directory of the same name that somebody else made is refused,
and left as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gqa.core.errors import RefusedError, listing

MARK = ".gqa-mark.json"
LOCK = "lock"  # held while a run works in the directory
_TOOL = "gqa"
# Temporary caches of this process, which stand in for a cache that cannot be written
# (gqa.corpus.cache).
REMOVED_AT_EXIT: set[Path] = set()


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A hash of what makes two runs the same run: equal for equal JSON."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def read_mark(directory: Path) -> dict[str, Any] | None:
    """The mark of a directory: its "purpose" and what else `mark` was given.

    None if it has none that we wrote.
    """
    try:
        text = (directory / MARK).read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(content, dict) and content.get("tool") == _TOOL and "purpose" in content
    return content if is_ours else None


def is_ours(directory: Path, purpose: str) -> bool:
    """Whether a directory was made by `claim` for this purpose.

    A run that was killed while it made or removed the directory leaves it with nothing but half a
    mark and a lock.
    """
    if directory.is_symlink() or not directory.is_dir():
        return False

    content = read_mark(directory)
    if content is not None:
        return bool(content["purpose"] == purpose)

    names = {path.name for path in directory.iterdir()}
    return names <= {MARK, LOCK}


def claim(
    directory: Path, purpose: str, identity: str = "", ours: Collection[str] | None = None
) -> None:
    """Make a directory for unfinished work, or take over the one that an earlier run made for the
    same purpose.

    Args:
        directory: Where; its parents are made too.
        purpose: One word for the kind of work, like `states`.
        identity: The run that the work belongs to.
        ours: Patterns of the only names that the caller will ever replace or remove there. If they
            are given, a directory with other files is shared with these; otherwise it must contain
            nothing of anybody else.

    Raises:
        RefusedError: The directory exists, and what is in it is not ours.
        OSError: It cannot be written.
    """
    content = read_mark(directory)
    if content and (content["purpose"], content.get("run")) == (purpose, identity):
        return
    if os.path.lexists(directory) and not is_ours(directory, purpose):
        # A link to a shared directory is followed: a user may let the states of a run lie on
        # another disk.
        is_allowed_link = directory.is_symlink() and ours is not None
        if not directory.is_dir() or (directory.is_symlink() and not is_allowed_link):
            raise RefusedError(
                f"{directory} exists and is not a directory of {_TOOL}; move it away"
            )

        patterns = ["*"] if ours is None else ours
        foreign = {path.name for pattern in patterns for path in directory.glob(pattern)} - {
            MARK,
            LOCK,
        }
        if foreign and (content is None or content["purpose"] != purpose):
            raise RefusedError(
                f"{directory} contains {listing(foreign, 3)}, which no run of {_TOOL} has written; "
                "move it away"
            )

    directory.mkdir(parents=True, exist_ok=True)
    mark(directory, purpose, identity)


def mark(directory: Path, purpose: str, identity: str = "", /, **more: Any) -> None:
    """Write the mark of a directory that is ours."""
    content = {"tool": _TOOL, "purpose": purpose, "run": identity, **more}
    with (directory / MARK).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def remove(directory: Path, purpose: str) -> None:
    """Remove a directory that `claim` made for this purpose, the mark last: a run that is killed
    meanwhile leaves a directory that still is ours. Nothing is done if it is not there.

    Raises:
        RefusedError: It is not ours.
        OSError: Something in it cannot be removed.
    """
    if not os.path.lexists(directory):
        return
    if not is_ours(directory, purpose):
        raise RefusedError(f"{directory} is not a directory of {_TOOL}; move it away")

    for path in directory.iterdir():
        if path.name == MARK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (directory / MARK).unlink(missing_ok=True)
    directory.rmdir()


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
    """Whether a path belongs to this user, and no other user can change it: states are read with
    pickle, so those that somebody else could have put there must not be.
    """
    if not hasattr(os, "getuid"):
        return True
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & stat.S_IWOTH


def open_shelf(name: str) -> Path | None:
    """A directory of this name on the first of the `shelves` that can be written;
    None if none can.
    """
    for shelf in shelves():
        place = shelf / name
        with suppress(OSError):
            shelf.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not is_private(shelf):
                continue
            place.mkdir(exist_ok=True, mode=0o700)
            if os.access(place, os.W_OK | os.X_OK):
                return place
    return None
