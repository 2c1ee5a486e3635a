"""Blocks of calibration text that is read: pieces of many documents of a source, and other pieces
that measure the result. Imports no torch.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from gqa.core.console import Watcher
from gqa.core.errors import RefusedError
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source

if TYPE_CHECKING:
    from gqa.checkpoint.read import Checkpoint
    from gqa.corpus.encoders import Encoder
    from gqa.corpus.tokens import Ints

# 64 times what is needed, as a token has about four: so blocks are of many documents.
_CHARACTERS_READ_PER_TOKEN = 256
COPY_TOKENS = 13  # tokens in a row that show that text is the same
_COPY_SHARE = 0.5  # of a block: if so much of it is calibration text, it does not measure quality
_HELDOUT_ONE_IN = 8  # of short text one block in so many may be held out


def read_blocks(
    checkpoint: Checkpoint,
    source: Source,
    *,
    tokens: int,
    length: int,
    seed: int,
    repeats: bool,
    trust_remote_code: bool = False,
    heldout_count: int = 0,
) -> tuple[Ints, Ints]:
    """Cut text into blocks: pieces of many documents, which are better than a few whole ones.

    If a decoder's tokenizer adds no BOS to texts, one of START_EVERY pieces begins with it in place
    of its own first token; chats begin as their template begins them.

    Args:
        checkpoint: The model.
        source: The text.
        tokens: Tokens of all blocks together, rounded down to whole blocks.
        length: Tokens of a block.
        seed: Of the choice among documents, and of repeated passages.
        repeats: Whether some blocks repeat themselves, in the same shares as in generated
            text.
        heldout_count: The most blocks that are held out; of short text an eighth.

    Returns:
        Token ids (N, length), and (M, length) of the blocks that are held out.

    Raises:
        RefusedError, TextError: The text cannot be used.
    """
    import numpy as np

    from gqa.convert.heads.config import read_config
    from gqa.corpus.blocks import START_EVERY, with_repeats
    from gqa.corpus.encoders import Encoders
    from gqa.corpus.tokens import check_ids
    from gqa.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, trust_remote_code, instead="use self")
    encoder = Encoders(tokenizer, checkpoint.name).of(source)
    stream = _shuffled_tokens(source, encoder, tokens, seed)
    if len(stream) < length:
        raise RefusedError(
            f"{source.spec} has {len(stream)} tokens, less than one block of {length} tokens; pass "
            "more text, or lower --context"
        )

    pieces = stream[: len(stream) // length * length].reshape(-1, length)
    config = read_config(checkpoint.config, checkpoint.name).text_config
    check_ids(int(pieces.max()), config.vocab_size, checkpoint.name)

    numbers, heldout_numbers = _choose_pieces(len(pieces), tokens // length, heldout_count)
    blocks: Ints = pieces[numbers]
    heldout_blocks: Ints = pieces[heldout_numbers]

    # As in `START_EVERY`: the model also sees BOS (EOS, if it has none) at the beginning, which its
    # tokenizer never adds.
    lacks_start = not encoder.starts_documents and not config.is_encoder_decoder
    if lacks_start and encoder.start is not None:
        blocks[START_EVERY - 1 :: START_EVERY, 0] = encoder.start
        heldout_blocks[START_EVERY - 1 :: START_EVERY, 0] = encoder.start

    if repeats:
        rows = [
            with_repeats(blocks.__getitem__, index, seed, encoder.start)
            for index in range(len(blocks))
        ]
        blocks = np.stack(rows)
    return blocks, heldout_blocks


def _shuffled_tokens(source: Source, encoder: Encoder, tokens: int, seed: int) -> Ints:
    """At least that many tokens of a source, if it has them.

    Its documents are in an order by the hashes of their texts and the seed. No more of them are
    tokenized than have _CHARACTERS_READ_PER_TOKEN for each token, if that is enough.
    """
    import numpy as np

    from gqa.corpus.reading_order import permutation

    digests = []
    characters = []
    for text in source.texts():
        digests.append(row_digest(text))
        characters.append(len(text))

    order = permutation(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32), seed)
    characters_read = np.cumsum(np.array(characters)[order])
    documents = int(np.searchsorted(characters_read, _CHARACTERS_READ_PER_TOKEN * tokens)) + 1
    stream = _encode_documents(source, order[:documents], encoder)
    if len(stream) < tokens:  # its words are long
        stream = _encode_documents(source, order, encoder)
    return stream


def _encode_documents(source: Source, numbers: Ints, encoder: Encoder) -> Ints:
    """The tokens of the documents with these numbers, joined in the order of the numbers."""
    import numpy as np

    order = numbers.tolist()
    chosen = set(order)
    texts = [text for number, text in enumerate(source.texts()) if number in chosen]
    documents = dict(zip(sorted(chosen), encoder.encode(texts), strict=True))
    return np.concatenate([np.array(documents[number].tokens, np.int64) for number in order])


def _choose_pieces(n_pieces: int, wanted: int, heldout_count: int) -> tuple[Ints, Ints]:
    """Choose `wanted` of the pieces, evenly spaced, and at most `heldout_count` of the rest.

    If the rest is less than an eighth of the pieces, up to an eighth is held out all the same, and
    fewer are used.

    Returns:
        The numbers of the pieces that are used, and of those that are held out.
    """
    import numpy as np

    used = np.linspace(0, n_pieces - 1, min(wanted, n_pieces)).astype(int)
    rest = np.setdiff1d(np.arange(n_pieces), used)
    count = min(heldout_count, max(len(rest), n_pieces // _HELDOUT_ONE_IN))
    if len(rest) < count:  # short text: what is held out is no longer used
        rest = np.arange(n_pieces)
    heldout_numbers = rest[np.linspace(0, len(rest) - 1, count).astype(int)]
    return np.setdiff1d(used, heldout_numbers), heldout_numbers


def without_copies(heldout_blocks: Ints, blocks: Ints, source_name: str, watcher: Watcher) -> Ints:
    """The held-out blocks (M, T) of which less than half is in calibration blocks (N, T).

    Text that repeats itself, or is read twice, would make the result look better. Blocks are
    compared by their windows of COPY_TOKENS tokens in a row. A warning says how many are left out.
    """
    import numpy as np

    if not len(heldout_blocks) or heldout_blocks.shape[1] < COPY_TOKENS:
        return heldout_blocks

    # Only the windows of held-out blocks, which are few, are in memory.
    heldout_windows = [_windows(block) for block in heldout_blocks]
    searched = set(chain.from_iterable(heldout_windows))
    copied = set[bytes]()
    for block in blocks:
        copied.update(searched.intersection(_windows(block)))

    copied_windows = [sum(map(copied.__contains__, windows)) for windows in heldout_windows]
    # Blocks are equally long, so they have equally many windows.
    is_copy = np.array(copied_windows) >= _COPY_SHARE * len(heldout_windows[0])
    if is_copy.any():
        watcher.warn(
            f"{is_copy.sum():,} of {len(heldout_blocks):,} blocks of {source_name} that are "
            "meant to measure quality also occur in the calibration text; they are left out"
        )
    return heldout_blocks[~is_copy]


def _windows(block: Ints) -> list[bytes]:
    """All runs of COPY_TOKENS tokens in a block (T,), as bytes."""
    import numpy as np

    windows = np.lib.stride_tricks.sliding_window_view(block, COPY_TOKENS)
    return [window.tobytes() for window in windows]
