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
    "text": (".txt", ".md"),
    "json": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
_COMPRESSED = (".gz", ".zst")  # of text, JSON and CSV; the others compress inside
_CARD = re.compile(r"(readme|license)\.(md|txt)", re.IGNORECASE)
_DATASETS_FILES = re.compile(
    r"(dataset_infos?|dataset_dict|state)\.json|cache-.*\.arrow"
)  # files of `datasets` beside its data
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
    """The files of one format that a file, a directory or a glob names, each once, sorted by path.

    Directories are searched recursively, without hidden files, cards, and metadata of `datasets`. Raises CorpusError if
    there is no file, or files of several formats or splits.
    """
    path = Path(os.path.expanduser(spec))  # pathlib raises where there is no such user
    if os.path.isfile(path):  # pathlib raises where a name is too long
        if file_format(path) is None:
            raise CorpusError(f"{spec} has no suffix that says what it is; allowed are {ALLOWED}")
        return (path,)
    if os.path.isdir(path):
        files = _in_directory(path)
        if not files:
            raise CorpusError(f"the directory {spec} has no file with text; allowed are {ALLOWED}")
        splits = {split.lower() for file in files for split in _SPLITS.findall(str(file.relative_to(path)))}
        if len(splits) > 1:
            example = "train" if "train" in splits else min(splits)
            raise CorpusError(
                f"the directory {spec} holds several splits ({listing(splits)}); give the files of one, "
                f"for instance '{spec.rstrip('/')}/**/*{example}*'"
            )
    elif glob.has_magic(spec):
        matches = [Path(name) for name in glob.glob(str(path), recursive=True)]
        files = [file for match in matches for file in (_in_directory(match) if match.is_dir() else [match])]
        if not (files := [file for file in files if file_format(file) and not _DATASETS_FILES.fullmatch(file.name)]):
            raise CorpusError(
                f"nothing matches {spec} (files: {ALLOWED}); quote it, so that the shell leaves it as it is"
            )
    else:
        raise CorpusError(f"there is no file or directory {spec}")
    if any(file.suffix != ".md" for file in files):
        files = [file for file in files if not _CARD.fullmatch(file.name)] or files
    unique = {file.resolve(): file for file in sorted(files, reverse=True)}
    files = sorted(unique.values())
    formats = {file_format(file): file for file in files}
    if len(formats) > 1:
        examples = listing(str(file) for file in formats.values())
        raise CorpusError(f"{spec} names files of several formats ({examples}); give a pattern that names those of one")
    return tuple(files)


def _in_directory(directory: Path) -> list[Path]:
    files = []
    for path in directory.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if file_format(path) and not hidden and not _DATASETS_FILES.fullmatch(path.name) and path.is_file():
            files.append(path)
    return files


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
        raise file_error(error, files[0], columns) from error
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts


def file_error(error: BaseException, file: Path, columns: Sequence[str]) -> CorpusError:
    """The one-line error for what a reader of `datasets` raised."""
    if isinstance(error, StopIteration):
        return CorpusError(f"{file} holds no text: it is empty or blank")
    if isinstance(error, UnicodeDecodeError):
        return CorpusError(f"{file} is not UTF-8: {explain(error)}; convert it, for instance with iconv")
    if isinstance(error, KeyError) and file_format(file) not in ("csv", "tsv"):
        return CorpusError(f"{file} has no field {error}")
    if isinstance(error, KeyError):
        import pandas

        present = list(pandas.read_csv(file, sep="\t" if file_format(file) == "tsv" else ",", nrows=0).columns)
        return missing_column(str(file), next(name for name in columns if name not in present), present)
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else explain(error)
    return CorpusError(f"{file} cannot be read: {reason}")


def missing_column(place: str, column: str, present: Sequence[str]) -> CorpusError:
    """The error for a missing column, with those that exist."""
    return CorpusError(f"{place} has no field {column!r}; it has {listing(repr(name) for name in present) or 'none'}")
