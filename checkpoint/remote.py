"""Files of a checkpoint that lies elsewhere, fetched into a hidden directory when they are read, and deleted after."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

from gqa.checkpoint.errors import OutputError
from gqa.checkpoint.locks import locked


class Remote:
    """Where files come from, and once it is open, the directory where they are.

    `with remote:` around what uses the directory. It is deleted at the end, and where the result is wrong; after any
    other error, or a kill, it stays: the next run of the same source goes on with the files that are there.

    identity: What says that the files are the same: a commit, or what a file system tells of each.
    get: From a file's name and a directory, fetches it there, whole or not at all.
    cache: Where files can be kept instead; None where there is no such place. missing: Bytes of weights not in it.
    """

    def __init__(
        self, identity: str, get: Callable[[str, Path], object], cache: Path | None = None, missing: int = 0
    ) -> None:
        self.identity, self.cache, self.missing = identity, cache, missing
        self._get, self._place = get, Path()
        self._guard, self._fetching, self._held = Lock(), dict[str, Lock](), ExitStack()

    def open(self, place: Path, files: Iterable[str]) -> Path:
        """Fetch `files` and say where they are: below `place`, where what is left of another source is deleted.

        Raises RefusedError where another run uses it.
        """
        self._place = place
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            busy = f"another conversion is fetching to {place}; wait for it or give another -o"
            held.enter_context(locked(place / "lock", busy))
            told = place / "source"
            if not told.exists() or told.read_text(encoding="utf-8") != self.identity:
                shutil.rmtree(self.directory, ignore_errors=True)
                told.write_text(self.identity, encoding="utf-8")
            self.directory.mkdir(exist_ok=True)
            for broken in self.directory.rglob("*.incomplete"):
                broken.unlink()
            for file in files:
                self.fetch(file)
            self._held = held.pop_all()
        return self.directory

    @property
    def directory(self) -> Path:
        return self._place / "files"

    def fetch(self, file: str) -> None:
        """Have a file in the directory; several threads may ask for the same one."""
        with self._guard:
            fetching = self._fetching.setdefault(file, Lock())
        with fetching:
            if not (self.directory / file).exists():
                self._get(file, self.directory)

    def release(self, file: str) -> None:
        """A file is not needed any more."""
        (self.directory / file).unlink(missing_ok=True)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: object) -> None:
        with self._held:
            if kind is None or issubclass(kind, OutputError):
                shutil.rmtree(self._place, ignore_errors=True)
