"""Local text files: find them, and load them with `datasets`."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import CorpusError, explain, listing
from gqa.checkpoint.hub_errors import quiet

FORMATS = {
    "text": (".txt",),
    "json": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
_COMPRESSED = (".gz", ".zst")  # of text, JSON and CSV; the others compress inside
_SKIPPED = re.compile(r"(readme|license)\.txt|cache-.*\.arrow", re.I)  # of directories and patterns
_SPLITS = re.compile(r"(?<![a-z])(train|test|valid|validation|dev|eval|heldout)(?![a-z])", re.I)
_SUFFIXES = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
ALLOWED = f"{_SUFFIXES} (text, JSON and CSV also with .gz, or with .zst where zstandard is installed)"


def file_format(path: Path) -> str | None:
    """The key of FORMATS for the suffixes of a file, or None."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in _COMPRESSED
    last = suffixes[-2:-1] if compressed else suffixes[-1:]
    kind = next((name for name, known in FORMATS.items() if last and last[0] in known), None)
    return None if compressed and kind in ("parquet", "arrow") else kind


def is_local(spec: str) -> bool:
    """Whether a spec means files, not a hub name: it exists, or it is written as a path or pattern."""
    is_path = spec.startswith(("/", ".", "~")) or spec.endswith("/") or file_format(Path(spec)) or glob.has_magic(spec)
    return bool(is_path) or os.path.exists(spec)


def find_files(spec: str) -> tuple[Path, ...]:
    """The files of one format that a file, a directory or a glob names, sorted by path.

    Directories are searched recursively, without hidden files, cards, and caches of `datasets`. Raises CorpusError if
    there is no file, or files of several formats, or a directory holds several splits.
    """
    path = Path(os.path.expanduser(spec))  # pathlib raises where there is no such user
    if os.path.isfile(path):  # pathlib raises where a name is too long
        if file_format(path) is None:
            raise CorpusError(f"{spec} has no suffix that says what it is; allowed are {ALLOWED}")
        return (path,)
    if os.path.isdir(path):
        names = glob.iglob(f"{glob.escape(str(path))}/**", recursive=True)  # skips hidden files
    elif glob.has_magic(spec):
        names = glob.iglob(str(path), recursive=True)
    else:
        raise CorpusError(f"there is no file or directory {spec}")
    files = sorted(file for file in map(Path, names) if file_format(file) and file.is_file())
    files = [file for file in files if not _SKIPPED.fullmatch(file.name)]
    if not files:
        raise CorpusError(
            f"the directory {spec} has no file with text; allowed are {ALLOWED}"
            if os.path.isdir(path)
            else f"nothing matches {spec} (files: {ALLOWED}); quote it, so that the shell leaves it as it is"
        )
    if os.path.isdir(path):
        splits = {split.lower() for file in files for split in _SPLITS.findall(str(file.relative_to(path)))}
        if len(splits) > 1:
            example = "train" if "train" in splits else min(splits)
            raise CorpusError(
                f"the directory {spec} holds several splits ({listing(splits)}); give the files of one, "
                f"for instance '{spec.rstrip('/')}/**/*{example}*'"
            )
    formats = {file_format(file): file for file in files}
    if len(formats) > 1:
        examples = listing(str(file) for file in formats.values())
        raise CorpusError(f"{spec} names files of several formats ({examples}); give a pattern that names those of one")
    return tuple(files)


def load_files(files: Sequence[Path], columns: Sequence[str]) -> Any:
    """A `datasets.IterableDataset` of files of one format, with a shard for each. A text file is one row, "text"."""
    import datasets

    kind = str(file_format(files[0]))
    options: dict[str, Any] = {}
    if kind == "text":
        options = {"sample_by": "document", "encoding": "utf-8-sig"}
    elif kind in ("csv", "tsv"):  # by default pandas reads 007 as a number and NA as missing
        features = datasets.Features({name: datasets.Value("string") for name in columns})
        options = {"sep": "\t" if kind == "tsv" else ",", "features": features, "na_filter": False}
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # they log what they raise
    names = [glob.escape(str(file.absolute())) for file in files]
    builder = "csv" if kind == "tsv" else kind
    # Else `datasets` reports every load to a server.
    counts, datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, False
    try:
        with quiet("datasets"):
            return datasets.load_dataset(builder, data_files=names, split="train", streaming=True, **options)
    except Exception as error:  # pyarrow's, pandas' and Python's
        raise file_error(error, files[0]) from error
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts


def file_error(error: BaseException, file: Path) -> CorpusError:
    """The one-line error for what a reader of `datasets` raised."""
    if isinstance(error, StopIteration):
        return CorpusError(f"{file} holds no text: it is empty or blank")
    if isinstance(error, UnicodeDecodeError):
        return CorpusError(f"{file} is not UTF-8: {explain(error)}; convert it, for instance with iconv")
    if isinstance(error, KeyError):
        return CorpusError(f"{file} lacks a field that is named: {explain(error)}")
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else explain(error)
    return CorpusError(f"{file} cannot be read: {reason}")
