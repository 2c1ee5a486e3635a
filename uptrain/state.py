"""The states of a run: saved while it trains, loaded by the same command to continue it.

`Saver` (saver.py) decides when a state is saved, `States` where, and which are kept;
state_files.py writes and reads the files of one.

`trained` is the last state: the tensors of the result that training has changed, as they will be
stored, and its record. It is written before the result, so that whatever goes wrong then, the same
command only writes the result again.

A run with another OUT finds the states by what the run is, the fingerprint of its identity: an
*entry* on a *shelf* (core/shelves.py) says where they are. A *place* is a directory that may hold
states:

    place        what is in it
    OUT-state    a directory `step-N` of each state, `trained`, and the log
    entry        a mark that names OUT-state, and `trained` if the disk of OUT-state is full
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from gqa.checkpoint.output_directory import existing_parent
from gqa.core import shelves
from gqa.core.devices import from_main, on_main
from gqa.core.errors import OutputError, RefusedError, explain
from gqa.core.run_directory import RunDirectory, differences, fingerprint, refuse_another
from gqa.uptrain.identity import CONTENT_OF_DATA, command_of
from gqa.uptrain.run_length import STEP_DIGITS
from gqa.uptrain.state_files import (
    PARTIAL,
    TRAINED,
    WEIGHTS,
    State,
    publish,
    reason_of,
    remove_state,
    says_full_disk,
    write_record,
    write_tensors,
)

METRICS_LOG = "metrics.jsonl"
_STEP = f"step-{'[0-9]' * STEP_DIGITS}"
# Every name that is replaced or removed in OUT-state, where users may have other files.
_OURS = (
    _STEP,
    f"{_STEP}{PARTIAL}",
    TRAINED,
    f"{TRAINED}{PARTIAL}",
    METRICS_LOG,
    f".{METRICS_LOG}{PARTIAL}",
)


@dataclass(frozen=True)
class States:
    """The states of one run.

    Attributes:
        directory: Next to its output, or to that of the run that it continues.
        output: Its output, which may be elsewhere.
        fingerprint: Of its identity, by which runs with another output find them; none are found
            without.
    """

    directory: Path
    output: Path
    fingerprint: str = ""

    @cached_property
    def _run_directory(self) -> RunDirectory:
        return RunDirectory(self.directory, "training states", self.fingerprint, _OURS)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create, mark and lock the directory, and remove incomplete states.

        At the end remove it if nothing of ours is left in it.

        Raises RefusedError if another run has the lock, or somebody else made files that have our
        names.
        """
        with ExitStack() as stack:
            on_main(lambda: stack.enter_context(self._locked_here()))
            yield

    @contextmanager
    def _locked_here(self) -> Iterator[None]:
        """`lock` on the main process alone."""
        busy = (
            f"another run is using {self.directory}; wait for it, or choose another directory "
            "with -o (of other options, models or text: the same run is continued wherever its "
            "result goes)"
        )
        with self._run_directory.held(busy):
            for place in self.places():
                for leftover in place.glob(f"*{PARTIAL}"):
                    if any(leftover.match(name) for name in _OURS):
                        remove_state(leftover)
            yield

    # ----------------------------------------------------------------------------- where states are

    def places(self) -> list[Path]:
        """Directories where states may be: `directory`, which need not exist, and the entries of
        this run on shelves.
        """
        return [self.directory, *self._entries()]

    def _entries(self) -> list[Path]:
        """Entries on shelves that point to `directory`."""
        entries = shelves.entries(self.fingerprint)
        return [entry for entry in entries if shelves.directory_of(entry) == self.directory]

    def step_directories(self) -> list[Path]:
        """Directories of complete states, the oldest first. Without `trained`."""
        paths = list[Path]()
        for place in self.places():
            paths += place.glob(_STEP)
        return sorted(paths, key=lambda path: path.name)

    def trained_directory(self) -> Path | None:
        """The directory of the state whose training is done; None if there is none."""
        for place in self.places():
            if (place / TRAINED).is_dir():
                return place / TRAINED
        return None

    def latest(self) -> State | None:
        """The newest state, or `trained`; None if there is none.

        Raises RefusedError if it cannot be read.
        """
        path = self.trained_directory()
        if path is None:
            path = next(reversed(self.step_directories()), None)
        return None if path is None else State.read(path)

    def state_to_continue(self, description: dict[str, Any]) -> State | None:
        """The newest state, from which a run continues; None if it begins anew.

        Without --overwrite:
            No state: None.
            A state of the same run: that state.
            Of another run, or damaged: RefusedError, which says what differs and how to continue.

        With --overwrite:
            Of another run, or damaged: None.
            Of the same run, saved with --overwrite: that state, so that a repeated command
            continues.
            Of the same run, saved without: None, unless its weights are trained.
        """
        try:
            state = self.latest()
        except RefusedError:
            if description["overwrite"]:
                return None
            raise
        if state is None:
            return None

        changed = _changes(description, state)
        if description["overwrite"]:
            if changed:
                return None
            # A repeated command continues what it has begun. And the run that failed may have
            # advised --overwrite for what is at OUT: then its trained weights are written.
            was_begun_with_overwrite = state.record["overwrite"]
            return state if was_begun_with_overwrite or state.is_trained else None

        if changed:
            before = state.record
            command = "the same options"
            if before["argv"] and description["argv"]:
                command = command_of(before)
            refuse_another(
                self.directory,
                "another run",
                changed,
                f"continue it with {command}, or start over with --overwrite",
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
        """Write the state of all ranks, rename it when it is complete, and remove older ones
        until `keep` are left. Raises OutputError; then the states before are still there.
        """
        work = self.directory / f"step-{record['step']:0{STEP_DIGITS}d}{PARTIAL}"
        try:
            work.mkdir(parents=True, exist_ok=True)
            write_tensors(work, accelerator, model, optimizer, best)

            if accelerator.is_main_process:
                write_record(work, record)
                publish(work)
                self._register()
        # torch has errors of its own for files
        except (OSError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(work, ignore_errors=True)
            advice = "Check that directory and its disk"
            if says_full_disk(error):
                advice = "Free some space"
            raise OutputError(
                f"the state of step {record['step']} could not be saved in {self.directory} "
                f"({reason_of(error)}); {self.what_is_left()}. {advice}"
            ) from error

        if accelerator.is_main_process:
            for old in self.step_directories()[:-keep]:
                # The new state is complete: an older one that cannot be removed does no harm.
                with suppress(OSError):
                    remove_state(old)

    def save_trained(
        self, write: Callable[[Path], None], record: dict[str, Any], size: int, result_size: int
    ) -> State:
        """Write the weights of the result by `write(path)` and the record, on the main process.

        They are written next to the output, or on a shelf if the disk there is too full for these
        `size` bytes and the result's, or fails. Raises OutputError if neither can be written.
        """
        reasons = []
        for place in self._places_by_room(size, result_size):
            work = place / f"{TRAINED}{PARTIAL}"
            try:
                work.mkdir(parents=True, exist_ok=True)
                write(work / WEIGHTS)
                write_record(work, record)
                path = publish(work)
            except OSError as error:
                shutil.rmtree(work, ignore_errors=True)
                reasons.append(f"{place}: {error.strerror or explain(error)}")
                continue
            self._register()  # again: before, there may have been no directory to point to
            return State(path, record)
        raise OutputError(f"the trained weights could not be saved ({'; '.join(reasons)})")

    def _places_by_room(self, size: int, result_size: int) -> list[Path]:
        """The places where `trained` may be written, those with room for it first: on the disk of
        the output also for the result. The other is tried too, as the room is an estimate.
        """
        output_disk = existing_parent(self.output).stat().st_dev
        places = self._places_with(self._register())

        def has_room(place: Path) -> bool:
            result = result_size if place.stat().st_dev == output_disk else 0
            return shutil.disk_usage(place).free >= size + result

        return sorted(places, key=lambda place: not has_room(place))

    def _places_with(self, entry: Path | None) -> list[Path]:
        """`directory`, and the entry of this run on a shelf, if there is one."""
        return [self.directory] if entry is None else [self.directory, entry]

    def check_space(self, size: int, result_size: int) -> None:
        """Raise OutputError unless the result fits at the output, and the trained weights there too
        or on a shelf. On the main process, while the directory is locked.

        The entry on a shelf that it makes to look is removed again.
        """
        place_of_output = existing_parent(self.output)
        output_disk = place_of_output.stat().st_dev
        entry = self._register()
        places = self._places_with(entry)

        # One place on each disk
        disks = dict[int, Path]()
        for place in (*places, place_of_output):
            disks.setdefault(place.stat().st_dev, place)
        # The trained weights lie in the directory or on a shelf, not at the output itself.
        disks_of_weights = {place.stat().st_dev for place in places}
        free = {disk: shutil.disk_usage(place).free for disk, place in disks.items()}
        # The entry was made only to measure its disk. Without a state nobody may find it.
        if entry is not None and not self.step_directories():
            shelves.remove_entry(entry)

        left = dict(free)  # once the result is written
        left[output_disk] -= result_size
        most_left = max(left[disk] for disk in disks_of_weights)
        if left[output_disk] >= 0 and most_left >= size:
            return
        room = ", ".join(f"{free[disk]:,} are free at {place}" for disk, place in disks.items())
        raise OutputError(
            f"no space left: the result takes {result_size:,} bytes, and the trained weights, "
            f"which are saved before it, {size:,}; {room}. Free some space, choose another "
            "directory with -o, or set HF_HOME to another cache"
        )

    def _register(self) -> Path | None:
        """Make the entry of this run on a shelf; None if there can be none: then other outputs do
        not find it.
        """
        return shelves.register(self.fingerprint, self.directory)

    def what_is_left(self) -> str:
        """What is saved of a run that stops, in words, and which command goes on from there."""
        try:
            state = self.latest()
        except RefusedError:
            state = None
        if state is None:
            return "no state was saved before"

        if state.is_trained:
            anywhere = ", also with another -o," if self.fingerprint else ""
            return (
                f"nothing is lost: the trained weights are in {state.path}; "
                f"the same command{anywhere} writes the "
                "result without training again"
            )
        step = state.record["step"]
        return (
            f"step {step:,} is saved in {state.path.parent}, and the same command continues from it"
        )

    # ------------------------------------------------------------------------------------- removing

    def clear(self) -> None:
        """Remove all states, of a run that is started over."""
        self.remove_steps()
        self._remove_trained()

    def remove_steps(self) -> None:
        """Remove the states but `trained`."""
        for path in self.step_directories():
            remove_state(path)

    def _remove_trained(self) -> None:
        for place in self.places():
            remove_state(place / TRAINED)

    def finish(self, keep_states: bool) -> None:
        """Remove what a run with a complete result no longer needs; its own states stay with
        `keep_states`.
        """
        self._remove_trained()
        if not keep_states:
            self.remove_steps()
            (self.directory / METRICS_LOG).unlink(missing_ok=True)
        for entry in self._entries():
            shelves.remove_entry(entry)


def _changes(description: dict[str, Any], state: State) -> list[str]:
    """Why a run cannot continue from a state: what differs from the run that saved it."""
    before = state.record
    changed = differences(description["identity"], before["identity"])
    if before["unreadable_text"]:  # it stopped there: the text may have been repaired since
        changed = [change for change in changed if not change.startswith(f"{CONTENT_OF_DATA}: ")]

    batch = before["batch_size"]
    processes = description["ranks"]
    if batch % processes and not state.is_trained:
        changed.append(
            f"processes: {before['ranks']} -> {processes}, which cannot share a batch of {batch}"
        )
    return changed


def states_directory(output: Path) -> Path:
    """The directory of the states of a run, next to its output."""
    return output.with_name(f"{output.name}-state")


def find_states(output: Path, description: dict[str, Any]) -> States:
    """The states of a run: next to its output, or where a run with another output left them.
    Raises RefusedError if this run cannot continue those.

    An entry on a shelf whose directory is gone, but which has the trained weights, is changed to
    point to the directory next to this output.

    Args:
        output: Of the run.
        description: By `describe_run`.
    """
    return from_main(lambda: _find_states(output, description))


def _find_states(output: Path, description: dict[str, Any]) -> States:
    directory = states_directory(output)
    here = States(directory, output, fingerprint(description["identity"]))
    if here.step_directories() or here.trained_directory():
        return here

    for entry in shelves.entries(here.fingerprint):
        elsewhere = shelves.directory_of(entry)
        if elsewhere is None:
            continue
        if not elsewhere.exists() and (entry / TRAINED).is_dir():  # the disk of that output is gone
            shelves.point_to(entry, here.fingerprint, directory)
            return here
        if not shelves.is_private(elsewhere):
            continue
        other = States(elsewhere, output, here.fingerprint)
        try:
            other.latest()
        except RefusedError:  # damaged: it is refused for the output that it belongs to
            continue
        if other.state_to_continue(description):
            return other
    return here
