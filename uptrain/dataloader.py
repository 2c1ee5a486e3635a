"""The blocks that each step trains on: fixed by data, seed and length, whatever ranks and micro-batches share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.provenance import without_place
from gqa.convert.align.self_samples import SampledBlocks
from gqa.corpus.alpha import n_blocks_for, select
from gqa.corpus.repeats import BEFORE, mixed
from gqa.corpus.sources import Source, parse_self, parse_source, parse_sources
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import Block, Blocks, TokenisedText, concatenate, tokenise
from gqa.uptrain.defaults import settle_steps
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.training_model import Batch

_ENDLESS = 2**62  # tokens of a stream
Make = Callable[[Block, list[int]], Block]  # what a model is given, of a block as it is stored; seeds of what is random


def as_it_is(block: Block, seeds: list[int]) -> Block:
    return block


@dataclass(frozen=True)
class Dataloader:
    """Step s trains on blocks s * B to (s + 1) * B, in order, behind the `first` ones, B being the batch. Half of them
    repeat themselves where that is asked for (`gqa.corpus.repeats`).

    `options`: with block and batch decided. `fingerprint`: equal where the data is. `summary`: what the data is, for
    people. `heldout`: what was held back. `make`: turns blocks into pairs for an encoder-decoder. `mean`: tokens of a
    block, where they differ.
    """

    options: TrainOptions
    blocks: Blocks | StreamedBlocks | SampledBlocks
    steps: int
    fingerprint: str
    summary: str
    heldout: list[Block]
    first: int = 0
    make: Make = as_it_is
    mean: float | None = None

    def tokens(self, blocks: int) -> int:
        """Of so many blocks."""
        return round(blocks * (self.mean or self.options.block))

    @property
    def tokens_per_step(self) -> int:
        return self.tokens(self.options.blocks_per_step)

    def batches(self, first_step: int, rank: int, ranks: int, micro: int) -> Iterator[list[Batch]]:
        """For each step from `first_step` on, the micro-batches of one rank, which has every `ranks`th block."""
        batch = self.options.blocks_per_step
        for step in range(first_step, self.steps):
            begin = self.first + step * batch
            own = [self.block(number) for number in range(begin + rank, begin + batch, ranks)]
            yield [stack(own[start : start + micro]) for start in range(0, len(own), micro)]

    def block(self, index: int) -> Block:
        """As it is trained on; the first is `first`."""
        if not self.options.repeats:
            return self.make(self.blocks[index], [self.options.seed, index])
        near = {"first": self.first, "stride": getattr(self.blocks, "lanes", 1)}
        found = mixed(lambda number: self.blocks[number]["input_ids"], index, self.options.seed, 0, **near)
        return {"input_ids": found.astype(np.int64)}

    @property
    def places(self) -> list[Any]:
        """How far this process has read a stream, JSON-ready, for `seek`."""
        return self.blocks.places if isinstance(self.blocks, StreamedBlocks) else []

    def seek(self, places: list[Any]) -> None:
        """A stream goes on where all processes of a run were."""
        if isinstance(self.blocks, StreamedBlocks):
            self.blocks.seek(places)


def stack(blocks: list[Block]) -> Batch:
    """B blocks of T tokens as tensors (B, T). Shorter ones are filled up at the end: of pairs, which have masks, and
    whose labels do not count there.
    """

    def joined(name: str) -> torch.Tensor:
        parts = [torch.tensor(block[name]) for block in blocks]
        return pad_sequence(parts, True, -100 if name == "labels" else 0)

    return {name: joined(name) for name in blocks[0]}


def open_dataloader(options: TrainOptions, tokenizer: Any, longest: int, ranks: int = 1) -> Dataloader:
    """Of blocks of `longest` tokens at most, as `settle_steps` decides. Raises RefusedError and CorpusError."""
    sources, back = parse_sources(options.data, **how_to_read(options)), not heldout_sources(options)
    if not options.streaming:
        text = concatenate([tokenise(source, tokenizer) for source in sources])
        return open_text(options, text, [source.weight for source in sources], longest, ranks, back)
    if options.alpha is not None and options.pretraining_tokens is None:
        raise RefusedError("the length of a stream is not known: give --pretraining-tokens that --alpha is a share of")
    options = settle_steps(options, _ENDLESS, longest, ranks)
    steps = _steps(n_blocks_for(_ENDLESS, options.block, **_length(options)), options)
    first = _heldout_blocks(options) if back else 0
    blocks = StreamedBlocks(
        sources, tokenizer, block_size=options.block, n_blocks=first + steps * options.blocks_per_step,
        heldout_fraction=options.heldout_fraction, boundaries=options.mask_documents,
        first=first, batch=options.blocks_per_step, before=BEFORE if options.repeats else 0,
    )  # fmt: skip
    told = f"a stream of {blocks}"
    heldout = [blocks[number] for number in range(first)]
    return Dataloader(options, blocks, steps, f"{told} {blocks.encoder.identify()}", told, heldout, first)


def open_text(
    options: TrainOptions, text: TokenisedText, shares: Sequence[float | None], longest: int, ranks: int, back: bool
) -> Dataloader:
    """Of text that is tokenised, of sources with these weights; of it some is held `back`."""
    options = settle_steps(options, int(text.lengths.sum()), longest, ranks)
    heldout: list[Block] = []
    if back:
        text, heldout = _hold_back(text, options)
    weights = [share or 1.0 for share in shares] if any(shares) else None
    chosen = select(
        text, block_size=options.block, seed=options.seed, heldout_fraction=options.heldout_fraction,
        weights=weights, boundaries=options.mask_documents, **_length(options),
    )  # fmt: skip
    steps = _steps(chosen.blocks.n_blocks, options)
    return Dataloader(options, chosen.blocks, steps, text.fingerprint, chosen.summary(), heldout)


def _heldout_blocks(options: TrainOptions) -> int:
    """At most."""
    return max(1, options.heldout_tokens // options.block)


def _hold_back(text: TokenisedText, options: TrainOptions) -> tuple[TokenisedText, list[Block]]:
    """The text without a twentieth of it, or --heldout-tokens, and that in blocks; nothing of less than 20 blocks."""
    count = min(_heldout_blocks(options), int(text.lengths.sum()) // (20 * options.block))
    if not count:
        return text, []
    rest, aside = text.set_aside(count * options.block)
    blocks = Blocks(aside, np.arange(len(aside)), options.block, boundaries=options.mask_documents)
    return rest, [blocks[number] for number in range(len(blocks))]


def open_sampled(
    options: TrainOptions, write: Callable[[int, int], SampledBlocks], longest: int, ranks: int = 1
) -> Dataloader:
    """Blocks that the teacher writes, as `open_dataloader` has them; `write` gives so many of a size, which cannot be
    read where nothing is to be written. Raises RefusedError.
    """
    own = parse_self(options.data[0])
    data_tokens = own.tokens or _ENDLESS
    options = settle_steps(options, data_tokens, longest, ranks)
    length = _length(options) | ({} if options.lengths else {"tokens": data_tokens})  # all that is written
    n_blocks = n_blocks_for(data_tokens, options.block, **length)
    if n_blocks * options.block > data_tokens:
        raise RefusedError(
            f"{n_blocks * options.block:,} tokens of training are more than --data {options.data[0]}; ask for more"
        )
    steps, first = _steps(n_blocks, options), 0 if options.heldout else _heldout_blocks(options)
    count = steps * options.blocks_per_step
    blocks = write(options.block, first + count)
    told = f"{count:,} blocks of {options.block:,} that {without_place(options.teacher)} writes"
    heldout = [blocks[number] if blocks.fingerprint else {} for number in range(first)]
    return Dataloader(options, blocks, steps, blocks.fingerprint, told, heldout, first)


def _length(options: TrainOptions) -> dict[str, Any]:
    """How long training is, as `n_blocks_for` takes it."""
    return {
        "alpha": options.alpha, "tokens": options.tokens, "steps": options.steps,
        "blocks_per_step": options.blocks_per_step, "pretraining_tokens": options.pretraining_tokens,
    }  # fmt: skip


def _steps(n_blocks: int, options: TrainOptions) -> int:
    if steps := n_blocks // options.blocks_per_step:
        return steps
    raise RefusedError(
        f"there are {n_blocks} pairs to train on, less than one batch of {options.batch_size}; give more, or a smaller "
        "--batch-size"
        if options.target_field
        else f"there are {n_blocks} blocks of {options.block} tokens to train on, less than one batch of "
        f"{options.batch_size}; give more, a smaller --batch-size or a smaller --context"
    )


def open_heldout(options: TrainOptions, tokenizer: Any) -> list[Block]:
    """Blocks spread over the text that is named to be held out; none where nothing is named.

    Raises RefusedError and CorpusError.
    """
    sources, wanted, how = heldout_sources(options), _heldout_blocks(options), {"boundaries": options.mask_documents}
    if not sources:
        return []
    if any(source.streaming for source in sources):
        found = list(islice(StreamedBlocks(sources, tokenizer, block_size=options.block, **how), wanted))
    else:
        text = concatenate([tokenise(source, tokenizer) for source in sources])
        blocks = Blocks(text, np.arange(len(text)), options.block, **how)
        found = [blocks[int(number)] for number in np.linspace(0, len(blocks) - 1, min(wanted, len(blocks)))]
    if not found:
        raise RefusedError(f"the held-out text has less than one block of {options.block} tokens; give more")
    return found


def heldout_sources(options: TrainOptions) -> list[Source]:
    """What is named to be held out: by an option, or by the built-in text. Raises RefusedError and CorpusError."""
    if options.heldout:
        return [parse_source(options.heldout, field=options.field, separator=options.separator)]
    if not options.heldout_fraction:
        return [parse_source("stdlib:heldout")] if options.data == ("stdlib:train",) else []
    sources = parse_sources(options.data, **how_to_read(options))
    parts = [source.part("heldout", options.heldout_fraction) for source in sources]
    if found := [part for part in parts if next(part.read(), None)]:
        return found
    raise RefusedError(
        f"--heldout-fraction {options.heldout_fraction:g} holds out no document of {', '.join(options.data)}; give "
        "more, or text of its own with --heldout"
    )


def how_to_read(options: TrainOptions) -> dict[str, Any]:
    return {
        "field": options.field, "config": options.data_config, "split": options.split,
        "revision": options.data_revision, "streaming": options.streaming, "separator": options.separator,
    }  # fmt: skip
