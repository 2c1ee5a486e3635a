"""Where text comes from: the built-in corpus, local files, or a data set of the Hugging Face hub.

    stdlib:train   stdlib:heldout                          the source of Python's standard library
    notes.txt   data/   'data/**/*.jsonl.gz'               files of one format (`gqa.corpus.files`)
    org/name   org/name:config   org/name:config:split     a data set of the hub, through `datasets`

In a mixture, `SPEC@WEIGHT` gives a source its share of the tokens.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

from gqa.checkpoint.console import read_count
from gqa.checkpoint.errors import CorpusError, listing
from gqa.corpus.document import Document
from gqa.corpus.files import find_files, is_local, read_file
from gqa.corpus.hub import load_rows, read_rows
from gqa.corpus.stdlib import Split, stdlib_documents

_NO_DATA = "no data is named; give a file, a directory, a pattern, a data set of the hub or stdlib:train"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?::([^:]+))?(?::([^:]+))?")
_T = TypeVar("_T")
_WEIGHTED = re.compile(r"(.+)@([^@/]+)")


@dataclass(frozen=True)
class OwnText:
    """Text that a model is to write itself: how many tokens, where that is said; `plain`: none of it repeats itself."""

    tokens: int | None
    plain: bool


def is_self(spec: str) -> bool:
    """Whether a source is what a model writes itself: `self`, `self:1M`, `self:plain@2`. Who samples it knows how."""
    return re.split("[:@]", spec)[0] == "self"


def parse_self(spec: str) -> OwnText:
    """What `self:plain:1M` asks for. Raises CorpusError."""
    words = split_weight(spec)[0].split(":")
    plain = words[1:2] == ["plain"]
    count = words[1 + plain :]
    tokens = read_count(count[0]) if len(count) == 1 else None
    if count and not tokens:
        raise CorpusError(
            f"{spec} is not understood; give self, or the tokens that the model is to write, like self:1M, or "
            "self:plain, like self:plain:1M, for text of which nothing is repeated"
        )
    return OwnText(tokens, plain)


def uncounted(spec: str) -> str:
    """The same source, without how many tokens of it a model is to write: its share is that of others."""
    if not is_self(spec) or not (own := parse_self(spec)).tokens:
        return spec
    return "self:plain" if own.plain else "self"


@dataclass(frozen=True)
class Source:
    """Text that can be read any number of times, always in the same order.

    `spec` is what it was made from; `read` gives its documents, or those of the shard (file) of a number, of which
    there are `shards`; `identify` says what its content is, as a hash; `streaming` means that it is too large or too
    far away to be kept; `weight` is its share of a mixture's tokens, where it was given one.
    """

    spec: str
    read: Callable[..., Iterator[Document]]
    identify: Callable[[], str]
    streaming: bool = False
    weight: float | None = None
    shards: Callable[[], int] = field(default=lambda: 1)

    def documents(self) -> Iterator[Document]:
        """Documents in the order of the source, none of them blank.

        Raises CorpusError, while they are read, for what cannot be read and for a source without any text.
        """
        return self.some(self.read())

    def some(self, found: Iterator[_T]) -> Iterator[_T]:
        """What was found in it, which is something. Raises CorpusError where it is not."""
        if (first := next(found, None)) is None:
            raise CorpusError(f"{self.spec} holds no text: it is empty or blank")
        yield first
        yield from found

    def part(self, side: Split, fraction: float) -> Source:
        """The documents that are held out, about `fraction` of them by a hash of their text, or all others."""
        threshold, wanted = hash_threshold(fraction), side == "heldout"
        return replace(
            self,
            spec=f"{self.spec} ({side} part, {fraction:g} held out)",
            read=lambda *shard: (d for d in self.read(*shard) if is_below(text_digest(d.text), threshold) == wanted),
            identify=lambda: f"{self.identify()} {side} {fraction!r}",
        )


def parse_source(
    spec: str,
    *,
    field: str = "text",
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    revision: str | None = None,
    separator: str | None = None,
) -> Source:
    """The source that a spec names. Nothing of a hub data set is fetched before its documents are read.

    `field` holds the text in JSON, CSV, Parquet, Arrow and hub data sets. `config`, `split` ("train" by default) and
    `revision` choose among what a hub data set has; other sources have none and are read whole. `separator` cuts text
    files into documents; without it each file is one. Raises CorpusError.
    """
    if not spec.strip():
        raise CorpusError(_NO_DATA)
    if separator == "":
        raise CorpusError("the separator is empty; give the text between two documents, such as <|endoftext|>")
    if spec == "stdlib" or spec.startswith("stdlib:"):
        if (side := spec.removeprefix("stdlib:")) not in ("train", "heldout"):
            raise CorpusError(f"there is no {spec}; allowed are stdlib:train and stdlib:heldout")
        modules = partial(stdlib_documents, cast(Split, side))
        return Source(spec, lambda *_: modules(), lambda: _digest_documents(modules()), streaming)
    if is_local(spec):
        files = find_files(spec)
        texts = partial(_read_files, files, field, separator)
        digest = partial(_digest_files, files, field, separator)
        return Source(spec, texts, digest, streaming, shards=lambda: len(files))
    if not (named := _HUB_NAME.fullmatch(spec)):
        raise CorpusError(
            f"there is no file or directory {spec}, and it is no data set name (org/name[:config[:split]])"
        )
    name, own_config, own_split = named.groups()
    # Once: a branch may move on while its files are read.
    load = cache(partial(load_rows, name, own_config or config, own_split or split or "train", revision, streaming))
    # What identifies its rows is made of the commit, the configuration and the split.
    return Source(
        spec,
        lambda *shard: read_rows(name, load(), field, *(shard if streaming else ())),
        lambda: str(load()._fingerprint),
        streaming,
        shards=lambda: load().num_shards if streaming else 1,
    )


def parse_sources(specs: Sequence[str], **options: Any) -> tuple[Source, ...]:
    """The sources of a mixture, each `SPEC` or `SPEC@WEIGHT`; `options` are those of `parse_source`.

    Weights are shares of the tokens and need not sum to 1. Without weights every document counts once.
    Raises CorpusError, also where only some specs have a weight and where one is given twice.
    """
    pairs = weighted(specs)
    said = {option: options.get(option) for option in ("config", "revision", "split")}
    if said["split"] == "train":  # which it is unless told otherwise
        said["split"] = None
    check_of_hubs([name for name, _ in pairs], **said)
    return tuple(replace(parse_source(name, **options), weight=weight) for name, weight in pairs)


def weighted(specs: Sequence[str]) -> list[tuple[str, float | None]]:
    """The names of a mixture with their weights. Raises CorpusError as `parse_sources` does."""
    if not specs:
        raise CorpusError(_NO_DATA)
    pairs = [split_weight(spec) for spec in specs]
    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CorpusError(f"{listing(repeated)} is given twice; give it once, with a weight if it should count more")
    bare = [name for name, weight in pairs if weight is None]
    if 0 < len(bare) < len(pairs):
        raise CorpusError(
            f"{listing(bare)} has no weight while others have; give every source one (SPEC@WEIGHT) or none"
        )
    return pairs


def check_of_hubs(names: Sequence[str], **said: str | None) -> None:
    """Raise CorpusError for what is `said` to choose among what a hub data set has where there is none."""
    told = next((f"the {option} {value}" for option, value in said.items() if value), None)
    if told and all(name.partition(":")[0] == "stdlib" or is_local(name) for name in names):
        raise CorpusError(f"{listing(names)}: {told} is for hub data sets; leave it out")


def split_weight(spec: str) -> tuple[str, float | None]:
    """`SPEC@WEIGHT` in two. A name with an @ in it is a name where there is such a file. Raises CorpusError."""
    if os.path.exists(spec) or not (parts := _WEIGHTED.fullmatch(spec)):
        return spec, None
    try:
        weight = float(parts[2])
    except ValueError:
        return spec, None
    if not 0 < weight < float("inf"):
        raise CorpusError(f"{spec}: the weight {parts[2]} is not above 0")
    return parts[1], weight


def text_digest(text: str) -> bytes:
    """SHA-256 of a text in UTF-8, 32 bytes."""
    return hashlib.sha256(text.encode()).digest()


def hash_threshold(fraction: float) -> int:
    """The number below which 64-bit hashes are that fraction of all: exact, so the same on every machine."""
    return int(Fraction(repr(float(fraction))) * 2**64)


def is_below(digest: bytes, threshold: int) -> bool:
    """Whether the first 64 bits of a digest, as a big-endian number, are below the threshold."""
    return int.from_bytes(digest[:8], "big") < threshold


def _read_files(
    files: Sequence[Path], field: str, separator: str | None, shard: int | None = None
) -> Iterator[Document]:
    chosen = files if shard is None else files[shard : shard + 1]
    return chain.from_iterable(read_file(file, field, separator) for file in chosen)


def _digest_files(files: Sequence[Path], field: str, separator: str | None) -> str:
    """By what is in the files and how it is read; where they are does not matter."""
    digest = hashlib.sha256(repr((field, separator)).encode())
    for path in files:
        try:
            with path.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CorpusError(f"{path} cannot be read: {error.strerror}") from None
        digest.update(f"{path.suffixes[-2:]} {content}\n".encode())
    return digest.hexdigest()


def _digest_documents(documents: Iterator[Document]) -> str:
    return hashlib.sha256(b"".join(text_digest(found.text) for found in documents)).hexdigest()
