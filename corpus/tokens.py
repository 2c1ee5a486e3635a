"""Documents -> tokens, once, and tokens -> blocks of one length.

A document's tokens are its own with BOS before (where the tokenizer adds one) and EOS after, and nothing else: text
that happens to spell a special token is text. The documents of a list, one after the other, are cut into blocks
wherever that falls. So no token is padding, and a block depends on the list and its own number alone: not on batches
or ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import CorpusError, RefusedError
from gqa.checkpoint.hub_errors import quiet
from gqa.corpus.document import Document
from gqa.corpus.sources import Source, text_digest

if TYPE_CHECKING:
    import pyarrow  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerBase

Ints = NDArray[np.int64]
Block = dict[str, Ints]

_LAYOUT = 1  # of what is cached
_BATCH = 64  # documents tokenised at a time


@dataclass(frozen=True)
class TokenisedText:
    """The documents of a source (or of several, one after the other) as tokens, memory-mapped.

    `tokens`: Arrow's lists of int32, one for each of D documents. `digests`: (D, 32) uint8, SHA-256 of each document's
    text. `sizes`: documents of each source. `spans`: (D,) where in its tokens each document begins and ends, if not all
    of it counts.
    """

    tokens: pyarrow.ChunkedArray
    digests: NDArray[np.uint8]
    sizes: tuple[int, ...]
    fingerprint: str
    spans: tuple[Ints, Ints] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> Ints:
        """(D,) tokens of each document."""
        if self.spans is not None:
            return self.spans[1] - self.spans[0]
        import pyarrow.compute  # type: ignore[import-untyped]

        lengths: Ints = pyarrow.compute.list_value_length(self.tokens).to_numpy().astype(np.int64)
        return lengths

    def document(self, i: int) -> NDArray[np.int32]:
        """(n,) tokens of document i, BOS and EOS among them."""
        tokens: NDArray[np.int32] = self.tokens[i].values.to_numpy()
        return tokens if self.spans is None else tokens[self.spans[0][i] : self.spans[1][i]]

    def set_aside(self, tokens: int) -> tuple[TokenisedText, TokenisedText]:
        """The text without so many of its tokens, and these: of each source its share, whole documents in the order of
        their hash, and of the last one its end. What has become empty still counts as a document.
        """
        taken, lengths = np.zeros(len(self), np.int64), self.lengths
        for first, end in pairwise(np.cumsum([0, *self.sizes])):
            hashes = np.ascontiguousarray(self.digests[first:end, :8]).view(">u8").ravel()
            order = first + np.argsort(hashes, kind="stable")
            before = np.cumsum(lengths[order]) - lengths[order]
            wanted = -(-tokens * int(lengths[order].sum()) // int(lengths.sum()))
            taken[order] = np.clip(wanted - before, 0, lengths[order])
        cut = lengths - taken
        return replace(self, spans=(np.zeros_like(cut), cut)), replace(self, spans=(cut, lengths))


def tokenise(source: Source, tokenizer: PreTrainedTokenizerBase) -> TokenisedText:
    """The tokens of a source, from the cache where its content was tokenised before by the same tokenizer.

    The cache is that of `datasets` (HF_DATASETS_CACHE); processes that ask for the same at the same time wait for one
    of them. Raises CorpusError.
    """
    encoder = Encoder(tokenizer)
    key = f"gqa tokens {_LAYOUT} {source.identify()} {encoder.identify()}"

    def rows() -> Iterator[dict[str, Any]]:
        for found, tokens in encoder.encode(source.documents()):
            yield {"tokens": tokens, "digest": text_digest(found.text)}

    table, digests, fingerprint = cached_rows(key, rows, "tokens")
    return TokenisedText(table.column("tokens"), digests, (len(digests),), fingerprint)


def cached_rows(
    key: str, rows: Callable[[], Iterator[dict[str, Any]]], *columns: str
) -> tuple[Any, NDArray[np.uint8], str]:
    """An Arrow table of `columns` of token ids, the "digest" of each row (D, 32), and what the table is known by: a
    hash of `key`, which says all that decides the rows. They are made where they are not in the cache of `datasets`.
    """
    import datasets

    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:32]
    ids = datasets.List(datasets.Value("int32"))
    features = datasets.Features({name: ids for name in columns} | {"digest": datasets.Value("binary")})
    try:
        with quiet("datasets"):
            table = datasets.Dataset.from_generator(rows, features=features, fingerprint=fingerprint).data.table
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ or error) from None
    digests = np.frombuffer(b"".join(table.column("digest").to_pylist()), np.uint8).reshape(-1, 32)
    return table, digests, fingerprint


def concatenate(texts: Sequence[TokenisedText]) -> TokenisedText:
    """Several tokenised sources as one; `sizes` remembers how many documents are of each."""
    import pyarrow

    if len(texts) == 1:
        return texts[0]
    return TokenisedText(
        pyarrow.chunked_array([chunk for text in texts for chunk in text.tokens.chunks]),
        np.concatenate([text.digests for text in texts]),
        tuple(size for text in texts for size in text.sizes),
        hashlib.sha256(" ".join(text.fingerprint for text in texts).encode()).hexdigest()[:32],
    )


class Encoder:
    """What a tokenizer makes of documents. Raises CorpusError where it has no token to put between them.

    BOS is put before each where the tokenizer does that by itself: of Llama and Gemma, not of GPT-2 and Qwen.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise CorpusError("the tokenizer has no EOS token, which is put between documents; set its eos_token")
        self.eos: int = tokenizer.eos_token_id
        self.bos: int | None = tokenizer.bos_token_id if adds_bos(tokenizer) else None

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[Document, list[int]]]:
        """Each document with its tokens, BOS and EOS among them."""
        before, documents = [] if self.bos is None else [self.bos], iter(documents)
        while batch := list(islice(documents, _BATCH)):
            encoded = self.tokenizer(
                [found.text for found in batch],
                add_special_tokens=False,
                split_special_tokens=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # it warns of texts longer than the model's context
            )["input_ids"]
            for found, tokens in zip(batch, encoded, strict=True):
                yield found, [*before, *tokens, self.eos]

    def identify(self) -> str:
        """A hash of all that decides the tokens, and of nothing else: not of paths, not of paddings set before."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            content.pop("truncation", None)
            content.pop("padding", None)
        else:
            content = [type(self.tokenizer).__name__, repr(self.tokenizer), sorted(self.tokenizer.get_vocab().items())]
        return hashlib.sha256(json.dumps([content, self.bos, self.eos]).encode()).hexdigest()


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts BOS before a text when nobody tells it otherwise."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def first_token(config: Any, name: str) -> int:
    """What a sequence starts from: BOS, or EOS where there is none; a decoder beside an encoder may have a token of its
    own. Raises RefusedError where there is none of these.
    """
    own = getattr(config, "decoder_start_token_id", None) if config.is_encoder_decoder else None
    config = config.get_text_config(decoder=True)
    for given in (own, *(getattr(config, key, None) for key in ("bos_token_id", "eos_token_id"))):
        if isinstance(given, list):
            given = given[0] if given else None
        if isinstance(given, int) and 0 <= given < config.vocab_size:
            return given
    raise RefusedError(f"{name} has neither BOS nor EOS to start a sample from; give text instead of self")


def check_ids(largest: int, vocabulary: int, name: str) -> None:
    """Raise RefusedError where a tokenizer gives ids that the model `name` has no embedding of."""
    if largest >= vocabulary:
        raise RefusedError(
            f"the tokenizer of {name} gives token {largest}, its embedding has {vocabulary}; they do not belong "
            "together"
        )


class Blocks:
    """The stream of documents in an order, cut into blocks. A map-style data set for a DataLoader without shuffling.

    `order`: (N,) document numbers, repeated where there are several epochs. Block b is tokens b * size to
    (b + 1) * size of the stream: {"input_ids": (size,) int64} and, on request, "position_ids" and "document_ids"
    (size,): see `block_of`. There are `n_blocks`, by default all that fit.
    """

    def __init__(
        self, text: TokenisedText, order: Ints, size: int, n_blocks: int | None = None, boundaries: bool = False
    ) -> None:
        self.text, self.order, self.size, self.boundaries = text, order, size, boundaries
        self._ends = np.cumsum(text.lengths[order])
        tokens = int(self._ends[-1:].sum())
        self.n_blocks = tokens // size if n_blocks is None else n_blocks

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError outside."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(f"block {index} of {self.n_blocks}")
        begin = int(index) * self.size
        first = int(np.searchsorted(self._ends, begin, "right"))
        last = int(np.searchsorted(self._ends, begin + self.size, "left"))
        parts = [self.text.document(int(i)) for i in self.order[first : last + 1]]
        parts[0] = parts[0][begin - int(self._ends[first]) :]  # from the end: negative
        return block_of(parts, self.size, self.boundaries)


def block_of(parts: Sequence[NDArray[np.int32] | Sequence[int]], size: int, boundaries: bool) -> Block:
    """The first `size` tokens of consecutive (parts of) documents.

    With `boundaries` also "document_ids", which count them from 0, and "position_ids", which restart at 0 in each: what
    attention needs so that no document sees another one.
    """
    tokens = np.concatenate(parts)[:size].astype(np.int64)
    if not boundaries:
        return {"input_ids": tokens}
    lengths = [len(part) for part in parts]
    documents = np.repeat(np.arange(len(parts)), lengths)[:size]
    starts = np.cumsum([0, *lengths[:-1]])
    return {"input_ids": tokens, "document_ids": documents, "position_ids": np.arange(size) - starts[documents]}
