"""Documents -> cached tokens, and tokens -> blocks of one length.

A document gets BOS before it (if the tokenizer adds one) and EOS after it. Text that spells a
special token stays text. Consecutive documents are cut into blocks without padding, so a block
depends on the list of documents and its number, not on batches or ranks.

Documents are ordered by a hash of their text and the seed: the same on every machine, for every
number of ranks, and for any layout of files. Training reads a prefix, so a larger alpha first reads
the data of a smaller one. Held-out documents are identified by a hash of their text, so no seed,
alpha or other source brings them back.

Some blocks get repeated passages, which train recall from the context: the second copy of a passage
can be predicted from the first, whatever it says. Self-generated text hardly exercises retrieval
heads; a model that is calibrated or trained on plain text alone has a low perplexity but loses
recall.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.hub import local_cause, quiet
from gqa.core.errors import CorpusError, RefusedError, explain
from gqa.corpus.cache import cache_errors, datasets_cache
from gqa.corpus.sources import Source, row_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ints = NDArray[np.int64]
Block = dict[str, Ints]

_BATCH = 64  # documents tokenized at a time
SHORTEST = 16  # tokens of a repeated passage: shorter ones are predicted without the first copy
# Shares of the kinds of blocks; docs/results.md compares others.
MIX = {"plain": 0.5, "tiled": 0.25, "random": 0.25}
# Some tools begin a text with BOS even if the tokenizer does not: then one of so many blocks begins
# with it.
START_EVERY = 4
EARLIER_BLOCKS = 7  # earlier blocks from which a random block draws tokens too
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Documents:
    """D tokenized documents, or pairs, of one or several sources.

    `data`: a memory-mapped `datasets.Dataset` of token ids ("tokens", or "source" and "target") and
    the "digest" of each text. `fingerprint`: a hash of texts and tokenizer.
    """

    data: Any
    fingerprint: str

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


def tokenize(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase) -> Documents:
    """Tokenize and cache the documents of sources. Raises CorpusError."""
    encoder = Encoder(tokenizer)
    return tokenize_columns(sources, encoder.identify(), {"tokens": encoder.tokens})


def tokenize_columns(
    sources: Sequence[Source],
    identity: str,
    encoders: Mapping[str, Callable[[list[str]], list[list[int]]]],
) -> Documents:
    """Tokenize each column of the sources' rows by its encoder; `identity`: a hash of all that
    encoders depend on.

    The cache of `datasets` keeps the tokens of each source. One process tokenizes; others that need
    the same tokens wait. Raises CorpusError.
    """
    import datasets

    columns = {name: datasets.List(datasets.Value("int32")) for name in encoders}
    features = datasets.Features(columns | {"digest": datasets.Value("binary")})

    def rows(source: Source) -> Iterator[dict[str, Any]]:
        texts = source.rows()
        while batch := list(islice(texts, _BATCH)):
            texts_of_columns = map(list, zip(*batch, strict=True))
            tokens = [
                encode(column)
                for encode, column in zip(encoders.values(), texts_of_columns, strict=True)
            ]
            for row, *parts in zip(batch, *tokens, strict=True):
                yield dict(zip(encoders, parts, strict=True)) | {"digest": row_digest(*row)}

    parts, keys = [], []
    for source in sources:
        key = f"gqa tokens {source.identify()} {identity}"
        keys.append(hashlib.sha256(key.encode()).hexdigest()[:32])
        parts.append(_stored(partial(rows, source), features, keys[-1]))
    fingerprint = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:32]
    return Documents(datasets.concatenate_datasets(parts), fingerprint)


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


class Encoder:
    """Encodes documents. Raises CorpusError if the tokenizer has no EOS token.

    BOS is added if the tokenizer adds it by default, as for Llama and Gemma, but not GPT-2 and
    Qwen.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise CorpusError(
                "the tokenizer has no EOS token, which is put between documents; set its eos_token"
            )
        self.eos: int = tokenizer.eos_token_id
        bos: int | None = tokenizer.bos_token_id
        self.start = self.eos if bos is None else bos
        self.bos = bos if tokenizer("a")["input_ids"][:1] == [bos] else None

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Tokenize documents, all at once, including BOS and EOS."""
        before = [] if self.bos is None else [self.bos]
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warnings about texts longer than the model's context
        )["input_ids"]
        return [[*before, *tokens, self.eos] for tokens in encoded]

    def identify(self) -> str:
        """A hash of everything that determines the tokens, without paths and padding settings."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            content.pop("truncation", None)
            content.pop("padding", None)
        else:
            flags = {
                name: value
                for name, value in self.tokenizer.init_kwargs.items()
                if isinstance(value, bool)
            }
            settings = sorted(
                (name, flags[name]) for name in flags.keys() - {"is_local", "local_files_only"}
            )
            # The files also have merges or scores, get_vocab() does not
            with TemporaryDirectory() as directory:
                self.tokenizer.save_vocabulary(directory)
                files = [file.read_bytes().hex() for file in sorted(Path(directory).iterdir())]
            content = [
                type(self.tokenizer).__name__,
                sorted(self.tokenizer.get_vocab().items()),
                settings,
                files,
            ]
        return hashlib.sha256(json.dumps([content, self.bos, self.eos]).encode()).hexdigest()


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


def text_of_first_tokens(text: str, tokenizer: Any, count: int, **settings: Any) -> str:
    """The beginning of a text that its first `count` tokens cover, in the text's own characters;
    `settings`: of the tokenizer's call.

    Decoded tokens would not do: a tokenizer without a decoder puts spaces between them, others
    change white space. Tokenizers in Python know no positions: then it is the same share of the
    characters.
    """
    if not getattr(tokenizer, "is_fast", False):
        total = len(tokenizer(text, verbose=False, **settings)["input_ids"])
        return text[: round(len(text) * count / total)]
    offsets = tokenizer(text, verbose=False, return_offsets_mapping=True, **settings)[
        "offset_mapping"
    ]
    # Special tokens have the offsets (0, 0), also in the middle.
    return text[: max((end for _, end in offsets[:count]), default=0)]


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
    their digests, and the end of the last one.
    """
    limits: dict[bytes, int] = {}
    hashes = np.ascontiguousarray(documents.digests[:, :8]).view(">u8").ravel()
    for i in np.argsort(hashes, kind="stable"):
        if tokens <= 0:
            break
        digest, length = documents.digests[i].tobytes(), int(documents.lengths[i])
        if digest not in limits:
            limits[digest] = max(length - tokens, 0)
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


class Blocks:
    """Documents in a given order, cut into blocks: a map-style data set for a DataLoader without
    shuffling.

    `order`: (N,) document numbers, repeated in several epochs. `lengths`: (D,) tokens to read from
    the start of each document, by default all. Block b is tokens b * size to (b + 1) * size of the
    stream: {"input_ids": (size,) int64}. `n_blocks`: by default all.
    """

    def __init__(
        self,
        text: Documents,
        order: Ints,
        size: int,
        n_blocks: int | None = None,
        lengths: Ints | None = None,
    ) -> None:
        self.text, self.order, self.size = text, order, size
        self.lengths = text.lengths if lengths is None else lengths
        self._ends = np.cumsum(self.lengths[order])
        tokens = int(self._ends[-1:].sum())
        self.n_blocks = tokens // size if n_blocks is None else n_blocks

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError if it is out of range."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(f"block {index} of {self.n_blocks}")
        begin = int(index) * self.size
        first = int(np.searchsorted(self._ends, begin, "right"))
        last = int(np.searchsorted(self._ends, begin + self.size, "left"))
        parts = [self.text.tokens(int(i))[: self.lengths[i]] for i in self.order[first : last + 1]]
        # A negative start counts from the end
        parts[0] = parts[0][begin - int(self._ends[first]) :]
        return {"input_ids": np.concatenate(parts)[: self.size].astype(np.int64)}


def pack(documents: Iterable[Any], size: int, rest: Any = ()) -> Iterator[tuple[Block, Ints]]:
    """Pack the tokens of documents, after `rest` of an earlier document, into blocks; yield each
    block with the remaining tokens of its last document.
    """
    rest = np.asarray(rest, np.int64)
    for tokens in chain([()], documents):
        rest = np.concatenate([rest, np.asarray(tokens, np.int64)])
        for begin in range(0, len(rest) - size + 1, size):
            yield {"input_ids": rest[begin : begin + size]}, rest[begin + size :]
        rest = rest[len(rest) // size * size :]


def repeat_start(block: Ints, random: np.random.Generator) -> Ints:
    """Repeat the first `lag` tokens of a block (T,) to its end, `lag` uniform in T/8 ... T/2."""
    length = len(block)
    lag = random.integers(max(length // 8, 1), max(length // 2, 1), endpoint=True)
    return np.resize(block[:lag], length)


def is_plain(numbers: Any) -> Any:
    """Whether blocks with these numbers (an array, or one number) stay as they are; the others
    repeat passages.

    Multiples of the golden ratio are spread evenly, so each kind has its share in any run of
    blocks.
    """
    return numbers * _GOLDEN % 1.0 < MIX["plain"]


def with_repeats(
    blocks: Callable[[int], Ints], index: int, seed: int, start: int | None, *, first: int = 0
) -> Ints:
    """Block `index` (T,), plain or with repeated passages, in the shares of `MIX`.

    It depends on the index, the seed and the `EARLIER_BLOCKS` earlier blocks, not on the number of
    blocks.

    Args:
        blocks: Index -> plain block.
        start: The token that stays at the beginning of blocks that begin with it.
        first: The first block that exists.
    """
    plain = blocks(index)
    lead = int(plain[0] == start)
    head, block = plain[:lead], plain[lead:]
    # As `is_plain`.
    kind = list(MIX)[
        int(np.searchsorted(np.cumsum(list(MIX.values())), index * _GOLDEN % 1.0, side="right"))
    ]
    if kind == "plain" or len(block) < 2 * SHORTEST:
        return plain
    random = np.random.default_rng([seed, index])
    if kind == "random":
        before = [
            blocks(number)[lead:] for number in range(max(first, index - EARLIER_BLOCKS), index)
        ]
        block = random.choice(np.concatenate([*before, block]), len(block))
    return np.concatenate([head, repeat_start(block, random)])
