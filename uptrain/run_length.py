"""How long a run is: tokens of a block, blocks of a step, and steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from gqa.checkpoint.read import Checkpoint
from gqa.core.errors import CorpusError, RefusedError
from gqa.corpus.blocks import MIX, is_plain
from gqa.corpus.specs import parse_self
from gqa.models.classes import positions
from gqa.models.training_memory import MAX_BLOCK
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.schedule import depends_on_length

MAX_PAIR = 512  # most tokens of a source or target with relative positions, as for T5
# More tokens than any run reads: of a stream, of `self`, and of text that is not read yet
ENDLESS = 2**62
STEP_DIGITS = 8  # of the number of a step, in the names of states
_MOST_STEPS = 10**STEP_DIGITS - 1
# A run has at least so many steps, if smaller batches and blocks allow it
_MIN_STEPS = 250
_MAX_BATCH = 8  # blocks of a step
_MIN_BLOCK = 256  # tokens


@dataclass(frozen=True)
class Length:
    """How long a run is.

    Attributes:
        steps: Number of steps.
        blocks_per_step: Blocks of a step, over all processes.
        block_size: Tokens of a block.
    """

    steps: int
    blocks_per_step: int
    block_size: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.blocks_per_step * self.block_size

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self.steps * self.tokens_per_step


def largest_block(config: Any, checkpoint: Checkpoint, options: TrainOptions) -> int:
    """Tokens of a block, unless the run is so short that it gets shorter ones: --context, or by
    default the model's positions, at most `MAX_BLOCK` (`MAX_PAIR` for an encoder-decoder with
    relative positions).

    Raises RefusedError.
    """
    default = MAX_PAIR if config.is_encoder_decoder else MAX_BLOCK
    longest = positions(config)
    if options.context == 1:
        raise RefusedError("--context 1 leaves nothing to predict; pass at least 2")
    if longest and options.context and options.context > longest:
        raise RefusedError(
            f"--context {options.context} is more than the {longest} positions of "
            f"{checkpoint.name}; pass at most {longest}"
        )
    return options.context or min(longest or default, MAX_BLOCK)


def length_without_data(
    options: TrainOptions, config: Any, checkpoint: Checkpoint, processes: int
) -> Length | None:
    """How long a run is, as far as that does not depend on text, which is not read.

    Args:
        options: With data and length decided.
        config: transformers' config of the model.
        checkpoint: The model.
        processes: That share a step.

    Returns:
        None for pairs, and for a share of text whose length is not stated.

    Raises:
        RefusedError, CorpusError: There is less than one step, or the context is too long.
    """
    largest = largest_block(config, checkpoint, options)
    if config.is_encoder_decoder:
        return None
    stated_tokens = parse_self(options.data[0])[0] if options.is_generated else None
    if options.alpha is not None and not stated_tokens:
        return None

    data_tokens = stated_tokens or ENDLESS  # shorter text is read again
    options = decide_block_and_batch(options, data_tokens, largest, processes)
    steps = count_steps(count_blocks(options, data_tokens), options)
    return Length(steps, options.blocks_per_step, options.block_size)


def decide_block_and_batch(
    options: TrainOptions, data_tokens: int, largest: int, processes: int
) -> TrainOptions:
    """The options with the tokens of a block and the blocks of a step decided.

    By default a step has eight blocks of `largest` tokens. If that makes less than 250 steps, a
    step has fewer blocks, and blocks are shorter: with few tokens the number of steps decides the
    result (docs/uptraining.md). A constant learning rate keeps the default, so that a longer run
    begins with the steps of a shorter one. `processes` share a step: the default batch is a
    multiple of them.
    """
    tokens = options.tokens or data_tokens
    if options.alpha is not None:
        tokens = int(options.alpha * data_tokens)
        if options.repeats:
            tokens = int(tokens / MIX["plain"])
    may_shrink = options.steps is None and depends_on_length(options.schedule)

    block = options.context or largest
    if may_shrink and options.context is None:
        while tokens < _MIN_STEPS * block and block // 2 >= _MIN_BLOCK:
            block //= 2

    batch = options.batch_size
    if batch is None:
        target = _MAX_BATCH
        if may_shrink:
            target = min(_MAX_BATCH, tokens // (_MIN_STEPS * block))
        unit = processes * (options.micro_batch or 1)
        batch = max(1, target // unit) * unit
    return replace(options, context=block, batch_size=batch)


def count_blocks(options: TrainOptions, data_tokens: int) -> int:
    """Number of blocks to train on: those that `steps` need, or that fit into the wanted tokens.
    With repeats alpha counts the blocks of text alone.

    Raises CorpusError if that is less than one block, RefusedError if it is more than --data
    self:TOKENS states.
    """
    _require_a_block(options, data_tokens)
    if options.steps is not None:
        blocks = options.steps * options.blocks_per_step
    else:
        blocks = _wanted_tokens(options, data_tokens) // options.block_size
    if options.alpha is not None and options.repeats:
        blocks = blocks_with_text(blocks)
    _check_stated_tokens(options, blocks, data_tokens)
    return blocks


def _require_a_block(options: TrainOptions, data_tokens: int) -> None:
    """Raise CorpusError if the data has less than one block."""
    if not data_tokens:
        raise CorpusError(
            "all documents are validation text, and none is left to train on; pass other text with "
            "--heldout, or lower --heldout-fraction"
        )
    if data_tokens < options.block_size:
        raise CorpusError(
            f"the data has {data_tokens} tokens, less than one block of {options.block_size} "
            "tokens; pass more data, or lower --context"
        )


def _wanted_tokens(options: TrainOptions, data_tokens: int) -> int:
    """Tokens to train on: alpha x all tokens, or `tokens`, or without both all of the data.

    Raises CorpusError if they are less than one block.
    """
    alpha = options.alpha
    tokens = options.tokens or data_tokens
    option = "--tokens"
    length = f"--tokens {tokens} is"
    if alpha is not None:
        # Decimal: 0.29 of 100 is 29, not 28 as in binary.
        tokens = int(Fraction(repr(float(alpha))) * data_tokens)
        option = "--alpha"
        length = f"--alpha {alpha:g} is {tokens} tokens,"
    if tokens >= options.block_size:
        return tokens

    if options.target_column:  # --tokens is one pair at least
        raise CorpusError(f"--alpha {alpha:g} is less than one pair; raise it")
    raise CorpusError(
        f"{length} less than one block of {options.block_size} tokens; raise {option}, or lower "
        "--context"
    )


def count_text_blocks(blocks: int) -> int:
    """How many of the first blocks are text; the others repeat passages."""
    return int(is_plain(np.arange(blocks)).sum())


def blocks_with_text(text_blocks: int) -> int:
    """The most blocks of a run in which no more than `text_blocks` are text."""
    enough = int(text_blocks / MIX["plain"]) + 8  # the kinds alternate unevenly, by a few blocks
    text_so_far = np.cumsum(is_plain(np.arange(enough)))
    return int((text_so_far <= text_blocks).sum())


def _check_stated_tokens(options: TrainOptions, n_blocks: int, data_tokens: int) -> None:
    """Raise RefusedError if so many blocks are more than `--data self:TOKENS` states."""
    tokens = n_blocks * options.block_size
    if options.is_generated and tokens > data_tokens:
        raise RefusedError(
            f"training takes {tokens:,} tokens, more than --data {options.data[0]}; raise that "
            "number"
        )


def count_steps(n_blocks: int, options: TrainOptions) -> int:
    """Whole batches in so many blocks. Raises RefusedError if there is none, or too many."""
    steps = n_blocks // options.blocks_per_step
    if steps > _MOST_STEPS:
        length = next(iter(options.lengths), "the data")
        raise RefusedError(
            f"{length} makes {steps:,} steps, more than the {_MOST_STEPS:,} of a run; pass less"
        )
    if steps:
        return steps

    unit = "pairs" if options.target_column else f"blocks of {options.block_size} tokens"
    too_few = f"only {n_blocks} {unit}, less than one batch of {options.batch_size}"
    if options.lengths:
        (length,) = options.lengths
        more = "pass more data" if options.alpha == 1 else f"raise {length}"
        raise RefusedError(f"{length} makes {too_few}; {more}, or lower --batch-size")
    raise RefusedError(f"the data has {too_few}; pass more data, or lower --batch-size")
