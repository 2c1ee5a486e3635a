"""Training data of encoder-decoders: two columns of a data set, plain text with spans left out, or pairs that the
teacher writes. A block is one pair: `input_ids` and `attention_mask` (S,), and `labels` (T,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gqa.checkpoint.errors import RefusedError
from gqa.convert.merge.pairs import PairMaker
from gqa.corpus.alpha import Heldout, hold_back_of_each, reading_order
from gqa.corpus.pairs import PairBlocks, PairEncoder, pair_block, tokenise_pairs
from gqa.corpus.sources import is_self, parse_sources
from gqa.corpus.tokens import Block
from gqa.uptrain.dataloader import (
    Dataloader,
    count_held_back,
    count_steps,
    heldout_sources,
    length_arguments,
    mixture_weights,
    open_dataloader,
    open_heldout,
    open_sampled,
    source_options,
)
from gqa.uptrain.defaults import settle_steps
from gqa.uptrain.options import TrainOptions

MakePairs = Callable[[int], PairMaker]  # tokens of a side -> the teacher, which writes pairs


def open_pairs(
    options: TrainOptions, encoder: PairEncoder, tokenizer: Any, longest: int, ranks: int, teacher: MakePairs | None,
    write: bool = True,
) -> Dataloader:  # fmt: skip
    """A dataloader of pairs with at most `longest` tokens a side, and its held-out pairs. Unless `write`, the teacher
    writes nothing and its blocks are empty. Raises RefusedError and CorpusError.
    """
    if options.repeats:
        raise RefusedError(f"repeats are for decoders, {encoder.name} is an encoder-decoder")
    sampled = any(map(is_self, options.data))
    if options.target_field:
        if options.streaming or sampled:
            raise RefusedError("--target-field is a column of data that is stored; drop --streaming and --data self")
        return _open_table(options, encoder, options.context or longest, ranks)

    def corrupt(block: Block, seeds: list[int]) -> Block:
        return pair_block(encoder.corrupt(block["input_ids"], np.random.default_rng(seeds)))

    if sampled:
        assert teacher is not None
        loader = open_sampled(options, lambda size, count: teacher(size).sampled(count, write), longest, ranks)
    else:
        encoder.check_marks()
        loader = open_dataloader(options, tokenizer, longest, ranks)
    make = _split_pair if sampled else corrupt
    make_heldout = make if loader.heldout else corrupt
    heldout = loader.heldout or open_heldout(loader.options, tokenizer)
    pairs = [block and make_heldout(block, [number]) for number, block in enumerate(heldout)]
    return replace(loader, heldout=pairs, make=make)


def _split_pair(block: Block, seeds: list[int]) -> Block:
    """The pair of a sampled block, whose two halves are padded with -1."""
    source, target = (side[side >= 0] for side in np.split(block["input_ids"], 2))
    return pair_block((source, target))


def _open_table(options: TrainOptions, encoder: PairEncoder, size: int, ranks: int) -> Dataloader:
    """A dataloader of two columns. Lengths count pairs, not tokens, so alpha is a share of the pairs."""
    sources = parse_sources(options.data, **source_options(options))
    table = tokenise_pairs(sources, encoder)
    tokens = np.stack([table.count("source"), table.count("target")])
    count, mean = len(table), float(np.minimum(tokens, size).sum(0).mean())

    def pairs(tokens: int) -> int:
        return max(1, int(tokens / mean))

    all_pairs = options.pretraining_tokens and pairs(options.pretraining_tokens)
    if options.alpha is not None and int(options.alpha * (all_pairs or count)) < 1:
        raise RefusedError(f"--alpha {options.alpha:g} of {count:,} pairs is none; give more")
    counted = replace(
        options, context=1, tokens=options.tokens and pairs(options.tokens), pretraining_tokens=all_pairs,
        heldout_tokens=pairs(options.heldout_tokens),
    )  # fmt: skip
    counted = settle_steps(counted, count, 1, ranks)
    heldout_table = table
    if options.heldout:
        heldout_table = tokenise_pairs(heldout_sources(options), encoder)
        heldout = Heldout({bytes(digest): 0 for digest in heldout_table.digests})
        numbers = np.arange(len(heldout_table))
    else:
        limits = {} if options.heldout_fraction else hold_back_of_each(table, count_held_back(counted, table))
        heldout = Heldout(limits, options.heldout_fraction)
        numbers = np.flatnonzero(heldout.lengths(table) == 0)
        if options.heldout_fraction and not len(numbers):
            raise RefusedError("--heldout-fraction holds out no pair; give more, or pairs of their own with --heldout")
    numbers = numbers[np.linspace(0, len(numbers) - 1, min(counted.heldout_tokens, len(numbers))).astype(int)]
    heldout_pairs = PairBlocks(heldout_table, numbers, encoder, size)
    order, n_blocks, _ = reading_order(
        table, heldout.lengths(table), block_size=1, seed=options.seed, weights=mixture_weights(sources),
        **length_arguments(counted),
    )  # fmt: skip
    steps = count_steps(n_blocks, counted)
    summary = f"{steps * counted.blocks_per_step:,} pairs out of {count:,}, of {mean:.0f} tokens"
    if cut := int((tokens > size).any(0).sum()):
        summary += f"; {cut:,} are cut to {size} a side"
    return Dataloader(
        replace(options, context=size, batch_size=counted.batch_size), PairBlocks(table, order, encoder, size), steps,
        table.fingerprint, summary, [heldout_pairs[i] for i in range(len(numbers))], mean=mean,
    )  # fmt: skip
