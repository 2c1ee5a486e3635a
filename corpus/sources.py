"""A source of documents, which `datasets` reads: files, or a data set of the hub.

`gqa.corpus.specs` makes sources of what is typed after `--data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gqa.checkpoint.provenance import file_digests
from gqa.core.errors import CacheError, RefusedError, TextError
from gqa.corpus.chats import Chat, chat_text
from gqa.corpus.exclusion import Exclusion
from gqa.corpus.hub_datasets import hub_error
from gqa.corpus.readers import check_text, file_format, missing_column
from gqa.corpus.rows import in_lowest_fraction, row_digest

_ROWS = 64  # read at a time

# (columns, whether they have chats) -> a data set of `datasets`
Load = Callable[[Sequence[str], bool], Any]


def _no_chats() -> str | None:
    """The `chat_column` of data that has no columns."""
    return None


@dataclass(frozen=True)
class Source:
    """Documents that can be read repeatedly, always in the same order: texts, pairs of a source and
    a target, or chats.

    How it is read:

    1. `chat_column()` looks whether the data has a column of chats (`chat_column.py` says how).
    2. `columns` are that column, or if there is none `named_columns`.
    3. `load(columns, has_chats)` opens the data set.
    4. `_documents_of_batch` makes documents of its rows: what is blank, not accepted or excluded is
       left out.

    Attributes:
        spec: What was typed.
        load: Loads the data set of `datasets`, of files with these columns alone.
        named_columns: The columns that are asked for: the text, or the source and the target.
        chat_column: Finds the column of chats; None if documents are not chats. It may read the
            first row, so it is called when documents are read.
        files: Shards, if known.
        separator: What separates documents in a text file.
        accepts: Whether the document of this digest is read; None: all are.
        fraction: The share of the documents that `heldout_part` keeps; None: all.
        excluded: The parts of documents that `excluding` leaves out; None: no part.
    """

    spec: str
    load: Load
    named_columns: tuple[str, ...] = ("text",)
    chat_column: Callable[[], str | None] = _no_chats
    files: tuple[Path, ...] = ()
    separator: str | None = None
    accepts: Callable[[bytes], bool] | None = None
    fraction: float | None = None
    excluded: Exclusion | None = None

    @property
    def has_chats(self) -> bool:
        """Whether documents are chats. Raises TextError."""
        return self.chat_column() is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have the documents. Raises TextError."""
        column = self.chat_column()
        return self.named_columns if column is None else (column,)

    def _load(self) -> Any:
        return self.load(self.columns, self.has_chats)

    def identify(self) -> str:
        """What determines the documents: hashes of the content, and how it is read.

        Raises TextError.
        """
        from gqa.core.compat import fingerprint

        content: Any
        if self.files:
            content = [file_format(self.files[0]), *file_digests(self.files)]
        else:
            content = fingerprint(self._load())

        identity = f"{content} {self.columns} {self.fraction}"
        if self.has_chats:
            identity += " chats"
        if self.separator:
            identity += f" {self.separator!r}"
        if self.excluded:
            identity += f" without {self.excluded.identity}"
        return identity

    def texts(self) -> Iterator[str]:
        """Documents in the order of the source, none of them blank; of chats their `chat_text`.

        Raises TextError as `rows` does.
        """
        return (row[0] for row in self.rows())

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The texts of `columns`, in the order of the source, none of them blank; chats as `Chat`.

        Raises TextError for what cannot be read and for a source without any text.
        """
        rows = self.rows_if_any()
        first = next(rows, None)
        if first is None:
            raise TextError(
                f"{self.spec} has no text left: it is empty or blank, or all of it is validation "
                "text; pass other text"
            )
        yield first
        yield from rows

    def rows_if_any(self) -> Iterator[tuple[str, ...]]:
        """As `rows`, of a source that may have no text."""
        columns = self.columns
        document = Chat if self.has_chats else tuple
        for row in self.read(self.dataset()):
            yield document(row[name] for name in columns)

    def dataset(self) -> Any:
        """A `datasets.IterableDataset` of `columns` alone, of rows that have text in each.

        Raises TextError.
        """
        data = self._load()
        if hasattr(data, "to_iterable_dataset"):
            data = data.to_iterable_dataset()

        columns = list(self.columns)
        present = data.column_names
        if present is None and not self.files:  # a stream without names: its first row has them
            present = next(self.read(data), None)
        if present is not None:
            for name in columns:
                if name not in present:
                    raise missing_column(self.spec, columns, name, present)

        data = data.select_columns(columns)
        return data.map(
            self._documents_of_batch, batched=True, batch_size=_ROWS, remove_columns=columns
        )

    def read(self, data: Any) -> Iterator[dict[str, Any]]:
        """The rows of a data set of this source. Raises TextError."""
        try:
            yield from data
        except (RefusedError, CacheError):
            raise
        except Exception as error:  # the readers of `datasets` raise many kinds
            raise hub_error(error, self.spec) from error

    def _documents_of_batch(self, batch: dict[str, list[Any]]) -> dict[str, list[str]]:
        """The documents of a batch of rows, by column: rows with text in all columns, cut at the
        separator, without what is not accepted or excluded. Raises TextError.
        """
        columns = self.columns
        has_chats = self.has_chats
        separator = self.separator

        documents = list[tuple[str, ...]]()
        for values in zip(*(batch[column] for column in columns), strict=True):
            row = values
            if has_chats:
                row = Chat((chat_text(values[0], columns[0], self.spec),))
            for column, value in zip(columns, row, strict=True):
                check_text(value, column, self.spec, columns)

            parts = [row]
            if separator is not None:
                parts = [(text.strip("\n"),) for text in row[0].split(separator)]
            for part in parts:
                has_text = all(value and value.strip() for value in part)
                if has_text and self._is_accepted(part):
                    documents += self._remainder(part)

        texts = dict[str, list[str]]()
        for number, column in enumerate(columns):
            texts[column] = [document[number] for document in documents]
        return texts

    def _is_accepted(self, document: tuple[str, ...]) -> bool:
        return self.accepts is None or self.accepts(row_digest(*document))

    def _remainder(self, document: tuple[str, ...]) -> list[tuple[str, ...]]:
        """What is left of a document without what is excluded."""
        if self.excluded is None:
            return [document]
        return self.excluded.remainder(document)

    def shard(self, count: int, index: int) -> Source:
        """A part of the source: every `count`th shard (file), from `index` on."""
        if count == 1:
            return self
        files = self.files[index::count]

        def load(columns: Sequence[str], has_chats: bool) -> Any:
            return self.load(columns, has_chats).shard(count, index, contiguous=False)

        return replace(self, load=load, files=files)

    @property
    def n_shards(self) -> int:
        """The number of shards: files, or those that `datasets` counts in a stream."""
        return len(self.files) or getattr(self._load(), "num_shards", 1)

    def heldout_part(self, fraction: float) -> Source:
        """Only the held-out documents: those with the lowest hashes, about that fraction of all."""
        assert self.accepts is None
        return replace(
            self, accepts=partial(in_lowest_fraction, fraction=fraction), fraction=fraction
        )

    def excluding(self, excluded: Exclusion) -> Source:
        """The documents without the parts that are in held-out text."""
        return replace(self, excluded=excluded)

    def without_documents(self, heldout: Callable[[bytes], bool]) -> Source:
        """The documents whose digests are not held out.

        Not for `tokenize`: `identify` does not say what is left out.
        """
        assert self.accepts is None
        return replace(self, accepts=lambda digest: not heldout(digest))
