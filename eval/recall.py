"""Recall of the context, which perplexity hardly shows: repeated passages, values by their keys,
passkeys; and agreement with the baseline's greedy texts. No data is needed: passages are from text,
from generated text, or random tokens.

A question is a window (`gqa.eval.scoring`). Its answers are the predictions that the context
determines; an answer is right if it is the most probable token.

Two greedy texts are equal up to the first difference, so only the baseline generates. A model
scores that text and leaves it at the first token that is not its most probable one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from gqa.convert.generate.self_samples import derive_seed, sampled_blocks
from gqa.core.errors import RefusedError, explain
from gqa.eval.scoring import Window
from gqa.eval.subjects import Subject, input_device

Ints = NDArray[np.integer[Any]]

# Second copies of passages.
COPIED_TOKENS = 192  # tokens of a second copy at most
# From a token of the second copy to the same of the first.
DISTANCES = (64, 192, 512, *(1024 << n for n in range(12)))
LONGEST = {"generated": 512, "random": 512}  # distance, of kinds that show no more further away
READ = 2048  # tokens that are read for one distance, but two sequences at least and sixteen at most

# Values by their keys, and passkeys.
LENGTHS = (128, 256)  # tokens of a sequence; another length is the context
PAIRS = 16  # lines of a list of keys and values
DIGITS = 5  # tokens of a passkey
DEPTHS = 5  # places of a passkey, from the beginning of the context to its end
_PASSKEY = "\nThe pass key is"

# Generated texts, and greedy texts.
SAMPLE = 256  # tokens of a generated text
SAMPLES = 64  # number of generated texts
STEPS = 64  # tokens of a greedy text at most
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
        raise RefusedError(
            f"--recall works only with decoders, but {subject.name} is an encoder-decoder; remove "
            "--recall"
        )
    least = 2 * DISTANCES[0]
    if context < least:
        raise RefusedError(
            f"recall needs a context of at least {least} tokens, but --context is {context}; pass "
            "a larger --context, or --no-recall"
        )


def self_samples(subject: Subject, length: int, device: str | None, vocabulary: int) -> list[Any]:
    """Generated token ids below `vocabulary`, SAMPLES texts, each (length,); the seed differs
    from those of calibration and training.

    Raises RefusedError if the model cannot be sampled from.
    """
    try:
        blocks = sampled_blocks(
            lambda dtype, device=device: subject.load(dtype, device),
            input_device(device),
            subject.checkpoint,
            block_size=length,
            n_blocks=SAMPLES,
            seed=derive_seed(0, "evaluation"),
            plain=True,
            trust_remote_code=subject.trust_remote_code,
            id_limit=vocabulary,
        )
    except RefusedError as error:
        raise RefusedError(f"recall cannot be measured: {error}, or pass --no-recall") from error
    return [blocks[index]["input_ids"] for index in range(len(blocks))]


def make_questions(
    passages: Mapping[str, Ints], tokenizer: Any, vocabulary: int, context: int, prefix: int
) -> list[Questions]:
    """Questions of all kinds at all distances up to `context` tokens.

    Args:
        passages: Token ids of `text`, of `generated` or of both, without special tokens: what is
            copied, and, of the first of them, what stands around a passkey.
        tokenizer: Of all models.
        vocabulary: Number of token ids that the models know.
        context: Tokens of a question at most.
        prefix: The token that a sequence begins with.
    """
    random = np.random.default_rng(0)
    known = np.arange(min(vocabulary, len(tokenizer)))
    plain = np.setdiff1d(known, tokenizer.all_special_ids)
    words = _words(tokenizer, plain)

    questions: list[Questions] = []
    random_tokens = random.choice(plain, 16 * DISTANCES[2])
    for kind, ids in {**passages, "random": random_tokens}.items():
        for distance in _distances(kind, context):
            questions += _second_copies(kind, ids, distance, prefix)

    filler = next(iter(passages.values()))
    lengths = sorted({min(length, context) for length in (*LENGTHS, context)})
    for make in (_look_ups, _passkeys):
        for length in lengths:
            questions += make(tokenizer, words, filler, length, prefix, random)
    return questions


def _distances(kind: str, context: int) -> list[int]:
    """Distances of the copies of a kind of passage that fit into the context."""
    longest = LONGEST.get(kind, context)
    distances = [
        distance
        for distance in DISTANCES
        if distance + min(distance, COPIED_TOKENS) <= context and distance <= longest
    ]
    # Also the largest possible one, if it is not nearly one of them.
    last = context - COPIED_TOKENS
    if distances and distances[-1] * 1.25 <= last <= longest:
        distances.append(last)
    return distances


def _sequences(length: int) -> int:
    """How many sequences of this length are read for one distance."""
    return int(np.clip(READ // length, 2, 16))


def _second_copies(kind: str, ids: Ints, distance: int, prefix: int) -> Iterator[Questions]:
    """Passages of `distance` tokens followed by a copy of their beginning.

    The context does not determine the first token of the copy: it is no answer.
    """
    copied = min(distance, COPIED_TOKENS)
    count = min(_sequences(distance + copied), len(ids) // distance)
    if not count:
        return

    windows = []
    for start in np.linspace(0, len(ids) - distance, count).astype(int):
        passage = ids[start : start + distance].tolist()
        windows.append(Window((prefix, *passage, *passage[:copied]), copied - 1))
    yield Questions(kind, distance, tuple(windows), np.arange(count * (copied - 1)))


def _look_ups(
    tokenizer: Any, words: Ints, filler: Ints, length: int, prefix: int, random: np.random.Generator
) -> Iterator[Questions]:
    """`key: value` lines, text, and the same lines in another order, whose values are the
    answers.
    """
    colon = _tokens(tokenizer, ":")
    newline = _tokens(tokenizer, "\n")
    line = 2 + len(colon) + len(newline)  # tokens of it
    between = length - 2 * PAIRS * line
    if between < 0 or len(filler) < between or len(words) < 2 * PAIRS:
        return

    def lines_of(pairs: Ints) -> list[int]:
        lines = [[int(key), *colon, int(value), *newline] for key, value in pairs]
        return list(chain.from_iterable(lines))

    # A line is key, colon, value, newline. The lines at the end are scored from their first value
    # on, so the first scored token is an answer, and then one every `line` tokens.
    scored = PAIRS * line - 1 - len(colon)
    windows = []
    for start in np.linspace(0, len(filler) - between, _sequences(length)).astype(int):
        pairs = random.permutation(words)[: 2 * PAIRS].reshape(PAIRS, 2)
        text = filler[start : start + between].tolist()
        ids = (prefix, *lines_of(pairs), *text, *lines_of(random.permutation(pairs)))
        windows.append(Window(ids, scored))

    first_of_windows = scored * np.arange(len(windows))
    answers = (first_of_windows[:, None] + line * np.arange(PAIRS)).flatten()
    yield Questions("values", length, tuple(windows), answers)


def _passkeys(
    tokenizer: Any, words: Ints, filler: Ints, length: int, prefix: int, random: np.random.Generator
) -> Iterator[Questions]:
    """A passkey of random words at some depth of a text, repeated at its end."""
    question = _tokens(tokenizer, _PASSKEY)
    newline = _tokens(tokenizer, "\n")
    around = length - 2 * len(question) - 2 * DIGITS - len(newline) - 1
    if around < DEPTHS or len(filler) < around or len(words) < DIGITS:
        return

    windows = []
    for depth in np.linspace(0, 1, DEPTHS):
        start = int((len(filler) - around) * depth)
        text = filler[start : start + around].tolist()
        position = round(around * depth)
        key = random.choice(words, DIGITS, replace=False).tolist()
        statement = (*question, *key, *newline)
        ids = (prefix, *text[:position], *statement, *text[position:], *question, *key)
        windows.append(Window(ids, DIGITS))
    yield Questions("passkeys", length, tuple(windows), np.arange(DEPTHS * DIGITS))


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
    words = []
    for token, text, piece in zip(plain.tolist(), texts, raw, strict=True):
        word = text.strip()
        is_word = len(word) > 2 and word.isalpha() and word.islower()
        if is_word and piece[0] in "Ġ▁ ":
            words.append(token)
    return np.array(words) if len(words) >= 256 else plain


def summarize(questions: Sequence[Questions], hits: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """A JSON-ready record for each kind and distance.

    hits: Whether each scored token is the most probable one, (scored tokens,), of the windows of
        all questions, in their order.
    """
    records = []
    start = 0
    for question in questions:
        answers = hits[start + question.answers]
        start += sum(window.scored for window in question.windows)
        records.append(
            {
                "kind": question.kind,
                "distance": question.distance,
                "answers": len(answers),
                "accuracy": float(answers.mean()),
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
    ends = _end_tokens(model)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=steps, pad_token_id=0)
    greedy.eos_token_id = sorted(ends) or None
    rows = model.config.get_text_config(decoder=True).vocab_size
    if vocabulary is not None and vocabulary < rows:
        greedy.suppress_tokens = list(range(vocabulary, rows))

    ids = _pad_left(openings).to(model.device)
    mask = _pad_left([[1] * len(opening) for opening in openings]).to(model.device)
    checkpoint_config = model.generation_config
    model.generation_config = greedy  # without the checkpoint's penalties and sampling
    try:
        output: Tensor = model.generate(
            input_ids=ids, attention_mask=mask, generation_config=greedy
        )
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise RefusedError(
            f"{model.name_or_path} cannot write text ({explain(error)}), so recall cannot be "
            "measured; pass --no-recall"
        ) from error
    finally:
        model.generation_config = checkpoint_config

    windows = []
    for opening, text in zip(openings, output[:, ids.shape[1] :].tolist(), strict=True):
        # The text ends with the first token that ends it.
        length = next((number for number, token in enumerate(text, 1) if token in ends), steps)
        windows.append(Window((*opening, *text[:length]), length))
    return windows


def _end_tokens(model: PreTrainedModel) -> set[int]:
    """The tokens that end a text, by the model's generation config."""
    eos = model.generation_config.eos_token_id if model.generation_config else None
    return {eos} if isinstance(eos, int) else set(eos or ())


def _pad_left(lines: Sequence[Sequence[int]]) -> Tensor:
    """Lines of numbers as (B, T), filled with zeros on the left."""
    rows = [torch.tensor(line) for line in lines]
    return pad_sequence(rows, batch_first=True, padding_side="left")


def agreement(hits: NDArray[np.bool_], windows: Sequence[Window]) -> dict[str, float]:
    """How long a model's greedy texts are those of the baseline.

    Args:
        hits: For each scored token of `windows`, whether it is the model's most probable one.
        windows: Greedy texts of the baseline.

    Returns:
        `texts`: their number; `longest`: their mean number of tokens; `tokens`: the mean number of
        tokens before the model leaves them.
    """
    lengths = [window.scored for window in windows]
    hits_of_texts = np.split(hits, np.cumsum(lengths)[:-1])
    # The index of the first False; one is appended, for a text that the model never leaves.
    equal_tokens = [np.append(text_hits, False).argmin() for text_hits in hits_of_texts]
    return {
        "texts": len(windows),
        "longest": float(np.mean(lengths)),
        "tokens": float(np.mean(equal_tokens)),
    }


def decode_windows(tokenizer: Any, windows: Sequence[Window]) -> list[dict[str, str]]:
    """Prompts and greedy texts, decoded for a report."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return [
        {
            "prompt": decode(window.ids[: -window.scored]),
            "text": decode(window.ids[-window.scored :]),
        }
        for window in windows
    ]
