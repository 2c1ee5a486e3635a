"""Blocks of sources that are too large to store: `datasets` streams them, and they are tokenised on the way.

A stream is read in n lanes side by side; lane i has every nth shard (file) of each source from shard i on. Blocks come
from the lanes in turn, so each process reads only the shards of its blocks. The number of lanes depends on the batch
and the shards, not on the number of processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

# Position of a lane in one source: the state of its data set, and the rest of the last document.
State = dict[str, Any]


class StreamedBlocks:
    """Endless blocks: an exhausted source starts again. Each source has its share of the blocks.

    The number of lanes divides the `batch`, and every source has at least as many shards. A thread reads two batches
    ahead. Raises CorpusError for several sources without weights.
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
        self._ahead = 2 * batch // self.lanes
        self._worker = ThreadPoolExecutor(1)  # one: tokenizers are not to be called by several
        self._open = [self._lane(lane, 0, None) for lane in range(self.lanes)]

    def __str__(self) -> str:
        """The sources and the number of lanes, on which the blocks depend."""
        return ", ".join(
            source.spec if shards == 1 else f"{source.spec} ({shards} files, {self.lanes} at a time)"
            for source, shards in zip(self.sources, self._shards, strict=True)
        )

    def __getitem__(self, index: int) -> Block:
        """Block `index`; its lane is read forward, or again from the start."""
        number, lane = divmod(index, self.lanes)
        if number < self._open[lane].number:
            self._open[lane] = self._lane(lane, 0, None)
        return self._open[lane].block(number, self._ahead)

    @property
    def positions(self) -> list[Any]:
        """The position of each lane, JSON-ready: its number, its next block, and the state of each source."""
        return [
            [lane, blocks.number, [state | {"rest": np.asarray(state["rest"]).tolist()} for state in blocks.states]]
            for lane, blocks in enumerate(self._open)
            if blocks.states
        ]

    def seek(self, positions: list[Any]) -> None:
        """Continue each lane from its furthest position."""
        for lane, number, states in sorted(positions, key=lambda position: position[:2]):
            self._open[lane] = self._lane(lane, number, states)

    def _lane(self, lane: int, number: int, states: Sequence[State] | None) -> _Lane:
        return _Lane(self._blocks(lane, states), number, states or (), self._worker)

    def _blocks(self, lane: int, states: Sequence[State] | None) -> Iterator[tuple[Block, list[State]]]:
        """The blocks of a lane, each with the states after it; the source furthest behind its share comes next."""
        current = list(states or [{"blocks": 0, "rest": (), "data": None}] * len(self.sources))
        streams = [self._blocks_of(source, lane, state) for source, state in zip(self.sources, current, strict=True)]
        while True:
            least = min(range(len(current)), key=lambda i: current[i]["blocks"] / (self.sources[i].weight or 1.0))
            block, rest, data = next(streams[least])
            current = [*current]
            current[least] = {"blocks": current[least]["blocks"] + 1, "rest": rest, "data": data}
            yield block, current

    def _blocks_of(self, source: Source, lane: int, state: State) -> Iterator[tuple[Block, Any, dict[str, Any]]]:
        """The blocks of a lane's shards of one source, the rest of the last document, and the state of the data set."""
        part, position = source.shard(self.lanes, lane), state["data"]
        column = list(part.columns)
        data: Any = None

        def documents() -> Iterator[Any]:
            nonlocal data, position
            while True:
                data = part.dataset().map(
                    self._tokens, input_columns=column, batched=True, batch_size=_BATCH, remove_columns=column
                )
                first, start = True, position
                if start:
                    data.load_state_dict(start)
                position = None
                for row in part.read(data):
                    first = False
                    yield row["tokens"]
                if first and not start:
                    raise CorpusError(f"{part.spec} has nothing to train on: it is empty, blank or held out")

        for block, rest in pack(documents(), self._size, state["rest"]):
            yield block, rest, data.state_dict() if data else position

    def _tokens(self, texts: list[str]) -> dict[str, list[list[int]]]:
        """Tokenise a batch of documents, without what is held out."""
        pairs = zip(texts, self.encoder.tokens(texts), strict=True)
        rows = [tokens[: self._heldout.limit(row_digest(text), len(tokens))] for text, tokens in pairs]
        return {"tokens": [tokens for tokens in rows if tokens]}


class _Lane:
    """A lane that reads ahead: `number` of the next block, `states` before it."""

    def __init__(
        self, blocks: Iterator[tuple[Block, list[State]]], number: int, states: Sequence[State],
        worker: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        self.number, self.states, self._blocks, self._worker = number, states, blocks, worker
        self._queue: deque[Future[tuple[Block, list[State]]]] = deque()

    def block(self, number: int, ahead: int) -> Block:
        """Block `number`, the next or a later one; a thread reads `ahead` blocks ahead."""
        while True:
            while len(self._queue) < ahead:
                self._queue.append(self._worker.submit(next, self._blocks))
            block, self.states = self._queue.popleft().result()
            self.number += 1
            if self.number > number:
                return block
