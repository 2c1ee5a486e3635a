"""What encoder-decoders are trained on, as `dataloader` has blocks for decoders: two columns of a data set, plain text
of which spans are left out, what the teacher writes. A block is one pair, as the model is given it: `input_ids` and
`attention_mask` (S,), `labels` (T,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gqa.checkpoint.errors import RefusedError
from gqa.convert.align.self_samples import SampledBlocks
from gqa.corpus.alpha import heldout_mask
from gqa.corpus.pairs import Pair, PairEncoder, PairTable, tokenise_pairs
from gqa.corpus.sources import is_self, parse_sources
from gqa.corpus.tokens import Block, Ints
from gqa.uptrain.dataloader import (
    Dataloader,
    how_to_read,
    open_dataloader,
    open_heldout,
    open_sampled,
    open_text,
)
from gqa.uptrain.options import TrainOptions


def open_pairs(
    options: TrainOptions, encoder: PairEncoder, tokenizer: Any, longest: int, ranks: int,
    write: Callable[[int, int], SampledBlocks],
) -> Dataloader:  # fmt: skip
    """Of pairs whose sides have `longest` tokens at most, what is held out among them. `write` is as `open_sampled` has
    it. Raises RefusedError and CorpusError.
    """
    _check(options, encoder.name)
    if options.target_field:
        return _open_columns(options, encoder, longest, ranks)

    def corrupt(block: Block, seeds: list[int]) -> Block:
        return _block(encoder.corrupt(block["input_ids"], np.random.default_rng(seeds)))

    if own := is_self(options.data[0]):
        found = replace(open_sampled(options, write, longest, ranks), make=_written)
    else:
        encoder.check_marks()
        found = replace(open_dataloader(options, tokenizer, longest, ranks), make=corrupt)
    make = _written if own and found.heldout else corrupt
    heldout = found.heldout or open_heldout(found.options, tokenizer)
    return replace(found, heldout=[block and make(block, [number]) for number, block in enumerate(heldout)])


def _check(options: TrainOptions, name: str) -> None:
    if options.repeats or options.mask_documents:
        raise RefusedError(f"--repeats and --mask-documents are for decoders, {name} is an encoder-decoder; do without")
    if options.target_field and (options.streaming or any(map(is_self, options.data))):
        raise RefusedError("--target-field is a column of data that is stored; drop --streaming and --data self")


def _block(pair: Pair) -> Block:
    source, target = (np.array(side, np.int64) for side in pair)
    return {"input_ids": source, "attention_mask": np.ones_like(source), "labels": target}


def _written(block: Block, seeds: list[int]) -> Block:
    """Of what the teacher wrote, whose two halves are filled up with -1."""
    source, target = (side[side >= 0].tolist() for side in np.split(block["input_ids"], 2))
    return _block((source, target))


def _open_columns(options: TrainOptions, encoder: PairEncoder, longest: int, ranks: int) -> Dataloader:
    """A pair counts one where text is counted in tokens, so an alpha is of all pairs, in the order of their hashes."""
    size = options.block_size or longest
    table, weights = _read(options, options.data, encoder)
    count = len(table.numbers)
    lengths = [np.minimum(side, size) for side in table.lengths]
    mean = float(sum(side.sum() for side in lengths)) / count

    def pairs(tokens: int | None) -> int | None:
        return None if tokens is None else max(1, int(tokens / mean))

    if options.alpha is not None and int(options.alpha * (pairs(options.pretraining_tokens) or count)) < 1:
        raise RefusedError(f"--alpha {options.alpha:g} of {count:,} pairs is none; give more")
    told = {"tokens": options.tokens, "pretraining_tokens": options.pretraining_tokens,
            "heldout_tokens": options.heldout_tokens}  # fmt: skip
    counted = replace(options, block_size=1, **{name: pairs(tokens) for name, tokens in told.items()})
    named = bool(options.heldout or options.heldout_fraction)
    found = open_text(counted, table.numbers, weights, 1, ranks, back=not named)
    heldout = [_at(table, int(block["input_ids"][0]), encoder, size) for block in found.heldout]
    if named:
        other, _ = _read(options, [options.heldout], encoder) if options.heldout else (table, ())
        held = heldout_mask(other.numbers.digests, options.heldout_fraction or 1.0)
        heldout = _spread(other, np.flatnonzero(held), counted.heldout_tokens, encoder, size)
    cut = int(sum(side > size for side in table.lengths).astype(bool).sum())
    summary = f"{len(found.blocks):,} pairs out of {count:,}, of {mean:.0f} tokens"
    return replace(
        found, options=replace(found.options, block_size=size, **told), heldout=heldout, mean=mean,
        make=lambda block, seeds: _at(table, int(block["input_ids"][0]), encoder, size),
        summary=f"{summary}; {cut:,} are cut to {size} a side" if cut else summary,
    )  # fmt: skip


def _read(options: TrainOptions, data: Sequence[str], encoder: PairEncoder) -> tuple[PairTable, Sequence[float | None]]:
    how = how_to_read(options)
    sources, targets = (parse_sources(data, **how | {"field": f}) for f in (options.field, options.target_field))
    return tokenise_pairs(list(zip(sources, targets, strict=True)), encoder), [source.weight for source in sources]


def _spread(table: PairTable, numbers: Ints, wanted: int, encoder: PairEncoder, size: int) -> list[Block]:
    """So many of them, evenly."""
    if not len(numbers):
        raise RefusedError("--heldout-fraction holds out no pair; give more, or pairs of their own with --heldout")
    chosen = numbers[np.linspace(0, len(numbers) - 1, min(wanted, len(numbers))).astype(int)]
    return [_at(table, int(number), encoder, size) for number in chosen]


def _at(table: PairTable, number: int, encoder: PairEncoder, size: int) -> Block:
    return _block(encoder.framed(*table.pair(number), size))
