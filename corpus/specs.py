"""What is typed after `--data` names a source: text that comes with every installation, local
files, a data set of the Hugging Face hub, or text that the model writes.

    stdlib:train   general                                 built-in text (`BUILT_IN`)
    notes.txt   data/   'data/**/*.jsonl.gz'               files of one format (`FORMATS`)
    org/name   org/name:config   org/name:config:split     a data set of the hub
    self   self:1M   self:plain                            generated text, which is no `Source`

`datasets` reads all but generated text; HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what
they mean there.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gqa.core.errors import TextError, alternatives, listing
from gqa.core.option_types import read_amount
from gqa.corpus.chat_column import chat_column_of_data, chat_column_of_files
from gqa.corpus.files import find_files
from gqa.corpus.general import general_texts
from gqa.corpus.hub_datasets import load_hub
from gqa.corpus.readers import file_format, load_files
from gqa.corpus.sources import Source
from gqa.corpus.stdlib import stdlib_texts

if TYPE_CHECKING:
    import datasets

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?::([^:]+))?(?::([^:]+))?")


class BuiltIn(NamedTuple):
    """Text that comes with every installation.

    Attributes:
        texts: Yields its documents.
        heldout: The spec of the text that is held out of a training on this one alone, if no other
            is named; None: documents of this one are held out.
    """

    texts: Callable[[], Iterable[str]]
    heldout: str | None = None


GENERAL = "general"
# By spec, which may be a name or NAME:PART
BUILT_IN = {
    "stdlib:train": BuiltIn(partial(stdlib_texts, "train"), heldout="stdlib:heldout"),
    "stdlib:heldout": BuiltIn(partial(stdlib_texts, "heldout")),
    GENERAL: BuiltIn(general_texts),
}


def heldout_of_built_in(specs: Sequence[str]) -> str | None:
    """The spec of the text that is held out of a training on `specs`, if it comes with them."""
    if len(specs) != 1 or specs[0] not in BUILT_IN:
        return None
    return BUILT_IN[specs[0]].heldout


def _no_data() -> TextError:
    """The error if no source was named."""
    kinds = ["a file", "a directory", "a pattern", "a hub dataset", *BUILT_IN]
    return TextError(f"no data was passed; pass {alternatives(kinds)}")


def is_self(spec: str) -> bool:
    """Whether a spec means generated text: `self`, `self:1M`, `self:plain`."""
    return _name_of(spec) == "self"


def _name_of(spec: str) -> str:
    """`stdlib` of `stdlib:train`."""
    return spec.partition(":")[0]


def parse_self(spec: str) -> tuple[int | None, bool]:
    """Tokens of a spec like `self:plain:1M`, if given, and whether it is plain: without repeats.

    Raises TextError.
    """
    refusal = TextError(
        f"{spec} is not a source of text; pass self, self:1M for a number of tokens, or "
        "self:plain (self:plain:1M) for text without repeats"
    )
    match = re.fullmatch("self(:plain)?(?::(.+))?", spec)
    if match is None:
        raise refusal
    is_plain = bool(match[1])
    if match[2] is None:
        return None, is_plain

    tokens = read_amount(match[2])
    if not tokens:
        raise refusal
    return tokens, is_plain


def parse_source(
    spec: str,
    *,
    text_column: str = "text",
    target_column: str | None = None,
    split: str = "train",
    streaming: bool = False,
    separator: str | None = None,
) -> Source:
    """The source of a spec. Nothing of a hub data set is fetched before its documents are read.

    Documents are chats if `text_column` is one of CHAT_COLUMNS and contains lists, or if the data
    has such a column and none of the name `text_column`.

    Args:
        text_column: The column of text in JSON, CSV, Parquet, Arrow and hub data sets.
        target_column: The column of targets, which makes documents pairs.
        split: Of a hub data set whose spec names none.
        streaming: Whether a hub data set is read without being stored.
        separator: Cuts text files into documents; without it each file is one.

    Raises:
        TextError: The spec names nothing, or plain text that has no target.
    """
    if not spec.strip():
        raise _no_data()
    if target_column == text_column:
        raise TextError(
            f"--text-column and --target-column of {spec} are the same column; pass two different "
            "columns"
        )

    columns: tuple[str, ...] = (text_column,)
    if target_column:
        columns = (text_column, target_column)

    if _name_of(spec) in map(_name_of, BUILT_IN):
        return _built_in_source(spec, columns)
    if _names_files(spec):
        return _file_source(spec, columns, separator)
    if match := _HUB_NAME.fullmatch(spec):
        name, config, named_split = match.groups()
        return _hub_source(spec, name, config, named_split or split, columns, streaming)
    raise TextError(
        f"there is no file or directory {spec!r}, and it is not a dataset name "
        "(org/name[:config[:split]]); check the spelling"
    )


def planned_source(spec: str) -> str:
    """A source as a plan names it. A data set of the hub is said to be one, because a mistyped name
    of a file is taken for one, and a plan looks nothing up.
    """
    is_built_in = _name_of(spec) in map(_name_of, BUILT_IN)
    if is_built_in or is_self(spec) or _names_files(spec):
        return spec
    return f"{spec} (no file here: a data set of the hub, which a dry run does not look up)"


def _built_in_source(spec: str, columns: tuple[str, ...]) -> Source:
    """Built-in text. Raises TextError if the text of this name has no such part."""
    if spec not in BUILT_IN:
        parts = [known for known in BUILT_IN if _name_of(known) == _name_of(spec)]
        raise TextError(f"there is no {spec}; pass {alternatives(parts)}")
    _refuse_target(spec, columns)
    return Source(spec, partial(_load_texts, BUILT_IN[spec].texts))


def _load_texts(
    texts: Callable[[], Iterable[str]], columns: Sequence[str], has_chats: bool
) -> datasets.Dataset:
    """The data set of built-in text, a `Load`."""
    import datasets

    return datasets.Dataset.from_dict({"text": list(texts())})


def _names_files(spec: str) -> bool:
    """Whether a spec is a path or a pattern: it exists, or is written like one."""
    return (
        os.path.exists(spec)
        or spec.startswith(("/", ".", "~"))
        or spec.endswith("/")
        or file_format(Path(spec)) is not None
        or glob.has_magic(spec)
    )


def _file_source(spec: str, columns: tuple[str, ...], separator: str | None) -> Source:
    """Files of one format."""
    files = find_files(spec)
    if file_format(files[0]) == "text":
        _refuse_target(spec, columns)
        columns = ("text",)
        if separator:
            separator = separator.replace("\\n", "\n")  # as it is typed in a shell
    else:
        separator = None

    return Source(
        spec,
        partial(load_files, files),
        columns,
        chat_column=cache(partial(chat_column_of_files, files, columns)),
        files=files,
        separator=separator,
    )


def _hub_source(
    spec: str, name: str, config: str | None, split: str, columns: tuple[str, ...], streaming: bool
) -> Source:
    """A data set of the hub."""
    # Cached: a branch may move while its files are read.
    load = cache(partial(load_hub, name, config, split, streaming))
    return Source(
        spec,
        lambda columns, has_chats: load(),
        columns,
        chat_column=cache(partial(chat_column_of_data, name, load, columns)),
    )


def _refuse_target(spec: str, columns: tuple[str, ...]) -> None:
    """Raise TextError if plain text is asked for a column of targets."""
    if len(columns) > 1:
        raise TextError(
            f"{spec} is plain text and has no column {columns[1]!r}; pass a table, or remove "
            "--target-column"
        )


def check_text_options(specs: Iterable[str], text_column: str, separator: str | None) -> None:
    """Raise TextError if `text_column` or `separator` is given and no source uses it."""
    if text_column == "text" and separator is None:
        return
    sources = [
        parse_source(spec, text_column=text_column, separator=separator)
        for spec in specs
        if not is_self(spec)
    ]
    names = listing(source.spec for source in sources) or "generated text"

    if text_column != "text" and all(source.named_columns == ("text",) for source in sources):
        raise TextError(
            f"--text-column {text_column} is a column of tables and datasets, but {names} has no "
            "columns; remove --text-column"
        )
    if separator is not None and not any(source.separator is not None for source in sources):
        raise TextError(
            f"--separator splits text files into documents, but {names} is not a text file; "
            "remove --separator"
        )


def parse_sources(specs: Sequence[str], **options: Any) -> tuple[Source, ...]:
    """The sources of specs; `options` are those of `parse_source`.

    Raises TextError, also for a file or data set that is named twice.
    """
    if not specs:
        raise _no_data()
    sources = tuple(parse_source(spec, **options) for spec in specs)

    names = list[str | Path]()
    for source in sources:
        if source.files:
            names += [file.resolve() for file in source.files]
        else:
            names.append(source.spec)
    (name, count), *_ = Counter(names).most_common()
    if count > 1:
        raise TextError(f"the data names {name} {count} times; pass every file and dataset once")
    return sources
