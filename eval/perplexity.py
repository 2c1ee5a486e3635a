"""From documents to windows, and from scores to perplexities: sums first, one division at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gqa.checkpoint.errors import RefusedError
from gqa.corpus.windows import Window, llama_cpp_windows, rolling_windows, strided_windows
from gqa.eval.scoring import Scores

Protocol = Literal["rolling", "strided", "llama.cpp"]


@dataclass(frozen=True)
class Text:
    """What is scored: windows of token ids, and the size of what they were made of."""

    windows: tuple[Window, ...]
    protocol: Protocol | Literal["pairs"]
    context: int
    documents: int
    bytes: int
    words: int
    stride: int | None = None
    cut: int = 0  # pairs that are longer than the context

    @property
    def tokens(self) -> int:
        """Predictions that count."""
        return sum(window.scored for window in self.windows)

    @property
    def whole(self) -> bool:
        """Whether every token of the text is scored, so that its bytes and words have been predicted."""
        return self.protocol in ("rolling", "pairs") and not self.cut

    def record(self) -> dict[str, Any]:
        """Everything but the windows."""
        return {
            "protocol": self.protocol, "context": self.context, "stride": self.stride, "tokens": self.tokens,
            "documents": self.documents, "bytes": self.bytes, "words": self.words, "windows": len(self.windows),
            "cut": self.cut,
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
        RefusedError: Less text than one window (two for `llama.cpp`), or a stride that leaves gaps.
    """
    if stride and stride > context:
        raise RefusedError(f"--stride {stride:,} is more than the context of {context:,}: it would leave gaps unscored")
    if protocol == "rolling":
        found, sizes = _rolling(texts, tokenizer, context, max_tokens)
    else:
        found, sizes = _joined(texts, tokenizer, protocol, context, stride or context, max_tokens)
    needed = 2 * context if protocol == "llama.cpp" else context
    if sizes.tokens < needed:
        raise RefusedError(
            f"the text has {sizes.tokens:,} tokens, less than {'two windows' if needed > context else 'one window'} of "
            f"{context:,}; give more text or a smaller --context"
        )
    return Text(tuple(found), protocol, context, sizes.documents, sizes.bytes, sizes.words, stride)


@dataclass
class _Sizes:
    """Of the text so far."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    words: int = 0

    def add(self, text: str, tokens: int) -> None:
        self.tokens, self.documents = self.tokens + tokens, self.documents + 1
        self.bytes, self.words = self.bytes + len(text.encode()), self.words + count_words(text)


def _rolling(texts: Iterable[str], tokenizer: Any, context: int, max_tokens: int | None) -> tuple[list[Window], _Sizes]:
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise RefusedError("the tokenizer has neither BOS nor EOS to start a text with; use --stride")
    windows: list[Window] = []
    sizes = _Sizes()
    for text in texts:
        ids = encode(tokenizer, text)
        windows += rolling_windows(ids, context, prefix, sizes.documents)
        sizes.add(text, len(ids))
        if max_tokens and sizes.tokens >= max_tokens:
            break
    return windows, sizes


def _joined(
    texts: Iterable[str], tokenizer: Any, protocol: Protocol, context: int, stride: int, max_tokens: int | None
) -> tuple[list[Window], _Sizes]:
    kept, tokens = [], 0
    for text in texts:
        kept.append(text)
        if max_tokens:
            tokens += len(encode(tokenizer, text))
            if tokens >= max_tokens:
                break
    joined = "\n\n".join(kept)
    ids = encode(tokenizer, joined)
    sizes = _Sizes(len(ids), len(kept), len(joined.encode()), count_words(joined))
    if protocol == "strided":
        return list(strided_windows(ids, context, stride)), sizes
    bos = tokenizer.bos_token_id if ids and ids[0] == tokenizer.bos_token_id else None
    return list(llama_cpp_windows(ids, context, bos)), sizes


def encode(tokenizer: Any, text: str) -> list[int]:
    """With the special tokens that the tokenizer adds, but no second BOS where the text itself has one in front."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids: list[int] = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    return ids


def make_pairs(
    pairs: Iterable[tuple[str, str]], tokenizer: Any, start: int, context: int, max_tokens: int | None = None
) -> Text:
    """Source and target texts for an encoder-decoder: every target token is scored, after the token `start`.

    What is longer than the context is cut to it. Where the tokenizer itself puts `start` before a target, it is not
    scored: the decoder is given it. `max_tokens` is as in `make_text`, of targets. Raises RefusedError.
    """
    windows: list[Window] = []
    sizes, cut = _Sizes(), 0
    for number, (source, target) in enumerate(pairs):
        encoder: list[int] = tokenizer(source, verbose=False)["input_ids"]
        ids: list[int] = tokenizer(text_target=target, verbose=False)["input_ids"]
        ids = ids[ids[:1] == [start] :]
        if not ids:
            continue
        cut += max(len(encoder), len(ids)) > context
        if len(encoder) > context:  # the tokenizer cuts before its own last tokens
            encoder = tokenizer(source, truncation=True, max_length=context, verbose=False)["input_ids"]
        windows.append(Window((start, *ids[:context]), len(ids[:context]), number, tuple(encoder)))
        sizes.add(target, len(ids))
        if max_tokens and sizes.tokens >= max_tokens:
            break
    if not windows:
        raise RefusedError("there is no pair of a source and a target text; give more with --data")
    return Text(tuple(windows), "pairs", context, sizes.documents, sizes.bytes, sizes.words, cut=cut)


def count_words(text: str) -> int:
    """As lm-evaluation-harness counts them: the parts between runs of white space, empty ones at the ends included."""
    return len(re.split(r"\s+", text))


@dataclass(frozen=True)
class Perplexity:
    """`tokens` are those scored; per word and per byte only where every token of the text is."""

    nats: float
    nats_per_token: float
    tokens: int
    token_perplexity: float
    token_perplexity_error: float
    word_perplexity: float | None = None
    byte_perplexity: float | None = None
    bits_per_byte: float | None = None


def perplexity(scores: Scores, text: Text) -> Perplexity:
    """Sums divided once: exp(nats / tokens), exp(nats / words), exp(nats / bytes), nats / (ln 2 bytes).

    The error of the token perplexity is llama-perplexity's: PPL sqrt((mean(l^2) - mean(l)^2) / (n - 1)).
    """
    total, tokens = scores.total_nats, scores.tokens
    mean = total / tokens
    value = exp(mean)
    error = value * float(scores.nats.std(dtype="float64")) / math.sqrt(tokens - 1) if tokens > 1 else math.nan
    if not text.whole:
        return Perplexity(total, mean, tokens, value, error)
    per_byte = total / text.bytes
    return Perplexity(total, mean, tokens, value, error, exp(total / text.words), exp(per_byte), per_byte / math.log(2))


def exp(value: float) -> float:
    """Infinity where the number is too large to say."""
    return math.exp(value) if value < 700 else math.inf


def clusters(scores: Scores, windows: Sequence[Window]) -> list[int]:
    """What is resampled together: documents, or windows where there are fewer than 30 documents."""
    documents = [window.document for window in windows]
    ids = documents if len(set(documents)) >= 30 else list(range(len(windows)))
    return [ids[i] for i in scores.window]
