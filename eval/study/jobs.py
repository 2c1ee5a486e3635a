"""Conversions side by side, each in a process of its own; rows come back as soon as they are there."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from gqa.eval.study.cells import Bench, Report, Shared, measure_conversion
from gqa.eval.study.study import Cell
from gqa.uptrain.loop import StoppedError

_PATIENCE = 60  # seconds for a training to save its state


@dataclass
class _Worker:
    """A process, the device that it has, and the cells that it has not reported."""

    process: BaseProcess
    device: str
    left: list[Cell]


def measure_side_by_side(
    shared: Shared, conversions: Sequence[Sequence[Cell]], jobs: int, devices: Sequence[str], report: Report
) -> None:
    """Measure the cells of each conversion, up to `jobs` conversions at a time, on `devices` in turn.

    Processors' threads are shared out. A process that dies (for lack of memory, say) fails the cells it was at, and
    another takes its place.
    """
    waiting = deque(conversions)
    free = deque(devices[number % len(devices)] for number in range(jobs))
    active: dict[Connection, _Worker] = {}
    try:
        while waiting or active:
            while waiting and free:
                connection, worker = _start(shared, free.popleft(), max(1, torch.get_num_threads() // jobs))
                active[connection] = worker
                _give(connection, worker, waiting.popleft())
            for ready in wait(list(active)):
                assert isinstance(ready, Connection)
                worker = active[ready]
                try:
                    row = ready.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    for cell in worker.left:
                        report(shared.row(cell, f"its process ended with exit code {worker.process.exitcode}"))
                    row, worker.left = None, []
                if row is not None:
                    worker.left.remove(Cell.of(row))
                    report(row)
                elif waiting and worker.process.is_alive():
                    _give(ready, worker, waiting.popleft())
                else:
                    free.append(_end(ready, active.pop(ready)))
    finally:
        for worker in active.values():  # a training saves its state before it ends
            worker.process.terminate()
        for connection, worker in active.items():
            _end(connection, worker)


def _start(shared: Shared, device: str, threads: int) -> tuple[Connection, _Worker]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, shared, device, threads), daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed here
    return ours, _Worker(process, device, [])


def _give(connection: Connection, worker: _Worker, cells: Sequence[Cell]) -> None:
    worker.left = list(cells)
    with suppress(OSError):  # it has ended, which is noticed when it is waited for
        connection.send(cells)


def _end(connection: Connection, worker: _Worker) -> str:
    """Returns the device that is free now."""
    with suppress(OSError):
        connection.send(None)
    connection.close()
    worker.process.join(_PATIENCE)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    return worker.device


def alone(device: str, seen: str | None) -> tuple[str, str | None]:
    """What a process calls `device`, and the CUDA_VISIBLE_DEVICES with which it sees no other (None: as they are).

    accelerate takes the first device that it sees. `seen` is what the variable is now, by whose numbers devices go.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return kind, ""
    if kind != "cuda" or not number:
        return kind, None
    return kind, seen.split(",")[int(number)] if seen else number


def _work(connection: Connection, shared: Shared, device: str, threads: int) -> None:
    """A process: cells in, rows out, None after the last of them."""
    import transformers

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process decides
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    kind, seen = alone(device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if seen is not None:  # torch reads it when it first looks for a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = seen
    bench = Bench(shared, kind)
    with suppress(EOFError, OSError, StoppedError):  # the first process is gone, or ends this one
        while cells := connection.recv():
            measure_conversion(bench, cells, connection.send)
            connection.send(None)
        sys.exit(0)
    sys.exit(1)
