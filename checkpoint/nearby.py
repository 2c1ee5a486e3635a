"""Checkpoints near a path that is none: what a user who mistyped it may have meant."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from gqa.core.errors import alternatives

_SIMILAR = 0.8  # names that share less are not taken for each other
_SHOWN = 4  # directories that are named


def similar_directory(model: str) -> str | None:
    """The checkpoint whose path is nearly that of a path which does not exist.

    Each part of the path may be mistyped. The result is relative if the path is. None if there is
    no such checkpoint.
    """
    path = Path(model)
    directory = Path(path.anchor)
    for part in path.relative_to(path.anchor).parent.parts:
        if not (directory / part).is_dir():
            similar = _most_similar(part, _directories_in(directory))
            if similar is None:
                return None
            part = similar
        directory /= part

    name = path.name
    if not _is_checkpoint(directory / name):
        similar = _most_similar(name, _checkpoints_in(directory))
        if similar is None:
            return None
        name = similar
    return str(directory / name)


def _most_similar(name: str, names: list[str]) -> str | None:
    """The name that is most like another; None if none is much like it."""
    return next(iter(difflib.get_close_matches(name, names, 1, _SIMILAR)), None)


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
    return [name for name in _directories_in(directory) if _is_checkpoint(directory / name)]


def _directories_in(directory: Path) -> list[str]:
    """The names of the directories in a directory, sorted."""
    try:
        names = sorted(os.listdir(directory))
    except (OSError, ValueError):  # it does not exist, or is no path on this system
        return []
    return [name for name in names if os.path.isdir(directory / name)]


def _is_checkpoint(directory: Path) -> bool:
    return os.path.isfile(directory / "config.json")
