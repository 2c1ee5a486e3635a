"""States of a run: saved while it trains, loaded by the same command to continue it.

A state is a directory `step-N`: weights, optimizer and the best weights so far as torch's
distributed checkpoint, accelerate's own files (random states of every rank) and
`trainer_state.json` with the progress and the run. It gets this name only when it is complete. All
ranks write into one directory, which several machines must share. accelerate reads random states
with pickle: continue only from states that you made.

`trained` is the last state: the tensors of the result that training has changed, as they will be
stored, and its record. It is written before the result, so that whatever goes wrong then, the same
command only writes the result again.

States are in `OUT-state`. A run with another OUT finds them by what the run is, the hash of its
identity: an entry on a shelf (core/work.py) says where they are. The entry also keeps
`trained` if the disk of OUT-state is full.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
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

from gqa.checkpoint.provenance import checkpoint_digest, versions
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import fsync_directory, locked, write_text
from gqa.core.devices import from_main, native_bfloat16, on_main, out_of_memory, ranks
from gqa.core.errors import OutputError, RefusedError, differences, explain, listing
from gqa.core.escape import shell_line
from gqa.core.options import flag
from gqa.core.work import (
    LOCK,
    MARK,
    claim,
    fingerprint,
    is_private,
    mark,
    open_shelf,
    read_mark,
    remove,
    shelves,
)
from gqa.corpus.sources import is_self
from gqa.uptrain.dataloader import data_sources, heldout_sources
from gqa.uptrain.options import TrainOptions

RECORD = "trainer_state.json"
METRICS_LOG = "metrics.jsonl"
TRAINED = "trained"
WEIGHTS = "weights.safetensors"  # in `trained`
CONTENT_OF_DATA = "content of --data"  # in the identity of a run
_SHARDS = "shards"
_HASHED = {"model", "revision", "teacher", "data", "heldout"}  # options that name models and text
_PURPOSE, _ENTRY = "training states", "where training states are"  # of marked directories
_STEP = f"step-{'[0-9]' * 8}"
# Every name that is replaced or removed in OUT-state, where users may have other files.
_OURS = (
    _STEP,
    f"{_STEP}.partial",
    TRAINED,
    f"{TRAINED}.partial",
    METRICS_LOG,
    f".{METRICS_LOG}.partial",
)

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is intended


@dataclass
class TrainingProgress:
    """The part of a state besides weights and optimizer. Losses are nats per token.

    heldout_before, heldout_after: results of `heldout_losses` at the start and after `best_step`,
    the step with the lowest loss so far; step 0 is the model before training.
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

    @property
    def is_trained(self) -> bool:
        """Whether training is done: only the result is to be written."""
        return self.path.name == TRAINED


_KEYS = {
    *vars(TrainingProgress()),
    "identity",
    "overwrite",
    "argv",
    "directory",
    "ranks",
    "batch_size",
    "stream",
}
_KEYS |= {"unreadable_text"}


def describe_run(
    options: TrainOptions,
    checkpoint: Checkpoint,
    base: Checkpoint | None,
    device: str,
    argv: Sequence[str],
) -> dict[str, Any]:
    """What a state records of its run, JSON-ready.

    `identity`: what a run that continues it must share: options by flag, and hashes of models and
    text, which may have other paths.
    """
    content = {"MODEL": checkpoint_digest(checkpoint)}
    if base:
        content["--teacher"] = checkpoint_digest(base)
    if options.heldout:
        content["--heldout"] = " ".join(source.identify() for source in heldout_sources(options))
    if is_self(options.data[0]):  # samples also depend on these
        content["--data"] = (
            f"{options.data[0]} {versions('torch', 'transformers')} {native_bfloat16(device)}"
        )
    else:
        content["--data"] = " ".join(
            # A stream from the hub
            source.spec if options.streaming and not source.files else source.identify()
            for source in data_sources(options)
        )
    hashes = {
        name: hashlib.sha256(value.encode()).hexdigest()[:12] for name, value in content.items()
    }
    shared = {flag(name): value for name, value in options.binding().items() if name not in _HASHED}
    return {
        "identity": shared | {f"content of {name}": value for name, value in hashes.items()},
        "overwrite": options.overwrite,
        "argv": [*argv],
        "directory": os.getcwd(),
        "ranks": ranks().num_processes,
    }


@dataclass(frozen=True)
class States:
    """The states of one run.

    `directory`: next to its output, or to that of the run that it continues. `run`: the hash of its
    identity, by which runs with another output find them; none are found without.
    """

    directory: Path
    run: str = ""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create, mark and lock the directory, and remove incomplete states.

        At the end remove it if nothing of ours is left in it.

        Raises RefusedError if another run has the lock, or somebody else made files that have our
        names.
        """
        with ExitStack() as stack:
            on_main(lambda: stack.enter_context(self._lock_here()))
            yield

    @contextmanager
    def _lock_here(self) -> Iterator[None]:
        claim(self.directory, _PURPOSE, self.run, _OURS)
        message = (
            f"another run is using {self.directory}; wait for it or give another output with -o "
            "(of other options, "
            "models or text: the same run is continued wherever its result goes)"
        )
        try:
            with locked(self.directory / LOCK, message):
                # A run that has ended meanwhile took the mark along
                claim(self.directory, _PURPOSE, self.run, _OURS)
                for place in self.places():
                    for leftover in place.glob("*.partial"):
                        if any(leftover.match(name) for name in _OURS):
                            _remove(leftover)
                try:
                    yield
                finally:
                    if not any(True for name in _OURS for _ in self.directory.glob(name)):
                        (self.directory / MARK).unlink(missing_ok=True)
        finally:
            with suppress(OSError):  # not empty, or never made
                self.directory.rmdir()

    # ----------------------------------------------------------------------------- where states are

    def places(self) -> list[Path]:
        """Existing directories that may hold states: `directory`, and entries of this run on
        shelves.
        """
        return [
            self.directory,
            *(entry for entry in _entries(self.run) if _directory_of(entry) == self.directory),
        ]

    def complete(self) -> list[Path]:
        """Directories of complete states, the oldest first. Without `trained`."""
        found = (path for place in self.places() for path in place.glob(_STEP))
        return sorted(found, key=lambda path: path.name)

    def latest(self) -> State | None:
        """The newest state, or `trained`; None if there is none.

        Raises RefusedError if it cannot be read.
        """
        trained = [place / TRAINED for place in self.places() if (place / TRAINED).is_dir()]
        path = next(iter([*trained, *reversed(self.complete())]), None)
        if path is None:
            return None
        with _readable(path):
            record: dict[str, Any] = json.loads((path / RECORD).read_text())
            if missing := (_KEYS | ({"result"} if path.name == TRAINED else set())) - record.keys():
                raise ValueError(f"{RECORD} lacks {listing(missing)}")
        return State(path, record)

    def start(self, run: dict[str, Any]) -> State | None:
        """The state from which a run continues, the newest; None if it begins anew: if there is no
        state, and with --overwrite if the states are of another run, damaged, or of the same run
        without --overwrite, unless that has trained its weights already.

        Raises RefusedError, which names the differences and the command that continues, if they are
        of another run.
        """
        try:
            state = self.latest()
        except RefusedError:
            if run["overwrite"]:
                return None
            raise
        if state is None:
            return None
        before, processes = state.record, run["ranks"]
        changed = differences(run["identity"], before["identity"])
        if before["unreadable_text"]:  # it stopped there: the text may have been repaired since
            changed = [
                change for change in changed if not change.startswith(f"{CONTENT_OF_DATA}: ")
            ]
        if before["batch_size"] % processes and not state.is_trained:
            batch = before["batch_size"]
            changed.append(
                f"processes: {before['ranks']} -> {processes}, which cannot share a batch of "
                f"{batch}"
            )
        # The failed run may have advised --overwrite, for what is at OUT: its trained weights are
        # what is written.
        begins_anew = not before["overwrite"] and not state.is_trained
        if run["overwrite"] and (changed or begins_anew):
            return None
        if changed:
            command = _command(before) if before["argv"] and run["argv"] else "the same options"
            raise RefusedError(
                f"{self.directory} holds another run ({'; '.join(changed)}); continue it with "
                f"{command}, or begin anew with --overwrite"
            )
        return state

    # --------------------------------------------------------------------------------------- saving

    def save(
        self,
        accelerator: Accelerator,
        model: Any,
        optimizer: Any,
        best: dict[str, Tensor],
        record: dict[str, Any],
        keep: int,
    ) -> None:
        """Write the state of all ranks, rename it when it is complete, and remove all but the
        newest `keep`. Raises OutputError; then the states before are still there.
        """
        main = accelerator.is_main_process
        work = self.directory / f"step-{record['step']:08d}.partial"
        try:
            work.mkdir(parents=True, exist_ok=True)
            save_accelerator_state(str(work), [], [], [], [], accelerator.process_index, 0)
            weights, moments = get_state_dict(model, optimizer.optimizer)
            # It returns on all ranks when all have written, or fails on all.
            save(
                {"model": weights, "optimizer": moments, "best": best}, checkpoint_id=work / _SHARDS
            )
            if main:
                write_text(work / RECORD, json.dumps(record, indent=2) + "\n")
                _publish(work)
                self._register()
                for old in self.complete()[:-keep]:
                    _remove(old)
        except (
            OSError,
            RuntimeError,
            CheckpointException,
        ) as error:  # torch writes files with its own errors
            shutil.rmtree(work, ignore_errors=True)
            raise OutputError(
                f"the state of step {record['step']} could not be saved in {self.directory} "
                f"({_reason(error)}); {self.remains()}"
            ) from error

    def save_trained(
        self, write: Callable[[Path], None], record: dict[str, Any], size: int, result_size: int
    ) -> State:
        """Write the weights of the result by `write(path)` and the record, on the main process.

        They are written next to the output, or on a shelf if the disk there is too full for these
        `size` bytes and the result's, or fails. Raises OutputError if neither can be written.
        """
        reasons = []
        for place in self._places_to_write(size, result_size):
            work = place / f"{TRAINED}.partial"
            try:
                work.mkdir(parents=True, exist_ok=True)
                write(work / WEIGHTS)
                write_text(work / RECORD, json.dumps(record, indent=2) + "\n")
                for old in self.places():  # of a run that was started over
                    _remove(old / TRAINED)
                path = _publish(work)
            except OSError as error:
                shutil.rmtree(work, ignore_errors=True)
                reasons.append(f"{place}: {error.strerror or explain(error)}")
                continue
            self._register()
            return State(path, record)
        raise OutputError(f"the trained weights could not be saved ({'; '.join(reasons)})")

    def _places_to_write(self, size: int, result_size: int) -> list[Path]:
        """Where `trained` may be written, the best first: with room for it, and on the disk of the
        output also for the result.
        """
        entry = self._register()
        places = [self.directory, *([entry] if entry else [])]
        device = self.directory.stat().st_dev

        def has_room(place: Path) -> bool:
            needed = size + (result_size if place.stat().st_dev == device else 0)
            return shutil.disk_usage(place).free >= needed

        return sorted(places, key=lambda place: not has_room(place))

    def check_space(self, size: int, result_size: int) -> None:
        """Raise OutputError unless the result fits at the output, and the trained weights there too
        or on a shelf. On the main process, while the directory is locked.
        """
        disks: dict[int, Path] = {}
        entry = self._register()
        for place in (self.directory, *([entry] if entry else [])):
            disks.setdefault(place.stat().st_dev, place)

        free = {device: shutil.disk_usage(place).free for device, place in disks.items()}
        at_output = self.directory.stat().st_dev
        fits = [
            free[device] - (result_size if device == at_output else 0) >= size for device in disks
        ]
        if entry and not self.complete():
            _remove_entry(entry)
        if free[at_output] >= result_size and any(fits):
            return
        room = ", ".join(f"{free[device]:,} are free at {place}" for device, place in disks.items())
        raise OutputError(
            f"no space left: the result takes {result_size:,} bytes, and the trained weights, "
            f"which are saved before it, {size:,}; {room}. Free some space, give another directory "
            "with -o, or another cache with HF_HOME"
        )

    def _register(self) -> Path | None:
        """Make the entry of this run on a shelf; None if no shelf can be written: then other
        outputs do not find it.
        """
        if not self.run:
            return None
        with suppress(OSError, RefusedError):
            own = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:8]
            if entry := open_shelf(f"{self.run}-{own}"):
                claim(entry, _ENTRY, self.run)
                mark(entry, _ENTRY, self.run, directory=str(self.directory))
                return entry
        return None

    def remains(self) -> str:
        """What is left of a run that stops, in words, and how to go on."""
        try:
            state = self.latest()
        except RefusedError:
            state = None
        if state is None:
            return "no state was saved before; free some space, and start the run again"
        if state.is_trained:
            anywhere = ", also with another -o," if self.run else ""
            return (
                f"nothing is lost: the trained weights are in {state.path}; "
                f"the same command{anywhere} writes the "
                "result without training again"
            )
        step = state.record["step"]
        return (
            f"step {step:,} is saved in {state.path.parent}; free some space, and the same command "
            "continues from it"
        )

    # ------------------------------------------------------------------------------------- removing

    def clear(self) -> None:
        """Remove all states, of a run that is started over."""
        self.drop_steps()
        for place in self.places():
            _remove(place / TRAINED)

    def drop_steps(self) -> None:
        """Remove the states but `trained`."""
        for path in self.complete():
            _remove(path)

    def finish(self, keep: bool) -> None:
        """Remove what a run with a complete result no longer needs; its own states stay with
        `keep`.
        """
        for place in self.places():
            _remove(place / TRAINED)
        if not keep:
            self.drop_steps()
            (self.directory / METRICS_LOG).unlink(missing_ok=True)
        for entry in self.places()[1:]:
            _remove_entry(entry)


def find_states(directory: Path, run: dict[str, Any]) -> States:
    """The states of a run: in `directory`, next to its output, or where a run with another output
    left them.
    """
    return from_main(lambda: _find_states(directory, run))


def _find_states(directory: Path, run: dict[str, Any]) -> States:
    own = States(directory, fingerprint(run["identity"]))
    if own.complete() or any((place / TRAINED).is_dir() for place in own.places()):
        return own
    for entry in _entries(own.run):
        elsewhere = _directory_of(entry)
        if elsewhere is None:
            continue
        if not elsewhere.exists() and (entry / TRAINED).is_dir():  # the disk of that output is gone
            mark(entry, _ENTRY, own.run, directory=str(directory))
            return own
        if not is_private(elsewhere):
            continue
        other = States(elsewhere, own.run)
        with suppress(RefusedError):  # damaged: it is refused for the output that it belongs to
            if other.start(run):
                return other
    return own


def _entries(run: str) -> list[Path]:
    """The entries of a run on all shelves that only this user can write to."""
    if not run:
        return []
    found = [
        entry
        for shelf in shelves()
        if is_private(shelf)
        for entry in sorted(shelf.glob(f"{run}-*"))
    ]
    return [entry for entry in found if is_private(entry)]


def _directory_of(entry: Path) -> Path | None:
    """The directory next to an output that an entry names."""
    content = read_mark(entry) or {}
    name = content.get("directory")
    return Path(name) if isinstance(name, str) and content["purpose"] == _ENTRY else None


def _remove_entry(entry: Path) -> None:
    with suppress(OSError, RefusedError):
        remove(entry, _ENTRY)


def _publish(work: Path) -> Path:
    """Make a state durable, then give it its name, which is that of `work` without `.partial`."""
    for directory in [work, *(path for path in work.rglob("*") if path.is_dir())]:
        fsync_directory(directory)
    path = work.with_suffix("")
    work.rename(path)
    fsync_directory(path.parent)
    return path


def _remove(path: Path) -> None:
    """Remove a state.

    It first loses its name, so that a run that is killed meanwhile leaves none that seems whole.
    """
    if not os.path.lexists(path):
        return
    if path.suffix != ".partial":
        path = path.rename(path.with_suffix(".partial"))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _command(record: dict[str, Any]) -> str:
    """The command that saved a state, for a shell in the current directory."""
    several = record["ranks"] > 1
    launcher = ["torchrun", "--nproc_per_node", str(record["ranks"]), "-m", "gqa.uptrain"]
    words = shell_line([*(launcher if several else ["gqa-uptrain"]), *record["argv"]])
    if record["directory"] == os.getcwd():
        return words
    return f"{shell_line(['cd', record['directory']])} && {words}"


def load(
    state: State, accelerator: Accelerator, model: Any, optimizer: Any, best: dict[str, Tensor]
) -> None:
    """Read weights, optimizer and random states, and the best weights into the tensors of `best`.

    Ranks and shards may be others than when it was saved. Raises RefusedError if the state cannot
    be read.
    """
    path = state.path
    with _readable(path):
        FileSystemReader(path / _SHARDS).read_metadata()  # `read` would log every error of it
        weights, moments = get_state_dict(model, optimizer.optimizer)
        read({"model": weights, "best": best}, checkpoint_id=path / _SHARDS)
        # Parameters without gradients have no moments
        partial = DefaultLoadPlanner(allow_partial_load=True)
        read({"optimizer": moments}, checkpoint_id=path / _SHARDS, planner=partial)
        set_state_dict(
            model, optimizer.optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        # Accelerate ignores a file that it cannot read
        if (rank := accelerator.process_index) < state.record["ranks"]:
            torch.load(path / f"random_states_{rank}.pkl", weights_only=False)
        load_accelerator_state(str(path), [], [], [], [], rank)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # of json, pickle, zip files, torch
        raise RefusedError(
            f"the state {path} cannot be read ({_reason(error)}); delete it to continue from the "
            f"one before, or delete {path.parent} to begin anew"
        ) from error


def _reason(error: BaseException) -> str:
    """What the first rank that failed says in an error of torch.distributed.checkpoint; raised if
    it has no memory.
    """
    failures = error.failures if isinstance(error, CheckpointException) else {}
    cause = next((failure for failure, _ in failures.values()), error)
    if out_of_memory(cause):
        raise cause from error
    return explain(cause)
