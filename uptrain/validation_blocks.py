"""The validation blocks of a run, which measure the training.

Validation text is *held out*: it is never trained on. It is *named* (--validation,
--validation-fraction, or the held-out modules of stdlib:train), or else *drawn*: the documents with
the lowest hashes, until there is enough; of the last of them only its end. At most
--validation-tokens of it are *measured*. Of generated text the first blocks are held out
(text_data.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from gqa.uptrain.data_sources import validation_sources
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.overlap import Overlap, find_overlap, validation_texts

ONE_DRAWN_IN = 20  # blocks or pairs: this part of the data is held out at most, if none is named


def blocks_of_named_text(
    options: UptrainOptions, encoders: Encoders
) -> tuple[HeldoutDocuments, list[Block]]:
    """The documents of the validation sources, which training skips, and blocks of them.

    The blocks are spread evenly over the documents. Both are empty if no source is named.

    Raises RefusedError and TextError.
    """
    sources = validation_sources(options)
    if not sources:
        return HeldoutDocuments(), []

    text = tokenize(sources, encoders)
    heldout = HeldoutDocuments({bytes(digest): 0 for digest in text.digests})  # from token 0 on

    all_blocks = Blocks(text, np.arange(len(text)), options.block_size)
    if not len(all_blocks):
        raise RefusedError(
            f"the validation text has less than one block of {options.block_size} tokens; pass "
            "more text with --validation, or lower --context"
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
            "no block of the validation text has a token that counts in the loss; pass other text "
            "with --validation, or raise --context"
        )
    return heldout, blocks


def blocks_of_drawn_text(
    options: UptrainOptions, text: Documents
) -> tuple[HeldoutDocuments, list[Block]]:
    """The documents with the lowest hashes (`hold_back`), which training skips, and blocks of them:
    a twentieth of the data, and at most --validation-tokens.

    Both are empty for data of fewer than 20 blocks.
    """
    n_drawn = min(
        most_measured_blocks(options),
        int(text.lengths.sum()) // (ONE_DRAWN_IN * options.block_size),
    )
    heldout = HeldoutDocuments(hold_back(text, n_drawn * options.block_size))

    # The drawn documents in the order of the data, each with the first token that is held out: 0,
    # but for the document that was drawn last.
    numbers = {bytes(digest): number for number, digest in enumerate(text.digests)}
    drawn = sorted((numbers[digest], first) for digest, first in heldout.limits.items())
    read = text.tokens_with_mask if text.has_masks else text.tokens
    heldout_tokens = (read(number)[first:] for number, first in drawn)

    packed = pack(heldout_tokens, options.block_size)
    with_targets = (block for block, _ in packed if has_targets(block))
    blocks = list(islice(with_targets, most_measured_blocks(options)))
    if not blocks:  # nothing would be measured by what is held out
        return HeldoutDocuments(), []
    return heldout, blocks


def passages_to_exclude(
    options: UptrainOptions,
    sources: Sequence[Source],
    heldout: HeldoutDocuments,
    encoders: Encoders,
) -> Exclusion:
    """Passages of the validation text, which are cut out of all documents that are trained on.

    Documents that `heldout` skips as a whole need not be searched for them.
    """
    texts: Iterable[str]
    named = validation_sources(options)
    if named:
        rows = chain.from_iterable(source.rows() for source in named)
        texts = map(searched_text, rows)
    else:
        texts = validation_texts(sources, heldout, encoders)

    skipped = frozenset(digest for digest, limit in heldout.limits.items() if not limit)
    return Exclusion(Passages.of(texts), left_to_reader=skipped)


def without_passages(
    options: UptrainOptions,
    sources: Sequence[Source],
    heldout: HeldoutDocuments,
    encoders: Encoders,
) -> tuple[Sequence[Source], Overlap]:
    """Stored sources without passages of the validation text, and how much of it they had. They are
    the same sources if they had none.
    """
    exclusion = passages_to_exclude(options, sources, heldout, encoders)
    overlap = find_overlap(sources, exclusion, heldout, encoders)
    if overlap.documents:
        sources = [source.excluding(exclusion) for source in sources]
    return sources, overlap


def has_targets(block: Block) -> bool:
    """Whether any token of a block is predicted and counts in the loss."""
    return "loss_mask" not in block or bool(block["loss_mask"][1:].any())


def most_measured_blocks(options: UptrainOptions) -> int:
    """The largest number of blocks that are measured."""
    return max(1, options.validation_tokens // options.block_size)
