"""What fits into a given memory, by the formula of `gqa.convert.heads.kv_cache`.

Budgets count weights and KV cache alone: activations, an engine's blocks and the allocator's losses are not modelled,
so what fits here is an upper bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gqa.checkpoint.errors import RefusedError
from gqa.convert.heads.kv_cache import KVCache
from gqa.eval.subjects import Subject


def fit(subjects: Sequence[Subject], memory: int, ranks: int, context: int) -> dict[str, Any]:
    """Add to each record the largest batch and context that fit into the memory of each of `ranks` that share it."""
    for subject in subjects:
        if not subject.cache:
            continue
        batch, longest, refused = None, None, {}
        try:
            if (query := subject.record["heads"]["query"]) % ranks:
                raise RefusedError(f"{ranks} ranks are not possible for {query} query heads: they must divide them")
            batch, longest = what_fits(subject.cache, subject.weight_bytes, memory, context, ranks)
        except RefusedError as error:  # of this conversion; the ranks may suit another
            refused = {"impossible": str(error)}
        subject.record["kv_cache"]["fits"] = {"batch": batch, "longest": longest, **refused}
    return {"bytes": memory, "ranks": ranks, "context": context}


def rank_cache(cache: KVCache, ranks: int) -> KVCache:
    """What one of `ranks` tensor-parallel ranks holds of a KV cache.

    Every layer's KV heads are split where `ranks` divides them and replicated, one a rank, where they divide `ranks`
    (as vLLM does it). That `ranks` divides the query heads is for `fit` to say.
    Raises RefusedError where neither holds.
    """
    for layer in cache.layers:
        if ranks < 1 or (layer.heads % ranks and ranks % layer.heads):
            raise RefusedError(
                f"{ranks} ranks are not possible for {layer.heads} key/value heads: one must be a multiple of the other"
            )
    return replace(cache, layers=tuple(replace(layer, heads=max(layer.heads // ranks, 1)) for layer in cache.layers))


def what_fits(
    cache: KVCache, weights_bytes: int, memory_bytes: int, context: int, ranks: int = 1
) -> tuple[int, int | None]:
    """How many sequences of `context` tokens fit beside the weights, and how long a single one may be, in tokens.

    0 where the weights alone do not fit. None tokens where memory is no limit: every layer has a window and all of them
    fit. What the model can use of it is another limit (`KVCache.context`).

    Args:
        weights_bytes: Of the whole model; a rank holds its share, rounded up.
        memory_bytes: Of one rank. Activations are not modelled: subtract what they need.
        ranks: Tensor-parallel ranks, see `rank_cache`.

    Raises:
        RefusedError: The ranks cannot share the KV heads.
    """
    held = rank_cache(cache, ranks)
    free = max(memory_bytes - -(-weights_bytes // ranks), 0)
    batch = free // held.bytes_at(context)
    window = max((layer.window or 0 for layer in held.layers), default=0)  # from here on the cache grows linearly
    growth = held.bytes_at(window + 1) - held.bytes_at(window)
    if not growth and held.bytes_at(window) <= free:
        return batch, None
    return batch, bisect_right(range(free // max(growth, 1) + 1), free, key=held.bytes_at) - 1  # it grows no slower
