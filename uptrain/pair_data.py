"""The data of a run of an encoder-decoder: pairs with at most so many tokens a side.

They are rows of two columns, plain text with spans left out, or what the teacher writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gqa.core.errors import RefusedError, TextError
from gqa.corpus.pairs import PairBlocks, PairEncoder, pair_block, tokenize_pairs
from gqa.corpus.reading_order import HeldoutDocuments, hold_back, reading_order
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Block, Documents, Ints
from gqa.uptrain.data_sources import data_sources, validation_sources
from gqa.uptrain.dataloader import Dataloader, MakePair
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.run_length import count_steps, default_batch, require_data, share_of
from gqa.uptrain.text_data import TextDataBuilder, percent
from gqa.uptrain.validation_blocks import ONE_DRAWN_IN, without_passages


def check_pair_options(options: UptrainOptions, name: str) -> None:
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
        raise RefusedError("--target-column cannot be used with a stream; remove --streaming")
    if options.target_column and options.is_generated:
        raise RefusedError(
            "--target-column names a column of a dataset, but the training text is generated "
            "(--data self); pass the dataset with --data, or remove --target-column"
        )


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
    def options(self) -> UptrainOptions:
        """The options of the run."""
        return self.text_builder.options

    def build(self) -> Dataloader:
        """The data that the options name. Raises RefusedError and TextError."""
        options = self.options
        if options.target_column:
            return self._stored_pairs()

        # Before text is generated, which may take hours
        if options.validation or not options.is_generated:
            self.encoder.require_marks()
        if options.is_generated:
            return self._generated()
        return self._corrupted()

    def _corrupted(self) -> Dataloader:
        """Blocks of text, each with spans left out."""
        loader = self.text_builder.build()
        validation_pairs = _make_pairs(self._corrupt, loader.validation_blocks)
        return replace(loader, validation_blocks=validation_pairs, make_pair=self._corrupt)

    def _generated(self) -> Dataloader:
        """Pairs that the teacher writes; validation text that is named has spans left out."""
        loader = self.text_builder.build()
        # The pairs that were generated for it, unless --validation names text.
        make_validation = self._corrupt if self.options.validation else _unpack_generated
        validation_pairs = _make_pairs(make_validation, loader.validation_blocks)

        # Lengths of the blocks to train on; each has two sides, padded with -1.
        count = loader.steps * loader.options.blocks_per_step
        lengths = list[int]()
        for number in range(loader.first_trained_block, loader.first_trained_block + count):
            tokens = loader.blocks[number]["input_ids"]
            lengths.append(int((tokens >= 0).sum()))
        return replace(
            loader,
            validation_blocks=validation_pairs,
            make_pair=_unpack_generated,
            tokens_of_blocks=np.array(lengths),
        )

    def _corrupt(self, block: Block, seeds: list[int]) -> Block:
        """The pair of a block of text with spans left out, and these spans."""
        random = np.random.default_rng(seeds)
        return pair_block(self.encoder.corrupt(block["input_ids"], random))

    def _stored_pairs(self) -> Dataloader:
        """Pairs of two columns."""
        sources: Sequence[Source] = data_sources(self.options)
        pairs = self._tokenize(sources)
        heldout, validation_pairs = self._validation_pairs(pairs)

        overlap = None
        if validation_pairs:
            encoders = self.text_builder.encoders
            sources, overlap = without_passages(self.options, sources, heldout, encoders)
            if overlap.documents:
                pairs = self._tokenize(sources)

        options = self._with_side_and_batch(pairs)
        lengths = heldout.lengths(pairs.table)  # (D,): 1 of a pair to train on, 0 of one held out
        available = int(lengths.sum())
        n_pairs = _count_pairs(options, pairs, available)
        steps = count_steps(n_pairs, options)
        order = reading_order(pairs.table, lengths, n_pairs, options.seed)

        trained = steps * options.blocks_per_step
        return Dataloader(
            options=options,
            blocks=PairBlocks(pairs.table, order, self.encoder, pairs.side_length),
            steps=steps,
            fingerprint=pairs.table.fingerprint,
            summary=_summary(pairs, available, order[:trained]),
            validation_blocks=validation_pairs,
            tokens_of_blocks=pairs.tokens[order],
            overlap=overlap,
        )

    def _tokenize(self, sources: Sequence[Source]) -> _StoredPairs:
        """The pairs of sources."""
        table = tokenize_pairs(sources, self.encoder)
        return _StoredPairs(table, self.encoder, self.text_builder.largest)

    def _with_side_and_batch(self, pairs: _StoredPairs) -> UptrainOptions:
        """The options for these pairs, with context (tokens of a side) and batch_size decided."""
        options = replace(self.options, context=pairs.side_length)
        if options.batch_size is not None:
            return options
        wanted = _wanted_pairs(options, pairs, len(pairs.table))
        return replace(options, batch_size=default_batch(options, wanted, self.text_builder.ranks))

    def _validation_pairs(self, pairs: _StoredPairs) -> tuple[HeldoutDocuments, list[Block]]:
        """The pairs that training skips, and some of them, evenly spaced, that measure it.

        They are those of the named sources, else a twentieth of `pairs`, by the order of their
        hashes. At most --validation-tokens of them measure.
        """
        most_measured = pairs.count_with(self.options.validation_tokens)
        named = validation_sources(self.options)
        if named:
            table = tokenize_pairs(named, self.encoder)
            heldout = HeldoutDocuments({bytes(digest): 0 for digest in table.digests})
            numbers = np.arange(len(table))
        else:
            table = pairs.table
            n_heldout = min(most_measured, len(table) // ONE_DRAWN_IN)
            heldout = HeldoutDocuments(hold_back(table, n_heldout))
            numbers = np.flatnonzero(heldout.lengths(table) == 0)

        n_measured = min(most_measured, len(numbers))
        picked = numbers[np.linspace(0, len(numbers) - 1, n_measured).astype(int)]
        blocks = PairBlocks(table, picked, self.encoder, pairs.side_length)
        return heldout, [blocks[number] for number in range(n_measured)]


@dataclass(frozen=True)
class _StoredPairs:
    """D pairs of two columns, each side cut to `side_length` tokens.

    How many of them are trained on is counted in pairs: --alpha is a share of the pairs, and
    numbers of tokens are divided by the tokens of a pair on average (`count_with`).

    Attributes:
        table: The pairs, without special tokens and not cut yet.
        encoder: Adds the special tokens.
        side_length: Tokens of a source, and of a target, at most.
    """

    table: Documents
    encoder: PairEncoder
    side_length: int

    @cached_property
    def tokens_of_sides(self) -> Ints:
        """(2, D) tokens of sources and of targets before they are cut, with special tokens."""
        special_tokens = np.array(self.encoder.frame_lengths)[:, None]
        sides = [self.table.token_counts("source"), self.table.token_counts("target")]
        tokens: Ints = np.stack(sides) + special_tokens
        return tokens

    @cached_property
    def tokens(self) -> Ints:
        """(D,) tokens of both sides of each pair, as they are trained on."""
        tokens: Ints = np.minimum(self.tokens_of_sides, self.side_length).sum(0)
        return tokens

    @property
    def mean_tokens(self) -> float:
        """Tokens of a pair on average."""
        return float(self.tokens.mean())

    def count_with(self, tokens: int) -> int:
        """How many pairs have about so many tokens; at least one."""
        return max(1, int(tokens / self.mean_tokens))


def _wanted_pairs(options: UptrainOptions, pairs: _StoredPairs, available: int) -> int:
    """How many pairs to train on by --alpha or --tokens; without both all of `available`."""
    if options.alpha is not None:
        return share_of(options.alpha, available)
    if options.tokens is not None:
        return pairs.count_with(options.tokens)
    return available


def _count_pairs(options: UptrainOptions, pairs: _StoredPairs, available: int) -> int:
    """Number of pairs to train on, of `available` that are not held out, each perhaps repeatedly.

    Raises TextError if there is none.
    """
    require_data(available)
    if options.steps is not None:
        return options.steps * options.blocks_per_step

    wanted = _wanted_pairs(options, pairs, available)
    if not wanted:
        raise TextError(f"--alpha {options.alpha:g} is less than one pair; raise it")
    return wanted


def _summary(pairs: _StoredPairs, available: int, trained: Ints) -> str:
    """What is read of `available` pairs, in words: `trained` has the number of each, in order."""
    distinct = min(len(trained), available)
    summary = (
        f"{distinct:,} of {available:,} pairs ({percent(distinct, available)}), of "
        f"{pairs.mean_tokens:,.1f} tokens on average"
    )
    if len(trained) > available:
        times = len(trained) / available
        summary += f", read {times:.2f} times, each time in another order"

    longer_side = pairs.tokens_of_sides.max(0)  # (D,)
    n_cut = int((longer_side[np.unique(trained)] > pairs.side_length).sum())
    if n_cut:
        are = "is" if n_cut == 1 else "are"
        summary += f"; {n_cut:,} {are} cut to {pairs.side_length} a side"
    return summary


def _make_pairs(make: MakePair, blocks: list[Block]) -> list[Block]:
    """The pairs of validation blocks, each with its number as the seed."""
    return [make(block, [number]) for number, block in enumerate(blocks)]


def _unpack_generated(block: Block, seeds: list[int]) -> Block:
    """The pair of a generated block, whose two halves are source and target, padded with -1."""
    source, target = np.split(block["input_ids"], 2)
    return pair_block((source[source >= 0], target[target >= 0]))
