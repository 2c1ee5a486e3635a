"""The base model of a converted checkpoint, by the conversion's record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gqa.checkpoint.hub import open_model
from gqa.checkpoint.provenance import PROVENANCE, path_of_record, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.core.errors import RefusedError, explain


def find_base(checkpoint: Checkpoint, source: dict[str, Any]) -> tuple[Checkpoint | None, str]:
    """The base model at the commit that was converted.

    A local base model is looked up by its path relative to the result, then beside the result.

    Args:
        checkpoint: The converted model.
        source: The part of the conversion's record that names the base model.

    Returns:
        The base model or None; and its name in words, or why there is none.
    """
    name = source.get("model")
    if not name or not isinstance(name, str):
        return None, f"{checkpoint.name} has no {PROVENANCE} that names its base model"

    local = find_local_base(checkpoint, source)
    if local is None and "path" in source:  # it was local at the conversion
        return None, f"the base model {name} was moved or deleted; pass it with --teacher"

    location = local or name
    revision = None if local else source.get("revision")
    try:
        base = open_model(location, revision)
    except (RefusedError, OSError) as error:
        return None, f"the base model {name} cannot be read: {explain(error)}"
    text = f"{location}{at_commit(base)}, the base model (--teacher none: train on text alone)"
    return base, text


def find_local_base(checkpoint: Checkpoint, source: Mapping[str, Any]) -> str | None:
    """The directory of the base model that the `source` of a conversion's record names.

    None if there is none.
    """
    name = source.get("model")
    directory = checkpoint.directory.resolve()

    candidates: list[Path] = []
    if path := path_of_record(source.get("path")):
        candidates.append(directory / path)
    if path_of_record(name) and Path(str(name)).name == name:
        candidates.append(directory.with_name(str(name)))

    for candidate in candidates:
        if os.path.isdir(candidate):
            return str(candidate.resolve())
    return None


def is_base_model(candidate: Checkpoint, checkpoint: Checkpoint, source: Mapping[str, Any]) -> bool:
    """Whether a model is the base model of a checkpoint: by its place, or by its name where that
    place is empty.
    """
    if local := find_local_base(checkpoint, source):
        return Path(local) == candidate.directory.resolve()
    return bool(source.get("model") == (candidate.hub_id or candidate.name))


def distills_from_base(checkpoint: Checkpoint, teacher: Checkpoint | None) -> bool:
    """Whether the teacher is the model from which the checkpoint was converted, by its record."""
    if teacher is None:
        return False
    source = object_in(read_record(checkpoint, PROVENANCE), "source")
    return bool(source) and is_base_model(teacher, checkpoint, source)


def object_in(record: Any, name: str) -> dict[str, Any]:
    """An object in a conversion's record, which users edit; empty if it is none."""
    part = record.get(name) if isinstance(record, dict) else None
    return part if isinstance(part, dict) else {}


def at_commit(checkpoint: Checkpoint) -> str:
    """The commit of a checkpoint, as the end of its name; empty if it is not from the hub."""
    return f" at commit {checkpoint.revision[:12]}" if checkpoint.revision else ""
