"""Recall of the context, which perplexity hardly shows: repeated passages, values by their keys, passkeys. No data is
needed: passages are from text, from self-generated text, or random tokens.

A question is a window (`gqa.eval.scoring`). Its answers are the predictions that the context determines; an answer is
right if it is the most probable token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqa.eval.scoring import Scores, Window
from gqa.eval.statistics import mean_interval

Ints = NDArray[np.integer[Any]]

COPIED = 192  # tokens of a second copy at most
DISTANCES = (64, 192, 512, *(1024 << n for n in range(12)))  # from a token of the second copy to the same of the first
LONGEST = {"samples": 512, "random": 512}  # distance, of kinds that show no more further away
READ = 2048  # tokens that are read for one distance, but two sequences at least and sixteen at most
PAIRS = 16  # lines of a list of keys and values
DIGITS = 5  # tokens of a passkey
DEPTHS = 5  # places of a passkey, from the beginning of the context to its end
RUN = 32  # answers next to each other that are resampled together for an interval
_PASSKEY = "\nThe pass key is"


@dataclass(frozen=True)
class Questions:
    """Windows of one kind whose answers stand `distance` tokens (or at most as many) before.

    answers: indices into the scored predictions of all windows; cluster: answers that are resampled together.
    """

    kind: str
    distance: int
    windows: tuple[Window, ...]
    answers: Ints
    cluster: Ints


def make_questions(
    streams: dict[str, Ints], tokenizer: Any, vocabulary: int, context: int, prefix: int
) -> list[Questions]:
    """Questions of all kinds at all distances up to `context` tokens.

    Args:
        streams: Token ids of `text`, of `samples` or of both, without special tokens: the passages, and what stands
            around a passkey.
        vocabulary: Number of token ids that the model knows.
        prefix: The token that a sequence begins with.
    """
    random = np.random.default_rng(0)
    plain = np.setdiff1d(np.arange(min(vocabulary, len(tokenizer))), tokenizer.all_special_ids)
    words = _words(tokenizer, plain)
    questions: list[Questions] = []
    for kind, stream in (streams | {"random": random.choice(plain, 16 * DISTANCES[2])}).items():
        for distance in _distances(context, LONGEST.get(kind, context)):
            questions += _second_copies(kind, stream, distance, prefix)
    filler = next(iter(streams.values()))
    for make in (_look_ups, _passkeys):
        for length in sorted({min(length, context) for length in (128, 256, context)}):
            questions += make(tokenizer, words, filler, length, prefix, random)
    return questions


def _distances(context: int, longest: int) -> list[int]:
    """DISTANCES that fit into the context with the second copy, and the largest possible one."""
    fitting = [d for d in DISTANCES if d + min(d, COPIED) <= context and d <= longest]
    last = context - COPIED
    if fitting and fitting[-1] * 1.25 <= last <= longest:
        fitting.append(last)
    return fitting


def _sequences(length: int) -> int:
    return int(np.clip(READ // length, 2, 16))


def _second_copies(kind: str, stream: Ints, distance: int, prefix: int) -> Iterable[Questions]:
    """Passages of `distance` tokens followed by a copy of their beginning. The context does not determine the first
    token of the copy: it is no answer.
    """
    copied = min(distance, COPIED)
    count = min(_sequences(distance + copied), len(stream) // distance)
    if not count:
        return
    starts = np.linspace(0, len(stream) - distance, count).astype(int)
    passages = [stream[start : start + distance].tolist() for start in starts]
    windows = [Window((prefix, *passage, *passage[:copied]), copied - 1, n) for n, passage in enumerate(passages)]
    answers = np.arange(count * (copied - 1))
    sequence, position = np.divmod(answers, copied - 1)
    runs = -(-(copied - 1) // RUN)
    yield Questions(kind, distance, tuple(windows), answers, sequence * runs + position // RUN)


def _look_ups(
    tokenizer: Any, words: Ints, filler: Ints, length: int, prefix: int, random: np.random.Generator
) -> Iterable[Questions]:
    """`key: value` lines, text, and the same lines in another order, whose values are the answers."""
    colon, newline = _tokens(tokenizer, ":"), _tokens(tokenizer, "\n")
    line = 2 + len(colon) + len(newline)
    between = length - 2 * PAIRS * line
    if between < 0 or len(filler) < between:
        return
    windows, count = list[Window](), _sequences(length)
    for number, start in enumerate(np.linspace(0, len(filler) - between, count).astype(int)):
        drawn = random.permutation(words)[: 2 * PAIRS].reshape(PAIRS, 2)
        listed, queried = (
            chain.from_iterable((int(key), *colon, int(value), *newline) for key, value in pairs)
            for pairs in (drawn, random.permutation(drawn))
        )
        ids = (prefix, *listed, *filler[start : start + between].tolist(), *queried)
        windows.append(Window(ids, PAIRS * line - 1 - len(colon), number))  # from the first value that is asked for
    answers = (np.arange(count)[:, None] * windows[0].scored + line * np.arange(PAIRS)).flatten()
    yield Questions("look-up", length, tuple(windows), answers, np.arange(len(answers)))


def _passkeys(
    tokenizer: Any, words: Ints, filler: Ints, length: int, prefix: int, random: np.random.Generator
) -> Iterable[Questions]:
    """A passkey of random words at some depth of a text, repeated at its end."""
    question, newline = _tokens(tokenizer, _PASSKEY), _tokens(tokenizer, "\n")
    around = length - 2 * len(question) - 2 * DIGITS - len(newline) - 1
    if around < DEPTHS or len(filler) < around:
        return
    windows = []
    for number, depth in enumerate(np.linspace(0, 1, DEPTHS)):
        start = int((len(filler) - around) * depth)
        text, position = filler[start : start + around].tolist(), round(around * depth)
        key = random.choice(words, DIGITS, replace=False).tolist()
        statement = (*question, *key, *newline)
        windows.append(
            Window((prefix, *text[:position], *statement, *text[position:], *question, *key), DIGITS, number)
        )
    answers = np.arange(DEPTHS * DIGITS)
    yield Questions("passkey", length, tuple(windows), answers, answers // DIGITS)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`; empty if the tokenizer has an unknown token for it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [] if tokenizer.unk_token_id in ids else ids


def _words(tokenizer: Any, plain: Ints) -> Ints:
    """Tokens that are a lower-case word after a space; all of `plain` if there are fewer than 256."""
    texts = tokenizer.batch_decode([[int(token)] for token in plain])
    raw = tokenizer.convert_ids_to_tokens(plain.tolist())
    words = [
        token for token, text, piece in zip(plain.tolist(), texts, raw, strict=True)
        if len(word := text.strip()) > 2 and word.isalpha() and word.islower() and piece[0] in "Ġ▁ "
    ]  # fmt: skip
    return np.array(words) if len(words) >= 256 else plain


def recall(questions: Sequence[Questions], scores: Scores) -> list[dict[str, Any]]:
    """A JSON-ready record for each kind and distance, with 95 % bootstrap intervals.

    `scores` begin with the windows of all questions, in their order.
    """
    records, start = [], 0
    for question in questions:
        picks = start + question.answers
        start += sum(window.scored for window in question.windows)
        nats, hits = scores.nats[picks].astype(np.float64), scores.hits[picks].astype(np.float64)
        accuracy, low, high = mean_interval(hits, question.cluster)
        mean, nats_low, nats_high = mean_interval(nats, question.cluster)
        records.append({
            "kind": question.kind, "distance": question.distance, "answers": len(picks),
            "accuracy": accuracy, "accuracy_low": low, "accuracy_high": high,
            "nats": mean, "nats_low": nats_low, "nats_high": nats_high,
        })  # fmt: skip
    return records
