"""Processes that work together: they wait for each other, however long one of them works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

from torch.distributed.distributed_c10d import _get_default_store

from gqa.checkpoint.loading import ranks

PATIENCE = timedelta(days=30)  # with what one process does
_meetings = count()


def wait_for_everyone() -> None:
    """Returns when all processes are here. They wait at the store through which they found each other: a collective
    ends the run where one process takes longer than its timeout (10 minutes with NCCL).
    """
    state = ranks()
    if state.num_processes > 1:
        meeting, store = next(_meetings), _get_default_store()
        names = [f"gqa {meeting} {rank}" for rank in range(state.num_processes)]
        store.set(names[state.process_index], "here")
        store.wait(names, PATIENCE)
        state.wait_for_everyone()  # the first process may keep the store: it goes when all have been answered


def said(word: str = "") -> str:
    """A word of the main process, for which the others wait as long."""
    if ranks().num_processes > 1:
        key, store = f"gqa {next(_meetings)} said", _get_default_store()
        if ranks().is_main_process:
            store.set(key, word)
        else:
            store.wait([key], PATIENCE)
            word = store.get(key).decode()
    return word


@contextmanager
def main_first() -> Iterator[None]:
    """The main process goes through the block, then the others do, also where it fails."""
    main = ranks().is_main_process
    if not main:
        wait_for_everyone()
    try:
        yield
    finally:
        if main:
            wait_for_everyone()
