"""The data of a run on text: stored, streamed, or written by the teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gqa.checkpoint.provenance import file_digests
from gqa.convert.generate.self_samples import SampledBlocks
from gqa.core.errors import plural
from gqa.corpus.blocks import SHORTEST, Blocks
from gqa.corpus.encoders import Encoders
from gqa.corpus.reading_order import HeldoutDocuments, count_in_loss, reading_order
from gqa.corpus.sources import Source
from gqa.corpus.specs import parse_self
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import Documents, Ints, tokenize
from gqa.uptrain.data_sources import data_sources
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.run_length import (
    ENDLESS,
    count_blocks,
    count_steps,
    decide_block_and_batch,
    text_blocks_among,
)
from gqa.uptrain.validation_blocks import (
    blocks_of_drawn_text,
    blocks_of_named_text,
    most_measured_blocks,
    passages_to_exclude,
    without_passages,
)

# (tokens of a block, number of blocks) -> what the teacher writes
Write = Callable[[int, int], SampledBlocks]


@dataclass(frozen=True)
class TextDataBuilder:
    """Makes the dataloader of a run on blocks of text.

    Attributes:
        options: Of the run.
        encoders: Of the model's tokenizer.
        largest: Tokens of a block, unless the run is so short that it gets shorter ones.
        ranks: Processes that share a step.
        write: Writes text with the teacher.
    """

    options: UptrainOptions
    encoders: Encoders
    largest: int
    ranks: int = 1
    write: Write | None = None

    def build(self) -> Dataloader:
        """The data that the options name. Raises RefusedError and TextError."""
        if self.options.is_generated:
            return self._generated()
        if self.options.streaming:
            return self._streamed()
        return self._from_documents()

    def _from_documents(self) -> Dataloader:
        """Blocks of documents whose tokens are stored."""
        sources: Sequence[Source] = data_sources(self.options)
        text = tokenize(sources, self.encoders)
        options = self._with_block_and_batch(int(text.lengths.sum()))

        heldout, validation_blocks = blocks_of_named_text(options, self.encoders)
        if not validation_blocks:
            heldout, validation_blocks = blocks_of_drawn_text(options, text)
        overlap = None
        if validation_blocks:
            sources, overlap = without_passages(options, sources, heldout, self.encoders)
            if overlap.documents:
                text = tokenize(sources, self.encoders)

        reading = _plan_reading(options, text, heldout)
        blocks = Blocks(
            text, reading.order, reading.block_size, reading.text_blocks, reading.lengths
        )
        return Dataloader(
            options=options,
            blocks=blocks,
            steps=reading.steps,
            fingerprint=text.fingerprint,
            summary=_summary(text, reading),
            validation_blocks=validation_blocks,
            distinct_tokens=reading.distinct_tokens,
            data_tokens=reading.data_tokens,
            overlap=overlap,
        )

    def _streamed(self) -> Dataloader:
        """Blocks of a source that is read while it is trained on."""
        (source,) = data_sources(self.options)
        options = self._with_block_and_batch(ENDLESS)
        steps = count_steps(count_blocks(options, ENDLESS), options)

        heldout, validation_blocks = blocks_of_named_text(options, self.encoders)
        if validation_blocks:
            # A stream is not searched before it is read: passages are left out on the way.
            exclusion = passages_to_exclude(options, [source], heldout, self.encoders)
            source = source.excluding(exclusion)

        blocks = StreamedBlocks(
            source,
            self.encoders.of(source),
            block_size=options.block_size,
            heldout=heldout,
            batch=options.blocks_per_step,
        )
        summary = f"a stream of {blocks}"
        if validation_blocks:
            summary += ", without passages of the validation text"
        contents = file_digests(source.files)
        fingerprint = f"{summary} {blocks.encoder.identify()} {contents}"
        return Dataloader(
            options=options,
            blocks=blocks,
            steps=steps,
            fingerprint=fingerprint,
            summary=summary,
            validation_blocks=validation_blocks,
        )

    def _generated(self) -> Dataloader:
        """Blocks that the teacher writes. The first are held out, unless --validation names other
        text.
        """
        assert self.write is not None
        spec = self.options.data[0]
        data_tokens = parse_self(spec)[0] or ENDLESS
        options = self._with_block_and_batch(data_tokens)
        steps = count_steps(count_blocks(options, data_tokens), options)
        count = steps * options.blocks_per_step

        _, validation_blocks = blocks_of_named_text(options, self.encoders)
        n_validation = 0
        if not validation_blocks:
            n_validation = most_measured_blocks(options)
        blocks = self.write(options.block_size, n_validation + count)
        if not validation_blocks:
            validation_blocks = [blocks[number] for number in range(n_validation)]

        teacher = Path(options.teacher).absolute().name
        summary = f"{plural(count, 'block')} of {options.block_size:,} tokens from {teacher}"
        return Dataloader(
            options=options,
            blocks=blocks,
            steps=steps,
            fingerprint=blocks.fingerprint,
            summary=summary,
            validation_blocks=validation_blocks,
            first_trained_block=n_validation,
        )

    def _with_block_and_batch(self, data_tokens: int) -> UptrainOptions:
        """The options for data of so many tokens, with context and batch_size decided, and without
        repeats if no passage fits twice into a block.
        """
        options = decide_block_and_batch(self.options, data_tokens, self.largest, self.ranks)
        if options.block_size < 2 * SHORTEST:
            return replace(options, repeats=False)
        return options


@dataclass(frozen=True)
class _Reading:
    """Which of D documents are read, in which order, and in how many blocks.

    Attributes:
        lengths: (D,) tokens of each document to train on; what follows them is held out.
        order: (N,) numbers of the documents in the order in which they are read.
        block_size: Tokens of a block.
        steps: Steps of the run.
        n_blocks: Blocks of the run.
        text_blocks: How many of them are text. The others repeat passages of these.
    """

    lengths: Ints
    order: Ints
    block_size: int
    steps: int
    n_blocks: int
    text_blocks: int

    @property
    def data_tokens(self) -> int:
        """Tokens that are not held out."""
        return int(self.lengths.sum())

    @property
    def read_tokens(self) -> int:
        """Tokens that are read; more than `data_tokens` if the data is read again."""
        return self.text_blocks * self.block_size

    @property
    def distinct_tokens(self) -> int:
        """How many of `data_tokens` are read."""
        return min(self.read_tokens, self.data_tokens)


def _plan_reading(options: UptrainOptions, text: Documents, heldout: HeldoutDocuments) -> _Reading:
    """What a run reads of documents. Raises RefusedError and TextError if that is too little."""
    lengths = heldout.lengths(text)
    steps = count_steps(count_blocks(options, int(lengths.sum())), options)
    n_blocks = steps * options.blocks_per_step
    # With repeats half of the blocks are text: of 1M tokens of the run, 0.5M are read. The others
    # take their passages from the blocks of text before them.
    text_blocks = text_blocks_among(n_blocks) if options.repeats else n_blocks
    order = reading_order(text, lengths, text_blocks * options.block_size, options.seed)
    return _Reading(lengths, order, options.block_size, steps, n_blocks, text_blocks)


def _summary(text: Documents, reading: _Reading) -> str:
    """What is read of documents, in words."""
    data_tokens = reading.data_tokens
    distinct = reading.distinct_tokens
    summary = f"{distinct:,} of {data_tokens:,} tokens ({percent(distinct, data_tokens)})"
    if text.has_masks:
        counted = count_in_loss(text, reading.lengths, reading.order, distinct)
        summary += f", {counted:,} of which count in the loss"
    summary += f", in {plural(reading.text_blocks, 'block')} of {reading.block_size:,}"

    if reading.read_tokens > data_tokens:
        times = reading.read_tokens / data_tokens
        summary += f", read {times:.2f} times, each time in another order"
    if reading.n_blocks > reading.text_blocks:
        repeating = plural(reading.n_blocks - reading.text_blocks, "more block")
        summary += f"; {repeating} with repeated passages of them"

    is_longer_chat = ~text.divisible & (reading.lengths > reading.block_size)  # (D,)
    longer_chats = int(is_longer_chat[np.unique(reading.order)].sum())
    if longer_chats:
        summary += f"; {plural(longer_chats, 'chat')} longer than a block, and cut there"
    return summary


def percent(part: int, whole: int) -> str:
    """`4.91%`, and `100%` only of all."""
    share = 100 * part / whole
    if share >= 99.9 and part != whole:
        return "99.9%"
    return f"{share:.3g}%"
