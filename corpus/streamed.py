"""The blocks of sources that are too large to be kept: documents in the order of the stream, tokenised on the way.

A stream is read in lanes side by side, each of which is every so many-th shard (file) of each source. Blocks come from
the lanes in turn, so who trains on every so many-th block reads a share of the shards. How many lanes there are is
decided by the batch and the shards, not by the number of processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, islice, tee
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import CorpusError
from gqa.corpus.alpha import shares_of
from gqa.corpus.document import Document
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Block, Encoder, block_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LANES = 64  # at most: each has a shard open, which is read again where a run goes on
_HELD = 8  # blocks of a lane that can be asked for again

# Where a block of a lane begins: its number there, how many tokens of the document at hand are before it and, for each
# source, the shard and the number there of the document at hand or next, and tokens of the documents before that.
Place = tuple[int, int, list[tuple[int, int, int]]]


class StreamedBlocks:
    """With `n_blocks` the stream ends there, and a lane of a source that is exhausted before begins again; without it,
    it ends with the first source.

    The `first` blocks come from the first lane, the others from all lanes, of which there are as many as divide the
    `batch` and every source has shards. A thread reads two batches ahead of those. Where a run is continued, so many
    blocks of a lane `before` the next one are asked for.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        *,
        block_size: int,
        n_blocks: int | None = None,
        heldout_fraction: float = 0.0,
        boundaries: bool = False,
        first: int = 0,
        batch: int = 1,
        before: int = 0,
    ) -> None:
        """Raises CorpusError where there are several sources and they have no weights."""
        if len(sources) > 1 and any(source.weight is None for source in sources):
            raise CorpusError("several streams need weights (SPEC@WEIGHT): their sizes are not known")
        self._specs = [source.spec for source in sources]
        if heldout_fraction:
            sources = [source.part("train", heldout_fraction) for source in sources]
        self.sources, self._shares = sources, list(map(float, shares_of([s.weight or 1.0 for s in sources])))
        self.encoder = Encoder(tokenizer)
        self.size, self.n_blocks, self.boundaries, self._first = block_size, n_blocks, boundaries, first
        self._shards = [source.shards() for source in sources]
        self.lanes = max(n for n in range(1, min(*self._shards, _LANES, batch) + 1) if batch % n == 0)
        self._ahead = 2 * batch // self.lanes
        worker = ThreadPoolExecutor(1)  # one: tokenizers are not to be called by several
        self._lanes = [_Lane(partial(self._blocks, lane), worker, before) for lane in range(self.lanes)]

    def __str__(self) -> str:
        """What is read, and in how many lanes: on all of that the blocks depend."""
        return ", ".join(
            spec if shards == 1 else f"{spec} ({shards} files, {self.lanes} at a time)"
            for spec, shards in zip(self._specs, self._shards, strict=True)
        )

    def __iter__(self) -> Iterator[Block]:
        for index in count() if self.n_blocks is None else range(self.n_blocks):
            try:
                yield self[index]
            except IndexError:
                return

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Its lane is read forward, and again from its start for one eight before the last of the lane.

        Raises IndexError where the stream has ended.
        """
        if index < self._first:
            return self._lanes[0].block(index, 1)
        turn, lane = divmod(index - self._first, self.lanes)
        return self._lanes[lane].block(turn + self._first * (lane == 0), self._ahead)

    @property
    def places(self) -> list[Any]:
        """How far each lane was read, if it was: its number and a `Place`."""
        return [[number, *place] for number, lane in enumerate(self._lanes) if (place := lane.place)]

    def seek(self, places: list[Any]) -> None:
        """Lanes go on from the furthest of these places for each."""
        for lane, number, offset, at in sorted(places):
            self._lanes[lane].seek((number, offset, at))

    def _blocks(self, lane: int, place: Place | None) -> Iterator[tuple[Place, Block, Place]]:
        """The blocks of a lane from a place on, each between where it begins and where it ends."""
        place = place or (0, 0, [(lane, 0, 0)] * len(self.sources))
        (number, used, _), ours = place, None
        if self.n_blocks is not None:
            ours = self._first * (lane == 0) + -(-(self.n_blocks - self._first - lane) // self.lanes)
        parts: list[NDArray[np.int32]] = []
        held = 0
        for at, tokens in self._merged(lane, place[2]):
            while held + len(tokens) - used >= self.size and number != ours:
                upto, number = used + self.size - held, number + 1
                end = number, upto, at
                yield place, block_of([*parts, tokens[used:upto]], self.size, self.boundaries), end
                place, used, parts, held = end, upto, [], 0
            if number == ours:
                return
            if used < len(tokens):
                parts.append(tokens[used:])
                held += len(tokens) - used
            used = 0

    def _merged(self, lane: int, at: Sequence[Any]) -> Iterator[tuple[list[Any], NDArray[np.int32]]]:
        """Each document with where sources are then, mixed as a selection is, until a source ends."""
        at = [*at]
        documents = [self._documents(source, lane, *at[source][:2]) for source in range(len(at))]
        while True:
            source = min(range(len(at)), key=lambda number: at[number][2] / self._shares[number])
            if not (found := next(documents[source], None)):
                return
            (shard, number, tokens), before = found, at[source][2]
            at = [*at]
            at[source] = shard, number, before
            yield at, tokens
            at = [*at]
            at[source] = shard, number + 1, before + len(tokens)

    def _documents(
        self, number: int, lane: int, shard: int, skipped: int
    ) -> Iterator[tuple[int, int, NDArray[np.int32]]]:
        """The documents of a source in a lane, with their shards and numbers there, from one on; again and again where
        a number of blocks is wanted.
        """
        source, shards, begin = self.sources[number], self._shards[number], (shard, skipped)
        if self.lanes > 1:
            source = replace(source, spec=f"{source.spec} (every {self.lanes}th file from file {lane + 1} on)")

        def once(shard: int, skipped: int) -> Iterator[tuple[int, int, Document]]:
            for current in range(shard, shards, self.lanes):
                numbered = enumerate(source.read(current))
                yield from ((current, n, found) for n, found in islice(numbered, skipped, None))
                skipped = 0

        def read() -> Iterator[tuple[int, int, Document]]:
            yield from source.some(once(lane, 0)) if begin == (lane, 0) else once(*begin)
            while self.n_blocks is not None:
                yield from source.some(once(lane, 0))

        places, documents = tee(read())
        encoded = self.encoder.encode(found for *_, found in documents)
        for (current, n, _), (_, tokens) in zip(places, encoded, strict=False):
            yield current, n, np.array(tokens, np.int32)


class _Lane:
    """The blocks of a lane, which `read` gives from a place on (None: from its start)."""

    def __init__(
        self,
        read: Callable[[Place | None], Iterator[tuple[Place, Block, Place]]],
        worker: ThreadPoolExecutor,
        before: int,
    ) -> None:
        self._read, self._worker, self._before = read, worker, before
        self._recent: deque[tuple[Place, Block, Place]] = deque(maxlen=_HELD)
        self._coming: deque[Future[Any]] = deque()
        self.seek(None)

    def seek(self, place: Place | None) -> None:
        """Where the next block that is asked for is found, unless it is before."""
        self._start, self._next, self._blocks = place, place[0] if place else 0, self._read(place)
        self._recent.clear()
        self._coming.clear()

    @property
    def place(self) -> Place | None:
        """Where a run that is continued is to read from; None where nothing was read."""
        places = [*(begin for begin, _, _ in self._recent), *(end for *_, end in [*self._recent][-1:])]
        return places[-1 - self._before :][0] if places else None

    def block(self, number: int, ahead: int) -> Block:
        """Block `number`; so many are read in a thread from the one that is next."""
        if number < self._next - len(self._recent):
            self.seek(self._start if self._start and self._start[0] <= number else None)
        while self._next <= number:
            while len(self._coming) < ahead:
                self._coming.append(self._worker.submit(next, self._blocks, None))
            if not (found := self._coming.popleft().result()):
                raise IndexError(f"the stream ended before block {number}")
            self._recent.append(found)
            self._next += 1
        return self._recent[number - self._next][1]
