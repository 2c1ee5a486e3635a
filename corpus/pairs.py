"""Pairs of a source and a target, which encoder-decoders read and write: two columns of a data set, or plain text of
which spans are left out as such models were trained on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np

from gqa.checkpoint.errors import CorpusError, RefusedError
from gqa.corpus.sources import Source, row_digest
from gqa.corpus.tokens import LAYOUT, Block, Documents, Encoder, Ints, cached_rows, first_token, list_lengths

Pair = tuple[list[int], list[int]]  # tokens of a source, and of its target: what the model is to predict

# As T5 was trained (arXiv 1910.10683, section 3.3.4).
NOISE, SPAN = 0.15, 3.0  # of all tokens, and tokens of a span of it on average
_SENTINELS = 100  # that T5 has
_BATCH = 64  # pairs tokenised at a time


def read_pairs(source: Source) -> Iterator[tuple[str, str]]:
    """The rows of a data set that have both a source and a target. Raises CorpusError, after the last, where the two
    columns are the same text.
    """
    differ = False
    for one, other in source.rows():
        differ = differ or one != other
        yield one, other
    if not differ:
        raise CorpusError(f"--field and --target-field of {source.spec} are the same text; name two columns")


class PairEncoder:
    """Text -> pairs for the model of transformers' `config`, an encoder-decoder that reads text.

    start: what its decoder reads first; end: what ends a text; pad: what fills a row; marks: what stands for spans that
    are left out, T5's sentinels in their order or one mask token (BART), empty where the tokenizer has neither.
    Without a `tokenizer` there is no text. Raises RefusedError where the config names no first token.
    """

    def __init__(self, config: Any, tokenizer: Any, name: str) -> None:
        self.name, self._tokenizer = name, tokenizer
        self.start, self.pad = first_token(config, name), int(config.pad_token_id or 0)
        end = config.get_text_config(decoder=True).eos_token_id
        self.end = self.start if end is None else int(end[0] if isinstance(end, list) else end)
        self.marks = [] if tokenizer is None else _marks(tokenizer)
        nothing: tuple[list[int], list[int]] = [], [self.end]
        self._around = nothing, nothing
        if tokenizer is not None:
            before, after = _frame(tokenizer, "text_target")
            target = before[before[:1] == [self.start] :], after or [self.end]
            self._around = _frame(tokenizer, "text"), target

    def encode(self, texts: Sequence[str], target: bool = False) -> list[list[int]]:
        """The tokens of sources, or of targets, and nothing before or after them."""
        how = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        found: list[list[int]] = self._tokenizer(**{"text_target" if target else "text": list(texts)}, **how)[
            "input_ids"
        ]
        return found

    def identify(self) -> str:
        """A hash of all that decides what `encode` gives."""
        return Encoder(self._tokenizer).identify()

    def framed(self, source: Sequence[int], target: Sequence[int], length: int) -> Pair:
        """With what the tokenizer puts before and after them, each cut to `length` in all; of a target not `start`,
        which is what the decoder reads.
        """
        one, other = (
            [*before, *ids[: length - len(before) - len(after)], *after]
            for ids, (before, after) in zip((source, target), self._around, strict=True)
        )
        return one, other

    def cuts(self, source: Sequence[int], target: Sequence[int], length: int) -> bool:
        """Whether `framed` cuts one of them."""
        sides = zip((source, target), self._around, strict=True)
        return any(len(before) + len(ids) + len(after) > length for ids, (before, after) in sides)

    def check_marks(self) -> None:
        """Raise RefusedError where there are none."""
        if not self.marks:
            raise RefusedError(
                f"the tokenizer of {self.name} has neither sentinels nor a mask token, so plain text makes no pairs: "
                "give pairs with --field and --target-field"
            )

    def corrupt(self, ids: Ints, generator: np.random.Generator) -> Pair:
        """A pair of plain text (T,), neither side of more tokens. Raises RefusedError where there are no marks."""
        self.check_marks()
        most = len(ids) - max(len(before) + len(after) for before, after in self._around)
        return self.framed(*corrupted(ids[: max(most, 2)], self.marks, generator), len(ids))


@dataclass(frozen=True)
class PairTable(Documents):
    """Tokenised pairs, memory-mapped: Arrow's lists of int32 of sources and of targets, without special tokens."""

    sources: Any
    targets: Any

    @cached_property
    def tokens(self) -> Ints:
        """(2, D) tokens of each source and of each target."""
        return np.stack([list_lengths(self.sources), list_lengths(self.targets)])

    def pair(self, number: int) -> Pair:
        return self.sources[number].as_py(), self.targets[number].as_py()


def tokenise_pairs(sources: Sequence[Source], encoder: PairEncoder) -> PairTable:
    """The pairs of data sets, one after the other, kept as `tokenise` keeps text. Raises CorpusError."""
    import pyarrow  # type: ignore[import-untyped]

    def rows(source: Source) -> Iterator[dict[str, Any]]:
        pairs = read_pairs(source)
        while batch := list(islice(pairs, _BATCH)):
            texts, answers = zip(*batch, strict=True)
            ids = encoder.encode(texts), encoder.encode(answers, target=True)
            for pair, one, other in zip(batch, *ids, strict=True):
                yield {"source": one, "target": other, "digest": row_digest(*pair)}

    parts = []
    for source in sources:
        key = f"gqa pairs {LAYOUT} {source.identify()} {encoder.identify()}"
        parts.append(cached_rows(key, partial(rows, source), "source", "target"))
    tables, digests, fingerprints = zip(*parts, strict=True)
    whole = pyarrow.concat_tables([table.replace_schema_metadata() for table in tables])  # each has its own key
    fingerprint = hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()[:32]
    return PairTable(np.concatenate(digests), tuple(map(len, digests)), fingerprint, whole["source"], whole["target"])


def pair_block(pair: tuple[Sequence[int] | Ints, Sequence[int] | Ints]) -> Block:
    """What an encoder-decoder is given of a pair: `input_ids` and `attention_mask` (S,), `labels` (T,)."""
    source, target = (np.array(side, np.int64) for side in pair)
    return {"input_ids": source, "attention_mask": np.ones_like(source), "labels": target}


@dataclass(frozen=True)
class PairBlocks:
    """A block is a pair of a table, in the order of these numbers; each side has `size` tokens at most."""

    table: PairTable
    order: Ints
    encoder: PairEncoder
    size: int

    def __getitem__(self, index: int) -> Block:
        return pair_block(self.encoder.framed(*self.table.pair(int(self.order[index])), self.size))


def corrupted(ids: Ints, marks: Sequence[int], generator: np.random.Generator) -> Pair:
    """Tokens (T,) -> the source with a mark for each span of noise, and the target: the spans, each behind its mark;
    or, with a single mark for all, the whole text.
    """
    noise = min(max(round(NOISE * len(ids)), 1), len(ids) - 1)
    most = noise if len(marks) == 1 else min(noise, len(marks))
    spans = max(1, min(round(noise / SPAN), most, len(ids) - noise))

    def cut(total: int) -> list[int]:
        places = np.sort(generator.choice(total - 1, spans - 1, replace=False)) + 1
        return [int(size) for size in np.diff([0, *places, total])]

    source, target, at = list[int](), list[int](), 0
    for number, (kept, lost) in enumerate(zip(cut(len(ids) - noise), cut(noise), strict=True)):
        mark = marks[number % len(marks)]
        source += [*ids[at : at + kept].tolist(), mark]
        target += [mark, *ids[at + kept : at + kept + lost].tolist()]
        at += kept + lost
    return source, ids.tolist() if len(marks) == 1 else target


def _marks(tokenizer: Any) -> list[int]:
    known = tokenizer.get_vocab()
    found = [known[name] for name in (f"<extra_id_{i}>" for i in range(_SENTINELS)) if name in known]
    return found or ([] if tokenizer.mask_token_id is None else [tokenizer.mask_token_id])


def _frame(tokenizer: Any, side: str) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    bare, whole = (tokenizer(**{side: "a"}, add_special_tokens=added)["input_ids"] for added in (False, True))
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:at], whole[at + len(bare) :]
