"""The data of a run of an encoder-decoder: pairs with at most so many tokens a side.

They are rows of two columns, plain text with spans left out, or what the teacher writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gqa.core.errors import RefusedError
from gqa.corpus.pairs import PairBlocks, PairEncoder, pair_block, tokenize_pairs
from gqa.corpus.reading_order import HeldoutDocuments, hold_back, reading_order
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Block, Documents, Ints
from gqa.uptrain.data_sources import data_sources, heldout_sources
from gqa.uptrain.dataloader import Dataloader, MakePair
from gqa.uptrain.heldout_blocks import blocks_to_hold_out, without_passages
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.run_length import count_blocks, count_steps, decide_block_and_batch
from gqa.uptrain.text_data import TextDataBuilder, percent


def check_pair_options(options: TrainOptions, name: str) -> None:
    """Raise RefusedError for options that an encoder-decoder, called `name`, cannot be trained
    with.
    """
    if options.repeats:
        raise RefusedError(
            f"repeats works only with decoders, but {name} is an encoder-decoder; remove repeats"
        )
    if options.assistant_only_loss:
        raise RefusedError(
            f"--assistant-only-loss works only with decoders, but {name} is an encoder-decoder; "
            "remove --assistant-only-loss"
        )
    if options.target_column and options.streaming:
        raise RefusedError(
            "--target-column is a column of stored data, not of a stream; remove --streaming"
        )
    if options.target_column and options.is_generated:
        raise RefusedError("--target-column is a column of stored data; pass that data with --data")


@dataclass(frozen=True)
class PairDataBuilder:
    """Makes the dataloader of a run on pairs.

    Attributes:
        text_builder: Makes the blocks of plain or generated text that become pairs.
        encoder: Makes pairs for this encoder-decoder.
    """

    text_builder: TextDataBuilder
    encoder: PairEncoder

    @property
    def options(self) -> TrainOptions:
        """The options of the run."""
        return self.text_builder.options

    def build(self) -> Dataloader:
        """The data that the options name. Raises RefusedError and CorpusError."""
        options = self.options
        if options.target_column:
            return self._stored_pairs(self.text_builder.largest)

        # Before text is generated, which may take hours
        if options.heldout or not options.is_generated:
            self.encoder.require_marks()
        if options.is_generated:
            return self._generated()
        return self._corrupted()

    def _corrupted(self) -> Dataloader:
        """Blocks of text, each with spans left out."""
        loader = self.text_builder.build()
        heldout = _make_pairs(self._corrupt, loader.heldout_blocks)
        return replace(loader, heldout_blocks=heldout, make_pair=self._corrupt)

    def _generated(self) -> Dataloader:
        """Pairs that the teacher writes; held-out text that is named has spans left out."""
        loader = self.text_builder.build()
        # The pairs that were generated for it, unless --heldout names text.
        make_heldout = self._corrupt if self.options.heldout else _unpack_generated
        heldout = _make_pairs(make_heldout, loader.heldout_blocks)

        # Lengths of the blocks to train on; each has two sides, padded with -1.
        count = loader.steps * loader.options.blocks_per_step
        lengths = list[int]()
        for number in range(loader.first_trained_block, loader.first_trained_block + count):
            tokens = loader.blocks[number]["input_ids"]
            lengths.append(int((tokens >= 0).sum()))
        return replace(
            loader,
            heldout_blocks=heldout,
            make_pair=_unpack_generated,
            tokens_of_blocks=np.array(lengths),
        )

    def _corrupt(self, block: Block, seeds: list[int]) -> Block:
        """The pair of a block of text with spans left out, and these spans."""
        random = np.random.default_rng(seeds)
        return pair_block(self.encoder.corrupt(block["input_ids"], random))

    def _stored_pairs(self, side_length: int) -> Dataloader:
        """Pairs of two columns, each side cut to `side_length` tokens.

        Lengths count pairs, not tokens, so alpha is a share of the pairs.
        """
        options = self.options
        sources: Sequence[Source] = data_sources(options)
        table = tokenize_pairs(sources, self.encoder)
        counted_in_pairs = self._counted_in_pairs(table, side_length)
        heldout, heldout_pairs = self._heldout_pairs(table, counted_in_pairs, side_length)

        overlap = None
        if heldout_pairs:
            encoders = self.text_builder.encoders
            sources, overlap = without_passages(options, sources, heldout, encoders)
            if overlap.documents:
                table = tokenize_pairs(sources, self.encoder)
                counted_in_pairs = self._counted_in_pairs(table, side_length)

        lengths = heldout.lengths(table)  # (D,): 1 of a pair to train on, 0 of one held out
        available = int(lengths.sum())
        n_blocks = count_blocks(counted_in_pairs, available)
        steps = count_steps(n_blocks, counted_in_pairs)
        trained = steps * counted_in_pairs.blocks_per_step
        distinct = min(trained, available)
        order = reading_order(table, lengths, n_blocks, options.seed)

        pair_tokens = self._tokens_of_pairs(table, side_length)
        mean = float(pair_tokens.mean())
        summary = (
            f"{distinct:,} of {available:,} pairs ({percent(distinct, available)}), of {mean:,.1f} "
            "tokens on average"
        )
        if trained > available:
            summary += f", read {trained / available:.2f} times, each time in another order"
        longest = self._tokens_of_sides(table).max(0)[np.unique(order[:trained])]
        n_cut = int((longest > side_length).sum())
        if n_cut:
            are = "is" if n_cut == 1 else "are"
            summary += f"; {n_cut:,} {are} cut to {side_length} a side"

        return Dataloader(
            options=replace(options, context=side_length, batch_size=counted_in_pairs.batch_size),
            blocks=PairBlocks(table, order, self.encoder, side_length),
            steps=steps,
            fingerprint=table.fingerprint,
            summary=summary,
            heldout_blocks=heldout_pairs,
            tokens_of_blocks=pair_tokens[order],
            overlap=overlap,
        )

    def _heldout_pairs(
        self, table: Documents, counted_in_pairs: TrainOptions, side_length: int
    ) -> tuple[HeldoutDocuments, list[Block]]:
        """The pairs that training skips, and some of them, evenly spaced, that measure it.

        They are those of the named sources, else pairs of the table by the order of their hashes.
        """
        named = heldout_sources(self.options)
        if named:
            heldout_table = tokenize_pairs(named, self.encoder)
            heldout = HeldoutDocuments({bytes(digest): 0 for digest in heldout_table.digests})
            numbers = np.arange(len(heldout_table))
        else:
            heldout_table = table
            heldout = HeldoutDocuments(
                hold_back(table, blocks_to_hold_out(counted_in_pairs, table))
            )
            numbers = np.flatnonzero(heldout.lengths(table) == 0)

        n_measured = min(counted_in_pairs.heldout_tokens, len(numbers))
        picked = numbers[np.linspace(0, len(numbers) - 1, n_measured).astype(int)]
        pairs = PairBlocks(heldout_table, picked, self.encoder, side_length)
        return heldout, [pairs[number] for number in range(n_measured)]

    def _tokens_of_sides(self, table: Documents) -> Ints:
        """(2, D) tokens of the sources and of the targets, with special tokens."""
        special_tokens = np.array(self.encoder.frame_lengths)[:, None]
        tokens: Ints = (
            np.stack([table.token_counts("source"), table.token_counts("target")]) + special_tokens
        )
        return tokens

    def _tokens_of_pairs(self, table: Documents, side_length: int) -> Ints:
        """(D,) tokens of the pairs, of which each side is cut to `side_length`."""
        tokens: Ints = np.minimum(self._tokens_of_sides(table), side_length).sum(0)
        return tokens

    def _counted_in_pairs(self, table: Documents, side_length: int) -> TrainOptions:
        """Options for counting only, with a *pair* as the unit of length, for functions that know
        only tokens and blocks: `context` is 1 (a block is one pair), and `tokens` and
        `heldout_tokens` are numbers of pairs. `_stored_pairs` puts the real `context` back. The
        pairs are those of a table, each side cut to `side_length` tokens.
        """
        options = self.options
        mean_tokens = float(self._tokens_of_pairs(table, side_length).mean())
        tokens = options.tokens
        if tokens:
            tokens = _pairs_of_tokens(tokens, mean_tokens)
        heldout_tokens = _pairs_of_tokens(options.heldout_tokens, mean_tokens)
        counted = replace(options, context=1, tokens=tokens, heldout_tokens=heldout_tokens)
        return decide_block_and_batch(counted, len(table), 1, self.text_builder.ranks)


def _make_pairs(make: MakePair, blocks: list[Block]) -> list[Block]:
    """The pairs of held-out blocks, each with its number as the seed."""
    return [make(block, [number]) for number, block in enumerate(blocks)]


def _unpack_generated(block: Block, seeds: list[int]) -> Block:
    """The pair of a generated block, whose two halves are source and target, padded with -1."""
    source, target = np.split(block["input_ids"], 2)
    return pair_block((source[source >= 0], target[target >= 0]))


def _pairs_of_tokens(tokens: int, mean_tokens: float) -> int:
    """How many pairs of so many tokens on average have about `tokens` tokens; at least one."""
    return max(1, int(tokens / mean_tokens))
