"""Pairs of a source and a target for encoder-decoders: two columns of a data set, or plain text
with spans left out (span corruption).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gqa.core.errors import RefusedError
from gqa.corpus.encoders import content_hash, tokenizer_content
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Block, Documents, Ints, first_token, join, tokenize_source

TokenPair = tuple[list[int], list[int]]  # tokens of a source, and of the target to predict
Frame = tuple[list[int], list[int]]  # special tokens before a text, and after it

# As T5 was trained (arXiv 1910.10683, section 3.3.4).
NOISE = 0.15  # share of the tokens left out
SPAN = 3.0  # mean tokens of a span
_SENTINELS = 100  # of T5


class PairEncoder:
    """Text -> pairs for the encoder-decoder of a transformers `config`.

    `tokenizer` may be None if no text is encoded. Raises RefusedError if the config names no first
    token.

    Attributes:
        start: The decoder's first token.
        end: The last token of a text.
        pad: The padding token.
        marks: Tokens in place of spans that are left out: T5's sentinels in order, or one mask
            token (BART), or empty.
    """

    def __init__(self, config: Any, tokenizer: Any, name: str) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.start = first_token(config, name)
        self.pad = int(config.pad_token_id or 0)
        end = config.get_text_config(decoder=True).eos_token_id
        if isinstance(end, list):
            end = next(iter(end), None)
        self.end = self.start if end is None else int(end)

        self.marks: list[int] = []
        only_end: Frame = ([], [self.end])
        self._frames = (only_end, only_end)  # of the source, and of the target
        if tokenizer is not None:
            self._read_tokenizer(tokenizer)

    def _read_tokenizer(self, tokenizer: Any) -> None:
        """Find the marks and the special tokens around texts."""
        if getattr(tokenizer, "tgt_lang", "") is None:  # M2M-100 then encodes no target
            tokenizer.tgt_lang = tokenizer.src_lang

        vocabulary = tokenizer.get_vocab()
        for number in range(_SENTINELS):
            sentinel = vocabulary.get(f"<extra_id_{number}>")
            if sentinel is not None:
                self.marks.append(sentinel)
        if not self.marks and tokenizer.mask_token_id is not None:
            self.marks = [tokenizer.mask_token_id]

        before, after = _frame(tokenizer, "text_target")
        if before[:1] == [self.start]:
            before = before[1:]  # only the decoder reads it
        self._frames = (_frame(tokenizer, "text"), (before, after or [self.end]))

    def encode(self, texts: Sequence[str], target: bool = False) -> list[list[int]]:
        """The tokens of sources, or of targets, without special tokens."""
        side = "text_target" if target else "text"
        settings = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(**{side: list(texts)}, **settings)["input_ids"]
        return ids

    def identify(self) -> str:
        """A hash of everything that determines the tokens of `encode`."""
        return content_hash(["pairs", tokenizer_content(self.tokenizer)])

    def add_special_tokens(
        self, source: Sequence[int], target: Sequence[int], length: int
    ) -> TokenPair:
        """Add the special tokens of the tokenizer, without `start` of the target, which only the
        decoder reads; each side is cut to `length` in all.
        """
        source_frame, target_frame = self._frames
        return _framed(source, source_frame, length), _framed(target, target_frame, length)

    def cuts(self, source: Sequence[int], target: Sequence[int], length: int) -> bool:
        """Whether `add_special_tokens` cuts one of them."""
        source_frame, target_frame = self.frame_lengths
        return max(len(source) + source_frame, len(target) + target_frame) > length

    @property
    def frame_lengths(self) -> tuple[int, int]:
        """Numbers of special tokens of a source, and of a target."""
        source_frame, target_frame = self._frames
        return _frame_length(source_frame), _frame_length(target_frame)

    def require_marks(self) -> None:
        """Raise RefusedError if there are no marks, so that no span can be left out."""
        if not self.marks:
            raise RefusedError(
                f"the tokenizer of {self.name} has neither sentinels nor a mask token, so plain "
                "text makes no pairs; pass pairs with --text-column and --target-column"
            )

    def corrupt(self, ids: Ints, generator: np.random.Generator) -> TokenPair:
        """A pair from plain text (T,), with at most T tokens a side.

        Raises RefusedError if there are no marks.
        """
        self.require_marks()
        length = len(ids)
        most = length - max(self.frame_lengths)
        source, target = corrupt_spans(ids[: max(most, 2)], self.marks, generator)
        return self.add_special_tokens(source, target, length)


def tokenize_pairs(sources: Sequence[Source], encoder: PairEncoder) -> Documents:
    """The pairs of data sets, without special tokens, stored as by `tokenize`.

    Raises TextError.
    """

    def encode(rows: list[tuple[str, ...]]) -> list[dict[str, Any]]:
        source_texts, target_texts = zip(*rows, strict=True)
        source_ids = encoder.encode(source_texts)
        target_ids = encoder.encode(target_texts, target=True)
        return [
            {"source": source, "target": target}
            for source, target in zip(source_ids, target_ids, strict=True)
        ]

    columns = ["source", "target"]
    identity = encoder.identify()
    return join([tokenize_source(source, columns, identity, encode) for source in sources])


def pair_block(pair: tuple[Sequence[int] | Ints, Sequence[int] | Ints]) -> Block:
    """The inputs of an encoder-decoder: `input_ids` and `attention_mask` (S,), `labels` (T,)."""
    source, target = (np.array(side, np.int64) for side in pair)
    return {"input_ids": source, "attention_mask": np.ones_like(source), "labels": target}


@dataclass(frozen=True)
class PairBlocks:
    """Pairs of a table as blocks, in this order, with at most `size` tokens a side."""

    table: Documents
    order: Ints
    encoder: PairEncoder
    size: int

    def __getitem__(self, index: int) -> Block:
        number = int(self.order[index])
        source = self.table.tokens(number, "source").tolist()
        target = self.table.tokens(number, "target").tolist()
        return pair_block(self.encoder.add_special_tokens(source, target, self.size))


def corrupt_spans(ids: Ints, marks: Sequence[int], generator: np.random.Generator) -> TokenPair:
    """Tokens (T,) -> the source, with a mark in place of each noise span, and the target: each mark
    followed by its span, or the whole text if there is one mark for all.
    """
    one_mark = len(marks) == 1
    noise = min(max(round(NOISE * len(ids)), 1), len(ids) - 1)
    most = noise if one_mark else min(noise, len(marks))
    spans = max(1, min(round(noise / SPAN), most, len(ids) - noise))

    def cut(total: int) -> list[int]:
        """Random sizes of `spans` parts that make up `total`."""
        ends = np.sort(generator.choice(total - 1, spans - 1, replace=False)) + 1
        return [int(size) for size in np.diff([0, *ends, total])]

    source = list[int]()
    target = list[int]()
    begin = 0
    plain_sizes = cut(len(ids) - noise)
    noise_sizes = cut(noise)
    for number, (plain_size, noise_size) in enumerate(zip(plain_sizes, noise_sizes, strict=True)):
        mark = marks[number % len(marks)]
        middle = begin + plain_size
        end = middle + noise_size
        source += [*ids[begin:middle].tolist(), mark]
        target += [mark, *ids[middle:end].tolist()]
        begin = end

    if one_mark:
        target = ids.tolist()
    return source, target


def _framed(ids: Sequence[int], frame: Frame, length: int) -> list[int]:
    """The tokens of a text between special tokens, cut to `length` in all if these fit there."""
    before, after = frame
    room = max(0, length - _frame_length(frame))
    return [*before, *ids[:room], *after]


def _frame_length(frame: Frame) -> int:
    before, after = frame
    return len(before) + len(after)


def _frame(tokenizer: Any, side: str) -> Frame:
    """The special tokens before and after a text."""
    plain = tokenizer(**{side: "a"}, add_special_tokens=False)["input_ids"]
    framed = tokenizer(**{side: "a"}, add_special_tokens=True)["input_ids"]
    begin = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    return framed[:begin], framed[begin + len(plain) :]
