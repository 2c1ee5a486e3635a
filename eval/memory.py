"""The batch and the context that fit into the memory of a device.

Memory counts weights and KV cache (`gqa.convert.heads.config`). Activations, an engine's blocks and fragmentation are
not modelled: the result is an upper bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gqa.checkpoint.errors import RefusedError
from gqa.convert.heads.config import KVCache
from gqa.eval.options import EvaluateOptions
from gqa.eval.subjects import Subject


def fit(
    subjects: Sequence[Subject], records: Sequence[dict[str, Any]], options: EvaluateOptions, context: int
) -> dict[str, Any]:
    """Add the largest batch of sequences of `context` tokens and the longest single sequence that fit into the memory
    of each tensor-parallel rank to each record, or the reason why there is none. Returns the settings.
    """
    ranks, memory = options.tensor_parallel, options.memory or 0
    for subject, record in zip(subjects, records, strict=True):
        if not subject.cache:
            continue
        batch, longest, refused = None, None, {}
        try:
            if (query := record["heads"]["query"]) % ranks:
                raise RefusedError(f"{ranks} ranks are not possible for {query} query heads: they must divide them")
            batch, longest = what_fits(*cache_and_weights(subject, options.precision), memory, context, ranks)
        except RefusedError as error:  # of this conversion; the ranks may suit another
            refused = {"impossible": str(error)}
        record["kv_cache"]["fits"] = {"batch": batch, "longest": longest, **refused}
    return {"bytes": memory, "ranks": ranks, "context": context, "precision": options.precision}


def cache_and_weights(subject: Subject, precision: str) -> tuple[KVCache, int]:
    """KV cache, and bytes of the weights, in `precision`; `auto`: as stored."""
    cache, checkpoint = subject.cache, subject.checkpoint
    assert cache
    if precision == "auto":
        return cache, checkpoint.nbytes
    number = 4 if precision == "float32" else 2
    floats = [spec for spec in checkpoint.tensors.values() if spec.dtype in ("F64", "F32", "F16", "BF16")]
    extra_bytes = sum(number * spec.numel - spec.nbytes for spec in floats)
    return replace(cache, bytes_per_number=number), checkpoint.nbytes + extra_bytes


def rank_cache(cache: KVCache, ranks: int) -> KVCache:
    """The part of a KV cache on one of `ranks` tensor-parallel ranks.

    As in vLLM, KV heads are split if `ranks` divides them, and replicated, one a rank, if they divide `ranks`. Raises
    RefusedError otherwise. `fit` checks the query heads.
    """
    for layer in (*cache.layers, *cache.cross):
        if ranks < 1 or (layer.heads % ranks and ranks % layer.heads):
            raise RefusedError(
                f"{ranks} ranks are not possible for {layer.heads} key/value heads: one must be a multiple of the other"
            )
    self_layers, cross_layers = (tuple(replace(layer, heads=max(layer.heads // ranks, 1)) for layer in kind) for kind in
                  (cache.layers, cache.cross))  # fmt: skip
    return replace(cache, layers=self_layers, cross=cross_layers)


def what_fits(
    cache: KVCache, weights_bytes: int, memory_bytes: int, context: int, ranks: int = 1
) -> tuple[int, int | None]:
    """Number of sequences of `context` tokens that fit beside the weights, and tokens of the longest single sequence.

    Both are 0 if the weights alone do not fit. The second is None if memory is no limit: every layer has a window and
    all windows fit. `KVCache.context` limits what the model can use.

    Args:
        weights_bytes: Of the whole model; a rank holds its share, rounded up.
        memory_bytes: Of one rank. Activations are not modelled: subtract what they need.
        ranks: Tensor-parallel ranks, see `rank_cache`.

    Raises:
        RefusedError: The ranks cannot share the KV heads.
    """
    local = rank_cache(cache, ranks)
    free = max(memory_bytes - -(-weights_bytes // ranks), 0)
    batch = free // local.bytes_at(context)
    window = max((layer.window or 0 for layer in local.layers), default=0)  # from here on the cache grows linearly
    growth = local.bytes_at(window + 1) - local.bytes_at(window)
    if not growth and local.bytes_at(window) <= free:
        return batch, None
    return batch, bisect_right(range(free // max(growth, 1) + 1), free, key=local.bytes_at) - 1  # it grows no slower
