"""Blocks of sources that are too large to store: `datasets` streams them, and they are tokenised on the way.

A stream is read in n lanes side by side; lane i has every nth shard (file) of each source from shard i on. Blocks come
from the lanes in turn, so each process reads only the shards of its blocks. The number of lanes depends on the batch
and the shards, not on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from gqa.checkpoint.errors import CorpusError
from gqa.corpus.alpha import Heldout
from gqa.corpus.sources import Source, row_digest
from gqa.corpus.tokens import Block, Encoder, pack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LANES = 64  # at most: each has a shard open
_BATCH = 64  # documents tokenised at a time

# Position of a lane in one source: blocks read, the state of its data set, and the rest of the last document.
State = dict[str, Any]


class StreamedBlocks:
    """Endless blocks: an exhausted source starts again. Each source has its share of the blocks.

    The number of lanes divides the `batch`, and every source has at least as many shards. Raises CorpusError for
    several sources without weights.
    """

    def __init__(
        self, sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, *, block_size: int, heldout: Heldout,
        batch: int = 1,
    ) -> None:  # fmt: skip
        if len(sources) > 1 and any(source.weight is None for source in sources):
            raise CorpusError("several streams need weights (SPEC@WEIGHT): their sizes are not known")
        self.sources, self.encoder, self._heldout = sources, Encoder(tokenizer), heldout
        self._size = block_size
        self._shards = [source.n_shards for source in sources]
        self.lanes = max(n for n in range(1, min(*self._shards, _LANES, batch) + 1) if batch % n == 0)
        # Of each lane: its next block, the position before it, and the blocks from there on.
        self._numbers, self._states = [0] * self.lanes, [list[State]()] * self.lanes
        self._blocks = [self._read(lane) for lane in range(self.lanes)]

    def __str__(self) -> str:
        """The sources and the number of lanes, on which the blocks depend."""
        return ", ".join(
            source.spec if shards == 1 else f"{source.spec} ({shards} files, {self.lanes} at a time)"
            for source, shards in zip(self.sources, self._shards, strict=True)
        )

    def __getitem__(self, index: int) -> Block:
        """Block `index`; its lane is read forward, or again from the start."""
        number, lane = divmod(index, self.lanes)
        if number < self._numbers[lane]:
            self.seek([[lane, 0, []]])
        for _ in range(self._numbers[lane], number + 1):
            block, self._states[lane] = next(self._blocks[lane])
        self._numbers[lane] = number + 1
        return block

    @property
    def positions(self) -> list[Any]:
        """The position of each lane, JSON-ready: its number, its next block, and the state of each source."""
        return [
            [lane, number, [state | {"rest": np.asarray(state["rest"]).tolist()} for state in states]]
            for lane, (number, states) in enumerate(zip(self._numbers, self._states, strict=True))
            if number
        ]

    def seek(self, positions: list[Any]) -> None:
        """Continue each lane from its furthest position."""
        for lane, number, states in sorted(positions, key=lambda position: position[:2]):
            self._numbers[lane], self._states[lane] = number, states
            self._blocks[lane] = self._read(lane)

    def _read(self, lane: int) -> Iterator[tuple[Block, list[State]]]:
        """The blocks of a lane, each with the states after it; the source furthest behind its share comes next."""
        states = self._states[lane] or [{"blocks": 0, "rest": (), "data": None}] * len(self.sources)
        streams = [self._read_source(source, lane, state) for source, state in zip(self.sources, states, strict=True)]
        while True:
            least = min(range(len(states)), key=lambda i: states[i]["blocks"] / (self.sources[i].weight or 1.0))
            block, rest, data = next(streams[least])
            states = [*states]
            states[least] = {"blocks": states[least]["blocks"] + 1, "rest": rest, "data": data}
            yield block, states

    def _read_source(self, source: Source, lane: int, state: State) -> Iterator[tuple[Block, Any, State]]:
        """The blocks of a lane's shards of one source, the rest of the last document, and the state of the data set."""
        part, position = source.shard(self.lanes, lane), state["data"]
        columns = list(part.columns)
        data = part.dataset().map(
            self._tokens, input_columns=columns, batched=True, batch_size=_BATCH, remove_columns=columns
        )
        if position:
            data.load_state_dict(position)

        def documents() -> Iterator[Any]:
            nonlocal position
            for epoch in count(position["epoch"] if position else 0):
                data.set_epoch(epoch)
                for row in part.read(data):
                    position = data.state_dict()
                    yield row["tokens"]
                if position is None:
                    raise CorpusError(f"{part.spec} has nothing to train on: it is empty, blank or held out")

        for block, rest in pack(documents(), self._size, state["rest"]):
            yield block, rest, position

    def _tokens(self, texts: list[str]) -> dict[str, list[list[int]]]:
        """Tokenise a batch of documents, without what is held out."""
        pairs = zip(texts, self.encoder.tokens(texts), strict=True)
        rows = [tokens[: self._heldout.limit(row_digest(text), len(tokens))] for text, tokens in pairs]
        return {"tokens": [tokens for tokens in rows if tokens]}
