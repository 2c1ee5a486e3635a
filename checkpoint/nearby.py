"""Checkpoints near a path that is none: what a user who mistyped it may have meant."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from gqa.core.errors import alternatives

_SIMILAR = 0.8  # names that share less are not taken for each other
_SHOWN = 4  # directories that are named


def similar_directory(model: str) -> str | None:
    """The checkpoint beside a path that does not exist whose name is nearly that of the path.

    It is written as the user wrote the path. None if there is no such checkpoint.
    """
    path = Path(model)
    names = _checkpoints_in(path.parent)
    similar = difflib.get_close_matches(path.name, names, 1, _SIMILAR)
    return str(path.with_name(similar[0])) if similar else None


def checkpoints_hint(directory: Path) -> str:
    """For an error about a directory without config.json: `did you mean DIRECTORY/CHECKPOINT?`.

    Empty if no directory in it has a config.json.
    """
    names = _checkpoints_in(directory)
    if not names:
        return ""
    shown = [str(directory / name) for name in names[:_SHOWN]]
    return f"did you mean {alternatives(shown)}?"


def _checkpoints_in(directory: Path) -> list[str]:
    """The names of the directories in a directory that have a config.json, sorted."""
    try:
        names = sorted(os.listdir(directory))
    except (OSError, ValueError):  # it does not exist, or is no path on this system
        return []
    return [name for name in names if os.path.isfile(directory / name / "config.json")]
