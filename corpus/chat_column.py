"""Which column of files or of a data set contains chats.

A column of chats has lists of messages. Whether a column has lists or text is said by the schema
of the first file, or by the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gqa.corpus.chats import CHAT_COLUMNS
from gqa.corpus.hub_datasets import hub_error
from gqa.corpus.readers import columns_with_text


def find_chat_column(columns: Sequence[str], has_text: Mapping[str, bool]) -> str | None:
    """The column of chats; None if documents are not chats.

    A column that is asked for by its name comes before the others.

    Args:
        columns: Those that are asked for: of text, or of sources and of targets.
        has_text: For each column that the data has, of `columns` and CHAT_COLUMNS, whether it has
            text (True) or lists (False).
    """
    if len(columns) > 1:  # a source and a target are no chat
        return None

    (text_column,) = columns
    candidates: Sequence[str] = CHAT_COLUMNS
    if text_column in has_text:
        if text_column not in CHAT_COLUMNS:
            return None
        candidates = [text_column]

    for column in candidates:
        if column in has_text and not has_text[column]:
            return column
    return None


def chat_column_of_files(files: Sequence[Path], columns: Sequence[str]) -> str | None:
    """The column of chats in files of one format; None if their documents are not chats.

    The first file that has one of `columns` or of CHAT_COLUMNS says it, as a file without rows has
    no columns. Raises TextError.
    """
    for file in files:
        has_text = columns_with_text(file, [*columns, *CHAT_COLUMNS])
        if has_text:
            return find_chat_column(columns, has_text)
    return None


def chat_column_of_data(name: str, load: Callable[[], Any], columns: Sequence[str]) -> str | None:
    """The column of chats in the data set `name` of the hub; None if its documents are not chats.

    Its first row says it. Raises TextError.
    """
    data = load()
    names = data.column_names  # None for some streams
    if names is not None:
        # The row is read only if a column may have chats, that is, if all of them had lists
        if find_chat_column(columns, dict.fromkeys(names, False)) is None:
            return None
        # Others may be pictures or sound, which need packages of their own
        candidates = {*columns, *CHAT_COLUMNS}
        data = data.select_columns([column for column in names if column in candidates])
    try:
        row: Mapping[str, Any] = next(iter(data), {})
    except Exception as error:  # the readers of `datasets` raise many kinds
        raise hub_error(error, name) from error
    has_text = {column: isinstance(value, str) for column, value in row.items()}
    return find_chat_column(columns, has_text)
