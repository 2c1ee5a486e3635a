"""The blocks that each step trains on: fixed by data, seed and length, whatever ranks and micro-batches share them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.provenance import without_place
from gqa.convert.merge.self_samples import SampledBlocks
from gqa.corpus.alpha import Heldout, hold_back, hold_back_of_each, n_blocks_for, select, shares_of
from gqa.corpus.pairs import PairBlocks
from gqa.corpus.repeats import mixed
from gqa.corpus.sources import Source, parse_self, parse_source, parse_sources, row_digest
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import Block, Blocks, Documents, Encoder, concatenate, pack, tokenise
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
    blocks: Blocks | StreamedBlocks | SampledBlocks | PairBlocks
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
        # A stream gives no block before the one that it is at.
        first = index if isinstance(self.blocks, StreamedBlocks) else self.first
        ids = mixed(lambda number: self.blocks[number]["input_ids"], index, self.options.seed, 0, first=first)
        return {"input_ids": ids.astype(np.int64)}

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
    sources = parse_sources(options.data, **how_to_read(options))
    if options.streaming:
        return _open_stream(options, sources, tokenizer, longest, ranks)
    text = concatenate([tokenise(source, tokenizer) for source in sources])
    options = settle_steps(options, int(text.lengths.sum()), longest, ranks)
    heldout, blocks = named_heldout(options, tokenizer), open_heldout(options, tokenizer)
    if not heldout:
        heldout = Heldout(hold_back_of_each(text, held_back(options, text) * options.block))
        digests = dict(zip(map(bytes, text.digests), range(len(text)), strict=True))
        parts = sorted((digests[digest], limit) for digest, limit in heldout.limits.items())
        blocks = _blocks((text.document(number)[limit:] for number, limit in parts), options)
    chosen = select(
        text, heldout=heldout, block_size=options.block, seed=options.seed, weights=weights_of(sources),
        boundaries=options.mask_documents, **length_of(options),
    )  # fmt: skip
    steps = steps_of(chosen.blocks.n_blocks, options)
    return Dataloader(options, chosen.blocks, steps, text.fingerprint, chosen.summary(), blocks)


def _open_stream(
    options: TrainOptions, sources: Sequence[Source], tokenizer: Any, longest: int, ranks: int
) -> Dataloader:
    if options.alpha is not None and options.pretraining_tokens is None:
        raise RefusedError("the length of a stream is not known: give --pretraining-tokens that --alpha is a share of")
    options = settle_steps(options, _ENDLESS, longest, ranks)
    steps = steps_of(n_blocks_for(_ENDLESS, options.block, **length_of(options)), options)
    heldout, held = named_heldout(options, tokenizer), open_heldout(options, tokenizer)
    if not heldout:  # the first documents
        limits, documents = dict[bytes, int](), dict[bytes, list[int]]()
        for source, share in zip(sources, shares_of([source.weight or 1.0 for source in sources]), strict=True):
            read = Encoder(tokenizer).encode(source.texts())
            pairs = ((row_digest(text), documents.setdefault(row_digest(text), tokens)) for text, tokens in read)
            wanted = math.ceil(share * heldout_blocks(options) * options.block)
            hold_back(((digest, len(tokens)) for digest, tokens in pairs), wanted, limits)
        heldout = Heldout(limits)
        held = _blocks((documents[digest][limit:] for digest, limit in limits.items()), options)
    blocks = StreamedBlocks(
        sources, tokenizer, block_size=options.block, heldout=heldout, boundaries=options.mask_documents,
        batch=options.blocks_per_step,
    )  # fmt: skip
    summary = f"a stream of {blocks}"
    return Dataloader(options, blocks, steps, f"{summary} {blocks.encoder.identify()}", summary, held)


def _blocks(documents: Iterable[Any], options: TrainOptions) -> list[Block]:
    """At most as many as are held out."""
    return [
        block for block, _ in islice(pack(documents, options.block, options.mask_documents), heldout_blocks(options))
    ]


def heldout_blocks(options: TrainOptions) -> int:
    """At most."""
    return max(1, options.heldout_tokens // options.block)


def held_back(options: TrainOptions, data: Documents) -> int:
    """Blocks: a twentieth of the data, or --heldout-tokens; of less than 20 blocks none."""
    return min(heldout_blocks(options), int(data.lengths.sum()) // (20 * options.block))


def open_sampled(
    options: TrainOptions, write: Callable[[int, int], SampledBlocks], longest: int, ranks: int = 1
) -> Dataloader:
    """Blocks that the teacher writes, as `open_dataloader` has them; `write` gives so many of a size, which cannot be
    read where nothing is to be written. Raises RefusedError.
    """
    own = parse_self(options.data[0])
    data_tokens = own.tokens or _ENDLESS
    options = settle_steps(options, data_tokens, longest, ranks)
    length = length_of(options) | ({} if options.lengths else {"tokens": data_tokens})  # all that is written
    n_blocks = n_blocks_for(data_tokens, options.block, **length)
    if n_blocks * options.block > data_tokens:
        raise RefusedError(
            f"{n_blocks * options.block:,} tokens of training are more than --data {options.data[0]}; ask for more"
        )
    steps, first = steps_of(n_blocks, options), 0 if options.heldout else heldout_blocks(options)
    count = steps * options.blocks_per_step
    blocks = write(options.block, first + count)
    told = f"{count:,} blocks of {options.block:,} that {without_place(options.teacher)} writes"
    heldout = [blocks[number] if blocks.fingerprint else {} for number in range(first)]
    return Dataloader(options, blocks, steps, blocks.fingerprint, told, heldout, first)


def length_of(options: TrainOptions) -> dict[str, Any]:
    """How long training is, as `n_blocks_for` takes it."""
    return {
        "alpha": options.alpha, "tokens": options.tokens, "steps": options.steps,
        "blocks_per_step": options.blocks_per_step, "pretraining_tokens": options.pretraining_tokens,
    }  # fmt: skip


def steps_of(n_blocks: int, options: TrainOptions) -> int:
    if steps := n_blocks // options.blocks_per_step:
        return steps
    raise RefusedError(
        f"there are {n_blocks} pairs to train on, less than one batch of {options.batch_size}; give more, or a smaller "
        "--batch-size"
        if options.target_field
        else f"there are {n_blocks} blocks of {options.block} tokens to train on, less than one batch of "
        f"{options.batch_size}; give more, a smaller --batch-size or a smaller --context"
    )


def weights_of(sources: Sequence[Source]) -> list[float] | None:
    """The weights of a mixture, if its sources have any."""
    weights = [source.weight for source in sources if source.weight is not None]
    return weights or None


def open_heldout(options: TrainOptions, tokenizer: Any) -> list[Block]:
    """Blocks spread over the text that is named to be held out; none where nothing is named.

    Raises RefusedError and CorpusError.
    """
    if not (sources := heldout_sources(options)):
        return []
    if options.streaming and options.heldout_fraction:
        texts = chain.from_iterable(source.texts() for source in sources)
        blocks = _blocks((tokens for _, tokens in Encoder(tokenizer).encode(texts)), options)
    else:
        text, wanted = concatenate([tokenise(source, tokenizer) for source in sources]), heldout_blocks(options)
        whole = Blocks(text, np.arange(len(text)), options.block, boundaries=options.mask_documents)
        blocks = [whole[int(number)] for number in np.linspace(0, len(whole) - 1, min(wanted, len(whole)))]
    if not blocks:
        raise RefusedError(f"the held-out text has less than one block of {options.block} tokens; give more")
    return blocks


def named_heldout(options: TrainOptions, tokenizer: Any) -> Heldout | None:
    """What is not trained on, as it is named to be held out. Raises CorpusError."""
    if options.heldout_fraction:
        return Heldout(fraction=options.heldout_fraction)
    texts = [tokenise(source, tokenizer) for source in heldout_sources(options)]
    return Heldout({bytes(digest): 0 for text in texts for digest in text.digests}) if texts else None


def heldout_sources(options: TrainOptions) -> list[Source]:
    """What is named to be held out: by an option, or by the built-in text. Raises RefusedError and CorpusError."""
    if options.heldout:
        fields = {"field": options.field, "target_field": options.target_field}
        return [*parse_sources([options.heldout], separator=options.separator, **fields)]
    if not options.heldout_fraction:
        return [parse_source("stdlib:heldout")] if options.data == ("stdlib:train",) else []
    sources = parse_sources(options.data, **how_to_read(options))
    parts = [source.part(options.heldout_fraction) for source in sources]
    if parts := [part for part in parts if next(part.read(part.dataset()), None)]:
        return parts
    raise RefusedError(
        f"--heldout-fraction {options.heldout_fraction:g} holds out no document of {', '.join(options.data)}; give "
        "more, or text of its own with --heldout"
    )


def how_to_read(options: TrainOptions) -> dict[str, Any]:
    return {
        "field": options.field, "target_field": options.target_field, "separator": options.separator,
        "streaming": options.streaming,
    }  # fmt: skip
