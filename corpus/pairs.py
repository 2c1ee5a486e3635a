"""Pairs of a source and a target for encoder-decoders: two columns of a data set, or plain text
with spans left out (span corruption).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gqa.core.errors import RefusedError
from gqa.corpus.encoders import TextEncoder
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Block, Documents, Ints, first_token, join, tokenize_source

TokenPair = tuple[list[int], list[int]]  # tokens of a source, and of the target to predict

# As T5 was trained (arXiv 1910.10683, section 3.3.4).
# share of the tokens left out, and mean tokens of a span
NOISE = 0.15
SPAN = 3.0
_SENTINELS = 100  # of T5


class PairEncoder:
    """Text -> pairs for the encoder-decoder of a transformers `config`.

    start: the decoder's first token; end: the last token of a text; pad: the padding token; marks:
    tokens in place of spans that are left out: T5's sentinels in order, or one mask token (BART),
    or empty. `tokenizer` may be None if no text is encoded. Raises RefusedError if the config names
    no first token.
    """

    def __init__(self, config: Any, tokenizer: Any, name: str) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.start = first_token(config, name)
        self.pad = int(config.pad_token_id or 0)
        end = config.get_text_config(decoder=True).eos_token_id
        self.end = self.start if end is None else int(end[0] if isinstance(end, list) else end)
        self.marks: list[int] = []
        nothing: tuple[list[int], list[int]] = [], [self.end]
        self._around = nothing, nothing
        if tokenizer is not None:
            if getattr(tokenizer, "tgt_lang", "") is None:  # M2M-100 then encodes no target
                tokenizer.tgt_lang = tokenizer.src_lang
            vocabulary = tokenizer.get_vocab()
            mask = tokenizer.mask_token_id
            sentinels = (vocabulary.get(f"<extra_id_{i}>") for i in range(_SENTINELS))
            self.marks = [i for i in sentinels if i is not None] or ([] if mask is None else [mask])
            before, after = _frame(tokenizer, "text_target")
            target = before[before[:1] == [self.start] :], after or [self.end]
            self._around = _frame(tokenizer, "text"), target

    def encode(self, texts: Sequence[str], target: bool = False) -> list[list[int]]:
        """The tokens of sources, or of targets, without special tokens."""
        sides = {"text_target" if target else "text": list(texts)}
        settings = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(**sides, **settings)["input_ids"]
        return ids

    def add_special_tokens(
        self, source: Sequence[int], target: Sequence[int], length: int
    ) -> TokenPair:
        """Add the special tokens of the tokenizer, without `start` of the target, which only the
        decoder reads; each side is cut to `length` in all.
        """
        framed_source, framed_target = (
            [*before, *ids[: length - len(before) - len(after)], *after]
            for ids, (before, after) in zip((source, target), self._around, strict=True)
        )
        return framed_source, framed_target

    def cuts(self, source: Sequence[int], target: Sequence[int], length: int) -> bool:
        """Whether `add_special_tokens` cuts one of them."""
        sides = zip((source, target), self._around, strict=True)
        return any(len(before) + len(ids) + len(after) > length for ids, (before, after) in sides)

    def corrupt(self, ids: Ints, generator: np.random.Generator) -> TokenPair:
        """A pair from plain text (T,), with at most T tokens a side.

        Raises RefusedError if there are no marks.
        """
        if not self.marks:
            raise RefusedError(
                f"the tokenizer of {self.name} has neither sentinels nor a mask token, "
                "so plain text makes no pairs: "
                "give pairs with --field and --target-field"
            )
        most = len(ids) - max(len(before) + len(after) for before, after in self._around)
        return self.add_special_tokens(
            *corrupt_spans(ids[: max(most, 2)], self.marks, generator), len(ids)
        )


def tokenize_pairs(sources: Sequence[Source], encoder: PairEncoder) -> Documents:
    """The pairs of data sets, without special tokens, stored as by `tokenize`.

    Raises CorpusError.
    """
    identity = TextEncoder(encoder.tokenizer).identify()

    def encode(rows: list[tuple[str, ...]]) -> list[dict[str, Any]]:
        source_texts, target_texts = zip(*rows, strict=True)
        source_ids = encoder.encode(source_texts)
        target_ids = encoder.encode(target_texts, target=True)
        return [
            {"source": source, "target": target}
            for source, target in zip(source_ids, target_ids, strict=True)
        ]

    columns = ["source", "target"]
    return join([tokenize_source(source, columns, identity, encode) for source in sources])


def pair_block(pair: tuple[Sequence[int] | Ints, Sequence[int] | Ints]) -> Block:
    """The inputs of an encoder-decoder: `input_ids` and `attention_mask` (S,), `labels` (T,)."""
    source, target = (np.array(side, np.int64) for side in pair)
    return {"input_ids": source, "attention_mask": np.ones_like(source), "labels": target}


@dataclass(frozen=True)
class PairBlocks:
    """Pairs of a table as blocks, in the order of these numbers,
    with at most `size` tokens a side.
    """

    table: Documents
    order: Ints
    encoder: PairEncoder
    size: int

    def __getitem__(self, index: int) -> Block:
        source, target = (
            self.table.tokens(int(self.order[index]), side).tolist()
            for side in ("source", "target")
        )
        return pair_block(self.encoder.add_special_tokens(source, target, self.size))


def corrupt_spans(ids: Ints, marks: Sequence[int], generator: np.random.Generator) -> TokenPair:
    """Tokens (T,) -> the source, with a mark in place of each noise span, and the target: each mark
    followed by its span, or the whole text if there is one mark for all.
    """
    noise = min(max(round(NOISE * len(ids)), 1), len(ids) - 1)
    most = noise if len(marks) == 1 else min(noise, len(marks))
    spans = max(1, min(round(noise / SPAN), most, len(ids) - noise))

    def cut(total: int) -> list[int]:
        ends = np.sort(generator.choice(total - 1, spans - 1, replace=False)) + 1
        return [int(size) for size in np.diff([0, *ends, total])]

    source = list[int]()
    target = list[int]()
    begin = 0
    for number, (plain_size, span_size) in enumerate(
        zip(cut(len(ids) - noise), cut(noise), strict=True)
    ):
        mark = marks[number % len(marks)]
        middle = begin + plain_size
        source += [*ids[begin:middle].tolist(), mark]
        target += [mark, *ids[middle : middle + span_size].tolist()]
        begin = middle + span_size
    return source, ids.tolist() if len(marks) == 1 else target


def _frame(tokenizer: Any, side: str) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    plain, framed = (
        tokenizer(**{side: "a"}, add_special_tokens=special)["input_ids"]
        for special in (False, True)
    )
    begin = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    return framed[:begin], framed[begin + len(plain) :]
