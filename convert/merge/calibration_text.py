"""The text that heads are calibrated on, as blocks: pieces of a source."""

from __future__ import annotations

import numpy as np

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_tokenizer
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import read_config
from gqa.corpus.alpha import permutation
from gqa.corpus.repeats import mixed
from gqa.corpus.sources import Source, row_digest
from gqa.corpus.tokens import Encoder, Ints, check_ids

_CHARACTERS = 256  # of text that are looked at for every token that is taken, which is some four of them


def read_blocks(
    checkpoint: Checkpoint, source: Source, tokens: int, length: int, seed: int, repeats: bool,
    trust_remote_code: bool = False,
) -> Ints:  # fmt: skip
    """(N, length) pieces of many documents, which say more than a few whole ones; with `repeats` a part of them repeats
    itself, in the shares of what a model writes. Raises RefusedError and CorpusError.

    No more is tokenised than they come from: documents in an order that hashes of their texts and the seed decide, as
    many as hold _CHARACTERS a token.
    """
    encoder = Encoder(load_tokenizer(checkpoint, trust_remote_code, instead="use self"))
    digests, characters = zip(*((row_digest(text), len(text)) for text in source.texts()), strict=True)
    order = permutation(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32), seed)
    reached, wanted = np.cumsum(np.array(characters)[order]), _CHARACTERS * tokens
    stream = _encoded(source, order[: int(np.searchsorted(reached, wanted)) + 1], encoder)
    if len(stream) < tokens:  # long words
        stream = _encoded(source, order, encoder)
    if len(stream) < length:
        raise RefusedError(f"{source.spec} has {len(stream)} tokens, fewer than one block of {length}; give more text")
    pieces = stream[: len(stream) // length * length].reshape(-1, length)
    blocks: Ints = pieces[np.linspace(0, len(pieces) - 1, min(tokens // length, len(pieces))).astype(int)]
    vocabulary = read_config(checkpoint.config, checkpoint.name).text.vocab_size
    check_ids(int(blocks.max()), vocabulary, checkpoint.name)
    if not repeats:
        return blocks
    lead = int((blocks[:, 0] == blocks[0, 0]).all())
    return np.stack([mixed(blocks.__getitem__, index, seed, lead) for index in range(len(blocks))])


def _encoded(source: Source, chosen: Ints, encoder: Encoder) -> Ints:
    """The tokens of the documents of these numbers, one after the other in their order."""
    numbers = set(chosen.tolist())
    read = (text for number, text in enumerate(source.texts()) if number in numbers)
    parts = dict(zip(sorted(numbers), (np.array(tokens, np.int64) for _, tokens in encoder.encode(read)), strict=True))
    return np.concatenate([parts[number] for number in chosen.tolist()])
