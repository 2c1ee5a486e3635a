"""Conversions side by side, each in a process of its own; rows come back as soon as they are there."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, cast

import torch

from gqa.eval.study.cells import Bench, measure_conversion
from gqa.eval.study.directory import Row
from gqa.eval.study.study import Cell
from gqa.uptrain.loop import StoppedError


def measure_side_by_side(
    bench: Bench, conversions: Sequence[Sequence[Cell]], jobs: int, report: Callable[[Row], None]
) -> None:
    """Measure the cells of each conversion, up to `jobs` conversions at a time, on the study's devices in turn.

    Processors' threads are shared out. A process that dies (for lack of memory, say) fails the cells it was at.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    waiting, free = deque(conversions), deque(islice(cycle(bench.options.devices), jobs))
    processes: dict[Any, Any] = {}  # by where their rows come from, with the cells that they have not reported
    context = get_context("spawn")
    try:
        while waiting or processes:
            while waiting and free:
                cells, (rows, theirs) = waiting.popleft(), context.Pipe(duplex=False)
                own = replace(bench, device=free.popleft())
                process = context.Process(target=_measure, args=(own, threads, cells, theirs))
                process.start()
                theirs.close()  # so that the rows end with the process
                processes[rows] = process, own.device, list(cells)
            for ready in cast(list[Connection], wait(list(processes))):
                process, device, left = processes[ready]
                try:
                    row = ready.recv()
                except (EOFError, OSError):  # between two rows, or in the middle of one
                    process.join()
                    del processes[ready]
                    free.append(device)
                    for cell in left:
                        report(cell.row("its process was ended, as it is where memory runs out"))
                else:
                    left.remove(Cell.of(row))
                    report(row)
    finally:
        for process, *_ in processes.values():  # a training saves its state before it ends
            process.terminate()
        for process, *_ in processes.values():
            process.join()


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


def _measure(bench: Bench, threads: int, cells: Sequence[Cell], rows: Connection) -> None:
    """What a process does."""
    import transformers

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process decides
    Thread(target=_follow, daemon=True).start()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    bench.device, seen = alone(bench.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if seen is not None:  # torch reads it when it first looks for a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = seen
    with suppress(StoppedError):  # a signal to this process alone; cells that have no row have failed
        measure_conversion(bench, cells, rows.send)


def _follow() -> None:
    """The first process, which may be killed."""
    first = parent_process()
    assert first is not None
    first.join()
    os._exit(1)
