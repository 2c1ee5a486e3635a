"""Blocks of a source that is too large to store: `datasets` streams it, and it is tokenized on the
way.

A stream is read in n lanes side by side; lane i has every nth shard (file) of the source from shard
i on. Blocks come from the lanes in turn: block b of the stream is block b // n of lane b % n. So
each process reads only the shards of its blocks. The number of lanes depends on the batch and the
shards, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypedDict

import numpy as np

from gqa.core.errors import CorpusError, RefusedError, plural
from gqa.corpus.blocks import pack
from gqa.corpus.encoders import Encoder
from gqa.corpus.reading_order import HeldoutDocuments
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source
from gqa.corpus.tokens import LOSS_MASK, Block, encode_rows, nothing_counts

_LANES = 64  # at most: each has a shard open
_BATCH = 64  # documents tokenized at a time


class LaneState(TypedDict, total=False):
    """Where a lane is read on: after one of its blocks. Empty: at the start. Never changed in
    place.
    """

    data: dict[str, Any] | None  # the state of its data set
    rest: Any  # the tokens of its last document that are in no block yet; a list once saved
    counts: bool  # whether any token so far counts in the loss
    files: int  # the number of shards of the source


class Bookmark(NamedTuple):
    """Where all lanes are, by lane: the number of the next block, and the state before it."""

    next_numbers: list[int]
    states: list[LaneState]


def saved_lanes_of(bookmark: Bookmark) -> list[Any]:
    """`StreamedBlocks.saved_lanes` at a bookmark."""
    saved_lanes = list[Any]()
    by_lane = zip(bookmark.next_numbers, bookmark.states, strict=True)
    for lane, (number, state) in enumerate(by_lane):
        if number:  # else nothing of the lane has been read
            saved_lanes.append([lane, number, state | {"rest": state["rest"].tolist()}])
    return saved_lanes


class StreamedBlocks:
    """Endless blocks: an exhausted source starts again, perhaps with its shards in another order,
    which `datasets` draws by the epoch.

    The number of lanes divides the batch, and the source has at least as many shards.

    Args:
        source: The documents.
        encoder: Tokenizes them.
        block_size: Tokens of a block.
        heldout: What is left out.
        batch: Blocks of a step, of all processes.
    """

    def __init__(
        self,
        source: Source,
        encoder: Encoder,
        *,
        block_size: int,
        heldout: HeldoutDocuments,
        batch: int = 1,
    ) -> None:
        self.source = source
        self.encoder = encoder
        self._heldout = heldout
        self._size = block_size
        self._shards = source.n_shards
        most_lanes = min(self._shards, _LANES, batch)
        self._n_lanes = max(n for n in range(1, most_lanes + 1) if batch % n == 0)
        self._lanes = [_Lane(partial(self._read, lane)) for lane in range(self._n_lanes)]

    def __str__(self) -> str:
        """The source and the number of lanes, on which the blocks depend."""
        if self._shards == 1:
            return self.source.spec
        return f"{self.source.spec} ({self._shards} files, {self._n_lanes} at a time)"

    def __getitem__(self, index: int) -> Block:
        """Block `index`; its lane is read forward, or again from the start."""
        number, lane = divmod(index, self._n_lanes)
        return self._lanes[lane].read_to(number)

    @property
    def saved_lanes(self) -> list[Any]:
        """`[lane, next block, state]` of each lane that this process has read, JSON-ready."""
        return saved_lanes_of(self.bookmark())

    def bookmark(self) -> Bookmark:
        """Where all lanes are, for `saved_lanes_of`; quick to take before every step."""
        next_numbers = [lane.next_number for lane in self._lanes]
        states = [lane.state for lane in self._lanes]
        return Bookmark(next_numbers, states)

    def seek(self, saved_lanes: list[Any]) -> None:
        """Read on from the `saved_lanes` of all processes of a run, taken after the same step.

        If several have read a lane, from the furthest of theirs: no later step needs a block before
        it.

        Raises RefusedError if the source had another number of shards then.
        """
        for *_, state in saved_lanes:
            self._check_files(state)

        # Sorted: the furthest of a lane comes last, and replaces the others.
        for lane, number, state in sorted(saved_lanes, key=lambda saved: saved[:2]):
            rest = np.array(state["rest"], int)
            self._lanes[lane].restart(number, state | {"rest": rest})

    def _check_files(self, state: LaneState) -> None:
        """Raise RefusedError if the source had another number of shards in this state of a lane."""
        # States of earlier versions have no such entry
        before = state.get("files", self._shards)
        if before != self._shards:
            raise RefusedError(
                f"{self.source.spec} has {plural(self._shards, 'file')}, but had {before:,} when "
                "the run was saved; start over with --overwrite"
            )

    def _read(self, lane: int, state: LaneState) -> Iterator[tuple[Block, LaneState]]:
        """The blocks of a lane from a state on, each with the state after it."""
        part = self.source.shard(self._n_lanes, lane)
        documents = _LaneDocuments(part, self._tokens, self._name_of(lane), state)
        for block, rest in pack(documents, self._size, state.get("rest", ())):
            state_after = LaneState(
                data=documents.position,
                rest=rest,
                counts=documents.any_counts,
                files=self._shards,
            )
            yield block, state_after

    def _name_of(self, lane: int) -> str:
        """The source; of several lanes, the files of it that this one reads."""
        if self._n_lanes == 1:
            return self.source.spec
        return (
            f"{self.source.spec} (of its {self._shards} files number {lane + 1} and each "
            f"{self._n_lanes} later)"
        )

    def _tokens(self, texts: list[str]) -> dict[str, list[Any]]:
        """Tokenize a batch of documents, without what is held out."""
        rows = encode_rows(self.encoder, [(text,) for text in texts])
        columns: dict[str, list[Any]] = {column: [] for column in rows[0]}
        for text, row in zip(texts, rows, strict=True):
            limit = self._heldout.limit(row_digest(text), len(row["tokens"]))
            if limit:
                for column, values in columns.items():
                    values.append(row[column][:limit])
        return columns


class _Lane:
    """The blocks of a lane, numbered from 0 on, which are read one after the other.

    Attributes:
        next_number: The number of the block that is read next.
        state: Where the lane is read on for it.
    """

    def __init__(self, read: Callable[[LaneState], Iterator[tuple[Block, LaneState]]]) -> None:
        """`read`: the blocks from a state on, each with the state after it."""
        self._read = read
        self.restart(0, LaneState())

    def restart(self, number: int, state: LaneState) -> None:
        """Read on with this block, from the state before it."""
        self.next_number = number
        self.state = state
        self._blocks = self._read(state)

    def read_to(self, number: int) -> Block:
        """The block of this number: those before it are read too, from the start if it lies behind.

        Raises RefusedError and CorpusError.
        """
        if number < self.next_number:
            self.restart(0, LaneState())

        while self.next_number <= number:
            block, self.state = next(self._blocks)
            self.next_number += 1
        return block


class _LaneDocuments:
    """The tokens of a lane's documents, from its state on.

    Attributes:
        position: State of the data set after the last document; None before the first.
        any_counts: Whether any token so far counts in the loss.
    """

    def __init__(
        self,
        source: Source,
        tokenize: Callable[[list[str]], dict[str, list[Any]]],
        name: str,
        state: LaneState,
    ) -> None:
        """`source` has the shards of the lane, which errors call `name`."""
        self.position: dict[str, Any] | None = state.get("data")
        self.any_counts = bool(state.get("counts"))
        self._source = source
        self._name = name

        columns = list(source.columns)
        self._data = source.dataset().map(
            tokenize,
            input_columns=columns,
            batched=True,
            batch_size=_BATCH,
            remove_columns=columns,
        )
        if self.position:
            self._data.load_state_dict(self.position)

    def __iter__(self) -> Iterator[Any]:
        """The lane's documents, epoch after epoch.

        `pack` takes one only when the one before is used up, so `position` is always that of the
        document of `rest`. Raises RefusedError and CorpusError.
        """
        is_continued = self.position is not None
        first_epoch = self.position["epoch"] if self.position else 0
        for epoch in count(first_epoch):
            self._data.set_epoch(epoch)
            documents = 0
            for row in self._source.read(self._data):
                documents += 1
                self.position = self._data.state_dict()
                counts = LOSS_MASK not in row or any(row[LOSS_MASK])
                self.any_counts = self.any_counts or counts
                yield tokens_of_row(row)

            # Only what is left of the epoch in which a run was stopped may be empty
            is_rest = is_continued and epoch == first_epoch
            if not documents and not is_rest:
                raise CorpusError(
                    f"{self._name} has no text to train on: it is empty, blank, or all held out; "
                    "pass other text"
                )
            if not self.any_counts:
                raise RefusedError(nothing_counts(self._name))


def tokens_of_row(row: Mapping[str, Any]) -> Any:
    """The tokens (n,) of a document, with a loss mask (n, 2)."""
    if LOSS_MASK in row:
        return np.stack([row["tokens"], row[LOSS_MASK]], axis=1)
    return row["tokens"]
