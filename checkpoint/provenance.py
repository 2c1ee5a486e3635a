"""Records that say how a checkpoint was made; hashes of checkpoints."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.write import DEFAULT_JOBS
from gqa.core.errors import CorruptError
from gqa.core.json_text import read_json_file

if TYPE_CHECKING:
    from gqa.checkpoint.read import Checkpoint

PROVENANCE = "gqa_conversion.json"
UPTRAINING = "gqa_uptraining.json"
METRICS = "gqa_uptraining.jsonl"
_CODE_TOKENIZER = re.compile(
    r"\.py$|\.model$|\.tiktoken$|\.jinja$|^tekken\.json$"
    r"|^(tokenizer|vocab|merges|special_tokens|added_tokens)[^/]*$"
)


@cache
def version(package: str = "gqa") -> str:
    """Installed version of this tool, or of another `package`."""
    return importlib.metadata.version(package)


def stamp(tool: str, argv: Sequence[str]) -> dict[str, Any]:
    """First entries of every record.

    `argv`: the command's arguments; empty for a call from Python.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"tool": tool, "version": version(), "argv": portable(argv), "created": created}


def versions(*packages: str) -> dict[str, str]:
    """Installed versions by package."""
    return {name: version(name) for name in packages}


def portable(value: Any) -> Any:
    """Arguments or options, JSON-ready.

    Of paths that say where this machine has its files (absolute ones, and those that begin with
    `..` or `~`), also after `--option=`, `-o` or a comma, only names stay.
    """
    if isinstance(value, list | tuple):
        return [portable(part) for part in value]
    if not isinstance(value, str | Path):
        return value

    # `--option=PATH`, `-oPATH`, or a path; several have commas between them.
    match = re.fullmatch(r"(--[\w-]+=|-\w(?=/|\.\./|~))?(.*)", str(value), re.DOTALL)
    assert match  # whatever the text is
    option, joined = match.groups(default="")
    paths = re.split(r",(?=/|\.\./|~)", joined)
    return option + ",".join(map(_portable_path, paths))


def _portable_path(text: str) -> str:
    """The last part of a path that says where this machine has its files; else all of it."""
    path = Path(text)
    is_of_this_machine = path.is_absolute() or text.startswith("~") or ".." in path.parts[:-1]
    return path.name if is_of_this_machine else text


def describe_request(options: Any, argv: Sequence[str]) -> dict[str, Any]:
    """Arguments and options of a command for its record, without absolute paths, JSON-ready."""
    return {
        "argv": portable(argv),
        "options": {name: portable(value) for name, value in asdict(options).items()},
    }


def relative_path(directory: Path, out: Path) -> str | None:
    """The path of a directory from `out`; None if the user's name is in it, or if it is no path on
    this system.
    """
    try:
        path = Path(os.path.relpath(directory.resolve(), out.resolve()))
    except (OSError, ValueError):  # too long, or with characters that no path can have
        return None

    user = _home_name()
    names_the_user = user in path.parts and user != "root"
    return None if names_the_user else path.as_posix()


def _home_name() -> str | None:
    """The last part of the home directory, usually the user's name.

    None for a user without one (in a container).
    """
    try:
        return Path.home().name or None
    except RuntimeError:
        return None


def path_of_record(value: object) -> str | None:
    """A path that a record names; None if it cannot be one on this system: users edit records."""
    if not isinstance(value, str) or not value or "\0" in value:
        return None
    try:
        os.fsencode(value)
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    return value


def read_record(checkpoint: Checkpoint, name: str) -> Any:
    """The record `name` that a conversion or a training wrote next to the weights; None if it
    cannot be read, or is so deeply nested that it could not be written again into the record of the
    next step.
    """
    try:
        return read_json_file(checkpoint.path(name), name)
    except (OSError, CorruptError):
        return None


def object_in(record: Any, name: str) -> dict[str, Any]:
    """An object in a conversion's record, which users edit; empty if it is none."""
    part = record.get(name) if isinstance(record, dict) else None
    return part if isinstance(part, dict) else {}


def checkpoint_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of the config and of the contents of all weight, code and tokenizer files."""
    origin = checkpoint.stored or checkpoint
    code_and_tokenizer = filter(_CODE_TOKENIZER.search, origin.side_files)
    files = [origin.path(name) for name in (*origin.files, *code_and_tokenizer)]

    config = json.dumps(origin.config, sort_keys=True)
    digests = [hashlib.sha256(config.encode()).hexdigest(), *file_digests(files)]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def file_digests(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of the contents of each file."""
    with ThreadPoolExecutor(max_workers=DEFAULT_JOBS) as pool:
        return list(pool.map(_file_digest, paths))


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
