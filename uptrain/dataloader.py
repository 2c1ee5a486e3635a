"""The blocks of each step, which depend on data, seed and length, not on ranks and micro-batches.

A block of an encoder-decoder is one pair: `input_ids` and `attention_mask` (S,) and `labels` (T,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gqa.corpus.blocks import BlockSource, block_of, is_plain, tokens_of, with_repeats
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import Block, Ints
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.overlap import Overlap

# Makes a pair that the model reads of a stored block; the numbers seed what is drawn for it.
MakePair = Callable[[Block, list[int]], Block]


@dataclass(frozen=True)
class Dataloader:
    """Blocks in the order in which they are trained on.

    With B blocks a step, step s (from 0) trains on blocks s * B to (s + 1) * B - 1, counted from
    `first_trained_block`. With `options.repeats` half of the blocks repeat passages
    (`with_repeats` in corpus/blocks.py).

    Attributes:
        options: With block and batch decided.
        blocks: Blocks as they are stored, streamed or generated. With `options.repeats` stored text
            has only those here that are text: `block` makes the others of them.
        steps: Number of steps of the run.
        fingerprint: Equal if the data is equal.
        summary: The data in words.
        validation_blocks: On which the run is measured.
        first_trained_block: The index in `blocks` of the first block that is trained on. Those
            before it are held out (only generated text has any).
        make_pair: Makes a pair (source, target) of one block, for an encoder-decoder; None if
            blocks are read as they are.
        tokens_of_blocks: Tokens of each block that is trained on, in order: entry 0 is block
            `first_trained_block`. None if all blocks have `options.block_size` tokens.
        data_tokens: Tokens of the data that are not held out; None where that is not counted, as
            for a stream.
        distinct_tokens: How many of `data_tokens` are trained on; None of a stream, of pairs, and
            of text that is generated.
        overlap: What the data has in common with the validation text.
    """

    options: UptrainOptions
    blocks: BlockSource
    steps: int
    fingerprint: str
    summary: str
    validation_blocks: list[Block]
    first_trained_block: int = 0
    make_pair: MakePair | None = None
    tokens_of_blocks: Ints | None = None
    data_tokens: int | None = None
    distinct_tokens: int | None = None
    overlap: Overlap | None = None

    def tokens_until(self, step: int) -> int:
        """Tokens of all blocks of the first `step` steps, repeats included."""
        blocks = step * self.options.blocks_per_step
        if self.tokens_of_blocks is None:
            return blocks * self.options.block_size
        return int(self.tokens_of_blocks[:blocks].sum())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, on average."""
        return self.tokens_until(self.steps) // self.steps

    @property
    def validation_tokens(self) -> int:
        """Tokens of the validation blocks; of a pair those of both sides."""
        tokens = 0
        for block in self.validation_blocks:
            tokens += len(block["input_ids"])
            if "labels" in block:
                tokens += len(block["labels"])
        return tokens

    def batches(
        self, first_step: int, rank: int, ranks: int, micro_batch: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """The micro-batches of one rank for each step from `first_step` on.

        Rank r of R has blocks r, r + R, r + 2 R, ... of each step.
        """
        batch = self.options.blocks_per_step
        for step in range(first_step, self.steps):
            begin = self.first_trained_block + step * batch
            of_rank = [self.block(number) for number in range(begin + rank, begin + batch, ranks)]
            yield [
                stack(of_rank[start : start + micro_batch])
                for start in range(0, len(of_rank), micro_batch)
            ]

    def block(self, number: int) -> Block:
        """Block `number` (from `first_trained_block` on) as the model reads it."""
        if not self.options.repeats:
            return self._plain_block(number)
        if isinstance(self.blocks, StreamedBlocks):
            return self._block_of_stream(number)
        return self._block_of_stored_text(number)

    def _plain_block(self, number: int) -> Block:
        """A block without repeats, or the pair that is made of it."""
        block = self.blocks[number]
        if self.make_pair is None:
            return block
        return self.make_pair(block, [self.options.seed, number])

    def _block_of_stream(self, number: int) -> Block:
        """A block that may repeat passages of its own text: a stream cannot go back to others."""
        return self._with_repeats(self._streamed_tokens, number, first=number)

    def _block_of_stored_text(self, number: int) -> Block:
        """A block of text, or one that repeats passages of earlier ones."""
        # Of stored text documents are held out, not blocks: block 0 is trained on
        return self._with_repeats(self._latest_text, number, first=0)

    def _with_repeats(self, read: Callable[[int], Ints], number: int, *, first: int) -> Block:
        """Block `number`, in which passages of blocks from `first` on may be repeated.

        `read` returns the tokens of a block as it is, without repeats.
        """
        tokens = with_repeats(read, number, self.options.seed, None, first=first)
        return block_of(tokens.astype(np.int64))

    def _streamed_tokens(self, number: int) -> Ints:
        return tokens_of(self.blocks[number])

    def _latest_text(self, number: int) -> Ints:
        """The latest block of text up to `number`: the block itself, or if it is one that repeats
        passages, the block of text before it. So all text that is read is also trained on as it is.
        """
        return tokens_of(self.blocks[int(self._text_numbers[number])])

    @cached_property
    def _text_numbers(self) -> Ints:
        """For each block of stored text the number, in `blocks`, of the latest that is text."""
        plain = is_plain(np.arange(self.steps * self.options.blocks_per_step))
        numbers: Ints = np.cumsum(plain) - 1
        return numbers


def stack(blocks: list[Block]) -> dict[str, Tensor]:
    """Stack B blocks of T tokens into tensors (B, T): ids, and loss masks where blocks have them.

    Pairs are padded at the end: their masks are 0 and their labels -100 there.
    """
    stacked = dict[str, Tensor]()
    for name in blocks[0]:
        rows = [torch.tensor(block[name]) for block in blocks]
        padding = -100 if name == "labels" else 0
        stacked[name] = pad_sequence(rows, batch_first=True, padding_value=padding)
    return stacked
