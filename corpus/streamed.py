"""Blocks of a source that is too large to store: `datasets` streams it, and it is tokenized on the
way.

A stream is read in n lanes side by side; lane i has every nth shard (file) of the source from shard
i on. Blocks come from the lanes in turn, so each process reads only the shards of its blocks. The
number of lanes depends on the batch and the shards, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np

from gqa.core.errors import CorpusError, RefusedError
from gqa.corpus.blocks import pack
from gqa.corpus.encoders import Encoder
from gqa.corpus.reading_order import HeldoutDocuments
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source
from gqa.corpus.tokens import LOSS_MASK, Block, encode_rows, nothing_counts

_LANES = 64  # at most: each has a shard open
_BATCH = 64  # documents tokenized at a time

# Position of a lane: the state of its data set, and the rest of the last document.
State = dict[str, Any]
Bookmark = tuple[list[int], list[State]]  # of each lane its next block, and its position


def positions_of(bookmark: Bookmark) -> list[Any]:
    """`StreamedBlocks.positions` at a bookmark."""
    positions = list[Any]()
    for lane, (number, state) in enumerate(zip(*bookmark, strict=True)):
        if number:  # else nothing of the lane has been read
            positions.append([lane, number, state | {"rest": state["rest"].tolist()}])
    return positions


class StreamedBlocks:
    """Endless blocks: an exhausted source starts again.

    The number of lanes divides the `batch`, and the source has at least as many shards.
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
        self.lanes = max(n for n in range(1, most_lanes + 1) if batch % n == 0)
        # Of each lane: its next block, the position before it, and the blocks from there on.
        self._numbers = [0] * self.lanes
        self._states = [State()] * self.lanes
        self._blocks = [self._read(lane) for lane in range(self.lanes)]

    def __str__(self) -> str:
        """The source and the number of lanes, on which the blocks depend."""
        if self._shards == 1:
            return self.source.spec
        return f"{self.source.spec} ({self._shards} files, {self.lanes} at a time)"

    def __getitem__(self, index: int) -> Block:
        """Block `index`; its lane is read forward, or again from the start."""
        number, lane = divmod(index, self.lanes)
        if number < self._numbers[lane]:
            self.seek([[lane, 0, {}]])

        for _ in range(self._numbers[lane], number + 1):
            block, self._states[lane] = next(self._blocks[lane])
        self._numbers[lane] = number + 1
        return block

    @property
    def positions(self) -> list[Any]:
        """The position of each lane, JSON-ready: its number, its next block, and its state."""
        return positions_of(self.bookmark())

    def bookmark(self) -> Bookmark:
        """Where all lanes are, for `positions_of`; quick to take before every step."""
        return [*self._numbers], [*self._states]

    def seek(self, positions: list[Any]) -> None:
        """Continue each lane from its furthest position."""
        for lane, number, state in sorted(positions, key=lambda position: position[:2]):
            self._numbers[lane] = number
            self._states[lane] = state | {"rest": np.array(state.get("rest", ()), int)}
            self._blocks[lane] = self._read(lane)

    def _read(self, lane: int) -> Iterator[tuple[Block, State]]:
        """The blocks of a lane, each with the state after it."""
        part = self.source.shard(self.lanes, lane)
        state = self._states[lane]
        position = state.get("data")
        columns = list(part.columns)
        data = part.dataset().map(
            self._tokens,
            input_columns=columns,
            batched=True,
            batch_size=_BATCH,
            remove_columns=columns,
        )
        if position:
            data.load_state_dict(position)

        def documents() -> Iterator[Any]:
            nonlocal position
            any_counts = bool(position)  # else the run before would have ended
            first_epoch = position["epoch"] if position else 0
            for epoch in count(first_epoch):
                data.set_epoch(epoch)
                for row in part.read(data):
                    position = data.state_dict()
                    any_counts = any_counts or any(row.get(LOSS_MASK, [True]))
                    yield tokens_of_row(row)
                if position is not None and not any_counts:
                    raise RefusedError(nothing_counts(part.spec))
                if position is None:
                    raise CorpusError(
                        f"{part.spec} has no text to train on: it is empty, blank, or all held "
                        "out; pass other text"
                    )

        for block, rest in pack(documents(), self._size, state.get("rest", ())):
            yield block, {"data": position, "rest": rest}

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


def tokens_of_row(row: Mapping[str, Any]) -> Any:
    """The tokens (n,) of a document, with a loss mask (n, 2)."""
    if LOSS_MASK in row:
        return np.stack([row["tokens"], row[LOSS_MASK]], axis=1)
    return row["tokens"]
