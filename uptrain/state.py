"""States of a run: saved while it trains, loaded to continue it.

A state is a directory `step-N`: weights, optimiser and the best weights so far as torch's distributed checkpoint,
accelerate's own files (random states of every rank) and `trainer_state.json` with the progress and the options.
It gets this name only when it is complete. All ranks write into one directory, which several machines must share.
accelerate reads random states with pickle: continue only from states that you made.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save

from gqa.checkpoint.errors import OutputError, RefusedError, explain
from gqa.checkpoint.loading import out_of_memory, ranks
from gqa.checkpoint.write import fsync_directory, locked, write_text

RECORD = "trainer_state.json"
KEPT = 2  # states
_SHARDS = "shards"


warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant, where it is one


@dataclass(frozen=True)
class States:
    """The states of one run, `directory/step-N`, of which the last two stay."""

    directory: Path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create and lock the directory, and remove incomplete states, in the main process. Raises RefusedError if
        another run has the lock.
        """
        if not ranks().is_main_process:
            yield
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        message = f"another run is using {self.directory}; wait for it or give another output with -o"
        try:
            with locked(self.directory / "lock", message):
                for leftover in self.directory.glob("*.partial"):
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                yield
        finally:
            with suppress(OSError):  # it is empty if nothing was saved, or if `remove` was called
                self.directory.rmdir()

    def remove(self) -> None:
        """Remove the states and the log, as far as possible."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def complete(self) -> list[Path]:
        """Complete states, the oldest first."""
        return sorted(record.parent for record in self.directory.glob(f"step-{'[0-9]' * 8}/{RECORD}"))

    def latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest state and its record. Raises RefusedError if there is none or it cannot be read."""
        if not (states := self.complete()):
            raise RefusedError(f"--resume: {self.directory} has no saved state; start without --resume")
        with _readable(states[-1]):
            record: dict[str, Any] = json.loads((states[-1] / RECORD).read_text())
            record["options"].keys()
        return states[-1], record

    def save(
        self, accelerator: Accelerator, model: Any, optimizer: Any, best: dict[str, Tensor], record: dict[str, Any]
    ) -> None:
        """Write the state of all ranks, rename it when it is complete, and remove older ones. Raises OutputError."""
        work, main = self.directory / f"step-{record['step']:08d}.partial", accelerator.is_main_process
        try:
            work.mkdir(parents=True, exist_ok=True)
            save_accelerator_state(str(work), [], [], [], [], accelerator.process_index, 0)
            weights, moments = get_state_dict(model, optimizer.optimizer)
            # It returns on all ranks when all have written, or fails on all.
            save({"model": weights, "optimizer": moments, "best": best}, checkpoint_id=work / _SHARDS)
            if main:
                write_text(work / RECORD, json.dumps(record, indent=2) + "\n")
                for directory in [work, *(path for path in work.rglob("*") if path.is_dir())]:
                    fsync_directory(directory)
                final = work.with_suffix("")
                if final.exists():  # an incomplete one
                    shutil.rmtree(final)
                work.rename(final)
                fsync_directory(self.directory)
                for old in self.complete()[:-KEPT]:
                    shutil.rmtree(old.rename(old.with_suffix(".partial")))
        except (OSError, RuntimeError, CheckpointException) as error:  # torch writes files with its own errors
            shutil.rmtree(work, ignore_errors=True)
            if out_of_memory(cause := _cause(error)):
                raise cause from error
            raise OutputError(
                f"the state of step {record['step']} could not be saved in {self.directory} ({explain(cause)}); free "
                "some space and continue from the last state with --resume"
            ) from error


def load(
    path: Path, record: dict[str, Any], accelerator: Accelerator, model: Any, optimizer: Any, best: dict[str, Tensor]
) -> None:
    """Read weights, optimiser and random states, and the best weights into the tensors of `best`. Ranks and shards may
    be others than when it was saved. Raises RefusedError if the state cannot be read.
    """
    with _readable(path):
        FileSystemReader(path / _SHARDS).read_metadata()  # `read` would log every error of it
        weights, moments = get_state_dict(model, optimizer.optimizer)
        read({"model": weights, "best": best}, checkpoint_id=path / _SHARDS)
        partial = DefaultLoadPlanner(allow_partial_load=True)  # parameters without gradients have no moments
        read({"optimizer": moments}, checkpoint_id=path / _SHARDS, planner=partial)
        set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments)
        if (rank := accelerator.process_index) < record["ranks"]:  # accelerate ignores a file that it cannot read
            torch.load(path / f"random_states_{rank}.pkl", weights_only=False)
        load_accelerator_state(str(path), [], [], [], [], rank)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # of json, pickle, zip files, torch
        if out_of_memory(cause := _cause(error)):
            raise cause from error
        raise RefusedError(
            f"the state {path} cannot be read ({explain(cause)}); delete it to continue from the one before"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """The error of the first rank that failed, from an error of torch.distributed.checkpoint."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)
