"""Pairs of a source and a target, which encoder-decoders read and write: two columns of a data set, or plain text of
which spans are left out as such models were trained on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import CorpusError, RefusedError
from gqa.corpus.document import Document
from gqa.corpus.sources import Source, text_digest
from gqa.corpus.tokens import Encoder, Ints, TokenisedText, cached_rows, first_token

Pair = tuple[list[int], list[int]]  # tokens of a source, and of its target: what the model is to predict

# As T5 was trained (arXiv 1910.10683, section 3.3.4).
NOISE, SPAN = 0.15, 3.0  # of all tokens, and tokens of a span of it on average
_SENTINELS = 100  # that T5 has
_BATCH = 64  # pairs tokenised at a time


def read_pairs(source: Source, targets: Source) -> Iterator[tuple[Document, str]]:
    """The rows of one data set that have both a source and a target: two columns of it, each as a `Source`.

    Raises CorpusError where no row has both, and where the two columns are the same text.
    """
    waiting: tuple[dict[str, Document], dict[str, Document]] = {}, {}  # the first column's, the second's
    found = differ = False
    for row in zip_longest(source.documents(), targets.documents()):
        for side, one in enumerate(row):
            if one is None:
                continue
            if (other := waiting[1 - side].pop(one.name, None)) is None:
                waiting[side][one.name] = one
                continue
            first, second = (other, one) if side else (one, other)
            found, differ = True, differ or first.text != second.text
            yield first, second.text
    if not found:
        raise CorpusError(f"no row of {source.spec} has both a source and a target; name two columns that belong")
    if not differ:
        raise CorpusError(f"--field and --target-field of {source.spec} are the same text; name two columns")


def pair_digest(source: str, target: str) -> bytes:
    """By which a pair is put in order and held out, as a document is by its text's."""
    return text_digest(f"{source}\0{target}")


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
class PairTable:
    """Tokenised pairs, memory-mapped: Arrow's lists of int32 of sources and of targets, nothing before or after them.

    `numbers`: a text of one token for each pair, which is its number here. So pairs are put in order, held out and
    counted as documents of text are, each as one token.
    """

    sources: Any
    targets: Any
    numbers: TokenisedText

    @cached_property
    def lengths(self) -> tuple[Ints, Ints]:
        """(D,) tokens of each source and of each target."""
        import pyarrow.compute  # type: ignore[import-untyped]

        one, other = (
            pyarrow.compute.list_value_length(side).to_numpy().astype(np.int64) for side in (self.sources, self.targets)
        )
        return one, other

    def pair(self, number: int) -> tuple[Ints, Ints]:
        return self.sources[number].values.to_numpy(), self.targets[number].values.to_numpy()


def tokenise_pairs(columns: Sequence[tuple[Source, Source]], encoder: PairEncoder) -> PairTable:
    """The pairs of data sets of which a column of sources and one of targets is given, one data set after the other, as
    `tokenise` has text. Raises CorpusError.
    """
    import pyarrow

    def rows(source: Source, targets: Source) -> Iterator[dict[str, Any]]:
        found = read_pairs(source, targets)
        while batch := list(islice(found, _BATCH)):
            sides = [one.text for one, _ in batch], [answer for _, answer in batch]
            made = encoder.encode(sides[0]), encoder.encode(sides[1], target=True)
            for one, other, source_ids, target_ids in zip(*sides, *made, strict=True):
                yield {"source": source_ids, "target": target_ids, "digest": pair_digest(one, other)}

    found = []
    for source, targets in columns:
        key = f"gqa pairs {source.identify()} {targets.identify()} {encoder.identify()}"
        found.append(cached_rows(key, partial(rows, source, targets), "source", "target"))
    tables, digests, fingerprints = zip(*found, strict=True)
    sizes = tuple(map(len, digests))
    whole = pyarrow.concat_tables(tables)
    told = hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()[:32]
    return PairTable(whole["source"], whole["target"], numbered(np.concatenate(digests), told, sizes))


def numbered(digests: NDArray[np.uint8], fingerprint: str, sizes: tuple[int, ...] = ()) -> TokenisedText:
    """A text of one token for each of what has these digests, D of 32 bytes: its number."""
    import pyarrow

    digests = digests.reshape(-1, 32)
    each = np.arange(len(digests) + 1, dtype=np.int32)
    tokens = pyarrow.chunked_array([pyarrow.ListArray.from_arrays(each, each[:-1])])
    return TokenisedText(tokens, digests, sizes or (len(digests),), fingerprint)


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
