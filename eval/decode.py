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
WARM_UP_STEPS, REPEATS = 2, 5


def decode_contexts(
    subjects: Sequence[Subject], lengths: Sequence[int] | None, steps: int
) -> tuple[int, ...]:
    """Tokens of the prompts, or sources, to time.

    Raises RefusedError if a model cannot be timed with them.
    """
    longest = min([subject.positions or MAX_DECODE for subject in subjects] + [MAX_DECODE])
    contexts = tuple(
        lengths or dict.fromkeys(max(1, share - steps) for share in (longest // 2, longest))
    )
    for subject in subjects:
        if subject.positions and max(contexts) + steps > subject.positions:
            raise RefusedError(
                f"--decode: {max(contexts):,} tokens and {steps:,} steps are more than the "
                f"{subject.positions:,} "
                f"positions of {subject.name}; give smaller --decode-contexts or --decode-steps"
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
    models, steps = (
        [subject.load(options.precision, options.device) for subject in subjects],
        options.decode_steps,
    )
    vocabulary = min(subject.vocabulary for subject in subjects)
    for record in records:
        record["decode"] = {"steps": steps, "repeats": REPEATS, "points": []}
    total = len(models) * len(options.decode_batches) * len(contexts) * REPEATS
    with Watcher(options.quiet) as watcher:
        watcher.stage("decoding", total, "run")
        for batch, context in product(options.decode_batches, contexts):
            prompts = torch.randint(
                vocabulary, (batch, context), generator=torch.Generator().manual_seed(0)
            )
            for model in models:
                greedy_decode(model, prompts.to(model.device), min(steps, WARM_UP_STEPS))
            runs: list[list[tuple[float, float]]] = [[] for _ in models]
            for _ in range(REPEATS):
                for model, model_runs in zip(models, runs, strict=True):
                    model_runs.append(greedy_decode(model, prompts.to(model.device), steps)[1:])
                    watcher.update()
            for record, model, model_runs in zip(records, models, runs, strict=True):
                prefills, seconds = zip(*model_runs, strict=True)
                record["decode"]["points"].append(
                    {
                        "batch": batch,
                        "context": context,
                        "prefill_seconds": statistics.median(prefills),  # to first token
                        # Of one decode step: a token for every sequence
                        "seconds_per_token": statistics.median(seconds),
                        "fastest": min(seconds),
                        "slowest": max(seconds),
                        "tokens_per_second": batch
                        / statistics.median(seconds),  # of the whole batch
                        **numerics(model),
                    }
                )


@torch.inference_mode()
def greedy_decode(model: PreTrainedModel, ids: Tensor, steps: int) -> tuple[Tensor, float, float]:
    """Greedy tokens (batch, steps + 1), seconds of the prefill and of one decode step.

    `ids`: prompts (batch, context), without padding: sources where there is an encoder, which is
    part of the prefill.
    """
    start, encoder_inputs = clock(model.device), dict[str, Any]()
    if model.config.is_encoder_decoder:
        encoder_inputs["encoder_outputs"] = model.get_encoder()(input_ids=ids, return_dict=True)
        ids = ids.new_full((len(ids), 1), first_token(model.config, model.name_or_path))
    token, cache = _read(model, ids, **encoder_inputs)
    prefilled, tokens = clock(model.device), [token]
    for _ in range(steps):
        token, cache = _read(model, token, cache, **encoder_inputs)
        tokens.append(token)
    return torch.cat(tokens, dim=1), prefilled - start, (clock(model.device) - prefilled) / steps


def _read(
    model: PreTrainedModel, ids: Tensor, cache: Any = None, **encoder_inputs: Any
) -> tuple[Tensor, Any]:
    """Greedy tokens (batch, 1) after `ids` (batch, T), and the cache.

    Raises RefusedError if there is none.
    """
    name = cache_name(model)
    options: dict[str, Any] = {
        "decoder_input_ids" if encoder_inputs else "input_ids": ids,
        name: cache,
    }
    if ids.shape[1] > 1 and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    output = model(**encoder_inputs, **options, use_cache=True)
    if output.get(name) is None:
        raise RefusedError(
            f"--decode needs a model that returns a key/value cache; {model.name_or_path} does not"
        )
    return output.logits[:, -1:].argmax(-1), output[name]


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
