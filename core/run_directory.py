"""The directory in which a run keeps its unfinished work: marked as ours, locked while a run works
in it, continued by the next run that does the same, removed when the result is complete.

    directory = RunDirectory(out.with_name(f"{out.name}-state"), "training states", fingerprint)
    with directory.held("another run is using it"):
        ...  # continue from what is in it, add to it, remove what is no longer needed

The mark is a small file that says which command made the directory and for which run. Only what has
a mark is replaced or removed; a directory of the same name that somebody else made is refused, and
left as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from gqa.core.errors import RefusedError, listing

MARK = ".gqa-mark.json"
LOCK = "lock"  # held while a run works in the directory
_NOT_CONTENTS = frozenset((MARK, LOCK))
_TOOL = "gqa"


class RunDirectory:
    """The directory of one run's unfinished work. Nothing is made before `claim`.

    A directory whose contents can be thrown away needs no fingerprint: then any run with the same
    purpose takes it over. What a run continues from says itself which run made it (`differences`):
    the mark of a directory may be newer than what is in it.

    Attributes:
        path: Where; hidden next to the result, or visible if people look into it.
        purpose: What the work is, in words, like "training states". A directory that was made for
            another purpose counts as that of somebody else.
        fingerprint: Of what determines the work.
        ours: Patterns of the only names that are ever replaced or removed there. A directory with
            other files is then shared with these. None if everything in the directory is ours.
    """

    def __init__(
        self,
        path: Path,
        purpose: str,
        fingerprint: str = "",
        ours: Collection[str] | None = None,
    ) -> None:
        self.path = path
        self.purpose = purpose
        self.fingerprint = fingerprint
        self.ours = ours

    # ------------------------------------------------------------------------------ whose it is

    def is_ours(self) -> bool:
        """Whether the directory exists and was made for this purpose, or is empty but for a mark
        and a lock: a run that was killed while it made or removed the directory leaves no more.
        """
        if self.path.is_symlink() or not self.path.is_dir():
            return False

        content = read_mark(self.path)
        if content is not None:
            return bool(content["purpose"] == self.purpose)

        names = {path.name for path in self.path.iterdir()}
        return names <= _NOT_CONTENTS

    def refuse_foreign(self, made_by: str = "left by a run of gqa") -> None:
        """Raise RefusedError if the name is taken by something that is not ours."""
        if os.path.lexists(self.path) and not self.is_ours():
            raise RefusedError(
                f"{self.path} was not {made_by}; move it away, or choose another directory with -o"
            )

    # ------------------------------------------------------------------------- making, working

    def claim(self) -> None:
        """Make the directory and its parents, or take over the one that an earlier run made for the
        same purpose.

        Raises:
            RefusedError: The directory exists, and what is in it is not ours.
            OSError: It cannot be written.
        """
        content = read_mark(self.path)
        if (
            content
            and content["purpose"] == self.purpose
            and content.get("run") == self.fingerprint
        ):
            return

        if os.path.lexists(self.path) and not self.is_ours():
            self._check_that_it_can_be_shared(content)
        self.path.mkdir(parents=True, exist_ok=True)
        self.mark()

    def _check_that_it_can_be_shared(self, content: dict[str, Any] | None) -> None:
        """Raise RefusedError if a directory without our mark, or with another one (`content`), is
        not a directory, or has files with names of ours.
        """
        # A link is followed if the directory may be shared: a user may let the states of a run lie
        # on another disk.
        is_allowed_link = self.path.is_symlink() and self.ours is not None
        if not self.path.is_dir() or (self.path.is_symlink() and not is_allowed_link):
            raise RefusedError(
                f"{self.path} exists and is not a directory of {_TOOL}; move it away"
            )

        with_our_names = {path.name for path in self.contents()}
        # The mark can be right here: `is_ours` does not follow links.
        if with_our_names and (content is None or content["purpose"] != self.purpose):
            raise RefusedError(
                f"{self.path} contains {listing(with_our_names, 3)}, which no run of {_TOOL} has "
                "written; move it away"
            )

    def mark(self, **more: Any) -> None:
        """Write the mark into a directory that exists and is ours, with `more` entries."""
        content = {"tool": _TOOL, "purpose": self.purpose, "run": self.fingerprint, **more}
        if read_mark(self.path) == content:  # a full disk would empty the file
            return
        with (self.path / MARK).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(content) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    @contextmanager
    def held(self, refusal: str) -> Iterator[None]:
        """Claim and lock the directory while the block runs; remove it afterwards if nothing of
        ours is left in it.

        Raises:
            RefusedError: What is in it is not ours, or another run holds it (with the text
                `refusal`).
            OSError: It cannot be written.
        """
        self.claim()
        try:
            with locked(self.path / LOCK, refusal):
                self.claim()  # a run that has ended meanwhile took the mark along
                try:
                    yield
                finally:
                    if not self.contents():
                        (self.path / MARK).unlink(missing_ok=True)
        finally:
            with suppress(OSError):  # it is not empty, or was never made
                self.path.rmdir()

    def contents(self) -> list[Path]:
        """What is in the directory under names of ours, except the mark and the lock."""
        patterns = ["*"] if self.ours is None else self.ours
        paths = set[Path]()
        for pattern in patterns:
            paths.update(self.path.glob(pattern))
        return sorted(path for path in paths if path.name not in _NOT_CONTENTS)

    # -------------------------------------------------------------------------------- removing

    def remove(self) -> None:
        """Remove the directory and everything in it; nothing is done if it does not exist.

        The mark goes last: a run that is killed meanwhile leaves a directory that still is ours.

        Raises:
            RefusedError: It is not ours.
            OSError: Something in it cannot be removed.
        """
        if not os.path.lexists(self.path):
            return
        if not self.is_ours():
            raise RefusedError(f"{self.path} was not created by {_TOOL}; move it away")

        for path in self.path.iterdir():
            if path.name == MARK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (self.path / MARK).unlink(missing_ok=True)
        self.path.rmdir()


def read_mark(directory: Path) -> dict[str, Any] | None:
    """The mark of a directory: its "purpose", its "run" and what else was written into it.

    None if it has none that we wrote.
    """
    try:
        text = (directory / MARK).read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(content, dict) and content.get("tool") == _TOOL and "purpose" in content
    return content if is_ours else None


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file, which the system releases when the process dies.

    Raises RefusedError if another process holds it, with the text `refusal`, or if it is a file of
    somebody else.
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


# ------------------------------------------------------------------------------------- identities


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A hash of what makes two runs the same run: equal for equal JSON."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def differences(
    now: Mapping[str, Any], before: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> list[str]:
    """What differs between two runs, for people: `name: before -> now` for each difference, sorted.

    Args:
        now: What determines the present run, as JSON; entries in groups are named "group entry".
        before: The same of an earlier run.
        names: What entries are called; those that are not in it keep their own names.
    """
    flat_now = _flat(now)
    flat_before = _flat(before)

    changed = dict[str, str]()
    for key in {*flat_now, *flat_before}:
        value_now = flat_now.get(key)
        value_before = flat_before.get(key)
        if value_now != value_before:
            name = (names or {}).get(key, key)
            changed[name] = f"{name}: {_value_text(value_before)} -> {_value_text(value_now)}"
    return [text for _, text in sorted(changed.items())]


def refuse_another(path: Path, work: str, changed: Collection[str], advice: str) -> NoReturn:
    """Raise RefusedError, because a directory has the work of another run.

    Args:
        path: The directory.
        work: What it has, like "layers of another run".
        changed: What differs between that run and this one, of `differences`.
        advice: What to do.
    """
    raise RefusedError(f"{path} holds {work} ({'; '.join(changed)}); {advice}")


def _flat(identity: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """The entries of an identity and of all groups in it."""
    flat: dict[str, Any] = {}
    for key, value in identity.items():
        name = f"{group} {key}".strip()
        if isinstance(value, dict):
            flat |= _flat(value, name)
        else:
            flat[name] = value
    return flat


def _value_text(value: Any) -> str:
    """A value as it is typed: lists with commas, hashes with 12 of their digits."""
    if isinstance(value, list):
        return ",".join(map(_value_text, value))
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}", r"\1", str(value))
