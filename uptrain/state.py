"""Saving and continuing a run. What is saved has its final name only when all of it is on disk.

A state is a directory `step-N`: accelerate's own files (weights, optimiser, scaler, random states of every rank) and
`trainer_state.json`, with the step, what the run was asked for, and the size and SHA-256 of each file. All ranks write
into the one directory, which several machines must share. accelerate reads random states with pickle: continue only
from states that you made.

Beside the states lie the weights with the lowest held-out loss so far, `best.bin`; each state has them too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.devices import out_of_memory
from gqa.checkpoint.errors import OutputError, RefusedError, explain, listing
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.write import fsync_directory, locked, replacing, write_text
from gqa.uptrain.options import TrainOptions, differences
from gqa.uptrain.waiting import main_first, wait_for_everyone

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

RECORD = "trainer_state.json"
BEST = "best.bin"
_SHARDS, _OPTIMIZER_SHARDS = "pytorch_model_fsdp_0", "optimizer_0"  # accelerate's names


@dataclass(frozen=True)
class States:
    """The states of one run, `directory/step-N`."""

    directory: Path
    keep_last: int

    @contextmanager
    def held(self) -> Iterator[None]:
        """The directory is there, no other run uses it meanwhile, and no half of a state is left from one that was
        killed; the main process sees to that. Raises RefusedError where another run does use it.
        """
        if not ranks().is_main_process:
            yield
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        using = f"another run is using {self.directory}; wait for it or give another output with -o"
        with locked(self.directory / "lock", using):
            for leftover in self.directory.glob("*.partial"):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            try:
                yield
            finally:
                if not any(path.stat().st_size for path in self.directory.rglob("*") if path.is_file()):
                    shutil.rmtree(self.directory, ignore_errors=True)  # refused at the first step, or all is written

    def all(self) -> list[Path]:
        """Complete states, the oldest first."""
        return sorted(record.parent for record in self.directory.glob(f"step-{'[0-9]' * 8}/{RECORD}"))

    def save(self, accelerator: Accelerator, record: dict[str, Any]) -> Path:
        """Write the state of all ranks; the older ones beyond `keep_last` go only when the new one is complete."""
        final = self.directory / f"step-{record['step']:08d}"
        work = final.with_suffix(".partial")
        with self._failing(f"the state of step {record['step']} could not be saved", "the one before", work):
            accelerator.step = 0  # micro-batches of a step are counted anew: other ranks have other shares of it
            # Not as safetensors: those hold no tied weights, which then are missing when the state is loaded.
            accelerator.save_state(str(work), safe_serialization=False)
            wait_for_everyone()
            with main_first():
                if accelerator.is_main_process:
                    if (self.directory / BEST).exists():
                        _link(self.directory / BEST, work / BEST)
                    self._publish(work, final, record)
        return final

    def _publish(self, work: Path, final: Path, record: dict[str, Any]) -> None:
        files = {str(p.relative_to(work)): _describe(p) for p in sorted(work.rglob("*")) if p.is_file()}
        write_text(work / RECORD, json.dumps(record | {"files": files}, indent=2) + "\n")
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
        """Replace the best weights of before. Raises OutputError."""
        import torch

        failing = self._failing("the best weights could not be kept", "the last state")
        with failing, replacing(self.directory / BEST) as fresh:
            torch.save(weights, fresh)

    @contextmanager
    def _failing(self, what: str, whence: str, work: Path | None = None) -> Iterator[None]:
        """What cannot be written is told with OutputError, and the half of it in `work` goes."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch writes files with its own errors
            if work:
                shutil.rmtree(work, ignore_errors=True)
            if out_of_memory(error):
                raise
            told = f"free some space and continue from {whence} with --resume"
            raise OutputError(f"{what} in {self.directory} ({explain(error)}); {told}") from None

    def best(self) -> dict[str, Tensor]:
        """What was kept last."""
        import torch

        found: dict[str, Tensor] = torch.load(self.directory / BEST, map_location="cpu", weights_only=True)
        return found

    def take_best(self, state: Path) -> None:
        """The best weights are again those of a state, or none where it has none."""
        (self.directory / BEST).unlink(missing_ok=True)
        if (state / BEST).exists():
            _link(state / BEST, self.directory / BEST)

    def continued(self, options: TrainOptions) -> TrainOptions:
        """The options with what the run that is continued made of those that are left open: how many processes share a
        step may decide how large it is. Raises RefusedError.
        """
        before = self.latest(whole=False)[1].get("options", {})
        left = {name: before.get(name) for name in ("block_size", "batch_size") if getattr(options, name) is None}
        return replace(options, **left)

    def latest(self, whole: bool = True) -> tuple[Path, dict[str, Any]]:
        """The newest state and its record; with `whole` every byte of it is checked.

        Raises RefusedError where there is none or it is damaged.
        """
        if not (found := self.all()):
            raise RefusedError(f"--resume: {self.directory} has no saved state; start without --resume")
        path = found[-1]
        older = "delete it to continue from the one before" if found[1:] else "start without --resume after deleting it"
        try:
            record: dict[str, Any] = json.loads((path / RECORD).read_text())
            files = record["files"].items() if whole else ()
            damaged = [name for name, known in files if not (path / name).is_file() or _describe(path / name) != known]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(f"the state {path} cannot be read ({explain(error)}); {older}") from None
        if damaged:
            raise RefusedError(f"the state {path} is damaged: {listing(damaged)} not as saved; {older}")
        return path, record


def load(path: Path, accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Weights, optimiser and random states as they were, also of shards where the run has none. Raises RefusedError
    where the run has shards and the state none.
    """
    from accelerate.checkpointing import load_accelerator_state
    from accelerate.utils import DistributedType
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as read

    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded and not (path / _SHARDS).is_dir():
        raise RefusedError(f"{path} was saved without FSDP and this run is with it; continue it without")
    if sharded or not (path / _SHARDS).is_dir():
        accelerator.load_state(str(path))
    else:
        weights, moments = get_state_dict(model, optimizer.optimizer)
        read({"model": weights}, checkpoint_id=path / _SHARDS)
        read({"optimizer": moments}, checkpoint_id=path / _OPTIMIZER_SHARDS)
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
    """The same file under a second name, or a copy of it where the system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _describe(path: Path) -> list[Any]:
    """[bytes, SHA-256], and the file is durable afterwards."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return [path.stat().st_size, digest]
