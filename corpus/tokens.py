"""Documents -> tokens, which stay in the cache of `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.hub import local_cause, quiet
from gqa.core.errors import RefusedError, TextError, explain, listing
from gqa.corpus.cache import cache_errors, datasets_cache
from gqa.corpus.encoders import Encoder, Encoders
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source

Ints = NDArray[np.int64]
Block = dict[str, Ints]

LOSS_MASK = "loss_mask"  # the column, where not all tokens count in the loss
_BATCH = 64  # documents tokenized at a time


@dataclass(frozen=True, eq=False)
class Documents:
    """D tokenized documents, or pairs, of one or several sources.

    Attributes:
        data: A memory-mapped `datasets.Dataset` of token ids ("tokens", or "source" and "target"),
            of loss masks where not all tokens count ("loss_mask"), and the "digest" of each text.
        fingerprint: A hash of texts and tokenizer.
        divisible: (D,) whether a part of each document is a document too (`is_divisible`).
    """

    data: Any
    fingerprint: str
    divisible: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.data)

    @cached_property
    def digests(self) -> NDArray[np.uint8]:
        """(D, 32) SHA-256 of each text."""
        digests = self.data.data.column("digest").to_pylist()
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)

    @cached_property
    def lengths(self) -> Ints:
        """Sizes (D,) of documents: tokens, or 1 for a pair."""
        if "tokens" in self.data.column_names:
            return self.token_counts("tokens")
        return np.ones(len(self), np.int64)

    @property
    def has_masks(self) -> bool:
        """Whether not all tokens count in the loss."""
        return LOSS_MASK in self.data.column_names

    def token_counts(self, column: str) -> Ints:
        """Tokens (D,) of each document in a column."""
        import pyarrow.compute  # type: ignore[import-untyped]

        counts: Ints = (
            pyarrow.compute.list_value_length(self.data.data.column(column))
            .to_numpy()
            .astype(np.int64)
        )
        return counts

    def tokens(self, i: int, column: str = "tokens") -> NDArray[np.int32]:
        """Tokens (n,) of document i, or of one side of pair i, as its encoder made them."""
        tokens: NDArray[np.int32] = self.data.data.column(column)[i].values.to_numpy()
        return tokens

    def tokens_with_mask(self, i: int) -> NDArray[np.int32]:
        """Tokens of document i, each with 1 if it counts in the loss, else 0: (n, 2)."""
        values = self.data.data.column(LOSS_MASK)[i].values
        mask = values.to_numpy(zero_copy_only=False).astype(np.int32)
        return np.stack([self.tokens(i), mask], axis=1)

    @cached_property
    def loss_tokens(self) -> Ints:
        """(D,) tokens of each document that count in the loss."""
        if not self.has_masks:
            return self.lengths

        parts = [np.zeros(0, np.int64)]
        for masks in self.data.data.column(LOSS_MASK).chunks:
            is_counted = masks.flatten().to_numpy(zero_copy_only=False)
            # At index i: how many of the first i tokens count
            counted_before = np.concatenate([[0], np.cumsum(is_counted)])
            ends = np.cumsum(masks.value_lengths().to_numpy())
            begins = np.concatenate([[0], ends[:-1]])
            parts.append(counted_before[ends] - counted_before[begins])
        return np.concatenate(parts)

    def check_loss_tokens(self, name: str) -> None:
        """Raise RefusedError if there are masks, and no token of any document counts."""
        if self.has_masks and not self.loss_tokens.any():
            raise RefusedError(nothing_counts(name))


def nothing_counts(name: str) -> str:
    """Why a model cannot be trained on data in which no token counts in the loss."""
    return (
        f"no chat of {name} has an assistant turn, on which alone --assistant-only-loss trains; "
        "pass other chats, or remove it"
    )


# Some rows of a source -> the columns of each row, without its digest
EncodeRows = Callable[[list[tuple[str, ...]]], list[dict[str, Any]]]


def tokenize(sources: Sequence[Source], encoders: Encoders) -> Documents:
    """Tokenize and cache the documents of sources.

    Raises RefusedError and TextError, also if there are loss masks and no token counts.
    """
    parts = []
    for source in sources:
        encoder = encoders.of(source)
        columns = ["tokens", LOSS_MASK] if encoder.masks else ["tokens"]
        encode = partial(encode_rows, encoder)
        parts.append(tokenize_source(source, columns, encoder.identify(), encode))
    documents = join(parts)
    documents.check_loss_tokens(listing(source.spec for source in sources))
    return documents


def encode_rows(encoder: Encoder, rows: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """The tokens of each document, and its loss mask if the encoder makes masks."""
    encoded = encoder.encode([row[0] for row in rows])
    if encoder.masks:
        return [{"tokens": document.tokens, LOSS_MASK: document.loss_mask} for document in encoded]
    return [{"tokens": document.tokens} for document in encoded]


def tokenize_source(
    source: Source, columns: Sequence[str], identity: str, encode: EncodeRows
) -> Documents:
    """Tokenize the rows of a source, or take the tokens from the cache of `datasets`.

    One process tokenizes; others that need the same tokens wait. Raises TextError.

    Args:
        columns: Those that `encode` returns: of tokens, and LOSS_MASK.
        identity: A hash of all that `encode` depends on.
    """
    import datasets

    types = dict[str, Any]()
    for name in columns:
        kind = "bool" if name == LOSS_MASK else "int32"
        types[name] = datasets.List(datasets.Value(kind))
    features = datasets.Features(types | {"digest": datasets.Value("binary")})

    def rows() -> Iterator[dict[str, Any]]:
        documents = source.rows()
        while batch := list(islice(documents, _BATCH)):
            for row, values in zip(batch, encode(batch), strict=True):
                yield values | {"digest": row_digest(*row)}

    key = f"gqa tokens {source.identify()} {identity}"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:32]
    data = _from_cache(rows, features, fingerprint)
    is_text = not source.has_chats and len(source.columns) == 1
    return Documents(data, fingerprint, divisible=np.full(len(data), is_text))


def join(parts: Sequence[Documents]) -> Documents:
    """The documents of several sources, one after the other."""
    import datasets

    keys = " ".join(part.fingerprint for part in parts)
    return Documents(
        datasets.concatenate_datasets([part.data for part in parts]),
        hashlib.sha256(keys.encode()).hexdigest()[:32],
        divisible=np.concatenate([part.divisible for part in parts]),
    )


def _from_cache(rows: Callable[[], Iterator[dict[str, Any]]], features: Any, key: str) -> Any:
    """The `datasets.Dataset` of this key in the cache; if there is none, `rows` are stored there.

    Args:
        rows: Makes the rows, if they are needed.
        features: The types of their columns.
        key: A hash of all that the rows depend on.

    Raises TextError and CacheError.
    """
    import datasets
    from datasets.exceptions import DatasetGenerationError

    directory = datasets_cache()
    with cache_errors():
        try:
            with quiet("datasets"):
                return datasets.Dataset.from_generator(rows, features, fingerprint=key)
        except DatasetGenerationError as error:
            # It wraps the error of the source, or of writing
            reason = error.__cause__ or error
            raise reason from reason.__cause__
        except RefusedError:
            raise
        except (OSError, ValueError) as error:
            if local_cause(error):
                raise
            place = directory / "generator" / f"default-fingerprint={key}"
            raise TextError(
                f"stored tokens cannot be read: {explain(error)}; delete {place}"
            ) from error


def first_token(config: Any, name: str, instead: str = "") -> int:
    """The first token of a sequence: an encoder-decoder's decoder start token, else BOS, else EOS.

    Raises RefusedError if there is none; `instead`: further advice.
    """
    candidates = list[Any]()
    if config.is_encoder_decoder:
        candidates.append(getattr(config, "decoder_start_token_id", None))
    text_config = config.get_text_config(decoder=True)
    candidates += [getattr(text_config, key, None) for key in ("bos_token_id", "eos_token_id")]

    for token in candidates:
        if isinstance(token, list):  # a model may have several EOS tokens
            token = next(iter(token), None)
        if isinstance(token, int) and 0 <= token < text_config.vocab_size:
            return token
    raise RefusedError(
        f"{name} has neither a BOS nor an EOS token, so no text can be started; set bos_token_id "
        f"in its config.json{instead}"
    )


def check_ids(largest: int, vocabulary: int, name: str) -> None:
    """Raise RefusedError if token ids exceed the embedding of the model `name`."""
    if largest >= vocabulary:
        raise RefusedError(
            f"the tokenizer gives token {largest}, but the embedding of {name} has {vocabulary} "
            "rows: they do not belong together; use the tokenizer of that model"
        )
