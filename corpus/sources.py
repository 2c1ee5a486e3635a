"""Sources of text: the built-in corpus, local files, or a data set of the Hugging Face hub.

    stdlib:train   stdlib:heldout                          the source of Python's standard library
    notes.txt   data/   'data/**/*.jsonl.gz'               files of one format (`FORMATS`)
    org/name   org/name:config   org/name:config:split     a data set of the hub

`datasets` reads them all; HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean
there.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqa.checkpoint.hub import cache_error, error_chain, hub_reason, local_cause, quiet
from gqa.checkpoint.provenance import file_digests
from gqa.core.errors import CacheError, CorpusError, explain, listing
from gqa.core.options import read_amount
from gqa.corpus.cache import datasets_cache
from gqa.corpus.chats import CHAT_COLUMNS, Chat, chat_text, spoken_text
from gqa.corpus.readers import FORMATS, check_text, columns_with_text, file_format, load_files
from gqa.corpus.stdlib import stdlib_texts

if TYPE_CHECKING:  # it imports numpy, for which `--help` does not wait
    from gqa.corpus.passages import Passages

_NO_DATA = (
    "no data is named; give a file, a directory, a pattern, a data set of the hub or stdlib:train"
)
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?::([^:]+))?(?::([^:]+))?")
_ROWS = 64  # read at a time
# Of a pair or a chat in held-out passages, from which on it is left out
_WHOLE_SHARE = 0.5
_SKIPPED = re.compile(r"(readme|license)\.txt|cache-.*\.arrow", re.I)  # of directories and patterns
_SPLITS = re.compile(r"(?<![a-z])(train|test|valid|validation|dev|eval|heldout)(?![a-z])")
_SUFFIXES = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
ALLOWED = f"{_SUFFIXES} (text, JSON and CSV also with .gz or .zst)"


def is_self(spec: str) -> bool:
    """Whether a spec means self-generated text: `self`, `self:1M`, `self:plain`."""
    return spec.split(":")[0] == "self"


def parse_self(spec: str) -> tuple[int | None, bool]:
    """Tokens of a spec like `self:plain:1M`, if given, and whether it is plain: without repeats.

    Raises CorpusError.
    """
    match = re.fullmatch("self(:plain)?(?::(.+))?", spec)
    tokens = read_amount(match[2]) if match and match[2] else None
    if not match or (match[2] and not tokens):
        raise CorpusError(
            f"{spec} is not a source of text; give self, self:1M for a number of tokens, "
            "or self:plain (self:plain:1M) "
            "for text without repeats"
        )
    return tokens, bool(match[1])


# (columns, whether they are chats) -> a data set of `datasets`
Load = Callable[[Sequence[str], bool], Any]


def _no_chats() -> None:
    """The `chat_column` of data that has no columns."""


@dataclass(frozen=True, eq=False)
class Exclusion:
    """Which parts of documents are left out of a source: passages of held-out text.

    Text is cut; of pairs and chats those are left out of which at least half is in passages.

    copies: digests of documents that stay as they are, because whoever reads the source leaves them
    out by digest.
    """

    passages: Passages
    copies: frozenset[bytes] = frozenset()

    @property
    def identity(self) -> str:
        copies = hashlib.sha256(b"".join(sorted(self.copies))).hexdigest()
        return f"{self.passages.identity} {copies}"

    def remainder(self, row: tuple[str, ...]) -> list[tuple[str, ...]]:
        """What is left of a document: pieces, each a document of its own."""
        if row_digest(*row) in self.copies:
            return [row]
        if is_divisible(row):
            return [(piece,) for piece in self.passages.remove_from(row[0])]
        return [] if self.passages.share(searched_text(row)) >= _WHOLE_SHARE else [row]


def is_divisible(row: tuple[str, ...]) -> bool:
    """Whether a part of a document is a document too: of plain text, not of pairs and chats."""
    return len(row) == 1 and not isinstance(row, Chat)


def searched_text(row: tuple[str, ...]) -> str:
    """The text of a document in which passages of other text are looked for."""
    return spoken_text(row[0]) if isinstance(row, Chat) else " ".join(row)


@dataclass(frozen=True)
class Source:
    """Documents that can be read repeatedly, always in the same order: texts, pairs of a source and
    a target, or chats.

    `load` gives the data set of `datasets`, from files the named columns alone. `fields`: the
    columns that are asked for: the text, or the source and the target. `chat_column`: the column of
    chats, if documents are chats; it may read the first row, so it is called when documents are.
    `files`: shards, if known. `separator`: between the documents of a text file. `takes`: only
    documents whose digest it accepts. `fraction`: of `part`. `excluded`: of `excluding`.
    """

    spec: str
    load: Load
    fields: tuple[str, ...] = ("text",)
    chat_column: Callable[[], str | None] = _no_chats
    files: tuple[Path, ...] = ()
    separator: str | None = None
    takes: Callable[[bytes], bool] | None = None
    fraction: float | None = None
    excluded: Exclusion | None = None

    @property
    def chats(self) -> bool:
        """Whether documents are chats. Raises CorpusError."""
        return self.chat_column() is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have the documents. Raises CorpusError."""
        column = self.chat_column()
        return self.fields if column is None else (column,)

    def _load(self) -> Any:
        return self.load(self.columns, self.chats)

    def identify(self) -> str:
        """What determines the documents: hashes of the content, and how it is read.

        Raises CorpusError.
        """
        from gqa.core.compat import fingerprint

        content = (
            [file_format(self.files[0]), *file_digests(self.files)]
            if self.files
            else fingerprint(self._load())
        )
        identity = f"{content} {self.columns} {self.fraction}"
        identity += " chats" if self.chats else ""
        identity += f" {self.separator!r}" if self.separator else ""
        return identity + (f" without {self.excluded.identity}" if self.excluded else "")

    def texts(self) -> Iterator[str]:
        """Documents in the order of the source, none of them blank; of chats their `chat_text`.

        Raises CorpusError as `rows` does.
        """
        return (row[0] for row in self.rows())

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The texts of `columns`, in the order of the source, none of them blank; chats as `Chat`.

        Raises CorpusError for what cannot be read and for a source without any text.
        """
        rows = self.rows_if_any()
        if (first := next(rows, None)) is None:
            raise CorpusError(f"{self.spec} holds no text: it is empty or blank, or held out")
        yield first
        yield from rows

    def rows_if_any(self) -> Iterator[tuple[str, ...]]:
        """As `rows`, of a source that may have no text."""
        columns = self.columns
        document = Chat if self.chats else tuple
        for row in self.read(self.dataset()):
            yield document(row[name] for name in columns)

    def dataset(self) -> Any:
        """A `datasets.IterableDataset` of `columns` alone, of rows that have text in each.

        Raises CorpusError.
        """
        data = self._load()
        if hasattr(data, "to_iterable_dataset"):
            data = data.to_iterable_dataset()
        columns = list(self.columns)
        present = data.column_names
        if present is not None and (missing := [name for name in columns if name not in present]):
            names = listing(map(repr, present)) or "none"
            raise CorpusError(f"{self.spec} has no field {missing[0]!r}; it has {names}")
        data = data.select_columns(columns)
        return data.map(self._texts, batched=True, batch_size=_ROWS, remove_columns=columns)

    def read(self, data: Any) -> Iterator[dict[str, Any]]:
        """The rows of a data set made from `dataset()`. Raises CorpusError."""
        try:
            yield from data
        except (CorpusError, CacheError):
            raise
        except Exception as error:  # the readers of `datasets` raise many kinds
            raise hub_error(error, self.spec) from error

    def _texts(self, batch: dict[str, list[Any]]) -> dict[str, list[str]]:
        """The rows of a batch with text in all columns, cut at the separator."""
        columns = self.columns
        chats = self.chats
        rows = list[tuple[str, ...]]()
        for values in zip(*(batch[column] for column in columns), strict=True):
            row = Chat((chat_text(values[0], columns[0], self.spec),)) if chats else values
            for column, value in zip(columns, row, strict=True):
                check_text(value, column, self.spec)
            parts = [row]
            if self.separator is not None:
                parts = [(text.strip("\n"),) for text in row[0].split(self.separator)]
            rows += [part for part in parts if all(value and value.strip() for value in part)]
        if self.takes is not None:
            rows = [row for row in rows if self.takes(row_digest(*row))]
        if self.excluded is not None:
            rows = [part for row in rows for part in self.excluded.remainder(row)]
        return {column: [row[number] for row in rows] for number, column in enumerate(columns)}

    def shard(self, count: int, index: int) -> Source:
        """The source with every `count`th shard (file) from `index` on only."""
        if count == 1:
            return self
        files = self.files[index::count]

        def load(columns: Sequence[str], chats: bool) -> Any:
            return self.load(columns, chats).shard(count, index, contiguous=False)

        return replace(self, load=load, files=files)

    @property
    def n_shards(self) -> int:
        return len(self.files) or getattr(self._load(), "num_shards", 1)  # of a stream

    def part(self, fraction: float) -> Source:
        """The held-out documents: about that fraction, those with the lowest hashes."""
        return replace(
            self, takes=partial(in_lowest_fraction, fraction=fraction), fraction=fraction
        )

    def excluding(self, excluded: Exclusion) -> Source:
        """The documents without passages of held-out text."""
        return replace(self, excluded=excluded)

    def without(self, heldout: Callable[[bytes], bool]) -> Source:
        """The documents whose digests are not held out."""
        return replace(self, takes=lambda digest: not heldout(digest))


def parse_source(
    spec: str,
    *,
    field: str = "text",
    target_field: str | None = None,
    split: str = "train",
    streaming: bool = False,
    separator: str | None = None,
) -> Source:
    """The source of a spec. Nothing of a hub data set is fetched before its documents are read.

    `field` holds the text in JSON, CSV, Parquet, Arrow and hub data sets; with `target_field` rows
    are pairs of both. Documents are chats if `field` is one of CHAT_COLUMNS and has lists, or if
    the data has such a column and none of the name `field`. `split` is that of a hub data set whose
    spec names none. `separator` cuts text files into documents; without it each file is one. Raises
    CorpusError.
    """
    if not spec.strip():
        raise CorpusError(_NO_DATA)
    if target_field == field:
        raise CorpusError(f"--field and --target-field of {spec} are the same column; name two")
    columns = (field, target_field) if target_field else (field,)
    separator = separator and separator.replace("\\n", "\n")  # typed in a shell
    if spec == "stdlib" or spec.startswith("stdlib:"):
        if (side := spec.removeprefix("stdlib:")) not in ("train", "heldout"):
            raise CorpusError(f"there is no {spec}; allowed are stdlib:train and stdlib:heldout")
        plain = True
        source = Source(spec, partial(_load_stdlib, side))
    elif (
        os.path.exists(spec)  # else it is written as a path or a pattern
        or spec.startswith(("/", ".", "~"))
        or spec.endswith("/")
        or file_format(Path(spec))
        or glob.has_magic(spec)
    ):
        files = find_files(spec)
        plain = file_format(files[0]) == "text"
        columns = ("text",) if plain and not target_field else columns
        chat_column = cache(partial(_chat_column_of_files, files, columns))
        source = Source(
            spec,
            partial(load_files, files),
            columns,
            chat_column,
            files,
            separator if plain else None,
        )
    elif match := _HUB_NAME.fullmatch(spec):
        name, config, named_split = match.groups()
        # Cached: a branch may move while its files are read.
        load = cache(partial(load_hub, name, config, named_split or split, streaming))
        chat_column = cache(partial(_chat_column_of_data, name, load, columns))
        plain = False
        source = Source(spec, lambda columns, chats: load(), columns, chat_column)
    else:
        raise CorpusError(
            f"there is no file or directory {spec}, and it is not a data set name "
            "(org/name[:config[:split]])"
        )
    if plain and target_field:
        raise CorpusError(f"{spec} is plain text and has no field {target_field!r}")
    return source


def check_text_options(specs: Iterable[str], field: str, separator: str | None) -> None:
    """Raise CorpusError if `field` or `separator` is given and none of the sources uses it."""
    if field == "text" and separator is None:
        return
    sources = [
        parse_source(spec, field=field, separator=separator) for spec in specs if not is_self(spec)
    ]
    names = listing(source.spec for source in sources) or "self-generated text"
    if field != "text" and all(source.fields == ("text",) for source in sources):
        raise CorpusError(
            f"--field {field} is a column of tables and data sets; {names} has no columns: leave "
            "it out"
        )
    if separator is not None and not any(source.separator is not None for source in sources):
        raise CorpusError(
            f"--separator splits text files into documents; {names} is not a text file: leave it "
            "out"
        )


def parse_sources(specs: Sequence[str], **options: Any) -> tuple[Source, ...]:
    """The sources of specs; `options` are those of `parse_source`.

    Raises CorpusError, also for a file or data set that is named twice.
    """
    if not specs:
        raise CorpusError(_NO_DATA)
    sources = tuple(parse_source(spec, **options) for spec in specs)
    names = Counter(
        chain.from_iterable(map(Path.resolve, s.files) if s.files else [s.spec] for s in sources)
    )
    (name, count), *_ = names.most_common()
    if count > 1:
        raise CorpusError(f"the data names {name} {count} times; name every file and data set once")
    return sources


def row_digest(*texts: str) -> bytes:
    """SHA-256 of a text, or of a source and a target, in UTF-8: 32 bytes.

    A file and a row of the same text differ in the white space around it, which does not count.
    """
    return hashlib.sha256("\0".join(text.strip() for text in texts).encode()).digest()


def in_lowest_fraction(digest: bytes, fraction: float) -> bool:
    """Whether a digest is in the lowest fraction of all, by its first 64 bits: exact, so the same
    on every machine.
    """
    return int.from_bytes(digest[:8], "big") < int(Fraction(repr(float(fraction))) * 2**64)


def find_files(spec: str) -> tuple[Path, ...]:
    """The files of one format that a file, a directory or a glob names, sorted by path, without
    those of no bytes.

    Directories are searched recursively, without hidden files, cards, and caches of `datasets`.
    Links are followed; a file that has several paths counts once, with the first of them. Raises
    CorpusError if there is no file, or files of several formats, or a directory holds several
    splits.
    """
    path = Path(os.path.expanduser(spec))  # pathlib raises where there is no such user
    # pathlib raises where a name is too long
    is_file = os.path.isfile(path)
    is_directory = os.path.isdir(path)
    if is_file:
        paths = [path]
    elif is_directory:
        paths = [file for file in _below(path) if not file.is_dir()]
    else:
        paths = [*_matches(Path(path.anchor), path.relative_to(path.anchor).parts)]

    files = [file for file in sorted(paths) if file_format(file) and os.path.isfile(file)]
    files = [file for file in files if is_file or not _SKIPPED.fullmatch(file.name)]
    files = _without_repeats(files)
    if not files:
        raise CorpusError(
            f"there is no file or directory {spec} with text; allowed are {ALLOWED}, and patterns"
        )

    splits = set[str]()
    if is_directory:
        splits = {split for file in files for split in _SPLITS.findall(str(file.relative_to(path)))}
    if len(splits) > 1:
        pattern = shlex.quote(f"{glob.escape(spec.rstrip('/'))}/**/*train*")
        raise CorpusError(
            f"the directory {spec} holds several splits ({listing(splits)}); give the files of "
            f"one, like {pattern}"
        )
    formats = {file_format(file): str(file) for file in files}
    if len(formats) > 1:
        examples = listing(formats.values())
        raise CorpusError(
            f"{spec} names files of several formats ({examples}); give a pattern that names those "
            "of one"
        )
    if not (files := [file for file in files if file.stat().st_size]):
        raise CorpusError(f"{spec} holds no text: it is empty or blank, or held out")
    return tuple(files)


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
    elif not glob.has_magic(part) or os.path.lexists(directory / part):
        if os.path.lexists(directory / part):
            yield from _matches(directory / part, rest)
    else:
        for path in _entries(directory):
            if fnmatchcase(path.name, part) and (
                part.startswith(".") or not path.name.startswith(".")
            ):
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


def load_hub(name: str, config: str | None, split: str, streaming: bool) -> Any:
    """Load a data set (`datasets.Dataset`, or `IterableDataset` when streaming) at its newest
    commit. Raises CorpusError.
    """
    import datasets
    from huggingface_hub import HfApi, constants

    datasets_cache()
    try:
        with quiet("datasets"):
            # The hub's own error comes first: `datasets` retries for half a minute and says less.
            revision = None if constants.HF_HUB_OFFLINE else HfApi().dataset_info(name).sha
            return datasets.load_dataset(
                name, config, split=split, revision=revision, streaming=streaming
            )
    except (
        Exception
    ) as error:  # datasets, huggingface_hub, its HTTP client and fsspec raise many kinds
        raise hub_error(error, name) from error


def hub_error(error: BaseException, name: str) -> CorpusError | CacheError:
    """The one-line error for a data set that cannot be loaded:
    the cause, and what to do about it.
    """
    if cause := local_cause(error):
        return cache_error(cause)
    if reason := hub_reason(error):
        return CorpusError(f"there is no file or directory {name}, and {reason}")
    message = explain(error_chain(error)[-1]).partition(" Example of usage")[0].rstrip(".")
    if re.match("config name|builderconfig|unknown split|bad split", message, re.IGNORECASE):
        message += f"; write {name}:CONFIG or {name}:CONFIG:SPLIT"
    return CorpusError(f"the data set {name} cannot be loaded: {message}")


def find_chat_column(fields: Sequence[str], has_text: Mapping[str, bool]) -> str | None:
    """The column of chats; None if documents are not chats.

    `has_text`: of the columns `fields` and CHAT_COLUMNS those that the data has, and whether they
    have text.
    """
    if len(fields) > 1:
        return None
    (field,) = fields
    if field in has_text and field not in CHAT_COLUMNS:
        return None
    for column in [field] if field in has_text else CHAT_COLUMNS:
        if column in has_text and not has_text[column]:
            return column
    return None


def _chat_column_of_files(files: Sequence[Path], fields: Sequence[str]) -> str | None:
    has_text = columns_with_text(files[0], [*fields, *CHAT_COLUMNS])
    return find_chat_column(fields, has_text)


def _chat_column_of_data(name: str, load: Callable[[], Any], fields: Sequence[str]) -> str | None:
    data = load()
    names = data.column_names
    # Where the names of columns are known, rows are read only if one of them may have chats.
    if names is not None and find_chat_column(fields, dict.fromkeys(names, False)) is None:
        return None
    try:
        row: Mapping[str, Any] = next(iter(data), {})
    except Exception as error:  # the readers of `datasets` raise many kinds
        raise hub_error(error, name) from error
    return find_chat_column(fields, {name: isinstance(row[name], str) for name in row})


def _load_stdlib(side: str, columns: Sequence[str], chats: bool) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"text": list(stdlib_texts(side))})
