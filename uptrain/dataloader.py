"""The blocks of each step, which depend on data, seed and length, not on ranks and micro-batches.

A block of an encoder-decoder is one pair, `input_ids` and `attention_mask` (S,) and `labels` (T,):
a row of two columns, plain text with spans left out, or what the teacher writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gqa.checkpoint.provenance import file_digests
from gqa.checkpoint.read import Checkpoint
from gqa.convert.merge.self_samples import SampledBlocks, derive_seed, sampled_blocks
from gqa.convert.merge.text_pairs import PairMaker
from gqa.core.console import Watcher
from gqa.core.devices import ranks
from gqa.core.errors import CorpusError, RefusedError, plural
from gqa.corpus.blocks import (
    MIX,
    SHORTEST,
    Blocks,
    BlockSource,
    block_of,
    is_plain,
    pack,
    tokens_of,
    with_repeats,
)
from gqa.corpus.encoders import Encoders
from gqa.corpus.exclusion import Exclusion
from gqa.corpus.pairs import PairBlocks, PairEncoder, pair_block, tokenize_pairs
from gqa.corpus.passages import Passages
from gqa.corpus.rows import searched_text
from gqa.corpus.sources import Source
from gqa.corpus.specs import is_self, parse_self, parse_source, parse_sources
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import (
    Block,
    Documents,
    Heldout,
    Ints,
    check_ids,
    hold_back,
    reading_order,
    tokenize,
)
from gqa.models.loading import load_model, positions
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.overlap import Overlap, find_overlap, heldout_texts

# Tokens of a block; of a source or target with relative positions, as for T5
MAX_BLOCK = 2048
MAX_PAIR = 512
_STEPS = 250  # of a run at least, if smaller batches and blocks allow it
# most blocks of a step, fewest tokens of a block
_BATCH = 8
_BLOCK = 256
_ENDLESS = 2**62  # tokens of a stream
# (stored block, seeds) -> the block that the model reads
MakeBlock = Callable[[Block, list[int]], Block]
# (tokens of a block, number of blocks) -> what the teacher writes
Write = Callable[[int, int], SampledBlocks]


@dataclass(frozen=True)
class Dataloader:
    """Step s trains on blocks s * B to (s + 1) * B after the `first` ones, in order, B being the
    batch. With `options.repeats` half of the blocks repeat passages (`with_repeats` in
    corpus/blocks.py).

    `options`: with block and batch decided. `fingerprint`: equal if the data is equal. `summary`:
    the data in words. `heldout`: held-out blocks. `make`: makes pairs of blocks for an
    encoder-decoder. `pair_tokens`: tokens of each block in order, if lengths differ.
    `distinct_tokens`: how many of the `data_tokens` that are not held out are trained on; None of a
    stream, of pairs, and of text that is generated. `overlap`: what the data has in common with the
    held-out text.
    """

    options: TrainOptions
    blocks: BlockSource
    steps: int
    fingerprint: str
    summary: str
    heldout: list[Block]
    first: int = 0
    make: MakeBlock | None = None
    pair_tokens: Ints | None = None
    distinct_tokens: int | None = None
    data_tokens: int | None = None
    overlap: Overlap | None = None

    def tokens_until(self, step: int) -> int:
        """Tokens of all blocks of the first `step` steps, repeats included."""
        blocks = step * self.options.blocks_per_step
        if self.pair_tokens is None:
            return blocks * self.options.block
        return int(self.pair_tokens[:blocks].sum())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, on average."""
        return self.tokens_until(self.steps) // self.steps

    @property
    def heldout_tokens(self) -> int:
        """Tokens of the held-out blocks; of a pair those of both sides."""
        if self.pair_tokens is None:
            return len(self.heldout) * self.options.block
        return sum(len(block["input_ids"]) + len(block["labels"]) for block in self.heldout)

    def batches(
        self, first_step: int, rank: int, ranks: int, micro: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """The micro-batches of one rank for each step from `first_step` on; a rank has every
        `ranks`th block.
        """
        batch = self.options.blocks_per_step
        for step in range(first_step, self.steps):
            begin = self.first + step * batch
            share = [self.block(number) for number in range(begin + rank, begin + batch, ranks)]
            yield [stack(share[start : start + micro]) for start in range(0, len(share), micro)]

    def block(self, index: int) -> Block:
        """Block `index` (from `first` on) as the model reads it."""
        if not self.options.repeats:
            block = self.blocks[index]
            return self.make(block, [self.options.seed, index]) if self.make else block
        if isinstance(self.blocks, StreamedBlocks):
            # A stream cannot go back to earlier blocks: a block repeats passages of its own text.
            read = self._streamed_tokens
            first = index
        else:
            read = self._latest_text
            first = self.first
        tokens = with_repeats(read, index, self.options.seed, None, first=first)
        return block_of(tokens.astype(np.int64))

    def _streamed_tokens(self, number: int) -> Ints:
        return tokens_of(self.blocks[number])

    def _latest_text(self, number: int) -> Ints:
        """The block of text that block `number` is or, if it repeats passages, the one before it:
        so all text of the data that is read is also trained on as it is.
        """
        return tokens_of(self.blocks[int(self._text_numbers[number])])

    @cached_property
    def _text_numbers(self) -> Ints:
        """For each block the number of the latest block of text."""
        plain = is_plain(np.arange(self.steps * self.options.blocks_per_step))
        numbers: Ints = np.cumsum(plain) - 1
        return numbers


def stack(blocks: list[Block]) -> dict[str, Tensor]:
    """Stack B blocks of T tokens into tensors (B, T): ids, and loss masks where blocks have them.

    Pairs are padded at the end: their masks are 0 and their labels -100 there.
    """
    return {
        name: pad_sequence(
            [torch.tensor(block[name]) for block in blocks], True, -100 if name == "labels" else 0
        )
        for name in blocks[0]
    }


@dataclass(frozen=True)
class DataBuilder:
    """Makes the dataloader of a run.

    `options`: of the run. `encoders`: of the model's tokenizer. `longest`: most tokens of a block.
    `ranks`: processes that share a step. `pair_encoder`: of an encoder-decoder. `write`: writes
    text with the teacher.
    """

    options: TrainOptions
    encoders: Encoders
    longest: int
    ranks: int = 1
    pair_encoder: PairEncoder | None = None
    write: Write | None = None

    def build(self) -> Dataloader:
        """The data that the options name. Raises RefusedError and CorpusError."""
        if self.pair_encoder is not None:
            return self.pairs(self.pair_encoder)
        return self.blocks()

    def blocks(self) -> Dataloader:
        """Blocks of text: generated, streamed or stored. Raises RefusedError and CorpusError."""
        if any(map(is_self, self.options.data)):
            return self._generated()
        if self.options.streaming:
            return self._streamed()
        return self._stored()

    def _stored(self) -> Dataloader:
        """Blocks of documents whose tokens are stored."""
        sources = data_sources(self.options)
        text = tokenize(sources, self.encoders)
        options = self._with_steps(self.options, int(text.lengths.sum()))
        if options.block < 2 * SHORTEST:
            options = replace(options, repeats=False)  # no passage fits twice

        heldout, heldout_blocks = self._named_heldout(options)
        if not heldout_blocks:
            heldout, heldout_blocks = hold_back_blocks(options, text)

        overlap = None
        if heldout_blocks:
            exclusion = self._exclusion(options, sources, heldout)
            overlap = find_overlap(sources, exclusion, heldout, self.encoders)
            if overlap.documents:
                remaining = [source.excluding(exclusion) for source in sources]
                text = tokenize(remaining, self.encoders)

        lengths = heldout.lengths(text)
        size = options.block
        data_tokens = int(lengths.sum())
        steps = count_steps(count_blocks(options, data_tokens), options)
        all_blocks = steps * options.blocks_per_step
        # Blocks that repeat passages take them from the blocks of text before, so they read no
        # further.
        text_blocks = count_plain(all_blocks) if options.repeats else all_blocks
        read_tokens = text_blocks * size

        distinct = min(read_tokens, data_tokens)
        summary = f"{distinct:,} of {data_tokens:,} tokens ({percent(distinct, data_tokens)})"
        summary += f", in {plural(text_blocks, 'block')} of {size:,}"
        if read_tokens > data_tokens:
            summary += f", read {read_tokens / data_tokens:.2f} times, each time in another order"
        if all_blocks > text_blocks:
            repeating = plural(all_blocks - text_blocks, "more block")
            summary += f"; {repeating} with repeated passages of them"
        longer = 0 if text.divisible else int((lengths > size).sum())
        if longer:
            summary += f"; {plural(longer, 'chat')} longer than a block, and cut there"
        order = reading_order(text, lengths, read_tokens, options.seed)
        return Dataloader(
            options,
            Blocks(text, order, size, text_blocks, lengths),
            steps,
            text.fingerprint,
            summary,
            heldout_blocks,
            distinct_tokens=distinct,
            data_tokens=data_tokens,
            overlap=overlap,
        )

    def _streamed(self) -> Dataloader:
        """Blocks of a source that is read while it is trained on."""
        (source,) = data_sources(self.options)
        options = self._with_steps(self.options, _ENDLESS)
        steps = count_steps(count_blocks(options, _ENDLESS), options)
        heldout, heldout_blocks = self._named_heldout(options)
        summary = ""
        if heldout_blocks:
            # A stream is not searched before it is read: passages are left out on the way.
            source = source.excluding(self._exclusion(options, [source], heldout))
            summary = ", without passages of the held-out text"
        blocks = StreamedBlocks(
            source,
            self.encoders.of(source),
            block_size=options.block,
            heldout=heldout,
            batch=options.blocks_per_step,
        )
        summary = f"a stream of {blocks}{summary}"
        contents = file_digests(source.files)
        fingerprint = f"{summary} {blocks.encoder.identify()} {contents}"
        return Dataloader(options, blocks, steps, fingerprint, summary, heldout_blocks)

    def _generated(self) -> Dataloader:
        """Blocks that the teacher writes. The first are held out, unless --heldout names other
        text.
        """
        assert self.write is not None
        spec = self.options.data[0]
        data_tokens = parse_self(spec)[0] or _ENDLESS
        options = self._with_steps(self.options, data_tokens)
        with_length = options if options.lengths else replace(options, tokens=data_tokens)
        n_blocks = count_blocks(with_length, data_tokens)
        if n_blocks * options.block > data_tokens:
            raise RefusedError(
                f"training takes {n_blocks * options.block:,} tokens, more than --data {spec}; "
                "raise that number"
            )
        steps = count_steps(n_blocks, options)
        _, heldout = self._named_heldout(options)
        count = steps * options.blocks_per_step
        first = 0 if heldout else count_heldout(options)
        blocks = self.write(options.block, first + count)
        teacher = Path(options.teacher).absolute().name
        summary = f"{plural(count, 'block')} of {options.block:,} tokens from {teacher}"
        heldout = heldout or [blocks[number] for number in range(first)]
        return Dataloader(options, blocks, steps, blocks.fingerprint, summary, heldout, first)

    def pairs(self, encoder: PairEncoder) -> Dataloader:
        """Pairs with at most `longest` tokens a side. Raises RefusedError and CorpusError."""
        options = self.options
        sampled = any(map(is_self, options.data))
        if options.repeats:
            raise RefusedError(f"repeats are for decoders, {encoder.name} is an encoder-decoder")
        if options.assistant_only_loss:
            raise RefusedError(
                f"--assistant-only-loss is for decoders, {encoder.name} is an encoder-decoder; "
                "leave it out"
            )
        if options.target_field:
            if options.streaming or sampled:
                raise RefusedError(
                    "--target-field is a column of stored data; leave out --streaming and --data "
                    "self"
                )
            return self._pairs_of_table(encoder, options.context or self.longest)

        def corrupt(block: Block, seeds: list[int]) -> Block:
            return pair_block(encoder.corrupt(block["input_ids"], np.random.default_rng(seeds)))

        def split(block: Block, seeds: list[int]) -> Block:
            # Each is padded with -1
            source, target = (side[side >= 0] for side in np.split(block["input_ids"], 2))
            return pair_block((source, target))

        loader = self.blocks()
        make = split if sampled else corrupt
        make_heldout = corrupt if options.heldout else make
        heldout = [make_heldout(block, [number]) for number, block in enumerate(loader.heldout)]
        if not sampled:
            return replace(loader, heldout=heldout, make=make)
        count = loader.steps * loader.options.blocks_per_step
        lengths = [
            int((loader.blocks[number]["input_ids"] >= 0).sum())
            for number in range(loader.first, loader.first + count)
        ]
        return replace(loader, heldout=heldout, make=make, pair_tokens=np.array(lengths))

    def _pairs_of_table(self, encoder: PairEncoder, size: int) -> Dataloader:
        """Pairs of two columns, each side cut to `size` tokens.

        Lengths count pairs, not tokens, so alpha is a share of the pairs.
        """
        options = self.options
        sources = data_sources(options)
        table = tokenize_pairs(sources, encoder)
        tokens = np.stack([table.count("source"), table.count("target")])
        count = len(table)
        mean = float(np.minimum(tokens, size).sum(0).mean())

        def pairs(tokens: int) -> int:
            return max(1, int(tokens / mean))

        in_pairs = replace(
            options,
            context=1,
            tokens=options.tokens and pairs(options.tokens),
            heldout_tokens=pairs(options.heldout_tokens),
        )
        counted = settle_steps(in_pairs, count, 1, self.ranks)
        if texts := heldout_sources(options):
            heldout_table = tokenize_pairs(texts, encoder)
            heldout = Heldout({bytes(digest): 0 for digest in heldout_table.digests})
            numbers = np.arange(len(heldout_table))
        else:
            heldout_table = table
            heldout = Heldout(hold_back(table, count_held_back(counted, table)))
            numbers = np.flatnonzero(heldout.lengths(table) == 0)
        numbers = numbers[
            np.linspace(0, len(numbers) - 1, min(counted.heldout_tokens, len(numbers))).astype(int)
        ]
        heldout_pairs = PairBlocks(heldout_table, numbers, encoder, size)

        overlap = None
        if len(numbers):
            exclusion = self._exclusion(options, sources, heldout)
            overlap = find_overlap(sources, exclusion, heldout, self.encoders)
            if overlap.documents:
                table = tokenize_pairs([source.excluding(exclusion) for source in sources], encoder)
                tokens = np.stack([table.count("source"), table.count("target")])

        lengths = heldout.lengths(table)
        available = int(lengths.sum())
        n_blocks = count_blocks(counted, available)
        order = reading_order(table, lengths, n_blocks, options.seed)
        steps = count_steps(n_blocks, counted)
        trained = steps * counted.blocks_per_step
        distinct = min(trained, available)
        summary = (
            f"{distinct:,} of {available:,} pairs ({percent(distinct, available)}), of {mean:,.1f} "
            "tokens on average"
        )
        if trained > available:
            summary += f", read {trained / available:.2f} times, each time in another order"
        if cut := int((tokens > size).any(0).sum()):
            summary += f"; {cut:,} are cut to {size} a side"
        return Dataloader(
            replace(options, context=size, batch_size=counted.batch_size),
            PairBlocks(table, order, encoder, size),
            steps,
            table.fingerprint,
            summary,
            [heldout_pairs[i] for i in range(len(numbers))],
            pair_tokens=np.minimum(tokens, size).sum(0)[order],
            overlap=overlap,
        )

    def _with_steps(self, options: TrainOptions, data_tokens: int) -> TrainOptions:
        return settle_steps(options, data_tokens, self.longest, self.ranks)

    def _named_heldout(self, options: TrainOptions) -> tuple[Heldout, list[Block]]:
        """The rule by which training skips the held-out sources, and blocks spread evenly over
        them; no blocks without such sources. Raises RefusedError and CorpusError.
        """
        sources = heldout_sources(options)
        if not sources:
            return Heldout(), []
        text = tokenize(sources, self.encoders)
        heldout = Heldout({bytes(digest): 0 for digest in text.digests})
        whole = Blocks(text, np.arange(len(text)), options.block)
        count = min(count_heldout(options), len(whole))
        blocks = [whole[int(number)] for number in np.linspace(0, len(whole) - 1, count)]
        blocks = [block for block in blocks if has_targets(block)]
        if not blocks:
            raise RefusedError(
                f"the held-out text has less than one block of {options.block} tokens; give more"
            )
        return heldout, blocks

    def _exclusion(
        self, options: TrainOptions, sources: Sequence[Source], heldout: Heldout
    ) -> Exclusion:
        """Passages of the held-out text, to leave out of all documents except those that `heldout`
        leaves out as a whole.
        """
        texts: Iterator[str]
        named = heldout_sources(options)
        if named:
            rows = chain.from_iterable(source.rows() for source in named)
            texts = map(searched_text, rows)
        else:
            texts = heldout_texts(sources, heldout, self.encoders)
        whole = frozenset(digest for digest, limit in heldout.limits.items() if not limit)
        return Exclusion(Passages.of(texts), whole)


def percent(part: int, whole: int) -> str:
    """`4.91%`, and `100%` only of all."""
    share = 100 * part / whole
    return f"{share:.3g}%" if part == whole or share < 99.9 else "99.9%"


def hold_back_blocks(options: TrainOptions, text: Documents) -> tuple[Heldout, list[Block]]:
    """The end of the data in the order of hashes, which training skips, and its blocks; no blocks
    of little data.
    """
    heldout = Heldout(hold_back(text, count_held_back(options, text) * options.block))
    numbers = dict(zip(map(bytes, text.digests), range(len(text)), strict=True))
    ends = sorted((numbers[digest], limit) for digest, limit in heldout.limits.items())
    read = text.tokens_with_mask if text.has_masks else text.tokens
    packed = pack((read(number)[limit:] for number, limit in ends), options.block)
    blocks = [block for block, _ in islice(packed, count_heldout(options))]
    return heldout, [block for block in blocks if has_targets(block)]


def has_targets(block: Block) -> bool:
    """Whether any token of a block is predicted and counts in the loss."""
    return "loss_mask" not in block or bool(block["loss_mask"][1:].any())


def count_heldout(options: TrainOptions) -> int:
    """The largest number of held-out blocks."""
    return max(1, options.heldout_tokens // options.block)


def count_held_back(options: TrainOptions, data: Documents) -> int:
    """The number of blocks to hold back: a twentieth of the data, --heldout-tokens at most, none of
    less than 20.
    """
    return min(count_heldout(options), int(data.lengths.sum()) // (20 * options.block))


def count_blocks(options: TrainOptions, data_tokens: int) -> int:
    """Number of blocks to train on: those that fit into alpha x all tokens, or into `tokens`, or
    that `steps` need. With repeats alpha counts the blocks of text alone. Raises CorpusError if
    that is less than one block.
    """
    alpha = options.alpha
    tokens = options.tokens
    size = options.block
    if not data_tokens:
        raise CorpusError(
            "all documents are held out and none is left to train on; hold out other or fewer "
            "documents"
        )
    if data_tokens < size:
        raise CorpusError(
            f"the data has {data_tokens} tokens, less than one block of {size}; lower --context"
        )
    if options.steps is not None:
        return options.steps * options.blocks_per_step
    if alpha is not None:
        # Decimal: 0.29 of 100 is 29, not 28 as in binary.
        tokens = int(Fraction(repr(float(alpha))) * data_tokens)
    assert tokens is not None
    if tokens < size:
        length = f"tokens is {tokens}" if alpha is None else f"alpha {alpha:g} is {tokens} tokens"
        raise CorpusError(f"{length}, less than one block of {size}; give more, or lower --context")
    blocks = tokens // size
    return with_repeating_blocks(blocks) if alpha is not None and options.repeats else blocks


def count_plain(blocks: int) -> int:
    """How many of the first blocks are text; the others repeat passages."""
    return int(is_plain(np.arange(blocks)).sum())


def with_repeating_blocks(text_blocks: int) -> int:
    """The most blocks of which so many are text, the others being those that repeat passages."""
    numbers = np.arange(int(text_blocks / MIX["plain"]) + 8)
    return int(np.searchsorted(np.cumsum(is_plain(numbers)), text_blocks, "right"))


def count_steps(n_blocks: int, options: TrainOptions) -> int:
    """Whole batches in so many blocks. Raises RefusedError if there is none."""
    if steps := n_blocks // options.blocks_per_step:
        return steps
    unit = "pairs" if options.target_field else f"blocks of {options.block} tokens"
    raise RefusedError(
        f"there are {n_blocks} {unit} to train on, less than one batch of {options.batch_size}; "
        "give more, or a smaller --batch-size"
    )


def heldout_sources(options: TrainOptions) -> list[Source]:
    """Held-out sources: those of --heldout and --heldout-fraction, and of the built-in text.

    Raises RefusedError and CorpusError.
    """
    if options.heldout:
        return [*data_sources(replace(options, data=(options.heldout,), streaming=False))]
    if not options.heldout_fraction:
        return [parse_source("stdlib:heldout")] if options.data == ("stdlib:train",) else []
    parts = [source.part(options.heldout_fraction) for source in data_sources(options)]
    if parts := [part for part in parts if next(part.read(part.dataset()), None)]:
        return parts
    raise RefusedError(
        f"--heldout-fraction {options.heldout_fraction:g} holds out no document; give more"
    )


def data_sources(options: TrainOptions) -> tuple[Source, ...]:
    """The sources of --data. Raises CorpusError."""
    return parse_sources(
        options.data,
        field=options.field,
        target_field=options.target_field,
        streaming=options.streaming,
        separator=options.separator,
    )


def settle_steps(options: TrainOptions, data_tokens: int, longest: int, ranks: int) -> TrainOptions:
    """The options with the tokens of a block and the blocks of a step decided.

    By default a step has eight blocks of `longest` tokens. If that makes less than 250 steps, a
    step has fewer blocks, and blocks are shorter: with few tokens the number of steps decides the
    result (docs/uptraining.md). A constant learning rate keeps the default, so that a longer run
    begins with the steps of a shorter one. `ranks` share a step.
    """
    tokens = options.tokens or data_tokens
    if options.alpha is not None:
        tokens = int(options.alpha * data_tokens)
        tokens = int(tokens / MIX["plain"]) if options.repeats else tokens
    short = options.steps is None and options.schedule != "constant"
    block = options.context or longest
    batch = options.batch_size
    while short and options.context is None and tokens < _STEPS * block and block // 2 >= _BLOCK:
        block //= 2
    if batch is None:
        unit = ranks * (options.micro_batch or 1)
        target = min(_BATCH, tokens // (_STEPS * block)) if short else _BATCH
        batch = max(1, target // unit) * unit
    return replace(options, context=block, batch_size=batch)


def find_block_size(
    config: Any, tokenizer: Any, checkpoint: Checkpoint, options: TrainOptions
) -> int:
    """Tokens of a block: --context, or the model's positions, `MAX_BLOCK` at most.

    Raises RefusedError.
    """
    default = MAX_PAIR if config.is_encoder_decoder else MAX_BLOCK
    config = config.get_text_config(decoder=True)
    check_ids(len(tokenizer) - 1, config.vocab_size, checkpoint.name)
    longest = positions(config)
    if options.context == 1:
        raise RefusedError("--context 1 leaves nothing to predict; give at least 2")
    if longest and options.context and options.context > longest:
        raise RefusedError(
            f"--context {options.context} is more than the {longest} positions of {checkpoint.name}"
        )
    return options.context or min(longest or default, MAX_BLOCK)


def build_data(
    options: TrainOptions,
    checkpoint: Checkpoint,
    base: Checkpoint | None,
    config: Any,
    tokenizer: Any,
    device: str,
    watcher: Watcher,
) -> Dataloader:
    """The data to train on, which the model of `base` may write, and the held-out blocks, for a
    model of a transformers `config`. Raises RefusedError and CorpusError.
    """
    longest = find_block_size(config, tokenizer, checkpoint, options)
    processes = ranks()
    pair_encoder = None
    trusted = options.trust_remote_code
    # The teacher may have more rows of logits than the model has embeddings.
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)

    def write(size: int, count: int) -> SampledBlocks:
        assert base is not None
        if pair_encoder:
            maker = PairMaker(base, device, size, options.seed, watcher, trusted, vocabulary)
            return maker.sampled(count)
        load = partial(
            load_model,
            str(base.directory),
            device=device,
            attention=options.attn_implementation,
            trust_remote_code=trusted,
        )
        _, plain = parse_self(options.data[0])
        return sampled_blocks(
            load,
            device,
            base,
            size,
            count,
            derive_seed(options.seed, "training"),
            plain,
            watcher,
            trust_remote_code=trusted,
            vocabulary=vocabulary,
        )

    # The main process tokenizes, or samples from the teacher; then the others read its cache, also
    # if it fails.
    if not processes.is_main_process:
        processes.wait_for_everyone()
    try:
        if config.is_encoder_decoder:
            pair_encoder = PairEncoder(config, tokenizer, checkpoint.name)
        encoders = Encoders(
            tokenizer, checkpoint.name, assistant_only_loss=options.assistant_only_loss
        )
        count = processes.num_processes
        return DataBuilder(options, encoders, longest, count, pair_encoder, write).build()
    finally:
        if processes.is_main_process:
            processes.wait_for_everyone()
