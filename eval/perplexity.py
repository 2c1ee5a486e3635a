"""From documents to windows, and from scores to perplexities: sums first, one division at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gqa.convert.errors import RefusedError
from gqa.corpus.windows import Window, llama_cpp_windows, rolling_windows, strided_windows
from gqa.eval.scoring import Scores

Protocol = Literal["rolling", "strided", "llama.cpp"]
PROTOCOLS: tuple[Protocol, ...] = ("rolling", "strided", "llama.cpp")


@dataclass(frozen=True)
class Text:
    """What is scored: windows of token ids, and the size of what they were made of."""

    windows: tuple[Window, ...]
    protocol: Protocol
    context: int
    documents: int
    bytes: int
    words: int
    stride: int | None = None

    @property
    def tokens(self) -> int:
        """Predictions that count."""
        return sum(window.scored for window in self.windows)

    def record(self) -> dict[str, Any]:
        """Everything but the windows."""
        return {
            "protocol": self.protocol, "context": self.context, "stride": self.stride, "tokens": self.tokens,
            "documents": self.documents, "bytes": self.bytes, "words": self.words, "windows": len(self.windows),
        }  # fmt: skip


def make_text(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    protocol: Protocol,
    context: int,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> Text:
    """Tokenise and cut into windows.

    `rolling` scores every token of every document once, as lm-evaluation-harness does: words and bytes of the text as
    it is, BOS (or else EOS) before the first token, even where the tokenizer puts one there itself, which is scored
    then. `strided` and `llama.cpp` work on one text, documents joined by blank lines.

    Args:
        max_tokens: Stop after the document that reaches this many tokens.

    Raises:
        RefusedError: No text, or less of it than one window.
    """
    if protocol == "rolling":
        windows, documents, size, words = _rolling(texts, tokenizer, context, max_tokens)
    else:
        kept = list(_until(texts, tokenizer, max_tokens))
        joined = "\n\n".join(kept)
        documents, size, words = len(kept), len(joined.encode()), count_words(joined)
        ids = encode(tokenizer, joined)
        if protocol == "strided":
            windows = list(strided_windows(ids, context, stride or context))
        else:
            bos = tokenizer.bos_token_id if ids and ids[0] == tokenizer.bos_token_id else None
            windows = list(llama_cpp_windows(ids, context, bos))
            if len(ids) < 2 * context:
                raise RefusedError(
                    f"the text has {len(ids):,} tokens, --protocol llama.cpp needs twice the context of {context:,}; "
                    "give more text or a smaller --context"
                )
    if not windows:
        raise RefusedError("the text has no token to score; give more text with --data")
    return Text(tuple(windows), protocol, context, documents, size, words, stride)


def _rolling(
    texts: Iterable[str], tokenizer: Any, context: int, max_tokens: int | None
) -> tuple[list[Window], int, int, int]:
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise RefusedError("the tokenizer has neither BOS nor EOS to start a text with; use --protocol strided")
    windows: list[Window] = []
    documents = size = words = tokens = 0
    for text in texts:
        ids = encode(tokenizer, text)
        windows += rolling_windows(ids, context, prefix, documents)
        documents, size, words = documents + 1, size + len(text.encode()), words + count_words(text)
        tokens += len(ids)
        if max_tokens and tokens >= max_tokens:
            break
    return windows, documents, size, words


def encode(tokenizer: Any, text: str) -> list[int]:
    """With the special tokens that the tokenizer adds, but no second BOS where the text itself has one in front."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    return ids


def _until(texts: Iterable[str], tokenizer: Any, max_tokens: int | None) -> Iterator[str]:
    tokens = 0
    for text in texts:
        yield text
        if max_tokens:
            tokens += len(encode(tokenizer, text))
            if tokens >= max_tokens:
                return


def make_pairs(pairs: Iterable[tuple[str, str]], tokenizer: Any, start: int, context: int) -> Text:
    """Source and target texts for an encoder-decoder: every target token is scored, after the token `start`."""
    windows: list[Window] = []
    size = words = 0
    for number, (source, target) in enumerate(pairs):
        encoder = tokenizer(source, truncation=True, max_length=context, verbose=False)["input_ids"]
        ids = tokenizer(text_target=target, truncation=True, max_length=context, verbose=False)["input_ids"]
        if ids:
            windows.append(Window((start, *ids), len(ids), number, tuple(encoder)))
        size, words = size + len(target.encode()), words + count_words(target)
    if not windows:
        raise RefusedError("there is no target text to score; give more with --data")
    return Text(tuple(windows), "rolling", context, len(windows), size, words)


def count_words(text: str) -> int:
    """As lm-evaluation-harness counts them: the parts between runs of white space, empty ones at the ends included."""
    return len(re.split(r"\s+", text))


@dataclass(frozen=True)
class Perplexity:
    """`tokens` are those scored; per word and per byte only where every token of the text is."""

    nats: float
    tokens: int
    token_perplexity: float
    token_perplexity_error: float
    word_perplexity: float | None = None
    byte_perplexity: float | None = None
    bits_per_byte: float | None = None

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"nats_per_token": self.nats_per_token}


def perplexity(scores: Scores, text: Text) -> Perplexity:
    """Sums divided once: exp(nats / tokens), exp(nats / words), exp(nats / bytes), nats / (ln 2 bytes).

    The error of the token perplexity is llama-perplexity's: PPL sqrt((mean(l^2) - mean(l)^2) / (n - 1)).
    """
    total, tokens = scores.total_nats, scores.tokens
    value = exp(total / tokens)
    error = value * float(scores.nats.std(dtype="float64")) / math.sqrt(tokens - 1) if tokens > 1 else math.nan
    if text.protocol != "rolling":
        return Perplexity(total, tokens, value, error)
    per_byte = total / text.bytes
    return Perplexity(total, tokens, value, error, exp(total / text.words), exp(per_byte), per_byte / math.log(2))


def exp(value: float) -> float:
    """Infinity where the number is too large to say."""
    return math.exp(value) if value < 700 else math.inf


def clusters(scores: Scores, windows: Sequence[Window]) -> list[int]:
    """What is resampled together: documents, or windows where there are fewer than 30 documents."""
    documents = [window.document for window in windows]
    ids = documents if len(set(documents)) >= 30 else list(range(len(windows)))
    return [ids[i] for i in scores.window]
