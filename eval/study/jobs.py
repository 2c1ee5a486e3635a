"""Conversions side by side, each in a process of its own; rows come back as soon as they are there."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import Pipe, active_children, get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread

import torch

from gqa.eval.study.cells import Bench, Report, Shared, measure_conversion
from gqa.eval.study.study import Cell
from gqa.uptrain.loop import StoppedError

# Of a process that measures: what it keeps from conversion to conversion, and where its rows go.
_bench: Bench
_rows: Connection


def measure_side_by_side(
    shared: Shared, conversions: Sequence[Sequence[Cell]], jobs: int, devices: Sequence[str], report: Report
) -> None:
    """Measure the cells of each conversion, up to `jobs` conversions at a time, on `devices` in turn.

    Processors' threads are shared out. A process that dies (for lack of memory, say) fails the cells it was at, and
    another takes its place.
    """
    waiting, others = deque(conversions), active_children()
    threads = max(1, torch.get_num_threads() // jobs)
    slots = [_Slot(shared, devices[number % len(devices)], threads) for number in range(min(jobs, len(conversions)))]
    busy = {slot.rows: slot for slot in slots}
    try:
        for slot in slots:
            slot.give(waiting.popleft())
        while busy:
            for rows in wait(list(busy)):
                assert isinstance(rows, Connection)
                slot = busy[rows]
                if (row := rows.recv()) is not None:
                    slot.left.remove(Cell.of(row))
                    report(row)
                    continue
                for cell in slot.unmeasured():
                    report(shared.row(cell, "its process was ended, as it is where memory runs out"))
                if waiting:
                    slot.give(waiting.popleft())
                else:
                    del busy[rows]
    finally:
        if busy:  # a training saves its state before it ends
            for process in set(active_children()) - set(others):
                process.terminate()
        for slot in slots:
            slot.pool.shutdown()


class _Slot:
    """A pool of one process with a device to itself: the death of a process breaks its pool, and so no other's.

    rows: what the process reports, and None where it is done with a conversion; left: the cells it has not reported.
    """

    def __init__(self, shared: Shared, device: str, threads: int) -> None:
        self.rows, self._report = Pipe(duplex=False)
        self._given = shared, device, threads, self._report
        self.left: list[Cell] = []
        self._start()

    def _start(self) -> None:
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), _start_process, self._given)

    def give(self, cells: Sequence[Cell]) -> None:
        self.left = list(cells)
        self._done: Future[None] = self.pool.submit(_measure, cells)
        self._done.add_done_callback(lambda _: self._report.send(None))

    def unmeasured(self) -> list[Cell]:
        """What the process has left behind; one that has died is replaced. Raises what else has failed."""
        try:
            self._done.result()
        except BrokenProcessPool:
            self.pool.shutdown()
            self._start()
        return self.left


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


def _start_process(shared: Shared, device: str, threads: int, rows: Connection) -> None:
    import transformers

    global _bench, _rows
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process decides
    Thread(target=_follow, daemon=True).start()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    kind, seen = alone(device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if seen is not None:  # torch reads it when it first looks for a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = seen
    _bench, _rows = Bench(shared, kind), rows


def _follow() -> None:
    """The first process, which may be killed."""
    first = parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _measure(cells: Sequence[Cell]) -> None:
    with suppress(StoppedError):  # a signal to this process alone; cells that have no row have failed
        measure_conversion(_bench, cells, _rows.send)
