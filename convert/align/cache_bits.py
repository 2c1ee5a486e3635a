"""Models whose attention reads a KV cache of few bits (`gqa.convert.align.rounding`), to be measured and trained so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.read import Checkpoint
from gqa.convert.align.attention import PLAIN, Attend, registered
from gqa.convert.align.rounding import reading
from gqa.convert.recast.targets import checkpoint_cache


def layers_with_cache(checkpoint: Checkpoint) -> int:
    """How many layers of a decoder keep keys and values. Raises RefusedError for other models."""
    with suppress(RefusedError):
        if not (cache := checkpoint_cache(checkpoint)).cross:
            return len(cache.layers)
    raise RefusedError(
        f"--cache-bits is for decoders with key/value heads, and {checkpoint.name} is none; leave it out"
    )


@contextmanager
def quantised_attention(bits: Iterable[int]) -> Iterator[None]:
    """Meanwhile models may have caches of these bits (`quantise_cache`)."""
    named = {f"gqa_cache{each}_{name}": (each, name) for each in bits for name in PLAIN}
    functions = {own: partial(_counted, reading(PLAIN[name][0], each)) for own, (each, name) in named.items()}
    with registered(functions, {own: PLAIN[name][1] for own, (_, name) in named.items()}):
        yield


def quantise_cache(model: PreTrainedModel, bits: int, layers: int, name: str) -> None:
    """From now on the attention of a model reads a cache of `bits`; inside `quantised_attention`. Gradients go through
    the rounding as if it were not there.

    Raises RefusedError where it cannot: another implementation of attention, or less than `layers` calls of it. A model
    without weights cannot be run, and is left to `check_reads`.
    """
    plain = model.config._attn_implementation
    if plain not in PLAIN:
        raise RefusedError(f"--cache-bits goes with sdpa and eager attention, {name} has {plain}; give one of them")
    model.set_attn_implementation(f"gqa_cache{bits}_{plain}")
    if model.device.type != "meta":
        ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        check_reads(partial(model, input_ids=ids, use_cache=False), layers, name)


@torch.no_grad()
def check_reads(run: Callable[[], Any], layers: int, name: str) -> None:
    """Raises RefusedError where to run a model takes less than `layers` calls of the attention that was chosen."""
    calls: list[Tensor] = []
    _SEEN.append(calls)
    try:
        run()
    finally:
        _SEEN.remove(calls)
    if len(calls) < layers:
        raise RefusedError(
            f"--cache-bits: {len(calls)} of {layers} layers of {name} call transformers' attention functions; leave it "
            "out for this model"
        )


_SEEN: list[list[Tensor]] = []  # who counts calls


def _counted(
    attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    for calls in _SEEN:
        calls.append(query)
    return attend(module, query, key, value, attention_mask, **options), None
