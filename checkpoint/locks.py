"""Lock files for what only one process may do at a time."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gqa.checkpoint.errors import RefusedError


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file, which the system releases when the process dies. Raises RefusedError if another holds it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RefusedError(refusal) from error
    try:
        yield
    finally:
        with suppress(OSError):  # it is removed while it is held (a waiting run notices), where that is possible
            path.unlink()
        lock.release()
