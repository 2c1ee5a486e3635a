"""Cut the text to score into windows, and check that all checkpoints tokenize it alike."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.chat_template import template_of
from gqa.core.errors import RefusedError, plural
from gqa.corpus.chats import Chat
from gqa.corpus.encoders import Encoders, HarnessEncoder, start_token
from gqa.corpus.pairs import PairEncoder
from gqa.corpus.specs import check_text_options, parse_sources
from gqa.corpus.tokens import check_ids
from gqa.eval.options import EvaluateOptions
from gqa.eval.scoring import Window, rolling_windows
from gqa.eval.subjects import Subject

# Default: for a model with 128k positions, windows of 128k tokens would take hours
MAX_CONTEXT = 2048
_ENOUGH_DOCUMENTS = 30  # to resample documents; with fewer, windows are resampled
_NOT_COMPARABLE = (
    "so their losses per token are not comparable; pass conversions of one checkpoint, or evaluate "
    "each alone and compare bits per byte"
)


class CutDocument(NamedTuple):
    """A document, or the target of a pair, as it is scored.

    Attributes:
        text: What its scored tokens spell, whose bytes and words count.
        windows: Its tokens in windows; none if it has no tokens.
        is_cut: Whether the windows have less of it than `text`: a pair that is longer than the
            context.
    """

    text: str
    windows: list[Window]
    is_cut: bool = False


def read_text(subjects: Sequence[Subject], options: EvaluateOptions, context: int) -> Text:
    """The text of `options`, tokenized for the first checkpoint.

    Raises RefusedError and TextError.
    """
    check_target_column(subjects[0], options.target_column)
    specs = options.data or ()
    check_text_options(specs, options.text_column, options.separator)
    sources = parse_sources(
        specs,
        text_column=options.text_column,
        target_column=options.target_column,
        split="test",
        separator=options.separator,
    )

    check_models_agree(subjects, next(sources[0].texts())[:2000])
    if any(source.has_chats for source in sources):
        check_templates_agree(subjects)

    rows = chain.from_iterable(source.rows() for source in sources)
    return cut_text(subjects, rows, context, options.tokens)


def check_target_column(subject: Subject, target_column: str | None) -> None:
    """Raise RefusedError unless `target_column` is given for an encoder-decoder and for no other
    model.
    """
    if subject.config.is_encoder_decoder != bool(target_column):
        if target_column:
            raise RefusedError(
                f"--target-column works only with encoder-decoders, but {subject.name} is not one; "
                "remove --target-column"
            )
        raise RefusedError(
            f"{subject.name} is an encoder-decoder, so it needs pairs; name the column of targets "
            "with --target-column"
        )


def check_models_agree(subjects: Sequence[Subject], sample: str) -> None:
    """Raise RefusedError unless all checkpoints read and predict the same tokens: else losses per
    token are not comparable. `sample`: text on which tokenizers with equal vocabularies may differ.
    """
    first = subjects[0]
    tokens_of_first = _tokenization(first, sample)
    for subject in subjects[1:]:
        if _tokenization(subject, sample) != tokens_of_first:
            raise RefusedError(
                f"{first.name} and {subject.name} have different tokenizers, {_NOT_COMPARABLE}"
            )
        if subject.config.is_encoder_decoder != first.config.is_encoder_decoder:
            raise RefusedError(
                f"one of {first.name} and {subject.name} is an encoder-decoder and the other is "
                f"not, {_NOT_COMPARABLE}"
            )

    # Rows beyond the tokenizer's are padding, of which checkpoints may have different numbers.
    needed = max(first.tokenizer.get_vocab().values()) + 1
    smallest = min(subjects, key=lambda one: one.vocabulary)
    if smallest.vocabulary < min(needed, max(one.vocabulary for one in subjects)):
        raise RefusedError(
            f"the embedding of {smallest.name} has only {smallest.vocabulary:,} of the {needed:,} "
            "tokens of its tokenizer, fewer than that of another model, so losses per token are "
            "not comparable; pass conversions of one checkpoint"
        )


def _tokenization(subject: Subject, sample: str) -> tuple[dict[str, int], list[int]]:
    """The vocabulary of a checkpoint's tokenizer, and the token ids that it gives for a text."""
    ids: list[int] = subject.tokenizer(sample, verbose=False)["input_ids"]
    return subject.tokenizer.get_vocab(), ids


def check_templates_agree(subjects: Sequence[Subject]) -> None:
    """Raise RefusedError unless all checkpoints have the same chat template: chats are encoded by
    that of the first one.
    """
    first = subjects[0]
    for subject in subjects[1:]:
        if template_of(subject.tokenizer) != template_of(first.tokenizer):
            raise RefusedError(
                f"{first.name} and {subject.name} have different chat templates, so they read "
                "different tokens of a chat; copy the template of one to the other, or pass a "
                "column of text with --text-column"
            )


def choose_context(subjects: Sequence[Subject], context: int | None) -> int:
    """Tokens per window: `context`, or by default the models' positions, at most MAX_CONTEXT.

    Raises RefusedError.
    """
    limit = min((subject.positions for subject in subjects if subject.positions), default=None)
    if context and limit and context > limit:
        raise RefusedError(
            f"--context {context} is more than the {limit} positions of the model; pass at most "
            f"{limit}"
        )
    return context or min(limit or MAX_CONTEXT, MAX_CONTEXT)


@dataclass(frozen=True)
class Text:
    """Windows of token ids to score, and the size of the text they come from."""

    windows: tuple[Window, ...]
    protocol: Literal["rolling", "pairs"]
    context: int
    documents: int
    bytes: int
    words: int
    cut: int = 0  # pairs that are longer than the context

    @property
    def tokens(self) -> int:
        """Number of scored predictions."""
        return sum(window.scored for window in self.windows)

    @property
    def clusters(self) -> NDArray[np.int64]:
        """(tokens,) bootstrap cluster of each prediction: its document, or if there are few of them
        its window.
        """
        documents = [window.document for window in self.windows]
        are_enough = len(set(documents)) >= _ENOUGH_DOCUMENTS
        ids = documents if are_enough else range(len(self.windows))
        return np.repeat(ids, [window.scored for window in self.windows])

    def record(self) -> dict[str, Any]:
        """Everything but the windows."""
        return {**vars(self), "tokens": self.tokens, "windows": len(self.windows)}


def cut_text(
    subjects: Sequence[Subject],
    rows: Iterable[tuple[str, ...]],
    context: int,
    max_tokens: int | None,
    limit_option: str = "--tokens",
) -> Text:
    """Cut rows (a text, a chat, or source and target for encoder-decoders) into windows of the
    first checkpoint's tokens.

    Args:
        subjects: All checkpoints.
        rows: What is cut.
        context: Tokens of a window.
        max_tokens: Tokens that are scored at most.
        limit_option: The option that `max_tokens` is from, for errors.

    Raises:
        TextError: The text cannot be used.
        RefusedError: There is too little text, or it has a token id outside a model's vocabulary.
    """
    first = subjects[0]
    if first.encoder:
        documents = pair_windows(rows, first.encoder, context, max_tokens)
        text = make_text(documents, "pairs", context)
        least = 1
    else:
        encoders = Encoders(first.tokenizer, first.name, text_encoder=HarnessEncoder)
        documents = document_windows(rows, encoders, context, max_tokens)
        text = make_text(documents, "rolling", context)
        least = min(context, max_tokens or context)
    if text.tokens < least:
        raise _too_little_text(text, least, limit_option)

    largest = max(max(*window.ids, *window.source) for window in text.windows)
    for subject in subjects:
        check_ids(largest, subject.vocabulary, subject.name)
    return text


def _too_little_text(text: Text, least: int, limit_option: str) -> RefusedError:
    """The error for a text of less than `least` tokens."""
    given = f"the text has {plural(text.tokens, 'token')}"
    if text.protocol == "pairs":
        return RefusedError(f"{given} in its targets; pass pairs whose targets are not empty")
    if least < text.context:
        return RefusedError(
            f"{given}, less than {limit_option} {least}; pass more text, or a smaller "
            f"{limit_option}"
        )
    return RefusedError(
        f"{given}, less than one window of {text.context:,}; pass more text, or a smaller --context"
    )


def make_text(
    documents: Iterable[CutDocument], protocol: Literal["rolling", "pairs"], context: int
) -> Text:
    """Collect documents. Their words and bytes are those of their whole texts."""
    windows = list[Window]()
    documents_read = 0
    n_bytes = 0
    words = 0
    cuts = 0
    for document in documents:
        windows += document.windows
        documents_read += 1
        n_bytes += len(document.text.encode())
        # As lm-evaluation-harness: counts empty words at the ends
        words += len(re.split(r"\s+", document.text))
        cuts += document.is_cut
    return Text(tuple(windows), protocol, context, documents_read, n_bytes, words, cuts)


def document_windows(
    rows: Iterable[tuple[str, ...]],
    encoders: Encoders,
    context: int,
    max_tokens: int | None = None,
) -> Iterator[CutDocument]:
    """Encode texts and chats, cut after `max_tokens`, and cut into windows as
    lm-evaluation-harness does: every token of every document is scored once.

    BOS (or else EOS) precedes the first token; a BOS that the tokenizer itself adds is then scored,
    too. A chat whose template writes it has no second one. Raises RefusedError and TextError.
    """
    prefix = prefix_token(encoders.tokenizer)
    left = max_tokens or sys.maxsize
    for number, row in enumerate(rows):
        encoder = encoders.chats if isinstance(row, Chat) else encoders.text
        (encoded,) = encoder.encode([row[0]])
        text = encoded.text
        ids = encoded.tokens

        # What the template writes first is the prefix, which is not scored
        has_prefix = encoder.starts_documents and ids[:1] == [prefix]
        most_ids = left + has_prefix
        if len(ids) > most_ids:
            text = encoder.beginning(text, most_ids)
            ids = ids[:most_ids]
        if has_prefix:
            text = text.removeprefix(encoders.tokenizer.convert_ids_to_tokens(prefix))
            ids = ids[1:]

        yield CutDocument(text, [*rolling_windows(ids, context, prefix, number)])
        left -= len(ids)
        if not left:
            break


def pair_windows(
    pairs: Iterable[tuple[str, ...]],
    encoder: PairEncoder,
    context: int,
    max_tokens: int | None = None,
) -> Iterator[CutDocument]:
    """One window per pair for an encoder-decoder, until they have `max_tokens`: every target token
    is scored, after the decoder start token. Sources and targets are cut to the context; pairs with
    an empty target are skipped.
    """
    number = 0
    left = max_tokens or sys.maxsize
    for source, target in pairs:
        (source_text_ids,) = encoder.encode([source])
        (target_text_ids,) = encoder.encode([target], target=True)
        if not target_text_ids:
            continue

        source_ids, target_ids = encoder.add_special_tokens(
            source_text_ids, target_text_ids, context
        )
        window = Window((encoder.start, *target_ids), len(target_ids), number, tuple(source_ids))
        is_cut = encoder.cuts(source_text_ids, target_text_ids, context)
        yield CutDocument(target, [window], is_cut)
        number += 1

        left -= len(target_ids)
        if left <= 0:
            break


def prefix_token(tokenizer: Any) -> int:
    """First token of every sequence: BOS, or else EOS.

    Raises RefusedError if the tokenizer has neither.
    """
    token = start_token(tokenizer)
    if token is None:
        raise RefusedError(
            "the tokenizer has neither a BOS nor an EOS token, so no text can be started; set "
            "its bos_token"
        )
    return token
