"""States of a run: saved while it trains, loaded to continue it.

A state is a directory `step-N`: weights and optimiser as torch's distributed checkpoint, accelerate's own files
(scaler, random states of every rank) and `trainer_state.json` with the progress and the options. It gets this name only
when it is complete. All ranks write into one directory, which several machines must share; training continues as soon
as weights and optimiser are copied to the host's memory. accelerate reads random states with pickle: continue only from
states that you made.

`best`, beside the states and in each of them, holds the weights with the lowest held-out loss so far.
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

from gqa.checkpoint.compat import tree_map_only
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
    """The states of one run, `directory/step-N`, of which the last `keep_last` stay."""

    directory: Path
    keep_last: int
    _writing: Future[None] | None = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create and lock the directory, and remove incomplete states, in the main process. Raises RefusedError if
        another run has the lock.
        """
        with ExitStack() as stack:
            if ranks().is_main_process:
                self.directory.mkdir(parents=True, exist_ok=True)
                message = f"another run is using {self.directory}; wait for it or give another output with -o"
                stack.callback(self._remove_empty)  # after the lock is released
                stack.enter_context(locked(self.directory / _LOCK, message))
                for leftover in self.directory.glob("*.partial"):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            stack.callback(self.finish)
            yield

    def remove(self) -> None:
        """Remove the states and the log; `lock` removes its file and the directory at its end."""
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                with suppress(OSError):
                    path.unlink()

    def _remove_empty(self) -> None:
        """Remove the directory if nothing is in it but an empty log; another run may have the lock by now."""
        with suppress(OSError):
            metrics = self.directory / "metrics.jsonl"
            if metrics.exists() and not metrics.stat().st_size:
                metrics.unlink()
            self.directory.rmdir()

    def complete(self) -> list[Path]:
        """Complete states, the oldest first."""
        return sorted(record.parent for record in self.directory.glob(f"step-{'[0-9]' * 8}/{RECORD}"))

    def save(self, accelerator: Accelerator, model: Any, optimizer: Any, record: dict[str, Any]) -> None:
        """Copy the state of all ranks to the host's memory and start writing it; `finish` or the next `save` waits for
        it. Older states beyond `keep_last` are removed when the new one is complete.

        Raises OutputError if this state or the one before cannot be written.
        """
        self.finish()
        work = self.directory / f"step-{record['step']:08d}.partial"
        with self._explain_errors(f"the state of step {record['step']}", work):
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
        """Wait until the state is written. Raises OutputError on all ranks if it cannot be."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    @cached_property
    def _group(self) -> Any:
        """The process group for writing states, apart from that of training."""
        return distributed.new_group(backend="gloo", timeout=TIMEOUT) if ranks().num_processes > 1 else None

    def _complete(self, work: Path, record: dict[str, Any], copies: dict[str, Any], group: Any) -> None:
        """Write a state and rename it. torch's `save` returns on all ranks when all have written, or fails on all."""
        with self._explain_errors(f"the state of step {record['step']}", work):
            save(copies, checkpoint_id=work / _SHARDS, process_group=group, no_dist=group is None)
            if not ranks().is_main_process:
                return
            write_text(work / RECORD, json.dumps(record, indent=2) + "\n")
            for directory in [work, *(p for p in work.rglob("*") if p.is_dir())]:
                fsync_directory(directory)
            final = work.with_suffix("")
            if final.exists():  # an incomplete one
                shutil.rmtree(final)
            work.rename(final)
            fsync_directory(self.directory)
            for old in self.complete()[: -self.keep_last]:
                shutil.rmtree(old.rename(old.with_suffix(".partial")))

    def save_best(self, weights: dict[str, Tensor]) -> None:
        """Replace the best weights by those of all processes. Raises OutputError."""
        self.finish()  # it uses the same process group
        work = self.directory / f"{BEST}.partial"
        with self._explain_errors("the best weights", work):
            save(weights, checkpoint_id=work, process_group=self._group, no_dist=self._group is None)
            if ranks().is_main_process:
                shutil.rmtree(self.directory / BEST, ignore_errors=True)
                work.rename(self.directory / BEST)

    @contextmanager
    def _explain_errors(self, content: str, work: Path) -> Iterator[None]:
        """Raise OutputError if the content cannot be saved, and remove the incomplete `work`."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:  # torch writes files with its own errors
            shutil.rmtree(work, ignore_errors=True)
            if out_of_memory(cause := _cause(error)) or is_disconnected(cause):
                raise cause from error
            raise OutputError(
                f"{content} could not be saved in {self.directory} ({explain(cause)}); free some space and continue "
                "from the last state with --resume"
            ) from error

    def read_best(self, weights: dict[str, Tensor]) -> None:
        """Read the best weights into these tensors."""
        read(weights, checkpoint_id=self.directory / BEST, process_group=self._group, no_dist=self._group is None)

    def restore_best(self, state: Path) -> None:
        """Replace the best weights by those of a state, which may have none."""
        shutil.rmtree(self.directory / BEST, ignore_errors=True)
        _link(state / BEST, self.directory / BEST)

    def fill(self, options: TrainOptions) -> TrainOptions:
        """Fill in the block and batch size of the last state, whose defaults may depend on the number of processes.
        Raises RefusedError.
        """
        saved = self.latest()[1].get("options", {})
        open_names = [name for name in ("context", "batch_size") if getattr(options, name) is None]
        return replace(options, **{name: saved.get(name) for name in open_names})

    def latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest state and its record. Raises RefusedError if there is none or it cannot be read."""
        if not (states := self.complete()):
            raise RefusedError(f"--resume: {self.directory} has no saved state; start without --resume")
        with _readable(states[-1]):
            record: dict[str, Any] = json.loads((states[-1] / RECORD).read_text())
            record.keys()
        return states[-1], record


def load(path: Path, saved_by: int, accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Read weights, optimiser and random states that `saved_by` ranks saved; ranks and shards may differ now. Raises
    RefusedError if the state cannot be read.
    """
    with _readable(path):
        FileSystemReader(path / _SHARDS).read_metadata()  # `read` would log every error of it
        weights, moments = get_state_dict(model, optimizer.optimizer)
        read({"model": weights}, checkpoint_id=path / _SHARDS)
        partial = DefaultLoadPlanner(allow_partial_load=True)  # parameters without gradients have no moments
        read({"optimizer": moments}, checkpoint_id=path / _SHARDS, planner=partial)
        set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments)
        if (rank := accelerator.process_index) < saved_by:  # accelerate ignores a file that it cannot read
            torch.load(path / f"random_states_{rank}.pkl", weights_only=False)
        load_accelerator_state(str(path), [], [], [], [], rank, accelerator.scaler)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # of json, pickle, zip files, torch
        if out_of_memory(cause := _cause(error)):
            raise cause from error
        raise RefusedError(
            f"the state {path} cannot be read ({explain(cause)}); delete it to continue from the one before, or start "
            "without --resume"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """The error of the first rank that failed, from an error of torch.distributed.checkpoint."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)


def check_run(path: Path, record: dict[str, Any], run: dict[str, Any]) -> None:
    """Raise RefusedError with all differences if the options or the data of a state are not those of this run."""
    changed = differences(json.loads(json.dumps(run["options"], default=str)), record.get("options", {}))
    if record.get("data") != run["data"]:
        changed.append("the content of the data")
    if changed:
        raise RefusedError(f"{path} was saved by another run: {'; '.join(changed)}; start without --resume, or as then")


def _link(source: Path, target: Path) -> None:
    """Hard-link the files of a directory, if it exists, or copy them if the file system has no links."""

    def link(file: str, name: str) -> None:
        try:
            os.link(file, name)
        except OSError:
            shutil.copyfile(file, name)

    if source.exists():
        shutil.copytree(source, target, copy_function=link)
