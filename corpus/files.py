"""The files that a path, a directory or a pattern names."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from gqa.core.errors import TextError, listing
from gqa.corpus.readers import allowed_files, file_format

_SKIPPED = re.compile(r"(readme|license)\.txt|cache-.*\.arrow", re.I)  # of directories and patterns
# Splits, with two patterns of the words that name them in a path. The first may stand next to other
# words, as in my-train-data; the second must be alone between slashes, because others contain it.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("valid|validation", "val"),
    "dev": ("dev", "development"),
    "test": ("test", "testing"),
    "eval": ("eval", "evaluation"),
    "heldout": ("heldout", "held-out"),
}


def find_files(spec: str) -> tuple[Path, ...]:
    """The files of a supported kind that a path, a directory or a glob names, sorted by path. Empty
    files are left out.

    Directories are searched recursively, without hidden files, README and LICENSE texts, and caches
    of `datasets`. Links are followed; a file that has several paths counts once, with the first of
    them.

    Raises TextError if there is no such file, if the files have several formats, or if a
    directory holds several splits.
    """
    # By os.path: pathlib raises for `~name` if there is no such user, and for a name that is too
    # long.
    path = Path(os.path.expanduser(spec))
    is_file = os.path.isfile(path)
    is_directory = os.path.isdir(path)
    if is_file:
        paths = [path]
    elif is_directory:
        paths = [file for file in _below(path) if not file.is_dir()]
    else:
        paths = [*_matches(Path(path.anchor), path.relative_to(path.anchor).parts)]

    files = [file for file in sorted(paths) if file_format(file) and os.path.isfile(file)]
    if not is_file:
        files = [file for file in files if not _SKIPPED.fullmatch(file.name)]
    files = _without_repeats(files)
    if not files:
        raise TextError(_no_files(spec, path))

    if is_directory:
        _check_one_split(spec, [str(file.relative_to(path)) for file in files])
    _check_one_format(spec, files)

    with_content = [file for file in files if file.stat().st_size]
    if not with_content:
        raise TextError(f"{spec} has no text: all its files are empty; pass other text")
    return tuple(with_content)


def _no_files(spec: str, path: Path) -> str:
    """The message for a spec that names no file of a supported kind: why, and what to do."""
    allowed = f"allowed are {allowed_files()}"
    if os.path.isdir(path):
        return f"the directory {spec} has no file of a supported kind; {allowed}"
    if os.path.lexists(path):
        return f"{spec} is not a file of a supported kind; {allowed}; name plain text .txt"
    if glob.has_magic(spec):
        return f"no file of a supported kind matches {spec}; {allowed}"
    if spec.endswith("/"):
        return f"there is no directory {spec!r}; check the path"
    return f"there is no file {spec!r}; check the path"


def _check_one_split(directory: str, names: Sequence[str]) -> None:
    """Raise TextError if files of these names in a directory are of several splits."""
    splits = set[str]()
    for split, (words, whole_words) in _SPLITS.items():
        anywhere = rf"(?<![a-z])({words})(?![a-z])"
        alone = rf"(^|/)({whole_words})(-\d+(-of-\d+)?)?(\.|/)"
        pattern = re.compile(f"{anywhere}|{alone}", re.IGNORECASE)
        if any(map(pattern.search, names)):
            splits.add(split)
    if len(splits) > 1:
        below = f"{glob.escape(directory.rstrip('/'))}/**/*"
        raise TextError(
            f"the directory {directory} holds several splits ({listing(splits)}); pass the files "
            f"of one, like {shlex.quote(f'{below}train*')}, or all as {shlex.quote(below)}"
        )


def _check_one_format(spec: str, files: Sequence[Path]) -> None:
    """Raise TextError if files have several formats."""
    formats = {file_format(file): str(file) for file in files}
    if len(formats) > 1:
        examples = listing(formats.values())
        raise TextError(
            f"{spec} names files of several formats ({examples}); pass a pattern that names those "
            "of one"
        )


def _without_repeats(files: Sequence[Path]) -> list[Path]:
    """The files without links, symbolic or hard, to those before."""
    first = dict[tuple[int, int], Path]()
    for file in files:
        status = file.stat()
        first.setdefault((status.st_dev, status.st_ino), file)
    return list(first.values())


def _matches(directory: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """The paths that a glob names, as `glob.iglob` does, but a part that exists as it is written is
    no pattern, and `**` ends where directories contain links to themselves.
    """
    if not pattern:
        yield directory
        return

    part, *rest = pattern
    if part == "**":
        for path in [directory, *_below(directory)]:
            if path.is_dir():
                yield from _matches(path, rest)
            elif not rest:
                yield path
    elif os.path.lexists(directory / part):
        yield from _matches(directory / part, rest)
    elif glob.has_magic(part):
        for path in _entries(directory):
            is_hidden = path.name.startswith(".") and not part.startswith(".")
            if fnmatchcase(path.name, part) and not is_hidden:
                yield from _matches(path, rest)


def _below(directory: Path) -> Iterator[Path]:
    """Files and directories below a directory, in any depth, without hidden ones.

    Links to directories are followed, but each directory is searched once.
    """
    searched = {os.path.realpath(directory)}
    waiting = [directory]
    while waiting:
        for path in _entries(waiting.pop()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                real = os.path.realpath(path)
                if real in searched:
                    continue
                searched.add(real)
                waiting.append(path)
            yield path


def _entries(directory: Path) -> list[Path]:
    """The paths in a directory, sorted; none of what cannot be listed."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [directory / name for name in names]
