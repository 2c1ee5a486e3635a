"""States of a run: saved while it trains, loaded by the same command to continue it.

A state is a directory `step-N`: weights, optimiser and the best weights so far as torch's distributed checkpoint,
accelerate's own files (random states of every rank) and `trainer_state.json` with the progress and the run.
It gets this name only when it is complete. All ranks write into one directory, which several machines must share.
accelerate reads random states with pickle: continue only from states that you made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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

from gqa.checkpoint.errors import OutputError, RefusedError, differences, explain, listing
from gqa.checkpoint.escape import shell_line
from gqa.checkpoint.loading import native_bfloat16, on_main, out_of_memory, ranks
from gqa.checkpoint.options import flag
from gqa.checkpoint.provenance import checkpoint_digest, versions
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import fsync_directory, locked, write_text
from gqa.corpus.sources import is_self
from gqa.uptrain.dataloader import data_sources, heldout_sources
from gqa.uptrain.options import TrainOptions

RECORD = "trainer_state.json"
_SHARDS = "shards"
_HASHED = {"model", "revision", "teacher", "data", "heldout"}  # options that name models and text
_STATES = 2  # to keep

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is intended


@dataclass
class TrainingProgress:
    """The part of a state besides weights and optimiser. Losses are nats per token.

    heldout_before, heldout_after: results of `heldout_losses` at the start and after `best_step`, the step with the
    lowest loss so far; step 0 is the model before training.
    """

    step: int = 0
    tokens: int = 0
    best_step: int = 0
    heldout_before: dict[str, float] | None = None
    heldout_after: dict[str, float] | None = None
    loss: float | None = None


@dataclass(frozen=True)
class State:
    """A saved state: its directory and `trainer_state.json`."""

    path: Path
    record: dict[str, Any]


_KEYS = {*vars(TrainingProgress()), "identity", "overwrite", "argv", "directory", "ranks", "batch_size", "stream"}


def describe_run(
    options: TrainOptions, checkpoint: Checkpoint, base: Checkpoint | None, device: str, argv: Sequence[str]
) -> dict[str, Any]:
    """What a state records of its run, JSON-ready. `identity`: what a run that continues it must share: options by
    flag, and hashes of models and text, which may have other paths.
    """
    content = {"MODEL": checkpoint_digest(checkpoint)}
    if base:
        content["--teacher"] = checkpoint_digest(base)
    if options.heldout:
        content["--heldout"] = " ".join(source.identify() for source in heldout_sources(options))
    if is_self(options.data[0]):  # samples also depend on these
        content["--data"] = f"{options.data[0]} {versions('torch', 'transformers')} {native_bfloat16(device)}"
    else:
        content["--data"] = " ".join(
            source.spec if options.streaming and not source.files else source.identify()  # a stream from the hub
            for source in data_sources(options)
        )
    hashes = {name: hashlib.sha256(value.encode()).hexdigest()[:12] for name, value in content.items()}
    shared = {flag(name): value for name, value in options.binding().items() if name not in _HASHED}
    return {
        "identity": shared | {f"content of {name}": value for name, value in hashes.items()},
        "overwrite": options.overwrite, "argv": [*argv], "directory": os.getcwd(), "ranks": ranks().num_processes,
    }  # fmt: skip


@dataclass(frozen=True)
class States:
    """The states of one run, `directory/step-N`, of which the last two stay."""

    directory: Path

    @contextmanager
    def lock(self, keep: bool) -> Iterator[None]:
        """Create and lock the directory, and remove incomplete states, and unless `keep` all. Raises RefusedError if
        another run has the lock.
        """
        with ExitStack() as stack:
            on_main(lambda: stack.enter_context(self._lock_here(keep)))
            yield

    @contextmanager
    def _lock_here(self, keep: bool) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        message = f"another run is using {self.directory}; wait for it or give another output with -o"
        try:
            with locked(self.directory / "lock", message):
                for leftover in [*self.directory.glob("step-*.partial"), *([] if keep else self.complete())]:
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
                yield
        finally:
            with suppress(OSError):  # it is empty if nothing was saved, or if the run is done
                self.directory.rmdir()

    def complete(self) -> list[Path]:
        """Directories of complete states, the oldest first."""
        return sorted(self.directory.glob(f"step-{'[0-9]' * 8}"))

    def latest(self) -> State:
        """The newest state. Raises RefusedError if it cannot be read."""
        path = self.complete()[-1]
        with _readable(path):
            record: dict[str, Any] = json.loads((path / RECORD).read_text())
            if missing := _KEYS - record.keys():
                raise ValueError(f"{RECORD} lacks {listing(missing)}")
        return State(path, record)

    def start(self, run: dict[str, Any]) -> State | None:
        """The state from which a run continues, the newest; None if it begins anew: if there is no state, and with
        --overwrite if the states are of another run, damaged, or of the same run without --overwrite.

        Raises RefusedError, which names the differences and the command that continues, if they are of another run.
        """
        if not self.complete():
            return None
        try:
            state = self.latest()
        except RefusedError:
            if run["overwrite"]:
                return None
            raise
        before, batch, processes = state.record, state.record["batch_size"], run["ranks"]
        changed = differences(run["identity"], before["identity"])
        if batch % processes:
            changed.append(f"processes: {before['ranks']} -> {processes}, which cannot share a batch of {batch}")
        if run["overwrite"] and (changed or not before["overwrite"]):
            return None
        if changed:
            command = _command(before) if before["argv"] and run["argv"] else "the same options"
            raise RefusedError(
                f"{self.directory} holds another run ({'; '.join(changed)}); continue it with {command}, or begin anew "
                "with --overwrite"
            )
        return state

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
                work.rename(work.with_suffix(""))
                fsync_directory(self.directory)
                for old in self.complete()[:-_STATES]:
                    shutil.rmtree(old.rename(old.with_suffix(".partial")))
        except (OSError, RuntimeError, CheckpointException) as error:  # torch writes files with its own errors
            shutil.rmtree(work, ignore_errors=True)
            raise OutputError(
                f"the state of step {record['step']} could not be saved in {self.directory} ({_reason(error)}); free "
                "some space, and the same command continues from the last state"
            ) from error


def _command(record: dict[str, Any]) -> str:
    """The command that saved a state, for a shell in the current directory."""
    several = record["ranks"] > 1
    launcher = ["torchrun", "--nproc_per_node", str(record["ranks"]), "-m", "gqa.uptrain"]
    words = shell_line([*(launcher if several else ["gqa-uptrain"]), *record["argv"]])
    if record["directory"] == os.getcwd():
        return words
    return f"{shell_line(['cd', record['directory']])} && {words}"


def load(state: State, accelerator: Accelerator, model: Any, optimizer: Any, best: dict[str, Tensor]) -> None:
    """Read weights, optimiser and random states, and the best weights into the tensors of `best`. Ranks and shards may
    be others than when it was saved. Raises RefusedError if the state cannot be read.
    """
    path = state.path
    with _readable(path):
        FileSystemReader(path / _SHARDS).read_metadata()  # `read` would log every error of it
        weights, moments = get_state_dict(model, optimizer.optimizer)
        read({"model": weights, "best": best}, checkpoint_id=path / _SHARDS)
        partial = DefaultLoadPlanner(allow_partial_load=True)  # parameters without gradients have no moments
        read({"optimizer": moments}, checkpoint_id=path / _SHARDS, planner=partial)
        set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments)
        if (rank := accelerator.process_index) < state.record["ranks"]:  # accelerate ignores a file that it cannot read
            torch.load(path / f"random_states_{rank}.pkl", weights_only=False)
        load_accelerator_state(str(path), [], [], [], [], rank)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # of json, pickle, zip files, torch
        raise RefusedError(
            f"the state {path} cannot be read ({_reason(error)}); delete it to continue from the one before, or delete "
            f"{path.parent} to begin anew"
        ) from error


def _reason(error: BaseException) -> str:
    """What the first rank that failed says in an error of torch.distributed.checkpoint; raised if it has no memory."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    cause = next((failure for failure, _ in failures.values()), error)
    if out_of_memory(cause):
        raise cause from error
    return explain(cause)
