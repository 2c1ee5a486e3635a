"""Processes that train together: they wait for what one of them does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import DistError, broadcast_object_list, monitored_barrier, new_group

from gqa.checkpoint.loading import ranks

TIMEOUT = timedelta(hours=6)  # for what one process does alone, which may take much longer than a collective waits


@cache
def _waiting_group() -> Any:
    return new_group(backend="gloo", timeout=TIMEOUT)


def is_disconnected(error: BaseException) -> bool:
    """Whether a collective failed because another process has ended: torch has a class for some of these errors."""
    return isinstance(error, DistError) or bool(
        isinstance(error, RuntimeError) and re.search("gloo|monitoredbarrier", str(error), re.IGNORECASE)
    )


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Raise ConnectionError with `what` the processes wait for if one of them has ended or does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not is_disconnected(error):
            raise
        reason = "a process of this run has ended or does not answer"
        raise ConnectionError(f"{reason}, and the others wait for {what}; see its output, then start again") from error


def wait_for_everyone(what: str) -> None:
    """Return when all processes are here. Raises ConnectionError if one does not come within `TIMEOUT`."""
    if ranks().num_processes > 1:
        with waiting_for(what):
            monitored_barrier(_waiting_group(), timeout=TIMEOUT)


def broadcast_str(text: str, what: str) -> str:
    """Broadcast a string from the main process, for which the others wait up to `TIMEOUT`."""
    words = [text]
    if ranks().num_processes > 1:
        with waiting_for(what):
            broadcast_object_list(words, group=_waiting_group())
    return words[0]


@contextmanager
def main_first(what: str) -> Iterator[None]:
    """The main process goes through the block, then the others do, also where it fails."""
    main = ranks().is_main_process
    if not main:
        wait_for_everyone(what)
    try:
        yield
    finally:
        if main:
            wait_for_everyone(what)
