"""Saving and continuing a run. What is saved has its final name only when all of it is on disk.

A state is a directory `step-N`: weights and optimiser as torch's distributed checkpoint, accelerate's own files
(scaler, random states of every rank) and `trainer_state.json` with the step and what the run was asked for. All ranks
write into the one directory, which several machines must share; training goes on as soon as weights and optimiser are
copied to the memory of the host. accelerate reads random states with pickle: continue only from states that you made.

Beside the states lie the weights with the lowest held-out loss so far, `best`, which all ranks write in the same way;
each state has them too.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import OutputError, RefusedError, explain
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.locks import locked
from gqa.checkpoint.processes import TIMEOUT, is_disconnected
from gqa.checkpoint.write import fsync_directory, write_text
from gqa.uptrain.options import TrainOptions, differences

RECORD = "trainer_state.json"
BEST = "best"
_SHARDS, _LOCK = "shards", "lock"


warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant, where it is one


@dataclass
class States:
    """The states of one run, `directory/step-N`."""

    directory: Path
    keep_last: int
    _writing: Future[None] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block the directory exists, no other run uses it, and no half of a state is left from one that was
        killed; the main process sees to that. Raises RefusedError if another run uses it.
        """
        with ExitStack() as stack:
            if ranks().is_main_process:
                self.directory.mkdir(parents=True, exist_ok=True)
                using = f"another run is using {self.directory}; wait for it or give another output with -o"
                stack.callback(self._remove_empty)  # after the lock is released
                stack.enter_context(locked(self.directory / _LOCK, using))
                for leftover in self.directory.glob("*.partial"):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            stack.callback(self.finish)
            yield

    def remove(self) -> None:
        """Remove the states and the log while the directory is locked; the lock and the directory go with `held`."""
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                with suppress(OSError):
                    path.unlink()

    def _remove_empty(self) -> None:
        """What is left if the first step was refused, or if all is written; another run may have the lock by now."""
        with suppress(OSError):
            metrics = self.directory / "metrics.jsonl"
            if metrics.exists() and not metrics.stat().st_size:
                metrics.unlink()
            self.directory.rmdir()

    def all(self) -> list[Path]:
        """Complete states, the oldest first."""
        return sorted(record.parent for record in self.directory.glob(f"step-{'[0-9]' * 8}/{RECORD}"))

    def save(self, accelerator: Accelerator, model: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """Begin to write the state of all ranks, which `finish` or the next `save` ends: what training changes is
        copied when this returns. The older ones beyond `keep_last` go only when the new one is complete.

        Raises OutputError if it or the one before cannot be written.
        """
        self.finish()
        work = self.directory / f"step-{record['step']:08d}.partial"
        with self._failing(f"the state of step {record['step']}", work):
            work.mkdir(parents=True, exist_ok=True)
            if accelerator.is_main_process:
                _link(self.directory / BEST, work / BEST)
            rank, scaler = accelerator.process_index, accelerator.scaler if accelerator.is_main_process else None
            save_accelerator_state(str(work), [], [], [], [], rank, 0, scaler)
            weights, moments = get_state_dict(model, optimizer.optimizer)
            copies = tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), {"model": weights, "optimizer": moments})
        thread = ThreadPoolExecutor(1)
        self._writing = thread.submit(self._complete, work, record, copies, self._group)
        thread.shutdown(wait=False)

    def finish(self) -> None:
        """The state that is being written is complete. Raises OutputError if it cannot be, on all ranks."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    @cached_property
    def _group(self) -> Any:
        """What ranks write states together in while they train in another."""
        return distributed.new_group(backend="gloo", timeout=TIMEOUT) if ranks().num_processes > 1 else None

    def _complete(self, work: Path, record: dict[str, Any], copies: dict[str, Any], group: Any) -> None:
        """Write a state under its name. torch's `save` ends on all ranks when all have written, or fails on all."""
        with self._failing(f"the state of step {record['step']}", work):
            save(copies, checkpoint_id=work / _SHARDS, process_group=group, no_dist=group is None)
            if not ranks().is_main_process:
                return
            write_text(work / RECORD, json.dumps(record, indent=2) + "\n")
            for directory in [work, *(p for p in work.rglob("*") if p.is_dir())]:
                fsync_directory(directory)
            final = work.with_suffix("")
            if final.exists():  # saved before, without all of its files
                shutil.rmtree(final)
            work.rename(final)
            fsync_directory(self.directory)
            for old in self.all()[: -self.keep_last]:
                gone = old.with_suffix(".partial")
                old.rename(gone)
                shutil.rmtree(gone)

    def keep_best(self, weights: dict[str, Tensor]) -> None:
        """Replace the best weights of before by what each process has. Raises OutputError."""
        self.finish()  # which processes talk about too
        work = self.directory / f"{BEST}.partial"
        with self._failing("the best weights", work):
            save(weights, checkpoint_id=work, process_group=self._group, no_dist=self._group is None)
            if ranks().is_main_process:
                shutil.rmtree(self.directory / BEST, ignore_errors=True)
                work.rename(self.directory / BEST)

    @contextmanager
    def _failing(self, what: str, work: Path) -> Iterator[None]:
        """Raise OutputError if `what` cannot be saved, and remove the half of it in `work`."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:  # torch writes files with its own errors
            shutil.rmtree(work, ignore_errors=True)
            if out_of_memory(cause := _cause(error)) or is_disconnected(cause):
                raise cause from error
            told = "free some space and continue from the last state with --resume"
            raise OutputError(f"{what} could not be saved in {self.directory} ({explain(cause)}); {told}") from error

    def read_best(self, weights: dict[str, Tensor]) -> None:
        """Read the best weights into these."""
        read(weights, checkpoint_id=self.directory / BEST, process_group=self._group, no_dist=self._group is None)

    def take_best(self, state: Path) -> None:
        """The best weights are again those of a state, or none if it has none."""
        shutil.rmtree(self.directory / BEST, ignore_errors=True)
        _link(state / BEST, self.directory / BEST)

    def continued(self, options: TrainOptions) -> TrainOptions:
        """The options with what the run that is continued made of those that are left open: how many processes share a
        step may decide how large it is. Raises RefusedError.
        """
        before = self.latest()[1].get("options", {})
        left = {name: before.get(name) for name in ("context", "batch_size") if getattr(options, name) is None}
        return replace(options, **left)

    def latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest state and its record. Raises RefusedError if there is none or it cannot be read."""
        if not (states := self.all()):
            raise RefusedError(f"--resume: {self.directory} has no saved state; start without --resume")
        with _readable(states[-1]):
            record: dict[str, Any] = json.loads((states[-1] / RECORD).read_text())
            record.keys()
        return states[-1], record


def load(path: Path, saved_by: int, accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Weights, optimiser and random states as they were when so many ranks saved them, whatever ranks and shards there
    are. Raises RefusedError if the state cannot be read.
    """
    with _readable(path):
        FileSystemReader(path / _SHARDS).read_metadata()  # of which `read` would log every error
        weights, moments = get_state_dict(model, optimizer.optimizer)
        read({"model": weights}, checkpoint_id=path / _SHARDS)
        partial = DefaultLoadPlanner(allow_partial_load=True)  # what never had a gradient has no moments
        read({"optimizer": moments}, checkpoint_id=path / _SHARDS, planner=partial)
        set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments)
        if (rank := accelerator.process_index) < saved_by:  # accelerate goes on without a file that it cannot read
            torch.load(path / f"random_states_{rank}.pkl", weights_only=False)
        load_accelerator_state(str(path), [], [], [], [], rank, accelerator.scaler)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # of json, pickle, zip files, torch
        if out_of_memory(cause := _cause(error)):
            raise cause from error
        told = "delete it to continue from the one before, or start without --resume"
        raise RefusedError(f"the state {path} cannot be read ({explain(cause)}); {told}") from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong in the first of the ranks that are named in an error of torch.distributed.checkpoint."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)


def check_same_run(path: Path, record: dict[str, Any], run: dict[str, Any]) -> None:
    """Raise RefusedError if a state belongs to another run than one of these `options` and `data`, with every
    difference.
    """
    changed = differences(json.loads(json.dumps(run["options"], default=str)), record.get("options", {}))
    if record.get("data") != run["data"]:
        changed.append("the content of the data")
    if changed:
        raise RefusedError(f"{path} was saved by another run: {'; '.join(changed)}; start without --resume, or as then")


def _link(source: Path, target: Path) -> None:
    """The same files, if there are any, below a second name, or copies of them where the system has no such names."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copyfile(one, other)

    if source.exists():
        shutil.copytree(source, target, copy_function=link)
