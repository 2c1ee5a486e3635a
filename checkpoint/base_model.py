"""The base model of a converted checkpoint, by the conversion's record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import PROVENANCE, object_in, path_of_record, read_record
from gqa.checkpoint.read import Checkpoint


def find_local_base(checkpoint: Checkpoint, base_record: Mapping[str, Any]) -> str | None:
    """The directory of the base model that a conversion's record names: by its path relative to the
    checkpoint, else beside the checkpoint by its name.

    None if there is none, or if the base model came from the hub.

    Args:
        checkpoint: The converted model.
        base_record: The part of the conversion's record that names the base model.
    """
    # A hub model's record has no path; a directory of its name may be another model.
    if "path" not in base_record:
        return None

    name = base_record.get("model")
    directory = checkpoint.directory.resolve()

    candidates: list[Path] = []
    if path := path_of_record(base_record["path"]):
        candidates.append(directory / path)
    if path_of_record(name) and Path(str(name)).name == name:
        candidates.append(directory.with_name(str(name)))

    for candidate in candidates:
        if os.path.isdir(candidate):
            return str(candidate.resolve())
    return None


def is_base_model(
    candidate: Checkpoint, checkpoint: Checkpoint, base_record: Mapping[str, Any]
) -> bool:
    """Whether a model is the base model of a checkpoint: by its place, or by its name where that
    place is empty.
    """
    if local := find_local_base(checkpoint, base_record):
        return Path(local) == candidate.directory.resolve()
    return bool(base_record.get("model") == (candidate.hub_id or candidate.name))


def distills_from_base(checkpoint: Checkpoint, teacher: Checkpoint | None) -> bool:
    """Whether the teacher is the model from which the checkpoint was converted, by its record."""
    if teacher is None:
        return False
    base_record = object_in(read_record(checkpoint, PROVENANCE), "source")
    return bool(base_record) and is_base_model(teacher, checkpoint, base_record)


def at_commit(checkpoint: Checkpoint) -> str:
    """The commit of a checkpoint, as the end of its name; empty if it is not from the hub."""
    return f" at commit {checkpoint.revision[:12]}" if checkpoint.revision else ""
