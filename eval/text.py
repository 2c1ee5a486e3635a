"""Cut the text to score into windows, and check that all checkpoints tokenize it alike."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Literal

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


def read_text(subjects: Sequence[Subject], options: EvaluateOptions, context: int) -> Text:
    """The text of `options`, tokenized for the first checkpoint.

    Raises RefusedError and CorpusError.
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
            f"{subject.name} is an encoder-decoder, which predicts a column of its own; pass that "
            "column with --target-column"
        )


def check_models_agree(subjects: Sequence[Subject], sample: str) -> None:
    """Raise RefusedError unless all checkpoints read and predict the same tokens: else losses per
    token are not comparable. `sample`: text on which tokenizers with equal vocabularies may differ.
    """
    traits: dict[str, Callable[[Subject], Any]] = {
        "tokenizers": lambda one: (
            one.tokenizer.get_vocab(),
            one.tokenizer(sample, verbose=False)["input_ids"],
        ),
        "kinds of models (one is an encoder-decoder)": lambda one: one.config.is_encoder_decoder,
    }
    first = subjects[0]
    for (name, trait), subject in product(traits.items(), subjects[1:]):
        if trait(subject) != trait(first):
            raise RefusedError(
                f"{first.name} and {subject.name} have different {name}, so their losses per "
                "token are not comparable; pass conversions of one checkpoint, or evaluate each "
                "alone and compare bits per byte"
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
) -> Text:
    """Cut rows (a text, a chat, or source and target for encoder-decoders) into windows of the
    first checkpoint's tokens.

    Raises CorpusError, and RefusedError for too little text or a token id outside a model's
    vocabulary.
    """
    first = subjects[0]
    if first.encoder:
        text = make_text(pair_windows(rows, first.encoder, context, max_tokens), "pairs", context)
    else:
        encoders = Encoders(first.tokenizer, first.name, text_encoder=HarnessEncoder)
        windows = document_windows(rows, encoders, context, max_tokens)
        text = make_text(windows, "rolling", context, least=min(context, max_tokens or context))

    largest = max(max(*window.ids, *window.source) for window in text.windows)
    for subject in subjects:
        check_ids(largest, subject.vocabulary, subject.name)
    return text


def make_text(
    documents: Iterable[tuple[str, list[Window], bool]],
    protocol: Literal["rolling", "pairs"],
    context: int,
    least: int = 1,
) -> Text:
    """Collect `documents`: each is the scored text, its windows, and whether they are cut to the
    context. Words and bytes count the whole text. Raises RefusedError for less than `least` tokens.
    """
    windows = list[Window]()
    documents_read = 0
    n_bytes = 0
    words = 0
    cuts = 0
    for text, parts, cut in documents:
        windows += parts
        documents_read += 1
        n_bytes += len(text.encode())
        # As lm-evaluation-harness: counts empty words at the ends
        words += len(re.split(r"\s+", text))
        cuts += cut

    result = Text(tuple(windows), protocol, context, documents_read, n_bytes, words, cuts)
    if result.tokens < least:
        raise RefusedError(
            f"the text has {plural(result.tokens, 'token')}, less than one window of {context:,}; "
            "pass more text, or a smaller --context"
        )
    return result


def document_windows(
    rows: Iterable[tuple[str, ...]],
    encoders: Encoders,
    context: int,
    max_tokens: int | None = None,
) -> Iterator[tuple[str, list[Window], bool]]:
    """Encode texts and chats, cut after `max_tokens`, and cut into windows as
    lm-evaluation-harness does: every token of every document is scored once.

    BOS (or else EOS) precedes the first token; a BOS that the tokenizer itself adds is then scored,
    too. A chat whose template writes it has no second one. Raises RefusedError and CorpusError.
    """
    prefix = prefix_token(encoders.tokenizer)
    left = max_tokens or sys.maxsize
    for number, row in enumerate(rows):
        encoder = encoders.chats if isinstance(row, Chat) else encoders.text
        ((text, ids, _),) = encoder.encode(row)

        if len(ids) > left:
            text = encoder.beginning(text, left)
            ids = ids[:left]
        left -= len(ids)

        if encoder.starts_documents and ids[:1] == [prefix]:
            ids = ids[1:]
        yield text, [*rolling_windows(ids, context, prefix, number)], False
        if not left:
            break


def pair_windows(
    pairs: Iterable[tuple[str, ...]],
    encoder: PairEncoder,
    context: int,
    max_tokens: int | None = None,
) -> Iterator[tuple[str, list[Window], bool]]:
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
        yield target, [window], encoder.cuts(source_text_ids, target_text_ids, context)
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
