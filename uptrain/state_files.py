"""The files of one state of a training, which all ranks write and read.

A state is a directory: the weights that train, optimizer and the best weights so far as torch's
distributed checkpoint, accelerate's own files (random states of every rank) and
`trainer_state.json` with the progress and the run. It is written under a temporary name, and gets
its own when it is complete. All ranks write into one directory, which several machines must share.
accelerate reads random states with pickle: continue only from states that you made.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from gqa.checkpoint.hub import error_chain
from gqa.checkpoint.write import fsync_directory, fsync_file, write_text
from gqa.core.devices import out_of_memory
from gqa.core.errors import RefusedError, explain, listing

RECORD = "trainer_state.json"
TRAINED = "trained"  # the directory of the state whose training is done
WEIGHTS = "weights.safetensors"  # in `trained`
PARTIAL = ".partial"  # at the end of the name of a state that is not complete
_SHARDS = "shards"
# Frozen weights are those of the checkpoint: they are not saved, so a state need not have them.
_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is intended


@dataclass
class TrainingProgress:
    """The part of a state besides weights and optimizer. Losses are nats per token.

    training_cross_entropy: Of the last step, also if there is a teacher.
    first_validation, lowest_validation: Results of `validation_losses` at the start, and after
        `best_step`, the step with the lowest loss so far; step 0 is the model before training.
    rate_cuts: How often the run has gone back to the best weights, each time with a lower learning
        rate.
    """

    step: int = 0
    tokens: int = 0
    best_step: int = 0
    first_validation: dict[str, float] | None = None
    lowest_validation: dict[str, float] | None = None
    training_cross_entropy: float | None = None
    rate_cuts: int = 0

    @property
    def is_unchanged(self) -> bool:
        """Whether validation text was measured and no step lowered its loss."""
        is_measured = self.first_validation and self.lowest_validation
        return bool(is_measured) and not self.best_step

    @classmethod
    def of(cls, record: dict[str, Any]) -> TrainingProgress:
        """The progress in the record of a state."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})


def state_record(
    progress: TrainingProgress,
    description: dict[str, Any],
    batch_size: int,
    *,
    stream: Sequence[Any] = (),
    unreadable_text: bool = False,
) -> dict[str, Any]:
    """What a state records besides weights and optimizer, JSON-ready.

    Args:
        progress: How far the run is.
        description: Of the run, by `describe_run`.
        batch_size: Blocks of a step.
        stream: Where each process is in a stream of text.
        unreadable_text: Whether the run stopped since its text could not be read.
    """
    return {
        **vars(progress),
        **description,
        "batch_size": batch_size,
        "stream": list(stream),
        "unreadable_text": unreadable_text,
    }


_DESCRIPTION = ("identity", "overwrite", "argv", "directory", "ranks")  # keys of `describe_run`
# The keys of every record: those of one that says nothing.
_KEYS = frozenset(state_record(TrainingProgress(), dict.fromkeys(_DESCRIPTION), batch_size=0))


@dataclass(frozen=True)
class State:
    """A saved state: its directory and `trainer_state.json`."""

    path: Path
    record: dict[str, Any]

    @property
    def is_trained(self) -> bool:
        """Whether training is done: only the result is to be written."""
        return self.path.name == TRAINED

    @classmethod
    def read(cls, path: Path) -> State:
        """The state in a directory. Raises RefusedError if its record cannot be read."""
        with _readable(path):
            record: dict[str, Any] = json.loads((path / RECORD).read_text())
            state = cls(path, record)
            needed = _KEYS | {"result"} if state.is_trained else _KEYS
            missing = needed - record.keys()
            if missing:
                raise ValueError(f"{RECORD} lacks {listing(missing)}")
        return state


def write_tensors(
    directory: Path, accelerator: Accelerator, model: Any, optimizer: Any, best: dict[str, Tensor]
) -> None:
    """Write weights, optimizer, random states and the best weights. All ranks call it; it returns
    on all when all have written, or fails on all.

    Raises OSError, RuntimeError and CheckpointException.
    """
    weights, moments = get_state_dict(model, optimizer.optimizer, options=_TRAINED_ONLY)
    state_dict_saver.save(
        {"model": weights, "optimizer": moments, "best": best}, checkpoint_id=directory / _SHARDS
    )

    # Each rank writes this file by itself, and the others must hear of its error
    error: OSError | RuntimeError | None = None
    try:
        save_accelerator_state(str(directory), [], [], [], [], accelerator.process_index, 0)
    except (OSError, RuntimeError) as raised:
        error = raised
    if any(gather_object([error is not None])):
        raise error or OSError("another process could not write its random states")


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Write `trainer_state.json`."""
    write_text(directory / RECORD, json.dumps(record, indent=2) + "\n")


def publish(work: Path) -> Path:
    """Make a state durable, then give it its name, which is that of `work` without `.partial`."""
    for part in (work, *work.rglob("*")):
        if part.is_dir():
            fsync_directory(part)
        else:
            fsync_file(part)  # accelerate leaves that to the system

    path = work.with_suffix("")
    work.rename(path)
    fsync_directory(path.parent)
    return path


def remove_state(path: Path) -> None:
    """Remove a state; nothing is done if it is not there.

    It first loses its name, so that a run that is killed meanwhile leaves none that seems whole.
    """
    if not os.path.lexists(path):
        return
    if path.suffix != PARTIAL:
        path = path.rename(path.with_suffix(PARTIAL))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_tensors(
    state: State, accelerator: Accelerator, model: Any, optimizer: Any, best: dict[str, Tensor]
) -> None:
    """Read what `write_tensors` has written: weights, optimizer and random states, and the best
    weights into the tensors of `best`.

    Ranks and shards may be others than when it was saved. Raises RefusedError if the state cannot
    be read.
    """
    path = state.path
    shards = path / _SHARDS
    with _readable(path):
        FileSystemReader(shards).read_metadata()  # loading would log every error of it
        weights, moments = get_state_dict(model, optimizer.optimizer, options=_TRAINED_ONLY)
        state_dict_loader.load({"model": weights, "best": best}, checkpoint_id=shards)
        # Parameters without gradients have no moments
        partial = DefaultLoadPlanner(allow_partial_load=True)
        state_dict_loader.load({"optimizer": moments}, checkpoint_id=shards, planner=partial)
        set_state_dict(
            model,
            optimizer.optimizer,
            model_state_dict=weights,
            optim_state_dict=moments,
            options=_TRAINED_ONLY,
        )

        rank = accelerator.process_index
        # Accelerate ignores a file that it cannot read
        if rank < state.record["ranks"]:
            torch.load(path / f"random_states_{rank}.pkl", weights_only=False)
        load_accelerator_state(str(path), [], [], [], [], rank)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn whatever is raised while a state is read into a RefusedError."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # of json, pickle, zip files, torch
        raise RefusedError(
            f"the state {path} cannot be read ({reason_of(error)}); delete it to continue from "
            f"the one before, or delete {path.parent} to start over"
        ) from error


def says_full_disk(error: BaseException) -> bool:
    """Whether an error of writing a state says that the disk, or a quota, is full.

    Errors that torch raises in C++ do not say it.
    """
    for cause in error_chain(_first_failure(error)):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
    return False


def _first_failure(error: BaseException) -> BaseException:
    """The error of the first rank that failed, in one of torch.distributed.checkpoint."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure for failure, _ in failures.values()), error)


def reason_of(error: BaseException) -> str:
    """What the first rank that failed says in an error of torch.distributed.checkpoint; raised if
    it has no memory.
    """
    cause = _first_failure(error)
    if out_of_memory(cause):
        raise cause from error
    return explain(cause)
