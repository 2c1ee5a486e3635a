"""Local files of text: which ones a path names, and the documents in each.

Text, JSON and CSV are read as they are, by Python's own readers: loaders that guess types turn a text that looks like a
date, a number or `NA` into something else, and cannot name the line that is broken. Parquet and Arrow state their types
and are read by pyarrow, as `datasets` does. All but whole text files and JSON arrays are streamed.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gqa.checkpoint.errors import CorpusError, explain, listing
from gqa.corpus.document import Document, document, missing_field

FORMATS = {
    "text": (".txt", ".md"),
    "json": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
_COMPRESSED = (".gz", ".zst")  # of text, JSON and CSV; the others compress inside
_CARD = re.compile(r"(readme|license)\.(md|txt)", re.IGNORECASE)
_OF_DATASETS = re.compile(r"(dataset_infos?|dataset_dict|state)\.json|cache-.*\.arrow")  # what it keeps beside its data
_SPLITS = re.compile(r"(?<![a-z])(train|test|valid|validation|dev|eval|heldout)(?![a-z])", re.I)
_BOM = b"\xef\xbb\xbf"
_SUFFIXES = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
ALLOWED = f"{_SUFFIXES} (text, JSON and CSV also with .gz or .zst)"


def file_format(path: Path) -> str | None:
    """The key of FORMATS that a file's name says, None for any other file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in _COMPRESSED
    last = suffixes[-2:-1] if packed else suffixes[-1:]
    found = next((name for name, known in FORMATS.items() if last and last[0] in known), None)
    return None if packed and found in ("parquet", "arrow") else found


def is_local(spec: str) -> bool:
    """Whether a spec means files rather than a name at the hub: it is there, or it is written as a path or pattern."""
    written = spec.startswith(("/", ".", "~")) or spec.endswith("/") or file_format(Path(spec)) or glob.has_magic(spec)
    return bool(written) or os.path.exists(spec)


def find_files(spec: str) -> tuple[Path, ...]:
    """The files of one format that a file, a directory or a glob names, each once, in the order of their paths.

    Directories are searched through; hidden files, cards and what `datasets` keeps beside its data are left out.
    Raises CorpusError where there are none, several formats, or several splits.
    """
    path = Path(os.path.expanduser(spec))  # pathlib raises where there is no such user
    if os.path.isfile(path):  # pathlib raises where a name is too long
        if file_format(path) is None:
            raise CorpusError(f"{spec} has no suffix that says what it is; allowed are {ALLOWED}")
        return (path,)
    if os.path.isdir(path):
        found = _in_directory(path)
        if not found:
            raise CorpusError(f"the directory {spec} has no file with text; allowed are {ALLOWED}")
        splits = {split.lower() for file in found for split in _SPLITS.findall(str(file.relative_to(path)))}
        if len(splits) > 1:
            wanted = "train" if "train" in splits else min(splits)
            raise CorpusError(
                f"the directory {spec} holds several splits ({listing(splits)}); give the files of one, "
                f"for instance '{spec.rstrip('/')}/**/*{wanted}*'"
            )
    elif glob.has_magic(spec):
        matches = [Path(name) for name in glob.glob(str(path), recursive=True)]
        found = [file for match in matches for file in (_in_directory(match) if match.is_dir() else [match])]
        if not (found := [file for file in found if file_format(file) and not _OF_DATASETS.fullmatch(file.name)]):
            raise CorpusError(
                f"nothing matches {spec} (files: {ALLOWED}); quote it, so that the shell leaves it as it is"
            )
    else:
        raise CorpusError(f"there is no file or directory {spec}")
    if any(file.suffix != ".md" for file in found):
        found = [file for file in found if not _CARD.fullmatch(file.name)] or found
    unique = {file.resolve(): file for file in sorted(found, reverse=True)}
    files = sorted(unique.values())
    formats = {file_format(file): file for file in files}
    if len(formats) > 1:
        examples = listing(str(file) for file in formats.values())
        raise CorpusError(f"{spec} names files of several formats ({examples}); give a pattern that names those of one")
    return tuple(files)


def _in_directory(directory: Path) -> list[Path]:
    found = []
    for path in directory.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if file_format(path) and not hidden and not _OF_DATASETS.fullmatch(path.name) and path.is_file():
            found.append(path)
    return found


def read_file(path: Path, field: str, separator: str | None = None) -> Iterator[Document]:
    """The documents of one file in their order. Raises CorpusError that names the file and the place in it."""
    kind = file_format(path)
    try:
        if kind == "text":
            yield from _read_text(path, separator)
        elif kind == "json":
            yield from _read_json(path, field)
        elif kind == "csv":
            yield from _read_csv(path, field)
        else:
            yield from _read_columns(path, field)
    except OSError as error:  # also of compressed streams that are cut short or corrupt
        # The system's own words where there is a number: Arrow wraps them in its own.
        reason = os.strerror(error.errno) if error.errno else explain(error)
        raise CorpusError(f"{path} cannot be read: {reason}") from None


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """The bytes of a file, uncompressed, from after a byte order mark on, and how long that is."""
    import pyarrow  # type: ignore[import-untyped]

    with pyarrow.input_stream(str(path)) as raw, io.BufferedReader(raw) as stream:
        marked = stream.peek(3)[:3] == _BOM
        yield stream, len(stream.read(3)) if marked else 0


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8: byte {offset + error.start} is {data[error.start]:#04x}; convert it, for instance "
            f"with iconv"
        ) from None


def _read_text(path: Path, separator: str | None) -> Iterator[Document]:
    """The whole file, or its pieces between separators without the line breaks next to those."""
    with _open(path) as (stream, offset):
        data = stream.read()
    if separator is None:
        text = _decode(data, path, offset)
        if text.strip():
            yield Document(str(path), text)
        return
    mark, start, number = separator.encode(), 0, 0
    while start <= len(data):
        end = data.find(mark, start)
        end = len(data) if end < 0 else end
        text = _decode(data[start:end], path, offset + start).strip("\r\n")
        if text.strip():
            number += 1
            yield Document(f"{path}:{number}", text)
        start = end + len(mark)


def _lines(path: Path) -> Iterator[str]:
    with _open(path) as (stream, offset):
        for line in stream:
            yield _decode(line, path, offset)
            offset += len(line)


def _read_json(path: Path, field: str) -> Iterator[Document]:
    """One object a line, or one array of objects."""
    first = True
    for number, line in enumerate(_lines(path), 1):
        if first and line.lstrip().startswith("["):
            rows = _parse("".join(_lines(path)), path, 1)
            places = ((f"{path}:{n}", row) for n, row in enumerate(rows, 1))
            yield from (found for place, row in places if (found := _json_document(place, row, field)))
            return
        first = first and not line.strip()
        if line.strip() and (found := _json_document(f"{path}:{number}", _parse(line.rstrip(), path, number), field)):
            yield found


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise CorpusError(
            f"{path}:{line + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}; wanted is one object a "
            "line, or one array of objects"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}:{line}: not JSON that can be read: {explain(error)}") from None


def _json_document(place: str, row: Any, field: str) -> Document | None:
    if not isinstance(row, dict):
        raise CorpusError(f"{place}: a JSON object with the field {field!r} is wanted, this is {type(row).__name__}")
    if field not in row:
        raise missing_field(place, field, row)
    return document(place, row[field], field)


def _read_csv(path: Path, field: str) -> Iterator[Document]:
    """The rows below a header."""
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long document
    rows = csv.reader(_lines(path), delimiter="\t" if ".tsv" in path.name.lower() else ",", strict=True)
    try:
        header = next(filter(None, rows), [])  # blank lines are no rows
        if header and field not in header:
            raise missing_field(str(path), field, header)
        for row in rows:
            if row and len(row) != len(header):
                raise CorpusError(f"{path}:{rows.line_num}: {len(row)} values under a header of {len(header)}")
            if row and (found := document(f"{path}:{rows.line_num}", row[header.index(field)], field)):
                yield found
    except csv.Error as error:
        raise CorpusError(f"{path}:{rows.line_num}: not CSV: {explain(error)}") from None


def _read_columns(path: Path, field: str) -> Iterator[Document]:
    import pyarrow

    number = 0
    try:
        for batch in _batches(path, field):
            column = batch.column(field)
            column.validate(full=True)  # what is memory-mapped is not checked when it is opened
            for value in column:
                number += 1
                if found := document(f"{path}:{number}", value.as_py(), field):
                    yield found
    except pyarrow.ArrowException as error:
        kind = path.suffix[1:].lower()
        raise CorpusError(f"{path} is no {kind} file or is damaged: {explain(error)}; make or fetch it again") from None


def _batches(path: Path, field: str) -> Iterator[Any]:
    """Record batches of some thousand rows that have the field, of Parquet nothing else."""
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    parquet = path.suffix.lower() == ".parquet"
    with pyarrow.memory_map(str(path)) as raw:
        stream: Any
        try:
            stream = pyarrow.parquet.ParquetFile(raw) if parquet else pyarrow.ipc.open_stream(raw)
        except pyarrow.ArrowInvalid:
            if parquet:
                raise
            stream = pyarrow.ipc.open_file(raw)  # the file format, which Feather uses, rather than the stream
        names = (stream.schema_arrow if parquet else stream.schema).names
        if field not in names:
            raise missing_field(str(path), field, names)
        if parquet:
            yield from stream.iter_batches(1024, columns=[field])
        elif isinstance(stream, pyarrow.ipc.RecordBatchFileReader):
            yield from (stream.get_batch(i) for i in range(stream.num_record_batches))
        else:
            yield from stream
