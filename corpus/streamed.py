"""Blocks of a source that is too large to store: `datasets` streams it, and it is tokenized on the
way.

A stream is read in *lanes*, side by side. Of n lanes, lane i has every nth shard (file) of the
source from shard i on, and reads them from front to back. Blocks come from the lanes in turn: block
b of the stream is block b // n of lane b % n. So each process reads only the shards of its blocks.
The number of lanes depends on the batch and the shards, not on the number of processes.

A *bookmark* says where all lanes are between two steps. A saved run has those of its processes, as
JSON: its *saved lanes*, from which any number of processes can read on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from gqa.core.errors import RefusedError, TextError, plural
from gqa.corpus.blocks import pack
from gqa.corpus.encoders import Encoder
from gqa.corpus.reading_order import HeldoutDocuments
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source
from gqa.corpus.tokens import LOSS_MASK, Block, Ints, encode_rows, nothing_counts

_LANES = 64  # at most: each has a shard open
_BATCH = 64  # documents tokenized at a time

# [lane, its next block, its state], JSON-ready: see `Bookmark.saved_lanes`
SavedLane = list[Any]


@dataclass(frozen=True, eq=False)
class LaneState:
    """Where a lane is: after one of its blocks, or by default at its start.

    Attributes:
        next_block: The number, in this lane, of the block that is read next.
        dataset_state: The state of the lane's data set after the last document that was read; None
            before the first.
        rest: (n,) or (n, 2) tokens of that document that are in no block yet.
        any_token_counts: Whether any token so far counts in the loss.
    """

    next_block: int = 0
    dataset_state: dict[str, Any] | None = None
    rest: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    any_token_counts: bool = False


@dataclass(frozen=True, eq=False)
class Bookmark:
    """Where all lanes of a stream are.

    Attributes:
        lanes: The state of each lane.
        n_shards: How many shards the source has.
    """

    lanes: list[LaneState]
    n_shards: int

    @property
    def saved_lanes(self) -> list[SavedLane]:
        """The lanes of which anything has been read, as a state of a run has them."""
        saved_lanes = list[SavedLane]()
        for lane, state in enumerate(self.lanes):
            if not state.next_block:
                continue
            saved = {
                "data": state.dataset_state,
                "rest": state.rest.tolist(),
                "counts": state.any_token_counts,
                "files": self.n_shards,
            }
            saved_lanes.append([lane, state.next_block, saved])
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
        self._n_shards = source.n_shards
        most_lanes = min(self._n_shards, _LANES, batch)
        self._n_lanes = max(n for n in range(1, most_lanes + 1) if batch % n == 0)
        self._lanes = [_Lane(partial(self._read, lane)) for lane in range(self._n_lanes)]

    def __str__(self) -> str:
        """The source and the number of lanes, on which the blocks depend."""
        if self._n_shards == 1:
            return self.source.spec
        return f"{self.source.spec} ({self._n_shards} files, {self._n_lanes} at a time)"

    def __getitem__(self, index: int) -> Block:
        """Block `index`; its lane is read forward, or again from the start."""
        number, lane = divmod(index, self._n_lanes)
        return self._lanes[lane].read_to(number)

    def bookmark(self) -> Bookmark:
        """Where all lanes are; quick to take before every step."""
        return Bookmark([lane.state for lane in self._lanes], self._n_shards)

    def seek(self, saved_lanes: Sequence[SavedLane]) -> None:
        """Read on from the saved lanes of all processes of a run, taken after the same step.

        If several processes have read a lane, it is read on from where the furthest of them was: no
        later step needs a block before it.

        Raises RefusedError if the source had another number of shards then.
        """
        # States of earlier versions may have no `files` and `counts`
        for _, _, saved in saved_lanes:
            self._check_shards(saved.get("files", self._n_shards))

        # The furthest of a lane comes last, and replaces the others
        for lane, next_block, saved in sorted(saved_lanes, key=lambda saved_lane: saved_lane[:2]):
            rest = np.array(saved["rest"], np.int64)
            state = LaneState(next_block, saved["data"], rest, saved.get("counts", False))
            self._lanes[lane].go_to(state)

    def _check_shards(self, before: int) -> None:
        """Raise RefusedError if the source had another number of shards `before`."""
        if before != self._n_shards:
            raise RefusedError(
                f"{self.source.spec} has {plural(self._n_shards, 'file')}, but had {before:,} when "
                "the run was saved; start over with --overwrite"
            )

    def _read(self, lane: int, state: LaneState) -> Iterator[tuple[Block, LaneState]]:
        """The blocks of a lane from a state on, each with the state after it."""
        part = self.source.shard(self._n_lanes, lane)
        documents = _LaneDocuments(part, self._tokens, self._name_of(lane), state)
        packed = pack(documents, self._size, state.rest)
        for number, (block, rest) in enumerate(packed, state.next_block):
            state_after = LaneState(
                next_block=number + 1,
                dataset_state=documents.dataset_state,
                rest=rest,
                any_token_counts=documents.any_token_counts,
            )
            yield block, state_after

    def _name_of(self, lane: int) -> str:
        """The source; of several lanes, the files of it that this one reads."""
        if self._n_lanes == 1:
            return self.source.spec
        return (
            f"{self.source.spec} (of its {self._n_shards} files number {lane + 1} and each "
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
    """The blocks of a lane, read one after the other.

    Attributes:
        state: Where the lane is.
    """

    def __init__(self, read: Callable[[LaneState], Iterator[tuple[Block, LaneState]]]) -> None:
        """`read`: the blocks from a state on, each with the state after it."""
        self._read = read
        self.go_to(LaneState())

    def go_to(self, state: LaneState) -> None:
        """Read on from this state."""
        self.state = state
        self._blocks = self._read(state)

    def read_to(self, number: int) -> Block:
        """The block of this number. Those before it are read too, from the start if it lies behind.

        Raises RefusedError and TextError.
        """
        if number < self.state.next_block:
            self.go_to(LaneState())

        while self.state.next_block <= number:
            block, self.state = next(self._blocks)
        return block


class _LaneDocuments:
    """The tokens of a lane's documents, from a state of the lane on.

    Attributes:
        dataset_state: As in `LaneState`, of the last document.
        any_token_counts: As in `LaneState`.
    """

    def __init__(
        self,
        source: Source,
        tokenize: Callable[[list[str]], dict[str, list[Any]]],
        name: str,
        state: LaneState,
    ) -> None:
        """`source` has the shards of the lane, which errors call `name`."""
        self.dataset_state = state.dataset_state
        self.any_token_counts = state.any_token_counts
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
        if self.dataset_state:
            self._data.load_state_dict(self.dataset_state)

    def __iter__(self) -> Iterator[Any]:
        """The lane's documents, epoch after epoch.

        `pack` takes one only when the one before is used up, so `dataset_state` is always that of
        the document whose `rest` is left. Raises RefusedError and TextError.
        """
        is_continued = self.dataset_state is not None
        first_epoch = self.dataset_state["epoch"] if self.dataset_state else 0
        for epoch in count(first_epoch):
            self._data.set_epoch(epoch)
            documents = 0
            for row in self._source.read(self._data):
                documents += 1
                self.dataset_state = self._data.state_dict()
                if LOSS_MASK not in row or any(row[LOSS_MASK]):
                    self.any_token_counts = True
                yield tokens_of_row(row)

            # Only what is left of the epoch in which a run was stopped may be empty
            is_rest = is_continued and epoch == first_epoch
            if not documents and not is_rest:
                raise TextError(
                    f"{self._name} has no text to train on: it is empty, blank, or all held out; "
                    "pass other text"
                )
            if not self.any_token_counts:
                raise RefusedError(nothing_counts(self._name))


def tokens_of_row(row: Mapping[str, Any]) -> Any:
    """The tokens (n,) of a document, with a loss mask (n, 2)."""
    if LOSS_MASK in row:
        return np.stack([row["tokens"], row[LOSS_MASK]], axis=1)
    return row["tokens"]
