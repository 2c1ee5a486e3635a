"""Recall of the context, which perplexity hardly shows: repeated passages, values by their keys,
passkeys; and agreement with the baseline's greedy texts. No data is needed: passages are from text,
from self-generated text, or random tokens.

A question is a window (`gqa.eval.scoring`). Its answers are the predictions that the context
determines; an answer is right if it is the most probable token.

Two greedy texts are equal up to the first difference, so only the baseline generates. A model
scores that text and leaves it at the first token that is not its most probable one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from gqa.convert.merge.self_samples import derive_seed, sampled_blocks
from gqa.core.errors import RefusedError, explain
from gqa.eval.scoring import Scores, Window
from gqa.eval.subjects import Subject, input_device

Ints = NDArray[np.integer[Any]]

COPIED = 192  # tokens of a second copy at most
# From a token of the second copy to the same of the first
DISTANCES = (64, 192, 512, *(1024 << n for n in range(12)))
LONGEST = {"samples": 512, "random": 512}  # distance, of kinds that show no more further away
READ = 2048  # tokens that are read for one distance, but two sequences at least and sixteen at most
PAIRS = 16  # lines of a list of keys and values
DIGITS = 5  # tokens of a passkey
DEPTHS = 5  # places of a passkey, from the beginning of the context to its end
_PASSKEY = "\nThe pass key is"

SAMPLE, SAMPLES = 256, 64  # tokens of a self-generated text, and number of texts
STEPS = 64
OPENING = 32  # tokens of a sample that are a prompt
PROMPTS = 12  # samples whose beginnings are prompts of greedy texts


@dataclass(frozen=True)
class Questions:
    """Windows of one kind whose answers stand `distance` tokens (or at most as many) before.

    answers: indices into the scored predictions of all windows.
    """

    kind: str
    distance: int
    windows: tuple[Window, ...]
    answers: Ints


def check_recall(subject: Subject, context: int) -> None:
    """Raise RefusedError if recall cannot be measured in windows of `context` tokens."""
    if subject.config.is_encoder_decoder:
        raise RefusedError(f"--recall is for decoders, and {subject.name} is an encoder-decoder")
    if context < (least := 2 * DISTANCES[0]):
        raise RefusedError(
            f"recall needs a context of at least {least} tokens, and --context is {context}: leave "
            "recall out"
        )


def self_samples(subject: Subject, length: int, device: str | None, vocabulary: int) -> list[Any]:
    """Self-generated token ids below `vocabulary`, each (length,); the seed differs from those of
    calibration and training.
    """
    try:
        blocks = sampled_blocks(
            lambda dtype, device=device: subject.load(dtype, device),
            input_device(device),
            subject.checkpoint,
            length,
            SAMPLES,
            derive_seed(0, "evaluation"),
            plain=True,
            trust_remote_code=subject.trust_remote_code,
            vocabulary=vocabulary,
        )
    except RefusedError as error:
        raise RefusedError(f"recall: {error}; or leave recall out") from error
    return [blocks[index]["input_ids"] for index in range(len(blocks))]


def make_questions(
    streams: dict[str, Ints], tokenizer: Any, vocabulary: int, context: int, prefix: int
) -> list[Questions]:
    """Questions of all kinds at all distances up to `context` tokens.

    Args:
        streams: Token ids of `text`, of `samples` or of both, without special tokens: the passages,
            and what stands around a passkey.
        vocabulary: Number of token ids that the model knows.
        prefix: The token that a sequence begins with.
    """
    random = np.random.default_rng(0)
    plain = np.setdiff1d(np.arange(min(vocabulary, len(tokenizer))), tokenizer.all_special_ids)
    words = _words(tokenizer, plain)
    questions: list[Questions] = []
    for kind, stream in (streams | {"random": random.choice(plain, 16 * DISTANCES[2])}).items():
        last, longest = context - COPIED, LONGEST.get(kind, context)
        distances = [d for d in DISTANCES if d + min(d, COPIED) <= context and d <= longest]
        if distances and distances[-1] * 1.25 <= last <= longest:  # the largest possible one
            distances.append(last)
        for distance in distances:
            questions += _second_copies(kind, stream, distance, prefix)
    filler = next(iter(streams.values()))
    for make in (_look_ups, _passkeys):
        for length in sorted({min(length, context) for length in (128, 256, context)}):
            questions += make(tokenizer, words, filler, length, prefix, random)
    return questions


def _sequences(length: int) -> int:
    return int(np.clip(READ // length, 2, 16))


def _second_copies(kind: str, stream: Ints, distance: int, prefix: int) -> Iterable[Questions]:
    """Passages of `distance` tokens followed by a copy of their beginning.

    The context does not determine the first token of the copy: it is no answer.
    """
    copied = min(distance, COPIED)
    count = min(_sequences(distance + copied), len(stream) // distance)
    if not count:
        return
    starts = np.linspace(0, len(stream) - distance, count).astype(int)
    passages = [stream[start : start + distance].tolist() for start in starts]
    windows = [Window((prefix, *passage, *passage[:copied]), copied - 1) for passage in passages]
    yield Questions(kind, distance, tuple(windows), np.arange(count * (copied - 1)))


def _look_ups(
    tokenizer: Any, words: Ints, filler: Ints, length: int, prefix: int, random: np.random.Generator
) -> Iterable[Questions]:
    """`key: value` lines, text, and the same lines in another order,
    whose values are the answers.
    """
    colon, newline = _tokens(tokenizer, ":"), _tokens(tokenizer, "\n")
    line = 2 + len(colon) + len(newline)
    between = length - 2 * PAIRS * line
    if between < 0 or len(filler) < between or len(words) < 2 * PAIRS:
        return
    windows, count = list[Window](), _sequences(length)
    for start in np.linspace(0, len(filler) - between, count).astype(int):
        drawn = random.permutation(words)[: 2 * PAIRS].reshape(PAIRS, 2)
        listed, queried = (
            chain.from_iterable((int(key), *colon, int(value), *newline) for key, value in pairs)
            for pairs in (drawn, random.permutation(drawn))
        )
        ids = (prefix, *listed, *filler[start : start + between].tolist(), *queried)
        # From the first value that is asked for
        windows.append(Window(ids, PAIRS * line - 1 - len(colon)))
    answers = (np.arange(count)[:, None] * windows[0].scored + line * np.arange(PAIRS)).flatten()
    yield Questions("look-up", length, tuple(windows), answers)


def _passkeys(
    tokenizer: Any, words: Ints, filler: Ints, length: int, prefix: int, random: np.random.Generator
) -> Iterable[Questions]:
    """A passkey of random words at some depth of a text, repeated at its end."""
    question, newline = _tokens(tokenizer, _PASSKEY), _tokens(tokenizer, "\n")
    around = length - 2 * len(question) - 2 * DIGITS - len(newline) - 1
    if around < DEPTHS or len(filler) < around or len(words) < DIGITS:
        return
    windows = []
    for depth in np.linspace(0, 1, DEPTHS):
        start = int((len(filler) - around) * depth)
        text, position = filler[start : start + around].tolist(), round(around * depth)
        key = random.choice(words, DIGITS, replace=False).tolist()
        statement = (*question, *key, *newline)
        windows.append(
            Window(
                (prefix, *text[:position], *statement, *text[position:], *question, *key), DIGITS
            )
        )
    yield Questions("passkey", length, tuple(windows), np.arange(DEPTHS * DIGITS))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`; empty if the tokenizer has an unknown token for it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [] if tokenizer.unk_token_id in ids else ids


def _words(tokenizer: Any, plain: Ints) -> Ints:
    """Tokens that are a lower-case word after a space; all of `plain` if there are fewer than
    256.
    """
    texts = tokenizer.batch_decode([[int(token)] for token in plain])
    raw = tokenizer.convert_ids_to_tokens(plain.tolist())
    words = [
        token
        for token, text, piece in zip(plain.tolist(), texts, raw, strict=True)
        if len(word := text.strip()) > 2 and word.isalpha() and word.islower() and piece[0] in "Ġ▁ "
    ]
    return np.array(words) if len(words) >= 256 else plain


def summarize(questions: Sequence[Questions], scores: Scores) -> list[dict[str, Any]]:
    """A JSON-ready record for each kind and distance.

    `scores` begin with the windows of all questions, in their order.
    """
    records, start = [], 0
    for question in questions:
        picks = start + question.answers
        start += sum(window.scored for window in question.windows)
        records.append(
            {
                "kind": question.kind,
                "distance": question.distance,
                "answers": len(picks),
                "accuracy": float(scores["hits"][picks].mean()),
            }
        )
    return records


@torch.inference_mode()
def greedy_texts(
    model: PreTrainedModel,
    openings: Sequence[Sequence[int]],
    steps: int = STEPS,
    vocabulary: int | None = None,
) -> list[Window]:
    """Greedy texts after each opening, up to EOS or `steps` tokens, as windows that score them.

    Token ids are below `vocabulary`, if it is given.

    Raises RefusedError for a model that transformers cannot generate with.
    """
    eos = model.generation_config.eos_token_id if model.generation_config else None
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    greedy = GenerationConfig(do_sample=False, max_new_tokens=steps, pad_token_id=0)
    greedy.eos_token_id = sorted(ends) or None
    rows = model.config.get_text_config(decoder=True).vocab_size
    if vocabulary is not None and vocabulary < rows:
        greedy.suppress_tokens = list(range(vocabulary, rows))
    checkpoint_config = model.generation_config
    model.generation_config = greedy  # without the checkpoint's penalties and sampling
    ids, mask = (
        pad_sequence(
            [torch.tensor(line) for line in lines], batch_first=True, padding_side="left"
        ).to(model.device)
        for lines in (openings, [[1] * len(opening) for opening in openings])
    )
    try:
        output: Tensor = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=greedy
        )
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise RefusedError(
            f"{model.name_or_path} cannot write text: {explain(error)}; leave recall out"
        ) from error
    finally:
        model.generation_config = checkpoint_config
    windows = []
    for opening, text in zip(openings, output[:, ids.shape[1] :].tolist(), strict=True):
        end = next((length for length, token in enumerate(text, 1) if token in ends), steps)
        windows.append(Window((*opening, *text[:end]), end))
    return windows


def agreement(hits: NDArray[np.bool_], windows: Sequence[Window]) -> dict[str, float]:
    """Mean number of tokens before the model leaves the baseline's text, of the `longest` possible
    on average. `hits`: for each scored token of `windows`, whether it is the most probable.
    """
    scored = [window.scored for window in windows]
    lengths = [
        np.append(text_hits, False).argmin() for text_hits in np.split(hits, np.cumsum(scored)[:-1])
    ]
    return {
        "texts": len(windows),
        "longest": float(np.mean(scored)),
        "tokens": float(np.mean(lengths)),
    }


def decode_windows(tokenizer: Any, windows: Sequence[Window]) -> list[dict[str, str]]:
    """Prompts and greedy texts, decoded for a report."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return [
        {"prompt": decode(w.ids[: -w.scored]), "text": decode(w.ids[-w.scored :])} for w in windows
    ]
