"""Saving and continuing a run. What is saved has its final name only when all of it is on disk.

A state is a directory `step-N`: accelerate's own files (weights, optimiser, scaler, random states of every rank) and
`trainer_state.json`, with the step, what the run was asked for, and the size and SHA-256 of each file. accelerate reads
random states with pickle: continue only from states that you made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.convert.errors import OutputError, RefusedError, listing
from gqa.convert.writer import fsync_directory, write_text
from gqa.uptrain.options import differences

if TYPE_CHECKING:
    from accelerate import Accelerator

RECORD = "trainer_state.json"


@dataclass(frozen=True)
class States:
    """The states of one run, `directory/step-N`."""

    directory: Path
    keep_last: int

    def all(self) -> list[Path]:
        """Complete states, the oldest first."""
        found = [p for p in self.directory.glob("step-*") if p.suffix != ".partial" and (p / RECORD).is_file()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def save(self, accelerator: Accelerator, record: dict[str, Any]) -> Path:
        """Write the state of all ranks; the older ones beyond `keep_last` go only when the new one is complete."""
        final = self.directory / f"step-{record['step']:08d}"
        work = final.with_suffix(".partial")
        if accelerator.is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob("*.partial"):
                shutil.rmtree(leftover)
        accelerator.wait_for_everyone()
        try:
            # Not as safetensors: those hold no tied weights, which then are missing when the state is loaded.
            accelerator.save_state(str(work), safe_serialization=False)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(work, ignore_errors=True)
            raise OutputError(
                f"the state could not be saved in {self.directory}: {error}; nothing else is lost"
            ) from None
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            files = {str(p.relative_to(work)): _describe(p) for p in sorted(work.rglob("*")) if p.is_file()}
            write_text(work / RECORD, json.dumps(record | {"files": files}, indent=2) + "\n")
            for directory in [work, *(p for p in work.rglob("*") if p.is_dir())]:
                fsync_directory(directory)
            shutil.rmtree(final, ignore_errors=True)
            work.rename(final)
            fsync_directory(self.directory)
            for old in self.all()[: -self.keep_last]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()
        return final

    def latest(self) -> tuple[Path, dict[str, Any]]:
        """The newest state and its record, checked. Raises RefusedError where there is none or it is damaged."""
        found = self.all()
        if not found:
            raise RefusedError(f"--resume: {self.directory} has no saved state; start without --resume")
        path = found[-1]
        try:
            record: dict[str, Any] = json.loads((path / RECORD).read_text())
            damaged = [name for name, known in record["files"].items() if _describe(path / name) != known]
        except (OSError, ValueError, KeyError) as error:
            raise RefusedError(
                f"the state {path} cannot be read ({error}); delete it to continue from an older one"
            ) from None
        if damaged:
            raise RefusedError(
                f"the state {path} is damaged: {listing(damaged)} changed since it was saved; delete it to continue "
                "from an older one"
            )
        return path, record


def check_same_run(path: Path, record: dict[str, Any], options: dict[str, Any], data: str) -> None:
    """Raise RefusedError where a state belongs to another run, with every difference."""
    changed = differences(json.loads(json.dumps(options, default=str)), record["options"])
    if record["data"] != data:
        changed.append("the content of the data")
    if changed:
        raise RefusedError(f"{path} was saved by another run: {'; '.join(changed)}; start without --resume, or as then")


def _describe(path: Path) -> list[Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
    return [path.stat().st_size, digest]
