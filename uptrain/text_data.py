"""The data of a run on text: stored, streamed, or written by the teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gqa.checkpoint.provenance import file_digests
from gqa.convert.generate.self_samples import SampledBlocks
from gqa.core.errors import plural
from gqa.corpus.blocks import SHORTEST, Blocks
from gqa.corpus.encoders import Encoders
from gqa.corpus.reading_order import count_in_loss, reading_order
from gqa.corpus.specs import parse_self
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import tokenize
from gqa.uptrain.data_sources import data_sources
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.heldout_blocks import (
    blocks_of_named_text,
    blocks_of_the_end,
    most_measured_blocks,
    passages_to_exclude,
)
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.overlap import find_overlap
from gqa.uptrain.run_length import (
    ENDLESS,
    count_blocks,
    count_steps,
    count_text_blocks,
    decide_block_and_batch,
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

    options: TrainOptions
    encoders: Encoders
    largest: int
    ranks: int = 1
    write: Write | None = None

    def build(self) -> Dataloader:
        """The data that the options name. Raises RefusedError and CorpusError."""
        if self.options.is_generated:
            return self._generated()
        if self.options.streaming:
            return self._streamed()
        return self._stored()

    def _stored(self) -> Dataloader:
        """Blocks of documents whose tokens are stored."""
        sources = data_sources(self.options)
        text = tokenize(sources, self.encoders)
        options = self._with_block_and_batch(int(text.lengths.sum()))
        size = options.block
        if size < 2 * SHORTEST:
            options = replace(options, repeats=False)  # no passage fits twice

        heldout, heldout_blocks = blocks_of_named_text(options, self.encoders)
        if not heldout_blocks:
            heldout, heldout_blocks = blocks_of_the_end(options, text)

        overlap = None
        if heldout_blocks:
            exclusion = passages_to_exclude(options, sources, heldout, self.encoders)
            overlap = find_overlap(sources, exclusion, heldout, self.encoders)
            if overlap.documents:
                remaining = [source.excluding(exclusion) for source in sources]
                text = tokenize(remaining, self.encoders)

        lengths = heldout.lengths(text)
        data_tokens = int(lengths.sum())
        steps = count_steps(count_blocks(options, data_tokens), options)
        n_blocks = steps * options.blocks_per_step
        # Blocks that repeat passages take them from the blocks of text before, so they read no
        # further.
        text_blocks = n_blocks
        if options.repeats:
            text_blocks = count_text_blocks(n_blocks)
        read_tokens = text_blocks * size
        distinct = min(read_tokens, data_tokens)
        order = reading_order(text, lengths, read_tokens, options.seed)

        summary = f"{distinct:,} of {data_tokens:,} tokens ({percent(distinct, data_tokens)})"
        if text.has_masks:
            counted = count_in_loss(text, lengths, order, distinct)
            summary += f", {counted:,} of which count in the loss"
        summary += f", in {plural(text_blocks, 'block')} of {size:,}"
        if read_tokens > data_tokens:
            summary += f", read {read_tokens / data_tokens:.2f} times, each time in another order"
        if n_blocks > text_blocks:
            repeating = plural(n_blocks - text_blocks, "more block")
            summary += f"; {repeating} with repeated passages of them"
        if not text.divisible:
            longer = int((lengths[np.unique(order)] > size).sum())
            if longer:
                summary += f"; {plural(longer, 'chat')} longer than a block, and cut there"

        return Dataloader(
            options=options,
            blocks=Blocks(text, order, size, text_blocks, lengths),
            steps=steps,
            fingerprint=text.fingerprint,
            summary=summary,
            heldout_blocks=heldout_blocks,
            distinct_tokens=distinct,
            data_tokens=data_tokens,
            overlap=overlap,
        )

    def _streamed(self) -> Dataloader:
        """Blocks of a source that is read while it is trained on."""
        (source,) = data_sources(self.options)
        options = self._with_block_and_batch(ENDLESS)
        steps = count_steps(count_blocks(options, ENDLESS), options)

        heldout, heldout_blocks = blocks_of_named_text(options, self.encoders)
        if heldout_blocks:
            # A stream is not searched before it is read: passages are left out on the way.
            exclusion = passages_to_exclude(options, [source], heldout, self.encoders)
            source = source.excluding(exclusion)

        blocks = StreamedBlocks(
            source,
            self.encoders.of(source),
            block_size=options.block,
            heldout=heldout,
            batch=options.blocks_per_step,
        )
        summary = f"a stream of {blocks}"
        if heldout_blocks:
            summary += ", without passages of the held-out text"
        contents = file_digests(source.files)
        fingerprint = f"{summary} {blocks.encoder.identify()} {contents}"
        return Dataloader(
            options=options,
            blocks=blocks,
            steps=steps,
            fingerprint=fingerprint,
            summary=summary,
            heldout_blocks=heldout_blocks,
        )

    def _generated(self) -> Dataloader:
        """Blocks that the teacher writes. The first are held out, unless --heldout names other
        text.
        """
        assert self.write is not None
        spec = self.options.data[0]
        data_tokens = parse_self(spec)[0] or ENDLESS
        options = self._with_block_and_batch(data_tokens)
        steps = count_steps(count_blocks(options, data_tokens), options)
        count = steps * options.blocks_per_step

        _, heldout_blocks = blocks_of_named_text(options, self.encoders)
        n_heldout = 0
        if not heldout_blocks:
            n_heldout = most_measured_blocks(options)
        blocks = self.write(options.block, n_heldout + count)
        if not heldout_blocks:
            heldout_blocks = [blocks[number] for number in range(n_heldout)]

        teacher = Path(options.teacher).absolute().name
        summary = f"{plural(count, 'block')} of {options.block:,} tokens from {teacher}"
        return Dataloader(
            options=options,
            blocks=blocks,
            steps=steps,
            fingerprint=blocks.fingerprint,
            summary=summary,
            heldout_blocks=heldout_blocks,
            first_trained_block=n_heldout,
        )

    def _with_block_and_batch(self, data_tokens: int) -> TrainOptions:
        """The options for data of so many tokens, with context and batch_size decided."""
        return decide_block_and_batch(self.options, data_tokens, self.largest, self.ranks)


def percent(part: int, whole: int) -> str:
    """`4.91%`, and `100%` only of all."""
    share = 100 * part / whole
    if share >= 99.9 and part != whole:
        return "99.9%"
    return f"{share:.3g}%"
