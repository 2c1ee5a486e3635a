"""The checkpoints to evaluate, their records from config and headers, and the batch and context that fit into memory.

Memory counts weights and KV cache (`gqa.convert.heads.kv_cache`). Activations, an engine's blocks and fragmentation are
not modelled: the result is an upper bound.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import RefusedError, explain, one_line
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.loading import check_predicts_tokens, positions, read_auto_config
from gqa.checkpoint.provenance import PROVENANCE, UPTRAINING, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert.heads.config import read_config
from gqa.convert.heads.kv_cache import KVCache
from gqa.convert.recast.targets import as_it_is, checkpoint_cache
from gqa.corpus.pairs import PairEncoder


@dataclass(frozen=True)
class Subject:
    """A checkpoint to evaluate. transformers loads `path`; tables show `name`."""

    name: str
    path: str
    checkpoint: Checkpoint
    trust_remote_code: bool = False
    cache_bits: int | None = None

    def quantised(self, bits: int) -> Subject:
        """The same checkpoint with a KV cache of `bits`."""
        return replace(self, name=f"{self.name} (int{bits})", cache_bits=bits)

    @cached_property
    def config(self) -> Any:
        """transformers' config."""
        try:
            return read_auto_config(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # whatever a library raises about a config it cannot read
            raise RefusedError(f"transformers cannot read the config of {self.name}: {explain(error)}") from error

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.checkpoint, self.trust_remote_code)

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config(decoder=True)

    @property
    def vocabulary(self) -> int:
        return int(self.text_config.vocab_size)

    @property
    def positions(self) -> int | None:
        """Positions in the model's config, or None."""
        return positions(self.config)

    @cached_property
    def encoder(self) -> PairEncoder | None:
        """Encoder of pairs for an encoder-decoder, else None."""
        return PairEncoder(self.config, self.tokenizer, self.name) if self.config.is_encoder_decoder else None

    def check_predicts_tokens(self) -> None:
        """Raise RefusedError for a model that predicts no tokens."""
        check_predicts_tokens(self.config, self.name, self.trust_remote_code)

    @cached_property
    def cache(self) -> KVCache | None:
        """KV cache by formula; None for an architecture whose KV heads are unknown."""
        try:
            formula = checkpoint_cache(self.checkpoint)
        except RefusedError:
            return None
        return formula.quantised(self.cache_bits) if self.cache_bits else formula

    def cache_and_weights(self, precision: str) -> tuple[KVCache, int]:
        """KV cache, and bytes of the weights, in `precision`; `auto`: as stored."""
        assert self.cache
        if precision == "auto":
            return self.cache, self.checkpoint.nbytes
        number = 4 if precision == "float32" else 2
        floats = [spec for spec in self.checkpoint.tensors.values() if spec.dtype in ("F64", "F32", "F16", "BF16")]
        extra_bytes = sum(number * spec.numel - spec.nbytes for spec in floats)
        return replace(self.cache, bytes_per_number=number), self.checkpoint.nbytes + extra_bytes

    @cached_property
    def record(self) -> dict[str, Any]:
        """JSON-ready record from config and headers; measurements are added to it."""
        record: dict[str, Any] = {
            "name": self.name,
            "path": self.path,
            "revision": self.checkpoint.revision,
            "model_type": self.config.model_type,
            "parameters": self.checkpoint.parameters,
            "weight_bytes": self.checkpoint.nbytes,
            "provenance": read_record(self.checkpoint, PROVENANCE),
            "training": read_record(self.checkpoint, UPTRAINING),
        }
        if self.cache:
            config = read_config(as_it_is(self.checkpoint).config, self.name)
            context = self.cache.context
            record["heads"] = {"query": config.main.query, "kv": config.average_kv}
            record["kv_cache"] = {
                "bytes_per_token": self.cache.bytes_per_token,
                "cross_bytes_per_token": self.cache.cross_bytes_per_token,
                "context": context,
                "bytes_at_context": self.cache.bytes_at(context) if context else None,
                "remark": self.cache.remark,
                "bits": self.cache_bits or 8 * self.cache.bytes_per_number,
            }
        return record


def open_subjects(models: Sequence[str], trust_remote_code: bool = False, revision: str | None = None) -> list[Subject]:
    """Open directories and hub ids, each with a distinct name; hub ids are downloaded."""
    local = [os.path.lexists(model) for model in models]
    if revision is not None and all(local):
        raise RefusedError("--revision is for hub ids, and all of these are local paths")
    checkpoints = [
        open_model(model, None if is_local else revision) for model, is_local in zip(models, local, strict=True)
    ]
    paths = [(c.hub_id,) if c.hub_id else Path(os.path.abspath(c.directory or "")).parts for c in checkpoints]
    return [
        Subject(name, str(checkpoint.directory), checkpoint, trust_remote_code)
        for name, checkpoint in zip(distinct_names(paths), checkpoints, strict=True)
    ]


def distinct_names(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """The shortest distinct end of each path; repeated paths are numbered."""
    names: list[str] = []
    for parts in paths:
        different = [other for other in paths if other != parts]
        lengths = (n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in different))
        name = one_line("/".join(parts[-next(lengths, len(parts)) :]))
        repeats = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({repeats + 1})" if repeats else name)
    return names


def fit(subjects: Sequence[Subject], memory: int, ranks: int, context: int, precision: str) -> dict[str, Any]:
    """Add the largest batch and context that fit into the `memory` of each tensor-parallel rank to each record."""
    for subject in subjects:
        if not subject.cache:
            continue
        batch, longest, refused = None, None, {}
        try:
            if (query := subject.record["heads"]["query"]) % ranks:
                raise RefusedError(f"{ranks} ranks are not possible for {query} query heads: they must divide them")
            batch, longest = what_fits(*subject.cache_and_weights(precision), memory, context, ranks)
        except RefusedError as error:  # of this conversion; the ranks may suit another
            refused = {"impossible": str(error)}
        subject.record["kv_cache"]["fits"] = {"batch": batch, "longest": longest, **refused}
    return {"bytes": memory, "ranks": ranks, "context": context, "precision": precision}


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
