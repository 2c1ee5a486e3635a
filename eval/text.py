"""The text to score, cut into windows; checks that all checkpoints read it as the same tokens; perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gqa.checkpoint.errors import RefusedError
from gqa.corpus.pairs import PairEncoder
from gqa.corpus.sources import parse_source
from gqa.eval.options import EvaluateOptions
from gqa.eval.scoring import Window, rolling_windows
from gqa.eval.statistics import Floats
from gqa.eval.subjects import Subject

MAX_CONTEXT = 2048  # by default: windows of 128k tokens for a model of 128k positions would take hours


def read_text(subjects: Sequence[Subject], options: EvaluateOptions) -> Text:
    """The text of `options`, tokenised for the first checkpoint. Raises RefusedError and CorpusError."""
    first, target = subjects[0], options.target_field
    check_target_field(first, target)
    context = choose_context(subjects, options.context)
    source = parse_source(str(options.data), field=options.field, target_field=target, split="test")
    check_models_agree(subjects, next(source.texts())[:2000])
    if first.encoder:
        text = make_pairs(source.rows(), first.encoder, context, options.tokens)
    else:
        text = make_text(source.texts(), first.tokenizer, context, options.tokens)
    check_ids(subjects, text)
    return text


def check_target_field(subject: Subject, target_field: str | None) -> None:
    """Raise RefusedError unless an encoder-decoder, and no other model, has a field of targets."""
    if subject.config.is_encoder_decoder != bool(target_field):
        raise RefusedError(
            f"--target-field is for encoder-decoders, {subject.name} is none"
            if target_field
            else f"{subject.name} is an encoder-decoder: name the text to predict with --target-field"
        )


def check_models_agree(subjects: Sequence[Subject], sample: str) -> None:
    """Raise RefusedError if two checkpoints tokenise differently: their losses per token do not compare."""
    first = subjects[0]
    vocabulary, ids = first.tokenizer.get_vocab(), first.tokenizer(sample, verbose=False)["input_ids"]
    for other in subjects[1:]:
        other_vocabulary = other.tokenizer.get_vocab()
        if other_vocabulary != vocabulary or other.tokenizer(sample, verbose=False)["input_ids"] != ids:
            raise RefusedError(
                f"{first.name} ({len(vocabulary):,} tokens) and {other.name} ({len(other_vocabulary):,}) have "
                "different tokenizers, so their losses per token do not compare; evaluate each alone and compare bits "
                "per byte"
            )
        if other.config.is_encoder_decoder != first.config.is_encoder_decoder:
            raise RefusedError(f"of {first.name} and {other.name} only one is an encoder-decoder: they do not compare")
        if other.vocabulary != first.vocabulary:
            raise RefusedError(
                f"{first.name} predicts {first.vocabulary:,} tokens and {other.name} {other.vocabulary:,}; "
                "give conversions of the same checkpoint"
            )


def check_ids(subjects: Sequence[Subject], text: Text) -> None:
    """Raise RefusedError if a token id is outside a model's vocabulary: the tokenizer belongs to another model."""
    largest = max(max(*window.ids, *window.source) for window in text.windows)
    for subject in subjects:
        if largest >= subject.vocabulary:
            raise RefusedError(
                f"the tokenizer of {subject.name} gives token {largest:,} and its model knows {subject.vocabulary:,}: "
                "they do not belong together"
            )


def choose_context(subjects: Sequence[Subject], context: int | None) -> int:
    """Tokens of a window: `context`, or without one the models' positions, at most MAX_CONTEXT. Raises RefusedError."""
    limit = min((subject.positions for subject in subjects if subject.positions), default=None)
    if context and limit and context > limit:
        raise RefusedError(
            f"--context {context} is more than the {limit} positions that the model was made for; give at most {limit}"
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
        """Predictions that count."""
        return sum(window.scored for window in self.windows)

    @property
    def clusters(self) -> NDArray[np.int64]:
        """What each is resampled with: its document, or its window where there are fewer than 30 documents."""
        documents = [window.document for window in self.windows]
        ids = documents if len(set(documents)) >= 30 else range(len(self.windows))
        return np.repeat(ids, [window.scored for window in self.windows])

    def record(self) -> dict[str, Any]:
        """Everything but the windows."""
        return {**vars(self), "tokens": self.tokens, "windows": len(self.windows)}


def make_text(texts: Iterable[str], tokenizer: Any, context: int, max_tokens: int | None = None) -> Text:
    """Tokenise and cut into windows as lm-evaluation-harness does: every token of every document is scored once.

    Words and bytes are those of the text as it is. BOS (or else EOS) stands before the first token, even if the
    tokenizer puts one there itself, which is scored then. `max_tokens`: stop after the document that reaches it.

    Raises RefusedError for less text than one window.
    """
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise RefusedError("the tokenizer has neither BOS nor EOS to start a text with")
    taken = _take(((text, encode(tokenizer, text)) for text in texts), max_tokens)
    if (tokens := sum(len(ids) for _, ids in taken)) < context:
        raise RefusedError(
            f"the text has {tokens:,} tokens, less than one window of {context:,}; give more text or a smaller "
            "--context"
        )
    windows = [window for n, (_, ids) in enumerate(taken) for window in rolling_windows(ids, context, prefix, n)]
    return Text(tuple(windows), "rolling", context, len(taken), *_sizes(text for text, _ in taken))


def _take(documents: Iterable[tuple[Any, ...]], max_tokens: int | None) -> list[tuple[Any, ...]]:
    """Documents (text, token ids, ...) up to the one that reaches `max_tokens`."""
    taken, tokens = [], 0
    for document in documents:
        taken.append(document)
        tokens += len(document[1])
        if max_tokens and tokens >= max_tokens:
            break
    return taken


def _sizes(texts: Iterable[str]) -> tuple[int, int]:
    """Bytes and words."""
    sizes = [(len(text.encode()), count_words(text)) for text in texts]
    return sum(size for size, _ in sizes), sum(words for _, words in sizes)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids with the tokenizer's special tokens, but without a second BOS if the text begins with one."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    return ids


def make_pairs(
    pairs: Iterable[tuple[str, ...]], encoder: PairEncoder, context: int, max_tokens: int | None = None
) -> Text:
    """Source and target texts for an encoder-decoder: every target token is scored, after the decoder start token.

    Pairs are cut to the context; `max_tokens` counts targets. Raises RefusedError and CorpusError.
    """

    def scored_pairs() -> Iterator[tuple[str, list[int], list[int], bool]]:
        for source, target in pairs:
            ids = encoder.encode([source])[0], encoder.encode([target], target=True)[0]
            if ids[1]:
                source_ids, target_ids = encoder.framed(*ids, context)
                yield target, target_ids, source_ids, encoder.cuts(*ids, context)

    taken = _take(scored_pairs(), max_tokens)
    windows = [_pair_window(encoder, source, target, n) for n, (_, target, source, _) in enumerate(taken)]
    if not windows:
        raise RefusedError("there is no pair of a source and a target text; give more with --data")
    cut = sum(row[3] for row in taken)
    return Text(tuple(windows), "pairs", context, len(taken), *_sizes(row[0] for row in taken), cut=cut)


def _pair_window(encoder: PairEncoder, source_ids: Sequence[int], target_ids: Sequence[int], number: int) -> Window:
    return Window((encoder.start, *target_ids), len(target_ids), number, tuple(source_ids))


def count_words(text: str) -> int:
    """Words as lm-evaluation-harness counts them: parts between white space, with empty ones at the ends."""
    return len(re.split(r"\s+", text))


def perplexity(nats: Floats, text: Text) -> dict[str, float | None]:
    """exp(nats / tokens), exp(nats / words), exp(nats / bytes) and nats / (ln 2 bytes), each from sums over all tokens;
    per word and per byte only if no pair is cut.

    The error of the token perplexity is llama-perplexity's: PPL sqrt((mean(l^2) - mean(l)^2) / (n - 1)).
    """
    total, tokens = float(nats.sum(dtype="float64")), len(nats)
    mean, per_byte = total / tokens, total / text.bytes
    spread = float(nats.std(dtype="float64"))
    return {
        "nats": total,
        "nats_per_token": mean,
        "tokens": tokens,
        "token_perplexity": _exp(mean),
        "token_perplexity_error": _exp(mean) * spread / math.sqrt(tokens - 1) if tokens > 1 else math.nan,
        "word_perplexity": _exp(total / text.words) if not text.cut else None,
        "byte_perplexity": _exp(per_byte) if not text.cut else None,
        "bits_per_byte": per_byte / math.log(2) if not text.cut else None,
    }


def _exp(value: float) -> float:
    """e^value, or infinity beyond the range of floats."""
    return math.exp(value) if value < 700 else math.inf
