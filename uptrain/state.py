"""Saving and continuing a run. What is saved has its final name only when all of it is on disk.

A state is a directory `step-N`: weights and optimiser as torch's distributed checkpoint, accelerate's own files
(scaler, random states of every rank) and `trainer_state.json`, with the step, what the run was asked for, and the size
and SHA-256 of each file. All ranks write into the one directory, which several machines must share; training goes on as
soon as weights and optimiser are copied to the memory of the host. accelerate reads random states with pickle: continue
only from states that you made.

Beside the states lie the weights with the lowest held-out loss so far, `best`, which all ranks write in the same way;
each state has them too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as distributed
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import OutputError, RefusedError, explain, listing
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.locks import locked
from gqa.checkpoint.processes import TIMEOUT, wait_for_everyone, waiting_for
from gqa.checkpoint.write import fsync_directory, write_text
from gqa.uptrain.options import TrainOptions, differences

RECORD = "trainer_state.json"
BEST = "best"
_SHARDS, _LOCK = "shards", "lock"
_OF_RANK = re.compile(r"(?:__|random_states_)(\d+)[_.]")  # how names of files begin that a rank writes


warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant, where it is one


@dataclass
class States:
    """The states of one run, `directory/step-N`."""

    directory: Path
    keep_last: int
    _writing: Future[None] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """The directory is there, no other run uses it meanwhile, and no half of a state is left from one that was
        killed; the main process sees to that. Raises RefusedError where another run does use it.
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

        Raises OutputError where it or the one before cannot be written.
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
            found = tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), {"model": weights, "optimizer": moments})
        thread = ThreadPoolExecutor(1)
        self._writing = thread.submit(self._complete, work, record, found, self._group)
        thread.shutdown(wait=False)

    def finish(self) -> None:
        """The state that is being written is complete. Raises OutputError where it cannot be, on all ranks."""
        writing, self._writing = self._writing, None
        if writing:
            writing.result()

    @cached_property
    def _group(self) -> Any:
        """What ranks write states together in, while they train in another; and however long one of them takes."""
        return distributed.new_group(backend="gloo", timeout=TIMEOUT) if ranks().num_processes > 1 else None

    def _complete(self, work: Path, record: dict[str, Any], found: dict[str, Any], group: Any) -> None:
        """Write a state under its name. Each rank hashes what it wrote; all hear of an error of any."""
        state, told = ranks(), dict[str, Any]()
        try:
            save(found, checkpoint_id=work / _SHARDS, process_group=group, no_dist=group is None)
            files = (path for path in sorted(work.rglob("*")) if path.is_file())
            own = (path for path in files if _writer(path) % state.num_processes == state.process_index)
            told = {str(path.relative_to(work)): _describe(path) for path in own}
        except (OSError, RuntimeError, CheckpointException) as found:
            told = {"error": explain(_cause(found))}
        everyone: list[Any] = [told]
        if group:
            everyone = [None] * state.num_processes
            with waiting_for("the state to be written"):
                distributed.all_gather_object(everyone, told, group=group)
        with self._failing(f"the state of step {record['step']}", work):
            if failed := [each["error"] for each in everyone if "error" in each]:
                raise OSError(failed[0])
            if state.is_main_process:
                self._publish(work, record | {"files": {name: how for each in everyone for name, how in each.items()}})

    def _publish(self, work: Path, record: dict[str, Any]) -> None:
        final = work.with_suffix("")
        write_text(work / RECORD, json.dumps(record, indent=2) + "\n")
        for directory in [work, *(p for p in work.rglob("*") if p.is_dir())]:
            fsync_directory(directory)
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
        """What cannot be saved is told with OutputError, and the half of it in `work` goes."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as found:  # torch writes files with its own errors
            shutil.rmtree(work, ignore_errors=True)
            if out_of_memory(error := _cause(found)):
                raise error from None
            told = "free some space and continue from the last state with --resume"
            raise OutputError(f"{what} could not be saved in {self.directory} ({explain(error)}); {told}") from None

    def read_best(self, weights: dict[str, Tensor]) -> None:
        """What was kept last, into these."""
        read(weights, checkpoint_id=self.directory / BEST, process_group=self._group, no_dist=self._group is None)

    def take_best(self, state: Path) -> None:
        """The best weights are again those of a state, or none where it has none."""
        shutil.rmtree(self.directory / BEST, ignore_errors=True)
        _link(state / BEST, self.directory / BEST)

    def continued(self, options: TrainOptions) -> TrainOptions:
        """The options with what the run that is continued made of those that are left open: how many processes share a
        step may decide how large it is. Raises RefusedError.
        """
        before = self.latest(whole=False)[1].get("options", {})
        left = {name: before.get(name) for name in ("block_size", "batch_size") if getattr(options, name) is None}
        return replace(options, **left)

    def latest(self, whole: bool = True) -> tuple[Path, dict[str, Any]]:
        """The newest state and its record; with `whole` every byte of it is checked, by all processes together, each
        those files that it would have written.

        Raises RefusedError where there is none or it is damaged.
        """
        if not (found := self.all()):
            raise RefusedError(f"--resume: {self.directory} has no saved state; start without --resume")
        path = found[-1]
        older = "delete it to continue from the one before" if found[1:] else "start without --resume after deleting it"
        rank, count = ranks().process_index, ranks().num_processes
        try:
            record: dict[str, Any] = json.loads((path / RECORD).read_text())
            files = record["files"].items() if whole else ()
            own = [(path / name, known) for name, known in files if _writer(Path(name)) % count == rank]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(f"the state {path} cannot be read ({explain(error)}); {older}") from None
        damaged = [str(file.relative_to(path)) for file, known in own if not _is_whole(file, known)]
        if whole:
            wait_for_everyone("the state to be checked")  # longer than a collective would
            damaged = gather_object(damaged)
        if damaged:
            raise RefusedError(f"the state {path} is damaged: {listing(damaged)} not as saved; {older}")
        return path, record


def load(path: Path, accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Weights, optimiser and random states as they were, whatever processes and shards there were and are."""
    weights, moments = get_state_dict(model, optimizer.optimizer)
    read({"model": weights}, checkpoint_id=path / _SHARDS)
    # What never had a gradient has no moments.
    read({"optimizer": moments}, checkpoint_id=path / _SHARDS, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments)
    load_accelerator_state(str(path), [], [], [], [], accelerator.process_index, accelerator.scaler)


def check_same_run(path: Path, record: dict[str, Any], run: dict[str, Any]) -> None:
    """Raise RefusedError where a state belongs to another run than one of these `options` and `data`, with every
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


def _cause(error: BaseException) -> BaseException:
    """What went wrong in the first of the processes in which torch could not save."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def _writer(path: Path) -> int:
    """The rank that wrote a file of a state; the first one where its name does not say."""
    found = _OF_RANK.match(path.name)
    return int(found[1]) if found else 0


def _is_whole(path: Path, known: Any) -> bool:
    try:
        return path.is_file() and _describe(path) == known
    except OSError:  # told with those that are damaged: the other processes wait to hear of it
        return False


def _describe(path: Path) -> list[Any]:
    """[bytes, SHA-256], and the file is durable afterwards."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return [path.stat().st_size, digest]
