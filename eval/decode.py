"""Time per generated token, beside the time that memory needs at least to deliver what a token reads.

A decode step reads all weights once and the keys and values of every sequence (GQA, arXiv 2305.13245, section 1): at
batch 1 and a short context the weights dominate and fewer KV heads cannot be much faster; the gain grows with batch x
context. The cache's share of a step's bytes is what a conversion can make smaller; the share of the memory's speed that
a step reached is above 1 where weights stay in a processor's cache.

What is timed is a plain loop over transformers' model with its default cache, which appends by copying: a step reads
and writes every layer's keys and values once more than the roofline counts. Small models are bound by the loop itself.
Without a mask transformers' sdpa uses torch's grouped kernel; on processors that may be bound by arithmetic in bfloat16
and then no faster with fewer heads (`benchmarks/attention.py --dtype bfloat16` shows it), float32 is bound by memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.write import Progress, unwatched
from gqa.eval.memory import check_length, last_logits, model_cache, model_name, random_tokens, vocabulary_size

WARM_UP_STEPS = 2
BANDWIDTH_REPEATS = 7
BANDWIDTH_BYTES = 1 << 28  # far more than a processor's caches hold


@dataclass(frozen=True)
class Decoded:
    """One run: the greedy tokens (batch, steps + 1), and the seconds of the prefill and of one decode step."""

    tokens: Tensor
    prefill_seconds: float
    seconds_per_token: float


@dataclass(frozen=True)
class DecodePoint:
    """One model at one batch size and context length."""

    batch: int
    context: int  # tokens of each prompt
    prefill_seconds: float  # until the first token is known (TTFT), the median of the repeats
    seconds_per_token: float  # of one decode step, which gives every sequence a token, the median of the repeats
    fastest: float  # of the repeats' seconds per token
    slowest: float
    tokens_per_second: float  # of the whole batch
    bytes_per_step: int  # that must be read for one step: all weights once, and the KV cache of the context
    cache_bytes: int  # the KV cache's part of them
    roofline_seconds: float  # what reading them takes at the measured memory bandwidth
    attention: str  # the loaded model's attn_implementation
    dtype: str
    turns: tuple[int, ...]  # when each repeat ran among those of all models: (0, 2) beside another model's (1, 3)


def measure_decode(
    models: Mapping[str, PreTrainedModel],
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    repeats: int,
    progress: Progress = unwatched,
) -> dict[str, list[DecodePoint]]:
    """Time prefill and greedy decoding of every model at every batch size and context length.

    The models take turns (A, B, A, B ...) after a warm-up of each, so that noise hits all alike, on the same random
    prompts. They are used as they are loaded: device, dtype and attention implementation are theirs.

    Args:
        models: By name; all of them stay loaded.
        batches: Numbers of sequences.
        contexts: Tokens of each prompt.
        steps: Decode steps of a run, each of one token per sequence, after the prefill has given the first.
        repeats: Timed runs of each model at each point.
        progress: Called with 1 after each of them.

    Returns:
        Points by model, in the order of batches and, within one, of contexts.

    Raises:
        RefusedError: Before anything is timed, where a model has fewer positions than a context and the steps need,
            its key/value heads are not known, or a number is not positive.
        torch.OutOfMemoryError: A batch does not fit on the GPU.
    """
    if min(steps, repeats, *batches, *contexts, 1) < 1:
        raise RefusedError("batch sizes, contexts, steps and repeats must be 1 or more")
    for model in models.values():
        check_length(model, max(contexts, default=1) + steps)
    caches = {name: model_cache(model) for name, model in models.items()}
    bandwidth = {device: memory_bandwidth(device) for device in {model.device for model in models.values()}}
    vocabulary = min(map(vocabulary_size, models.values()), default=1)
    points: dict[str, list[DecodePoint]] = {name: [] for name in models}
    for batch, context in product(batches, contexts):
        prompts = random_tokens(vocabulary, batch, context)
        for model in models.values():
            greedy_decode(model, prompts.to(model.device), min(steps, WARM_UP_STEPS))
        runs: list[tuple[str, Decoded]] = []
        for name, model in [*models.items()] * repeats:
            runs.append((name, greedy_decode(model, prompts.to(model.device), steps)))
            progress(1)
        for name, model in models.items():
            own = {turn: run for turn, (whose, run) in enumerate(runs) if whose == name}
            cache_bytes = batch * caches[name].bytes_at(context)
            points[name].append(_point(model, batch, context, own, cache_bytes, bandwidth[model.device]))
    return points


def _point(
    model: PreTrainedModel, batch: int, context: int, runs: Mapping[int, Decoded], cache_bytes: int, bandwidth: float
) -> DecodePoint:
    seconds = [run.seconds_per_token for run in runs.values()]
    bytes_per_step = weights_read(model) + cache_bytes
    return DecodePoint(
        batch=batch,
        context=context,
        prefill_seconds=statistics.median(run.prefill_seconds for run in runs.values()),
        seconds_per_token=statistics.median(seconds),
        fastest=min(seconds),
        slowest=max(seconds),
        tokens_per_second=batch / statistics.median(seconds),
        bytes_per_step=bytes_per_step,
        cache_bytes=cache_bytes,
        roofline_seconds=bytes_per_step / bandwidth,
        attention=str(model.config._attn_implementation),
        dtype=str(model.dtype).removeprefix("torch."),
        turns=tuple(runs),
    )


@torch.inference_mode()
def greedy_decode(model: PreTrainedModel, ids: Tensor, steps: int) -> Decoded:
    """Greedy decoding of `steps` tokens after the first, timed apart from the prefill.

    Args:
        model: In eval mode.
        ids: Prompts (batch, context), without padding.
        steps: Forward passes of one token per sequence.

    Raises:
        RefusedError: The model returns no cache to decode with.
    """
    only_last = last_logits(model)
    start = clock(model.device)
    output = model(input_ids=ids, use_cache=True, **only_last)
    tokens = [output.logits[:, -1:].argmax(-1)]
    prefilled = clock(model.device)
    cache = output.get("past_key_values")
    if cache is None:
        raise RefusedError(f"{model_name(model)} returns no key/value cache: there is no decoding to time")
    for _ in range(steps):
        output = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True, **only_last)
        tokens.append(output.logits[:, -1:].argmax(-1))
    return Decoded(torch.cat(tokens, dim=1), prefilled - start, (clock(model.device) - prefilled) / steps)


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of all parameters, each counted once (tied ones too): what one decode step reads.

    A step looks up single rows of the input embedding, so that table counts only where it is the output's as well.
    All experts of a mixture are counted though a small batch needs few of them.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = getattr(table, "weight", None)
    tied = head is not None and getattr(head, "weight", None) is looked_up
    return sum(p.numel() * p.element_size() for p in model.parameters() if tied or p is not looked_up)


def memory_bandwidth(device: torch.device | str = "cpu", nbytes: int = BANDWIDTH_BYTES) -> float:
    """Bytes per second that torch moves to and from the memory of `device`, as this process gets them.

    The faster of summing a large array (read once) and copying it (read once, written once), best of several runs.
    """
    device = torch.device(device)
    count = nbytes // 4
    source, target = torch.ones(count, device=device), torch.zeros(count, device=device)
    reading, copying = [], []
    for _ in range(BANDWIDTH_REPEATS):
        start = clock(device)
        source.sum()
        middle = clock(device)
        target.copy_(source)
        reading.append(middle - start)
        copying.append(clock(device) - middle)
    return max(4 * count / min(reading), 8 * count / min(copying))


def clock(device: torch.device) -> float:
    """Seconds, once all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
