"""The held-out blocks of a run, which measure the training.

Text that is *held back* is never trained on. It is *named* (--heldout, --heldout-fraction, or the
held-out modules of stdlib:train), or else the end of the data. Of it at most --heldout-tokens are
*measured*. Generated text holds back its first blocks (text_data.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from gqa.core.errors import RefusedError
from gqa.corpus.blocks import Blocks, pack
from gqa.corpus.encoders import Encoders
from gqa.corpus.exclusion import Exclusion
from gqa.corpus.passages import Passages
from gqa.corpus.reading_order import HeldoutDocuments, hold_back
from gqa.corpus.rows import searched_text
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Block, Documents, tokenize
from gqa.uptrain.data_sources import heldout_sources
from gqa.uptrain.options import TrainOptions
from gqa.uptrain.overlap import heldout_texts


def blocks_of_named_text(
    options: TrainOptions, encoders: Encoders
) -> tuple[HeldoutDocuments, list[Block]]:
    """The documents of the held-out sources, which training skips, and blocks of them.

    The blocks are spread evenly over the documents. Both are empty if no source is named.

    Raises RefusedError and CorpusError.
    """
    sources = heldout_sources(options)
    if not sources:
        return HeldoutDocuments(), []

    text = tokenize(sources, encoders)
    heldout = HeldoutDocuments({bytes(digest): 0 for digest in text.digests})  # from token 0 on

    all_blocks = Blocks(text, np.arange(len(text)), options.block)
    if not len(all_blocks):
        raise RefusedError(
            f"the held-out text has less than one block of {options.block} tokens; pass more text "
            "with --heldout, or a smaller --context"
        )
    count = min(most_measured_blocks(options), len(all_blocks))
    # Evenly spaced first, then the others in order: some may have no target
    evenly = np.linspace(0, len(all_blocks) - 1, count).astype(int).tolist()
    numbers = dict.fromkeys([*evenly, *range(len(all_blocks))])
    with_targets = (
        block for block in (all_blocks[number] for number in numbers) if has_targets(block)
    )
    blocks = list(islice(with_targets, count))
    if not blocks:
        raise RefusedError(
            "no block of the held-out text has a token that counts in the loss; pass other text "
            "with --heldout, or a larger --context"
        )
    return heldout, blocks


def blocks_of_the_end(
    options: TrainOptions, text: Documents
) -> tuple[HeldoutDocuments, list[Block]]:
    """The end of the data, in the order of the documents' hashes, which training skips, and its
    blocks. Little data has no held-out end.
    """
    heldout = HeldoutDocuments(hold_back(text, blocks_to_hold_back(options, text) * options.block))

    # Of each document with a limit, the tokens from there on, in the order of the data.
    numbers = {bytes(digest): number for number, digest in enumerate(text.digests)}
    ends = sorted((numbers[digest], limit) for digest, limit in heldout.limits.items())
    read = text.tokens_with_mask if text.has_masks else text.tokens
    packed = pack((read(number)[limit:] for number, limit in ends), options.block)

    with_targets = (block for block, _ in packed if has_targets(block))
    blocks = list(islice(with_targets, most_measured_blocks(options)))
    if not blocks:  # nothing would be measured by what is held back
        return HeldoutDocuments(), []
    return heldout, blocks


def passages_to_exclude(
    options: TrainOptions,
    sources: Sequence[Source],
    heldout: HeldoutDocuments,
    encoders: Encoders,
) -> Exclusion:
    """Passages of the held-out text, which are cut out of all documents that are trained on.

    Documents that `heldout` skips as a whole need not be searched for them.
    """
    texts: Iterator[str]
    named = heldout_sources(options)
    if named:
        rows = chain.from_iterable(source.rows() for source in named)
        texts = map(searched_text, rows)
    else:
        texts = heldout_texts(sources, heldout, encoders)

    whole = frozenset(digest for digest, limit in heldout.limits.items() if not limit)
    return Exclusion(Passages.of(texts), whole)


def has_targets(block: Block) -> bool:
    """Whether any token of a block is predicted and counts in the loss."""
    return "loss_mask" not in block or bool(block["loss_mask"][1:].any())


def most_measured_blocks(options: TrainOptions) -> int:
    """The largest number of blocks that are measured."""
    return max(1, options.heldout_tokens // options.block)


def blocks_to_hold_back(options: TrainOptions, data: Documents) -> int:
    """The number of blocks to hold back: a twentieth of the data, and at most --heldout-tokens.

    Data of fewer than 20 blocks has none.
    """
    return min(most_measured_blocks(options), int(data.lengths.sum()) // (20 * options.block))
