"""How long a run is: tokens of a block, blocks of a step, and steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from gqa.checkpoint.read import Checkpoint
from gqa.core.errors import RefusedError, TextError
from gqa.corpus.blocks import MIX, is_plain
from gqa.corpus.specs import parse_self
from gqa.models.classes import positions
from gqa.models.training_memory import MAX_BLOCK
from gqa.uptrain.options import UptrainOptions
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


def largest_block(config: Any, checkpoint: Checkpoint, options: UptrainOptions) -> int:
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
    options: UptrainOptions, config: Any, checkpoint: Checkpoint, processes: int
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
        RefusedError, TextError: There is less than one step, or the context is too long.
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
    options: UptrainOptions, data_tokens: int, largest: int, processes: int
) -> UptrainOptions:
    """The options with the tokens of a block and the blocks of a step decided.

    By default a step has eight blocks of `largest` tokens. If that makes less than 250 steps, a
    step has fewer blocks, and blocks are shorter: with few tokens the number of steps decides the
    result (docs/uptraining.md). The default stays with --steps, and with a constant learning rate,
    where a longer run begins with the steps of a shorter one.

    Args:
        options: With the length decided, as far as --alpha does not leave it to the data.
        data_tokens: Tokens of the data, with those that will be held out.
        largest: By `largest_block`.
        processes: That share a step.
    """
    tokens = _tokens_of_run(options, data_tokens)
    block = options.context or _default_block(options, tokens, largest)
    batch = options.batch_size or default_batch(options, tokens // block, processes)
    return replace(options, context=block, batch_size=batch)


def _tokens_of_run(options: UptrainOptions, data_tokens: int) -> int:
    """Tokens that a run takes, unless --steps says it: with those of blocks that repeat passages,
    which are half of it.

    --alpha counts the tokens of text alone, so with repeats the run takes 1 / MIX["plain"] times as
    many.
    """
    if options.alpha is None:
        return options.tokens or data_tokens

    text_tokens = share_of(options.alpha, data_tokens)
    return int(text_tokens / MIX["plain"]) if options.repeats else text_tokens


def _may_shrink(options: UptrainOptions) -> bool:
    """Whether blocks and batches may be smaller than by default, for more steps."""
    return options.steps is None and depends_on_length(options.schedule)


def _default_block(options: UptrainOptions, tokens: int, largest: int) -> int:
    """Tokens of a block in a run of so many tokens, without --context."""
    block = largest
    if _may_shrink(options):
        while tokens < _MIN_STEPS * block and block // 2 >= _MIN_BLOCK:
            block //= 2
    return block


def default_batch(options: UptrainOptions, blocks: int, processes: int) -> int:
    """Blocks (or pairs) of a step in a run of so many, without --batch-size.

    A multiple of the processes, and of --micro-batch on each of them.
    """
    target = _MAX_BATCH
    if _may_shrink(options):
        target = min(_MAX_BATCH, blocks // _MIN_STEPS)
    unit = processes * (options.micro_batch or 1)
    return max(1, target // unit) * unit


def share_of(alpha: float, total: int) -> int:
    """alpha x total, rounded down; in decimal: 0.29 of 100 is 29, not 28 as in binary."""
    return int(Fraction(repr(float(alpha))) * total)


def count_blocks(options: UptrainOptions, data_tokens: int) -> int:
    """Number of blocks to train on: those that --steps need, a share --alpha of the data, or those
    that fit into --tokens; without any of them all of the data once.

    Args:
        options: With block and batch decided.
        data_tokens: Tokens that are not held out.

    Raises:
        TextError: It is less than one block.
        RefusedError: It is more than --data self:TOKENS states.
    """
    require_data(data_tokens)
    if data_tokens < options.block_size:
        raise TextError(
            f"the data has {data_tokens} tokens, less than one block of {options.block_size} "
            "tokens; pass more data, or lower --context"
        )

    if options.steps is not None:
        blocks = options.steps * options.blocks_per_step
    elif options.alpha is not None:
        blocks = _blocks_of_alpha(options, options.alpha, data_tokens)
    elif options.tokens is not None:
        blocks = _blocks_of_tokens(options, options.tokens)
    else:
        blocks = data_tokens // options.block_size

    tokens = blocks * options.block_size
    if options.is_generated and tokens > data_tokens:
        raise RefusedError(
            f"training needs {tokens:,} tokens, but --data {options.data[0]} leaves "
            f"{data_tokens:,} besides the validation text; raise the number after 'self:'"
        )
    return blocks


def require_data(count: int) -> None:
    """Raise TextError if no tokens, or pairs, are left to train on."""
    if not count:
        raise TextError(
            "all documents are validation text, and none is left to train on; pass other text with "
            "--validation, or lower --validation-fraction"
        )


def _blocks_of_alpha(options: UptrainOptions, alpha: float, data_tokens: int) -> int:
    """The blocks of a run that reads this share of the data, each token once. Blocks that repeat
    passages come on top. Raises TextError if it is less than one block.
    """
    tokens = share_of(alpha, data_tokens)
    if tokens < options.block_size:
        raise TextError(
            f"--alpha {alpha:g} is {tokens} tokens, less than one block of {options.block_size} "
            "tokens; raise --alpha, or lower --context"
        )
    blocks_of_text = tokens // options.block_size
    return blocks_for_text(blocks_of_text) if options.repeats else blocks_of_text


def _blocks_of_tokens(options: UptrainOptions, tokens: int) -> int:
    """The blocks that fit into --tokens, those that repeat passages included. Raises TextError if
    it is less than one block.
    """
    if tokens < options.block_size:
        raise TextError(
            f"--tokens {tokens} is less than one block of {options.block_size} tokens; raise "
            "--tokens, or lower --context"
        )
    return tokens // options.block_size


def text_blocks_among(blocks: int) -> int:
    """How many of the first blocks are text; the others repeat passages."""
    return int(is_plain(np.arange(blocks)).sum())


def blocks_for_text(text_blocks: int) -> int:
    """The most blocks of a run of which `text_blocks` are text: the inverse of
    `text_blocks_among`.
    """
    enough = int(text_blocks / MIX["plain"]) + 8  # the kinds alternate unevenly, by a few blocks
    text_so_far = np.cumsum(is_plain(np.arange(enough)))
    return int((text_so_far <= text_blocks).sum())


def count_steps(n_blocks: int, options: UptrainOptions) -> int:
    """Whole batches in so many blocks. Raises RefusedError if there is none, or too many."""
    steps = n_blocks // options.blocks_per_step
    if steps > _MOST_STEPS:
        length = next(iter(options.lengths), "the data")
        raise RefusedError(
            f"{length} makes {steps:,} steps, but a run may have at most {_MOST_STEPS:,}; pass a "
            "smaller number"
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
