"""Encoded documents -> blocks of one length, some of which repeat passages.

Consecutive documents are cut into blocks without padding, so a block depends on the list of
documents and its number, not on batches or ranks.

Some blocks get repeated passages, which train recall from the context: the second copy of a passage
can be predicted from the first, whatever it says. Generated text hardly exercises retrieval
heads; a model that is calibrated or trained on plain text alone has a low perplexity but loses
recall.

Arrays of tokens are (T,) ids, or where not all of them count in the loss (T, 2): each id with 1 if
it counts, else 0 (`tokens_with_mask`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import numpy as np

from gqa.corpus.tokens import Block, Documents, Ints

SHORTEST = 16  # tokens of a repeated passage: shorter ones are predicted without the first copy
# Shares of the kinds of blocks; docs/results.md compares others.
MIX = {"plain": 0.5, "tiled": 0.25, "random": 0.25}
# Some tools begin a text with BOS even if the tokenizer does not: then one of so many blocks begins
# with it.
START_EVERY = 4
EARLIER_BLOCKS = 7  # earlier blocks from which a random block draws tokens too
_GOLDEN = (math.sqrt(5) - 1) / 2


class BlockSource(Protocol):
    """Blocks by their number, from 0 on: of stored documents (`Blocks`), of a stream
    (`StreamedBlocks`), of pairs (`PairBlocks`), or generated (`SampledBlocks`).
    """

    def __getitem__(self, index: int) -> Block:
        """Block `index`: `input_ids` (T,), and `loss_mask` (T,) where not all tokens count in the
        loss; of pairs `input_ids`, `attention_mask` and `labels`.
        """
        ...


def block_of(tokens: Ints) -> Block:
    """The block of tokens (T,), or (T, 2) with their loss mask."""
    if tokens.ndim == 1:
        return {"input_ids": tokens}
    return {"input_ids": tokens[:, 0], "loss_mask": tokens[:, 1]}


def tokens_of(block: Block) -> Ints:
    """The tokens of a block, (T,), or (T, 2) with their loss mask: the opposite of `block_of`."""
    if "loss_mask" not in block:
        return block["input_ids"]
    return np.stack([block["input_ids"], block["loss_mask"]], axis=1)


class Blocks:
    """Documents in a given order, cut into blocks by their number.

    Block b is tokens b * size to (b + 1) * size of the stream: {"input_ids": (size,) int64}, and of
    documents with masks {"loss_mask": (size,)}.

    Attributes:
        text: The documents.
        order: (N,) document numbers, repeated in several epochs.
        size: Tokens of a block.
        n_blocks: By default all.
        lengths: (D,) tokens to read from the start of each document, by default all.
    """

    def __init__(
        self,
        text: Documents,
        order: Ints,
        size: int,
        n_blocks: int | None = None,
        lengths: Ints | None = None,
    ) -> None:
        self.text = text
        self.order = order
        self.size = size
        self.lengths = text.lengths if lengths is None else lengths
        self._ends = np.cumsum(self.lengths[order])
        tokens = int(self._ends[-1:].sum())
        self.n_blocks = tokens // size if n_blocks is None else n_blocks

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError if it is out of range."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(f"block {index} of {self.n_blocks}")

        begin = int(index) * self.size
        first = int(np.searchsorted(self._ends, begin, "right"))
        last = int(np.searchsorted(self._ends, begin + self.size, "left"))
        read = self.text.tokens_with_mask if self.text.has_masks else self.text.tokens
        parts = [read(int(i))[: self.lengths[i]] for i in self.order[first : last + 1]]
        # A negative start counts from the end
        parts[0] = parts[0][begin - int(self._ends[first]) :]
        return block_of(np.concatenate(parts)[: self.size].astype(np.int64))


def pack(documents: Iterable[Any], size: int, rest: Any = ()) -> Iterator[tuple[Block, Ints]]:
    """Pack the tokens of documents, after `rest` of an earlier document, into blocks; yield each
    block with the remaining tokens of its last document.
    """
    rest = np.asarray(rest, np.int64)
    for document in chain([()], documents):  # first none: `rest` alone may fill blocks
        tokens = np.asarray(document, np.int64)
        if len(tokens):
            # No tokens have no mask either: then there is nothing to join them with.
            rest = np.concatenate([rest, tokens]) if len(rest) else tokens
        for begin in range(0, len(rest) - size + 1, size):
            yield block_of(rest[begin : begin + size]), rest[begin + size :]
        rest = rest[len(rest) // size * size :]


def repeat_start(block: Ints, random: np.random.Generator) -> Ints:
    """Repeat the first `period` tokens of a block (T,) or (T, 2) to its end, `period` uniform in
    T/8 ... T/2.
    """
    length = len(block)
    period = random.integers(max(length // 8, 1), max(length // 2, 1), endpoint=True)
    return np.resize(block[:period], block.shape)


def is_plain(numbers: Any) -> Any:
    """Whether blocks with these numbers (an array, or one number) stay as they are; the others
    repeat passages.
    """
    return _place(numbers) < MIX["plain"]


def _kind(index: int) -> str:
    """The kind of block `index`, a key of `MIX`."""
    upper_bounds = np.cumsum(list(MIX.values()))
    number = int(np.searchsorted(upper_bounds, _place(index), side="right"))
    return list(MIX)[number]


def _place(numbers: Any) -> Any:
    """A place from 0 to 1 for each block, by its number (an array, or one number), which determines
    its kind.

    Multiples of the golden ratio are spread evenly, so each kind has its share in any run of
    blocks.
    """
    return numbers * _GOLDEN % 1.0


def with_repeats(
    read_block: Callable[[int], Ints], index: int, seed: int, start: int | None, *, first: int = 0
) -> Ints:
    """Block `index` (T,) or (T, 2), plain or with repeated passages, in the shares of `MIX`.

    It depends on the index, the seed and the `EARLIER_BLOCKS` earlier blocks, not on the number of
    blocks. A token takes its mask with it.

    Args:
        read_block: Reads the plain block of an index.
        index: Of the block.
        seed: Of the passages that are repeated.
        start: The token that stays at the beginning of blocks that begin with it.
        first: The first block that exists.
    """
    plain = read_block(index)
    begins_with_start = plain.flat[0] == start  # the first id, also where each has a mask
    start_length = int(begins_with_start)
    start_tokens = plain[:start_length]
    tokens = plain[start_length:]

    kind = _kind(index)
    if kind == "plain" or len(tokens) < 2 * SHORTEST:
        return plain

    random = np.random.default_rng([seed, index])
    if kind == "random":
        numbers = range(max(first, index - EARLIER_BLOCKS), index)
        earlier = [read_block(number)[start_length:] for number in numbers]
        tokens = random.choice(np.concatenate([*earlier, tokens]), len(tokens))
    return np.concatenate([start_tokens, repeat_start(tokens, random)])
