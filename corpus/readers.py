"""Read the rows of local files: text, JSON, CSV, Parquet and Arrow.

All files of one source are of one format, and those with rows have the columns that are named. Only
these columns are read, each file by itself, so files may differ in other columns and in types. A
file without rows has no text.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from gqa.core.errors import RefusedError, TextError, explain, listing, one_line
from gqa.corpus.cache import cache_errors, datasets_cache

COMPRESSED = (".gz", ".zst")
_PEEKED = 1 << 20  # bytes of a list of JSON in which its first row is looked for
# Bytes at most of a JSON value of several lines in a file with the name of JSON Lines
_MAX_VALUE = 1 << 28
_SHOWN = 60  # characters of a line that is not JSON
_ROWS = 1024  # of Parquet and CSV that are in memory at a time

# Columns of data sets for fine-tuning
_PROMPTS = frozenset({"prompt", "instruction", "question", "input"})
_ANSWERS = frozenset({"completion", "response", "output", "answer"})

Row = dict[str, Any]


class FileFormat(NamedTuple):
    """A kind of text file; `FORMATS` lists all.

    Attributes:
        title: What errors and docs/training-text.md call it.
        suffixes: Of the names of its files.
        read: The rows of a file, with some of its columns.
        text_columns: As `columns_with_text`; None for a format without types.
        may_be_compressed: Whether files may also have the suffixes COMPRESSED.
    """

    title: str
    suffixes: tuple[str, ...]
    read: Callable[[Path, Sequence[str]], Iterator[Row]]
    text_columns: Callable[[Path, Sequence[str]], dict[str, bool]] | None = None
    may_be_compressed: bool = False


def file_format(path: Path) -> str | None:
    """The key of FORMATS for the suffixes of a file, or None."""
    name = path.name.lower()
    for key, kind in FORMATS.items():
        decompressed = _decompressed_name(path) if kind.may_be_compressed else name
        if decompressed.endswith(kind.suffixes):
            return key
    return None


def _decompressed_name(path: Path) -> str:
    """The name of a file in lower case, without a suffix of COMPRESSED."""
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def allowed_files() -> str:
    """The suffixes of all formats, as errors and docs/training-text.md state them."""
    suffixes = chain.from_iterable(kind.suffixes for kind in FORMATS.values())
    compressed = [kind.title for kind in FORMATS.values() if kind.may_be_compressed]
    titles = f"{', '.join(compressed[:-1])} and {compressed[-1]}"
    return f"{', '.join(suffixes)} ({titles} also with {' or '.join(COMPRESSED)})"


def load_files(files: Sequence[Path], columns: Sequence[str], has_chats: bool = False) -> Any:
    """A `datasets.IterableDataset` of files of one format, with a shard for each.

    A text file is one row, "text". Values are texts, with `has_chats` of any type.
    """
    import datasets

    datasets_cache()  # `datasets` puts a lock there
    # A list is split into shards
    arguments: dict[str, Any] = {
        "files": [str(file) for file in files],
        "columns": tuple(columns),
        "has_chats": has_chats,
    }
    with cache_errors():
        return datasets.IterableDataset.from_generator(read_rows, gen_kwargs=arguments)


def read_rows(
    files: Iterable[str], columns: Sequence[str], has_chats: bool = False
) -> Iterator[Row]:
    """The rows of files, with `columns` only; a text or None in each, with `has_chats` any value.

    Raises TextError, which names the file.
    """
    for file in files:
        path = Path(file)
        try:
            for row in FORMATS[str(file_format(path))].read(path, columns):
                if not has_chats:
                    for column in columns:
                        check_text(row[column], column, file, columns)
                yield row
        except RefusedError:
            raise
        except UnicodeDecodeError as error:
            raise _not_utf8(file, error) from error
        except Exception as error:  # pyarrow's, pandas', Python's
            raise TextError(
                f"{file} cannot be read: {explain(error)}; repair it, or pass other text"
            ) from error


def columns_with_text(path: Path, names: Sequence[str]) -> dict[str, bool]:
    """For each of these columns that a file has, whether it has text (True) or something else, like
    lists (False): by the schema, or of JSON by the first row.

    Empty for formats without types (text and CSV). Raises TextError.
    """
    text_columns = FORMATS[str(file_format(path))].text_columns
    if text_columns is None:
        return {}
    try:
        return text_columns(path, names)
    except RefusedError:
        raise
    except Exception as error:  # pyarrow's, Python's
        raise TextError(
            f"{path} cannot be read: {explain(error)}; repair it, or pass other text"
        ) from error


def _json_text_columns(path: Path, names: Sequence[str]) -> dict[str, bool]:
    row = _first_of_json(path)
    return {name: isinstance(row[name], str) for name in names if name in row}


def _first_of_json(path: Path) -> Row:
    """The first object, as `_read_json` reads them, but of a long list only the beginning is
    parsed; empty if there is none.
    """
    with _open(path) as stream:
        start = _without_mark(stream.read(_PEEKED)).lstrip()
    value: Any = None
    if start.startswith(b"["):
        beginning = start[1:].decode(errors="ignore").lstrip()
        with suppress(ValueError, RecursionError):
            value, _ = json.JSONDecoder(strict=False).raw_decode(beginning)
    if value is None:
        _, value = next(_json_values(path), (0, None))
    return value if isinstance(value, dict) else {}


def _parquet_text_columns(path: Path, names: Sequence[str]) -> dict[str, bool]:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with pq.ParquetFile(path) as file:
        return _text_columns_of_schema(file.schema_arrow, names)


def _arrow_text_columns(path: Path, names: Sequence[str]) -> dict[str, bool]:
    with _arrow_batches(path) as (schema, _):
        return _text_columns_of_schema(schema, names)


def _text_columns_of_schema(schema: Any, names: Sequence[str]) -> dict[str, bool]:
    return {name: _has_text(schema.field(name).type) for name in names if name in schema.names}


def _has_text(kind: Any) -> bool:
    """Whether a type of pyarrow is text."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in is_text)


def check_text(value: Any, column: str, where: str, columns: Sequence[str]) -> None:
    """Raise TextError unless a value of a column is None or a text that UTF-8 can express.

    columns: The column of text, or those of sources and targets; `column` is one of them.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise TextError(
            f"{where}: column {column!r} has type {type(value).__name__}; pass a column of text "
            f"with {_column_option(column, columns)}"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can express
            raise TextError(
                f"{where}: column {column!r} is not Unicode: {explain(error)}; remove that row"
            ) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> TextError:
    return TextError(
        f"{where} is not UTF-8: {explain(error)}; if it is text, convert it, for "
        "instance with iconv"
    )


def _check_columns(columns: Sequence[str], present: Iterable[str], file: Path) -> None:
    """Raise TextError unless a file has the columns."""
    names = list(present)
    missing = [column for column in columns if column not in names]
    if missing:
        raise missing_column(file, columns, missing[0], names)


def missing_column(
    where: object, columns: Sequence[str], name: str, present: Iterable[str]
) -> TextError:
    """The error of a source without one of the columns that are asked for.

    Args:
        where: The source or its file.
        columns: The column of text, or those of sources and targets.
        name: The one of them that is missing.
        present: The columns that it has.
    """
    present = list(present)
    names = listing(map(repr, present)) or "none"
    option = _column_option(name, columns)
    what = "text" if option == "--text-column" else "targets"
    advice = f"name the column of {what} with {option}"
    if len(columns) == 1 and _has_prompts_and_answers(present):
        advice = "join prompt and answer into one column 'text', or write chats in 'messages'"
    return TextError(f"{where} has no column {name!r}; it has {names}; {advice}")


def _has_prompts_and_answers(columns: Iterable[str]) -> bool:
    """Whether a column has prompts and another the answers: one alone would be trained on."""
    names = {column.lower() for column in columns}
    return bool(names & _PROMPTS) and bool(names & _ANSWERS)


def _column_option(name: str, columns: Sequence[str]) -> str:
    """The option that names a column, of those of text, or of sources and targets."""
    return "--text-column" if name == columns[0] else "--target-column"


def _open(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed if its suffix says that it is compressed."""
    import gzip

    import pyarrow as pa

    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"))
    if suffix == ".zst":
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return path.open("rb")


def _read_text(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """One row, whose only column is "text", as `columns` asks for."""
    with _open(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig").read()
    yield {"text": text}


def _read_json(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of JSON Lines, or of one JSON value (`_json_values`).

    A key that only some objects have is None in the others; one that none has is an error.
    """
    present = set[str]()
    rows = 0
    for number, value in _json_values(path):
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise TextError(
                f"{path} cannot be read: row {number} is a JSON {kind}; write one object per line"
            )
        rows += 1
        present.update(value)
        yield {column: value.get(column) for column in columns}
    if rows:
        _check_columns(columns, present, path)


def _json_values(path: Path) -> Iterator[tuple[int, Any]]:
    """The values in a JSON file, each with its number from 1 on: of JSON Lines that of its line.

    The first line that is not blank decides what the file is:

    - It begins with `[`: the file is one list, whose items are the values.
    - It is a whole JSON value: JSON Lines.
    - It is neither: one value of several lines (`_rows_of_value`); or JSON Lines whose first line
      is broken, if the file has the name of JSON Lines and is no JSON value, or too large for one.
    """
    with _open(path) as stream:
        lines = enumerate(stream, 1)
        not_blank = ((number, line) for number, line in lines if _without_mark(line).strip())
        start, line = next(not_blank, (0, b""))
        first = _without_mark(line)

        if first.lstrip().startswith(b"["):
            value = _parse(first + stream.read(), str(path))
            yield from enumerate(_rows_of_value(value), 1)
        elif first and not _is_json(first):
            value = _value_of_lines(first, start, stream, path)
            yield from enumerate(_rows_of_value(value), 1)
        else:
            for number, line in chain([(start, first)], lines):
                if line.strip():
                    yield number, _parse_line(line, number, path)


def _value_of_lines(first: bytes, start: int, stream: io.BufferedReader, path: Path) -> Any:
    """The one JSON value of a file whose first line, of number `start`, is no value by itself.

    `stream` has the lines after it. Raises TextError, which names the line if the file may be
    JSON Lines.
    """
    if not _has_lines(path):
        return _parse(first + stream.read(), str(path))

    # A broken first line of JSON Lines is no reason to read a large file
    rest = stream.read(_MAX_VALUE + 1)
    if len(rest) <= _MAX_VALUE:
        with suppress(TextError):
            return _parse(first + rest, str(path))
    return _parse_line(first, start, path)  # raises


def _has_lines(path: Path) -> bool:
    """Whether a JSON file has the name of JSON Lines."""
    return not _decompressed_name(path).endswith(".json")


def _without_mark(line: bytes) -> bytes:
    """A line without the byte order mark."""
    return line.removeprefix(codecs.BOM_UTF8)


def _is_json(line: bytes) -> bool:
    """Whether a line is a whole JSON value."""
    try:
        json.loads(line, strict=False)
    except UnicodeDecodeError:
        return True  # so that the error names the line
    except (ValueError, RecursionError):
        return False
    return True


def _parse_line(line: bytes, number: int, path: Path) -> Any:
    """The value of a line of JSON Lines."""
    where = f"line {number} of {path}"
    try:
        return json.loads(line.decode(), strict=False)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except RecursionError as error:
        raise _broken_json(where, error) from error
    except ValueError as error:
        shown = one_line(line.decode().strip(), _SHOWN)
        raise TextError(
            f"{where} is not JSON ('{shown}'); repair it, or pass other text"
        ) from error


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode(), strict=False)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except (ValueError, RecursionError) as error:
        raise _broken_json(where, error) from error


def _broken_json(where: str, error: Exception) -> TextError:
    """The error for JSON that cannot be parsed; its position is counted from `where`."""
    return TextError(f"{where} cannot be read: {explain(error)}; repair it, or pass other text")


def _row_of_item(item: Any) -> Any:
    """The row of an item of a list; of a text, one with the column "text"."""
    return {"text": item} if isinstance(item, str) else item


def _rows_of_value(value: Any) -> Iterable[Any]:
    """The rows of a JSON value: of a list its items (texts are the column "text"), of an object of
    lists its columns' entries, of another object itself.
    """
    if isinstance(value, list):
        return map(_row_of_item, value)

    columns = list(value.values()) if isinstance(value, dict) else []
    if columns and all(isinstance(column, list) for column in columns):
        rows = zip_longest(*columns)
        return [dict(zip(value, row, strict=True)) for row in rows]
    return [value]


def _read_csv(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """All values are text: by default pandas reads 007 as a number and NA as missing."""
    import pandas

    with _open(path) as stream:
        try:
            frames = pandas.read_csv(stream, dtype=str, na_filter=False, chunksize=_ROWS)
        except pandas.errors.EmptyDataError:
            return
        with frames:
            for frame in frames:
                # pandas then takes the first column for labels of the rows, and shifts the others
                if not isinstance(frame.index, pandas.RangeIndex):
                    raise TextError(
                        f"{path} has rows with more fields than its header has columns; repair it: "
                        "a text with commas needs quotes, and no row may end with a comma"
                    )
                _check_columns(columns, map(str, frame.columns), path)
                for values in zip(*(frame[column] for column in columns), strict=True):
                    yield dict(zip(columns, values, strict=True))


def _read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        _check_columns(columns, file.schema_arrow.names, path)
        for batch in file.iter_batches(batch_size=_ROWS, columns=list(columns)):
            yield from batch.select(columns).to_pylist()


def _read_arrow(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    with _arrow_batches(path) as (schema, batches):
        _check_columns(columns, schema.names, path)
        for batch in batches:
            part = batch.select(columns)
            part.validate(full=True)
            yield from part.to_pylist()


@contextmanager
def _arrow_batches(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the batches of a stream, as `datasets` writes it, or of a file with an index
    (Feather).
    """
    import pyarrow as pa

    with pa.OSFile(str(path)) as stream:
        try:
            reader = pa.ipc.open_stream(stream)
            batches = iter(reader)
        except (OSError, pa.ArrowInvalid):
            reader = pa.ipc.open_file(stream)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        yield reader.schema, batches


FORMATS = {
    "text": FileFormat("text", (".txt",), _read_text, may_be_compressed=True),
    "json": FileFormat(
        "JSON",
        (".jsonl", ".json", ".ndjson"),
        _read_json,
        _json_text_columns,
        may_be_compressed=True,
    ),
    "csv": FileFormat("CSV", (".csv",), _read_csv, may_be_compressed=True),
    "parquet": FileFormat("Parquet", (".parquet",), _read_parquet, _parquet_text_columns),
    "arrow": FileFormat("Arrow", (".arrow",), _read_arrow, _arrow_text_columns),
}
