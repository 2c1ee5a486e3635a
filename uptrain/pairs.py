"""What encoder-decoders are trained on, as `dataloader` has blocks for decoders: two columns of a data set, plain text
of which spans are left out, what the teacher writes. A block is one pair, as the model is given it: `input_ids` and
`attention_mask` (S,), and `labels` (T,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gqa.checkpoint.errors import RefusedError
from gqa.convert.align.pairs import PairMaker
from gqa.corpus.alpha import heldout_mask
from gqa.corpus.pairs import PairEncoder, tokenise_pairs
from gqa.corpus.sources import Source, is_self, parse_sources
from gqa.corpus.tokens import Block, Ints, TokenisedText
from gqa.uptrain.dataloader import (
    Dataloader,
    how_to_read,
    open_dataloader,
    open_heldout,
    open_sampled,
    open_text,
)
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
    size = options.block_size or longest
    if options.target_field:
        return _open_rows(options, partial(_columns, options, encoder, size), size, ranks)

    def corrupt(block: Block, seeds: list[int]) -> Block:
        return _block(encoder.corrupt(block["input_ids"], np.random.default_rng(seeds)))

    if own := is_self(options.data[0]):
        assert teacher is not None
        found = open_sampled(options, lambda size, count: teacher(size).sampled(count, write), longest, ranks)
    else:
        encoder.check_marks()
        found = open_dataloader(options, tokenizer, longest, ranks)
    make = _written if own and found.heldout else corrupt
    heldout = found.heldout or open_heldout(found.options, tokenizer)
    made = [block and make(block, [number]) for number, block in enumerate(heldout)]
    return replace(found, heldout=made, make=_written if own else corrupt)


def _check(options: TrainOptions, name: str) -> None:
    if options.repeats or options.mask_documents:
        raise RefusedError(f"--repeats and --mask-documents are for decoders, {name} is an encoder-decoder; do without")
    if options.target_field and (options.streaming or any(map(is_self, options.data))):
        raise RefusedError("--target-field is a column of data that is stored; drop --streaming and --data self")


def _block(pair: tuple[Sequence[int] | Ints, Sequence[int] | Ints]) -> Block:
    source, target = (np.array(side, np.int64) for side in pair)
    return {"input_ids": source, "attention_mask": np.ones_like(source), "labels": target}


def _written(block: Block, seeds: list[int]) -> Block:
    """Of what the teacher wrote, whose two halves are filled up with -1."""
    source, target = (side[side >= 0] for side in np.split(block["input_ids"], 2))
    return _block((source, target))


@dataclass(frozen=True)
class _Rows:
    """Pairs that are stored: as texts of one token, which is their number, so that they are put in order, held out and
    counted as documents are; and the pair of each number. `mean`: tokens of one; `cut`: those that are not whole.
    """

    numbers: TokenisedText
    pair: Callable[[int], Block]
    mean: float
    weights: Sequence[float | None] = ()
    cut: int = 0


def _open_rows(options: TrainOptions, read: Callable[[Sequence[str]], _Rows], size: int, ranks: int) -> Dataloader:
    """A pair counts one where text is counted in tokens, so an alpha is of all pairs, in the order of their hashes."""
    rows = read(options.data)
    count, mean = len(rows.numbers), rows.mean

    def pairs(tokens: int) -> int:
        return max(1, int(tokens / mean))

    def made(block: Block, seeds: list[int]) -> Block:
        return rows.pair(int(block["input_ids"][0]))

    whole = pairs(options.pretraining_tokens) if options.pretraining_tokens else None
    if options.alpha is not None and int(options.alpha * (whole or count)) < 1:
        raise RefusedError(f"--alpha {options.alpha:g} of {count:,} pairs is none; give more")
    counted = replace(
        options, block_size=1, tokens=options.tokens and pairs(options.tokens), pretraining_tokens=whole,
        heldout_tokens=pairs(options.heldout_tokens),
    )  # fmt: skip
    named = bool(options.heldout or options.heldout_fraction)
    found = open_text(counted, rows.numbers, rows.weights, 1, ranks, back=not named)
    heldout = [made(block, []) for block in found.heldout]
    if named:
        other = read([options.heldout]) if options.heldout else rows
        held = np.flatnonzero(heldout_mask(other.numbers.digests, options.heldout_fraction or 1.0))
        if not len(held):
            raise RefusedError("--heldout-fraction holds out no pair; give more, or pairs of their own with --heldout")
        chosen = np.linspace(0, len(held) - 1, min(counted.heldout_tokens, len(held))).astype(int)
        heldout = [other.pair(int(number)) for number in held[chosen]]
    summary = f"{found.steps * found.options.blocks_per_step:,} pairs out of {count:,}, of {mean:.0f} tokens"
    settled = replace(options, block_size=size, batch_size=found.options.batch_size)
    return replace(
        found, options=settled, heldout=heldout, mean=mean, make=made,
        summary=f"{summary}; {rows.cut:,} are cut to {size} a side" if rows.cut else summary,
    )  # fmt: skip


def _columns(options: TrainOptions, encoder: PairEncoder, size: int, data: Sequence[str]) -> _Rows:
    columns = _parsed(options, data)
    table = tokenise_pairs(columns, encoder)
    lengths = np.stack(table.lengths)

    def pair(number: int) -> Block:
        source, target = table.pair(number)
        return _block(encoder.framed(source.tolist(), target.tolist(), size))

    mean, cut = float(np.minimum(lengths, size).sum(0).mean()), int((lengths > size).any(0).sum())
    return _Rows(table.numbers, pair, mean, [source.weight for source, _ in columns], cut)


def _parsed(options: TrainOptions, data: Sequence[str]) -> list[tuple[Source, Source]]:
    """The columns of sources and of targets of each."""
    how = how_to_read(options)
    fields = (options.field, options.target_field)
    return list(zip(*(parse_sources(data, **how | {"field": field}) for field in fields), strict=True))
