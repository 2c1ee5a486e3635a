"""Documents -> cached tokens, and the order in which they are read.

Documents are ordered by a hash of their text and the seed: the same on every machine, for every
number of ranks, and for any layout of files. Training reads a prefix, so a larger alpha first reads
the data of a smaller one. Held-out documents are identified by a hash of their text, so no seed,
alpha or other source brings them back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.hub import local_cause, quiet
from gqa.core.errors import CorpusError, RefusedError, explain, listing
from gqa.corpus.cache import cache_errors, datasets_cache
from gqa.corpus.encoders import Encoder, Encoders
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source

Ints = NDArray[np.int64]
Block = dict[str, Ints]

LOSS_MASK = "loss_mask"  # the column, where not all tokens count in the loss
_BATCH = 64  # documents tokenized at a time


@dataclass(frozen=True)
class Documents:
    """D tokenized documents, or pairs, of one or several sources.

    `data`: a memory-mapped `datasets.Dataset` of token ids ("tokens", or "source" and "target"), of
    loss masks where not all tokens count ("loss_mask"), and the "digest" of each text.
    `fingerprint`: a hash of texts and tokenizer. `divisible`: whether a part of a document is a
    document too.
    """

    data: Any
    fingerprint: str
    divisible: bool = True

    def __len__(self) -> int:
        return len(self.data)

    @cached_property
    def digests(self) -> NDArray[np.uint8]:
        """(D, 32) SHA-256 of each text."""
        return np.frombuffer(
            b"".join(self.data.data.column("digest").to_pylist()), np.uint8
        ).reshape(-1, 32)

    @cached_property
    def lengths(self) -> Ints:
        """Sizes (D,) of documents: tokens, or 1 for a pair."""
        return (
            self.count("tokens")
            if "tokens" in self.data.column_names
            else np.ones(len(self), np.int64)
        )

    @property
    def has_masks(self) -> bool:
        """Whether not all tokens count in the loss."""
        return LOSS_MASK in self.data.column_names

    def count(self, column: str) -> Ints:
        """Numbers of tokens (D,) in a column."""
        import pyarrow.compute  # type: ignore[import-untyped]

        counts: Ints = (
            pyarrow.compute.list_value_length(self.data.data.column(column))
            .to_numpy()
            .astype(np.int64)
        )
        return counts

    def tokens(self, i: int, column: str = "tokens") -> NDArray[np.int32]:
        """Tokens (n,) of document i, with BOS and EOS."""
        tokens: NDArray[np.int32] = self.data.data.column(column)[i].values.to_numpy()
        return tokens

    def tokens_with_mask(self, i: int) -> NDArray[np.int32]:
        """Tokens of document i, each with 1 if it counts in the loss, else 0: (n, 2)."""
        values = self.data.data.column(LOSS_MASK)[i].values
        mask = values.to_numpy(zero_copy_only=False).astype(np.int32)
        return np.stack([self.tokens(i), mask], axis=1)

    def check_counted(self, name: str) -> None:
        """Raise RefusedError if there are masks, and no token of any document counts."""
        import pyarrow.compute

        if not self.has_masks:
            return
        values = pyarrow.compute.list_flatten(self.data.data.column(LOSS_MASK))
        if not pyarrow.compute.any(values).as_py():
            raise RefusedError(nothing_counts(name))


def nothing_counts(name: str) -> str:
    """Why data cannot be trained on in which no token counts."""
    return (
        f"no chat of {name} has an assistant turn, on which alone --assistant-only-loss trains; "
        "give other chats, or leave it out"
    )


# Some rows of a source -> the columns of each, without its digest
EncodeRows = Callable[[list[tuple[str, ...]]], list[dict[str, Any]]]


def tokenize(sources: Sequence[Source], encoders: Encoders) -> Documents:
    """Tokenize and cache the documents of sources.

    Raises RefusedError and CorpusError, also if there are loss masks and no token counts.
    """
    parts = []
    for source in sources:
        encoder = encoders.of(source)
        columns = ["tokens", LOSS_MASK] if encoder.masks else ["tokens"]
        encode = partial(encode_rows, encoder)
        parts.append(tokenize_source(source, columns, encoder.identify(), encode))
    documents = join(parts)
    documents.check_counted(listing(source.spec for source in sources))
    return documents


def encode_rows(encoder: Encoder, rows: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """The tokens of documents, and where the encoder makes masks their loss masks."""
    encoded = encoder.encode([row[0] for row in rows])
    if encoder.masks:
        return [{"tokens": one.tokens, LOSS_MASK: one.loss_mask} for one in encoded]
    return [{"tokens": one.tokens} for one in encoded]


def tokenize_source(
    source: Source, columns: Sequence[str], identity: str, encode: EncodeRows
) -> Documents:
    """Tokenize the rows of a source, or take the tokens from the cache of `datasets`.

    One process tokenizes; others that need the same tokens wait. Raises CorpusError.

    Args:
        columns: Those that `encode` returns: of tokens, and LOSS_MASK.
        identity: A hash of all that `encode` depends on.
    """
    import datasets

    types = {name: "bool" if name == LOSS_MASK else "int32" for name in columns}
    features = datasets.Features(
        {name: datasets.List(datasets.Value(kind)) for name, kind in types.items()}
        | {"digest": datasets.Value("binary")}
    )

    def rows() -> Iterator[dict[str, Any]]:
        documents = source.rows()
        while batch := list(islice(documents, _BATCH)):
            for row, values in zip(batch, encode(batch), strict=True):
                yield values | {"digest": row_digest(*row)}

    key = f"gqa tokens {source.identify()} {identity}"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:32]
    data = _stored(rows, features, fingerprint)
    return Documents(data, fingerprint, divisible=not source.chats)


def join(parts: Sequence[Documents]) -> Documents:
    """The documents of several sources, one after the other."""
    import datasets

    keys = " ".join(part.fingerprint for part in parts)
    return Documents(
        datasets.concatenate_datasets([part.data for part in parts]),
        hashlib.sha256(keys.encode()).hexdigest()[:32],
        divisible=all(part.divisible for part in parts),
    )


def _stored(rows: Callable[[], Iterator[dict[str, Any]]], features: Any, key: str) -> Any:
    """A `datasets.Dataset` of rows in the cache, where it may be already.

    Raises CorpusError and CacheError.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError

    directory = datasets_cache()
    with cache_errors():
        try:
            with quiet("datasets"):
                return datasets.Dataset.from_generator(rows, features, fingerprint=key)
        except DatasetGenerationError as error:  # wraps the error of the source, or of writing
            reason = error.__cause__ or error
            raise reason from reason.__cause__
        except RefusedError:
            raise
        except (OSError, ValueError) as error:
            if local_cause(error):
                raise
            place = directory / "generator" / f"default-fingerprint={key}"
            raise CorpusError(
                f"stored tokens cannot be read: {explain(error)}; delete {place}"
            ) from error


def first_token(config: Any, name: str) -> int:
    """The first token of a sequence: an encoder-decoder's decoder start token, else BOS, else EOS.

    Raises RefusedError if there is none.
    """
    start = getattr(config, "decoder_start_token_id", None) if config.is_encoder_decoder else None
    config = config.get_text_config(decoder=True)
    for token in (start, *(getattr(config, key, None) for key in ("bos_token_id", "eos_token_id"))):
        if isinstance(token, list):
            token = token[0] if token else None
        if isinstance(token, int) and 0 <= token < config.vocab_size:
            return token
    raise RefusedError(
        f"{name} has neither BOS nor EOS to start a sample from; give text instead of self"
    )


def check_ids(largest: int, vocabulary: int, name: str) -> None:
    """Raise RefusedError if token ids exceed the embedding of the model `name`."""
    if largest >= vocabulary:
        raise RefusedError(
            f"the tokenizer of {name} gives token {largest}, its embedding has {vocabulary}; they "
            "do not belong together"
        )


def permutation(digests: NDArray[np.uint8], seed: int, epoch: int = 0) -> Ints:
    """(D,) order of documents with these text digests (D, 32).

    The key is SHA-256(digest, seed, epoch, number of earlier copies of the text), which spreads
    copies out.
    """
    import pandas

    raw = digests.tobytes()
    copies = (
        pandas.DataFrame(np.frombuffer(raw, np.uint64).reshape(-1, 4))
        .groupby([0, 1, 2, 3])
        .cumcount()
    )
    salts = (f"{seed}:{epoch}:{copy}".encode() for copy in copies)
    keys = [
        hashlib.sha256(raw[32 * i : 32 * i + 32] + salt).digest()[:8]
        for i, salt in enumerate(salts)
    ]
    return np.argsort(np.frombuffer(b"".join(keys), ">u8"), kind="stable")


@dataclass(frozen=True)
class Heldout:
    """Text that training never reads, in any source and epoch: documents with a digest in `limits`
    from that number of tokens on.
    """

    limits: Mapping[bytes, int] = field(default_factory=dict)

    def limit(self, digest: bytes, length: int) -> int:
        """Tokens to train on, from the start of a document of this digest and length."""
        return min(self.limits.get(digest, length), length)

    def lengths(self, documents: Documents) -> Ints:
        """(D,) tokens of each document to train on."""
        pairs = zip(documents.digests, documents.lengths.tolist(), strict=True)
        return np.array(
            [self.limit(digest.tobytes(), length) for digest, length in pairs], np.int64
        )


def hold_back(documents: Documents, tokens: int) -> dict[bytes, int]:
    """The `limits` of a `Heldout` that hold back so many tokens: whole documents in the order of
    their digests, and the end of the last one, or the whole of it if it cannot be divided.
    """
    limits: dict[bytes, int] = {}
    hashes = np.ascontiguousarray(documents.digests[:, :8]).view(">u8").ravel()
    for i in np.argsort(hashes, kind="stable"):
        if tokens <= 0:
            break
        digest = documents.digests[i].tobytes()
        length = int(documents.lengths[i])
        if digest not in limits:
            limits[digest] = max(length - tokens, 0) if documents.divisible else 0
            tokens -= length - limits[digest]
    return limits


def reading_order(documents: Documents, lengths: Ints, tokens: int, seed: int = 0) -> Ints:
    """(N,) document numbers in training order, enough for so many tokens.

    `lengths`: (D,) tokens of each document to train on. Exhausted documents start again in another
    order; more tokens only append documents.
    """
    numbers = np.flatnonzero(lengths)
    epochs = range(-(-tokens // int(lengths.sum())))
    order = np.concatenate(
        [numbers[permutation(documents.digests[numbers], seed, epoch)] for epoch in epochs]
    )
    return order[: int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1]
