"""Processes that work together: they wait for each other, however long one of them works, share out rows and add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from gqa.checkpoint.errors import RefusedError
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


def share_work(options: dict[str, Any]) -> bool:
    """Whether this process, of those that share what a command with these options does, is the one that tells of it;
    the others become quiet. Raises RefusedError where --device names one for all.
    """
    state = ranks()
    wait_for_everyone()  # else one that refuses is gone before the others have found it
    if options["device"] and state.num_processes > 1:
        raise RefusedError(f"--device {options['device']} is for one process; a launcher gives each of several its own")
    options["quiet"] = options["quiet"] or not state.is_main_process
    return bool(state.is_main_process)


def own_share(rows: int, together: int = 1) -> slice:
    """Those of so many rows that are this process' own; all of them where it is alone. Rows that go `together`, so many
    at a time, stay together where that leaves some for each. Raises RefusedError.
    """
    if rows < (processes := ranks().num_processes):
        raise RefusedError(f"{rows} blocks of text are too few for {processes} processes; give more text (--tokens)")
    together = together if -(-rows // together) >= processes else 1
    own = share_of(-(-rows // together))
    return slice(own.start * together, min(own.stop * together, rows))


def share_of(count: int) -> slice:
    """Which of so many are this process' own: one process' after another's, of some none where processes are more."""
    number, processes = ranks().process_index, ranks().num_processes
    return slice(count * number // processes, count * (number + 1) // processes)


def place_of(rows: int) -> slice:
    """Where so many rows of this process are among those of all, which lie one process' after another's."""
    start = int(sum(of_all(rows)[: ranks().process_index]))
    return slice(start, start + rows)


def add_up(*tensors: Tensor) -> None:
    """Each becomes the sum of those of all processes, which all have the same then. Tensors are where models run."""
    for tensor in tensors if ranks().num_processes > 1 else ():
        torch.distributed.all_reduce(tensor)


def of_all(number: float) -> list[float]:
    """What each process has of a number."""
    return list(gather_object([number]))


def total(number: float) -> float:
    """The sum of what all processes have."""
    return sum(of_all(number))


def mean_of_all(values: Tensor) -> Tensor:
    """(N, ...) -> the mean of the numbers of all processes, to the last bit what one that has them all gives."""
    if ranks().num_processes == 1:
        return values.mean()
    return torch.cat(gather_object([values.cpu()])).to(values.device).mean()


def as_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the main process has by these names."""
    found = dict(tensors)
    for name, tensor in tensors.items() if ranks().num_processes > 1 else ():
        sent = tensor.to(ranks().device, copy=True).contiguous()
        torch.distributed.broadcast(sent, 0)
        found[name] = sent.to(tensor.device)
    return found
