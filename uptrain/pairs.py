"""What encoder-decoders are trained on, as `dataloader` has blocks for decoders: two columns of a data set, plain text
of which spans are left out, what the teacher writes. A block is one pair, as the model is given it: `input_ids` and
`attention_mask` (S,), and `labels` (T,).
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

Maker = Callable[[int], PairMaker]  # the teacher, which writes texts of so many tokens


def open_pairs(
    options: TrainOptions, encoder: PairEncoder, tokenizer: Any, longest: int, ranks: int, teacher: Maker | None,
    write: bool = True,
) -> Dataloader:  # fmt: skip
    """Of pairs whose sides have `longest` tokens at most, what is held out among them. What the teacher is to write is
    not there to be read unless it is to `write`. Raises RefusedError and CorpusError.
    """
    _check(options, encoder.name)
    if options.target_field:
        return _open_table(options, encoder, options.context or longest, ranks)

    def corrupt(block: Block, seeds: list[int]) -> Block:
        return pair_block(encoder.corrupt(block["input_ids"], np.random.default_rng(seeds)))

    if own := is_self(options.data[0]):
        assert teacher is not None
        loader = open_sampled(options, lambda size, count: teacher(size).sampled(count, write), longest, ranks)
    else:
        encoder.check_marks()
        loader = open_dataloader(options, tokenizer, longest, ranks)
    make = _written if own and loader.heldout else corrupt
    heldout = loader.heldout or open_heldout(loader.options, tokenizer)
    pairs = [block and make(block, [number]) for number, block in enumerate(heldout)]
    return replace(loader, heldout=pairs, make=_written if own else corrupt)


def _check(options: TrainOptions, name: str) -> None:
    if options.repeats or options.mask_documents:
        raise RefusedError(f"--repeats and --mask-documents are for decoders, {name} is an encoder-decoder; do without")
    if options.target_field and (options.streaming or any(map(is_self, options.data))):
        raise RefusedError("--target-field is a column of data that is stored; drop --streaming and --data self")


def _written(block: Block, seeds: list[int]) -> Block:
    """Of what the teacher wrote, whose two halves are filled up with -1."""
    source, target = (side[side >= 0] for side in np.split(block["input_ids"], 2))
    return pair_block((source, target))


def _open_table(options: TrainOptions, encoder: PairEncoder, size: int, ranks: int) -> Dataloader:
    """A pair counts one where text is counted in tokens, so an alpha is of all pairs, in the order of their hashes."""
    sources = parse_sources(options.data, **source_options(options))
    table = tokenise_pairs(sources, encoder)
    count, mean = len(table), float(np.minimum(table.tokens, size).sum(0).mean())

    def pairs(tokens: int) -> int:
        return max(1, int(tokens / mean))

    whole = options.pretraining_tokens and pairs(options.pretraining_tokens)
    if options.alpha is not None and int(options.alpha * (whole or count)) < 1:
        raise RefusedError(f"--alpha {options.alpha:g} of {count:,} pairs is none; give more")
    counted = replace(
        options, context=1, tokens=options.tokens and pairs(options.tokens), pretraining_tokens=whole,
        heldout_tokens=pairs(options.heldout_tokens),
    )  # fmt: skip
    counted = settle_steps(counted, count, 1, ranks)
    other = table
    if options.heldout:
        other = tokenise_pairs(heldout_sources(options), encoder)
        heldout = Heldout({bytes(digest): 0 for digest in other.digests})
        held = np.arange(len(other))
    else:
        limits = {} if options.heldout_fraction else hold_back_of_each(table, count_held_back(counted, table))
        heldout = Heldout(limits, options.heldout_fraction)
        held = np.flatnonzero(heldout.lengths(table) == 0)
        if options.heldout_fraction and not len(held):
            raise RefusedError("--heldout-fraction holds out no pair; give more, or pairs of their own with --heldout")
    held = held[np.linspace(0, len(held) - 1, min(counted.heldout_tokens, len(held))).astype(int)]
    order, n_blocks, _ = reading_order(
        table,
        heldout.lengths(table),
        block_size=1,
        seed=options.seed,
        weights=mixture_weights(sources),
        **length_arguments(counted),
    )
    steps = count_steps(n_blocks, counted)
    summary = f"{steps * counted.blocks_per_step:,} pairs out of {count:,}, of {mean:.0f} tokens"
    if cut := int((table.tokens > size).any(0).sum()):
        summary += f"; {cut:,} are cut to {size} a side"
    aside = PairBlocks(other, held, encoder, size)
    options = replace(options, context=size, batch_size=counted.batch_size)
    blocks, heldout_blocks = PairBlocks(table, order, encoder, size), [aside[number] for number in range(len(held))]
    return Dataloader(options, blocks, steps, table.fingerprint, summary, heldout_blocks, mean=mean)
