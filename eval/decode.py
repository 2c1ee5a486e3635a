"""Time per generated token.

A decode step reads all weights once and the keys and values of every sequence (GQA, arXiv
2305.13245, section 1): at batch 1 and a short context the weights dominate and fewer KV heads gain
little; the gain grows with batch x context. The context of an encoder-decoder is the source: the
encoder is part of the prefill, and a step reads the cross-attention cache.

The timed code is a plain loop over transformers' model with its default cache, which appends by
copying: a step reads and writes all keys and values once more than necessary. Small models are
bound by the loop. Without a mask transformers' sdpa uses torch's grouped kernel, which on CPUs may
be bound by bfloat16 arithmetic and then gains nothing from fewer heads; float32 is bound by memory.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gqa.core.console import Watcher
from gqa.core.errors import RefusedError
from gqa.corpus.tokens import first_token
from gqa.eval.options import EvaluateOptions
from gqa.eval.subjects import Subject, numerics
from gqa.models.loading import cache_name

MAX_DECODE = 4096
WARM_UP_STEPS = 2
REPEATS = 5


@dataclass(frozen=True)
class Timing:
    """One run of greedy decoding: seconds of the prefill, and of one decode step."""

    prefill_seconds: float
    step_seconds: float


def decode_contexts(
    subjects: Sequence[Subject], lengths: Sequence[int] | None, steps: int
) -> tuple[int, ...]:
    """Tokens of the prompts, or sources, to time: `lengths`, or by default so many that a run ends
    at half and at all of the models' positions.

    Raises RefusedError if a model cannot be timed with them.
    """
    longest = min([MAX_DECODE, *(subject.positions or MAX_DECODE for subject in subjects)])
    by_default = [max(1, end - steps) for end in (longest // 2, longest)]
    contexts = tuple(lengths or dict.fromkeys(by_default))

    for subject in subjects:
        if subject.positions and max(contexts) + steps > subject.positions:
            raise RefusedError(
                f"--decode: {max(contexts):,} tokens and {steps:,} steps are more than the "
                f"{subject.positions:,} positions of {subject.name}; pass smaller "
                "--decode-contexts or --decode-steps"
            )
    return contexts


def time_decoding(
    subjects: Sequence[Subject],
    records: Sequence[dict[str, Any]],
    options: EvaluateOptions,
    contexts: Sequence[int],
) -> None:
    """Time prefill and greedy decoding of every model at every batch size and after prompts of
    every length, REPEATS times, and add JSON-ready points to each record.

    All models are in memory at once: runs are interleaved (A, B, A, B ...) after a warm-up of each,
    so that noise affects all alike. All read the same random prompts, which are the sources where
    there is an encoder. A run gives the first token in the prefill, and one token per sequence in
    each step.

    Raises torch.OutOfMemoryError if a batch does not fit on the GPU.
    """
    models = [subject.load(options.precision, options.device) for subject in subjects]
    vocabulary = min(subject.vocabulary for subject in subjects)
    steps = options.decode_steps
    for record in records:
        record["decode"] = {"steps": steps, "repeats": REPEATS, "points": []}

    runs = len(models) * len(options.decode_batches) * len(contexts) * REPEATS
    with Watcher(options.quiet) as watcher:
        watcher.stage("decoding", runs, "run")
        for batch, context in product(options.decode_batches, contexts):
            generator = torch.Generator().manual_seed(0)
            prompts = torch.randint(vocabulary, (batch, context), generator=generator)
            timings = _interleaved_timings(models, prompts, steps, watcher)
            for record, model, timings_of_model in zip(records, models, timings, strict=True):
                point = _point(batch, context, timings_of_model)
                record["decode"]["points"].append(point | numerics(model))


def _interleaved_timings(
    models: Sequence[PreTrainedModel], prompts: Tensor, steps: int, watcher: Watcher
) -> list[list[Timing]]:
    """REPEATS timings of each model. prompts: (batch, context)."""
    for model in models:
        greedy_decode(model, prompts.to(model.device), min(steps, WARM_UP_STEPS))

    timings: list[list[Timing]] = [[] for _ in models]
    for _ in range(REPEATS):
        for model, timings_of_model in zip(models, timings, strict=True):
            _, timing = greedy_decode(model, prompts.to(model.device), steps)
            timings_of_model.append(timing)
            watcher.update()
    return timings


def _point(batch: int, context: int, timings: Sequence[Timing]) -> dict[str, Any]:
    """JSON-ready numbers of one batch size and context."""
    step_seconds = [timing.step_seconds for timing in timings]
    median_step = statistics.median(step_seconds)
    return {
        "batch": batch,
        "context": context,
        # To the first token.
        "prefill_seconds": statistics.median(timing.prefill_seconds for timing in timings),
        # Of one decode step, which gives a token for every sequence.
        "seconds_per_token": median_step,
        "fastest": min(step_seconds),
        "slowest": max(step_seconds),
        # Of the whole batch.
        "tokens_per_second": batch / median_step,
    }


@torch.inference_mode()
def greedy_decode(model: PreTrainedModel, ids: Tensor, steps: int) -> tuple[Tensor, Timing]:
    """Greedy tokens (batch, steps + 1), and how long they took.

    `ids`: prompts (batch, context), without padding: sources where there is an encoder, which is
    part of the prefill.
    """
    start = clock(model.device)
    encoder_inputs: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        encoder_inputs["encoder_outputs"] = model.get_encoder()(input_ids=ids, return_dict=True)
        ids = ids.new_full((len(ids), 1), first_token(model.config, model.name_or_path))
    token, cache = _read(model, ids, **encoder_inputs)
    prefilled = clock(model.device)

    tokens = [token]
    for _ in range(steps):
        token, cache = _read(model, token, cache, **encoder_inputs)
        tokens.append(token)
    end = clock(model.device)

    timing = Timing(prefilled - start, (end - prefilled) / steps)
    return torch.cat(tokens, dim=1), timing


def _read(
    model: PreTrainedModel, ids: Tensor, cache: Any = None, **encoder_inputs: Any
) -> tuple[Tensor, Any]:
    """Greedy tokens (batch, 1) after `ids` (batch, T), and the cache.

    Raises RefusedError if there is none.
    """
    name = cache_name(model)
    ids_name = "decoder_input_ids" if encoder_inputs else "input_ids"
    options: dict[str, Any] = {ids_name: ids, name: cache}
    # Of a prompt only the last logits are needed.
    if ids.shape[1] > 1 and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    output = model(**encoder_inputs, **options, use_cache=True)
    if output.get(name) is None:
        raise RefusedError(
            f"--decode needs a model that returns a KV cache, but {model.name_or_path} returns "
            "none; remove --decode"
        )
    return output.logits[:, -1:].argmax(-1), output[name]


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
