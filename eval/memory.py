"""KV-cache memory: by formula, as transformers really holds it, and what fits into a given memory.

The formula is that of `gqa.convert.heads.kv_cache`: bytes = sum over layers of heads x (key dim + value dim) x
tokens x bytes per number, where a sliding-window layer holds at most its window. Budgets count weights and KV cache
alone: activations, an engine's blocks and the allocator's losses are not modelled, so what fits here is an upper
bound.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from gqa.checkpoint.errors import RefusedError
from gqa.convert.heads.config import read_config
from gqa.convert.heads.kv_cache import KVCache, kv_cache

SEED = 0


def cache_of(model: PretrainedConfig) -> KVCache:
    """The KV cache of a model by formula: heads, numbers per token and window of every layer that caches, and bytes in
    the config's dtype, float32 where it states none. (Of a checkpoint's files it is `checkpoint_cache`.)

    Its `remark` says where transformers caches other heads than the model's key/value heads (Falcon's new
    architecture: all H), else it is None. Raises RefusedError where no key/value heads are known.
    """
    config = read_config(model.to_dict(), model.name_or_path or model.model_type)
    text = model.get_text_config(decoder=True)
    cross = getattr(text, "cross_attention_layers", None) or ()  # they read an image, not the tokens written
    layers = enumerate(DynamicCache(config=model).layers)
    cached = [number for number, layer in layers if isinstance(layer, DynamicLayer) and number not in cross]
    stated = str(text.dtype or model.dtype or torch.float32)  # saving a model turns its config's dtype into a name
    dtype: torch.dtype = getattr(torch, stated.removeprefix("torch."))
    return replace(kv_cache(config, cached, "F32"), bytes_per_number=dtype.itemsize)


def model_cache(model: PreTrainedModel) -> KVCache:
    """The KV cache of a loaded model by formula, in the dtype in which it computes. Raises RefusedError."""
    return replace(cache_of(model.config), bytes_per_number=model.dtype.itemsize)


@torch.inference_mode()
def measured_cache_bytes(model: PreTrainedModel, tokens: int, batch: int) -> int:
    """Bytes of memory that transformers' own cache object holds for `batch` sequences of `tokens`.

    All tokens but the last are a prefill and the last is a decode step: right after a prefill a sliding-window layer is
    a view that keeps the whole prompt's memory alive, from the first step on it has a tensor of its window. What is
    summed is the memory behind the key and value tensors of all layers, each counted once.

    Raises:
        RefusedError: More tokens than the model has positions, no tokens, or a model that keeps no such cache.
    """
    check_length(model, tokens)
    ids = random_tokens(vocabulary_size(model), batch, tokens).to(model.device)
    cache = None
    for part in ids.split([tokens - 1, 1], dim=1):
        if part.shape[1]:
            output = model(input_ids=part, past_key_values=cache, use_cache=True, **last_logits(model))
            cache = output.get("past_key_values")
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise RefusedError(f"{model_name(model)} keeps no cache with layers: there is nothing to measure")
    parts = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts if isinstance(t, Tensor)}
    return sum(storages.values())


def check_length(model: PreTrainedModel, tokens: int) -> None:
    """Raise RefusedError where a model cannot read `tokens` of one sequence, or reads no plain sequence at all."""
    if model.config.is_encoder_decoder:
        raise RefusedError(f"{model_name(model)} is an encoder-decoder: memory and speed are measured of decoders only")
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if tokens < 1 or (positions and tokens > positions):
        limit = f", it has {positions:,} positions" if positions and tokens > positions else ", at least 1 is needed"
        raise RefusedError(f"{tokens:,} tokens are not possible for {model_name(model)}{limit}")


def model_name(model: PreTrainedModel) -> str:
    """What to call a model in a message: where it was loaded from, or its class."""
    return str(model.name_or_path or type(model).__name__)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Token ids below this one are known to the model."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def random_tokens(vocabulary: int, batch: int, tokens: int) -> Tensor:
    """Token ids (batch, tokens), always the same."""
    return torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(SEED))


def last_logits(model: PreTrainedModel) -> dict[str, Any]:
    """The argument that asks for the logits of the last token alone, where the model's class has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def rank_cache(cache: KVCache, ranks: int) -> KVCache:
    """What one of `ranks` tensor-parallel ranks holds of a KV cache.

    Every layer's KV heads are split where `ranks` divides them and replicated, one a rank, where they divide `ranks`
    (as vLLM does it). That `ranks` divides the query heads is for `gqa.convert.summary.tensor_parallel` to say.
    Raises RefusedError where neither holds.
    """
    layers = []
    for layer in cache.layers:
        if ranks < 1 or (layer.heads % ranks and ranks % layer.heads):
            raise RefusedError(
                f"{ranks} ranks are not possible for {layer.heads} key/value heads: one must be a multiple of the other"
            )
        layers.append(replace(layer, heads=max(layer.heads // ranks, 1)))
    return replace(cache, layers=tuple(layers))


def largest_batch(cache: KVCache, weights_bytes: int, memory_bytes: int, context: int, ranks: int = 1) -> int:
    """How many sequences of `context` tokens fit beside the weights; 0 where the weights alone do not.

    Args:
        cache: As `cache_of` gives it.
        weights_bytes: Of the whole model; a rank holds its share, rounded up.
        memory_bytes: Of one rank. Activations are not modelled: subtract what they need.
        context: Tokens of each sequence, at least 1.
        ranks: Tensor-parallel ranks, see `rank_cache`.

    Raises:
        RefusedError: The ranks cannot share the KV heads, or there is no context.
    """
    if context < 1:
        raise RefusedError(f"a context of {context} tokens needs no memory: give at least 1")
    free = _free(weights_bytes, memory_bytes, ranks)
    return max(free, 0) // rank_cache(cache, ranks).bytes_at(context)


def largest_context(cache: KVCache, weights_bytes: int, memory_bytes: int, ranks: int = 1) -> int | None:
    """Tokens of the longest single sequence (batch 1) that fits beside the weights; arguments as `largest_batch`.

    None where memory is no limit: every layer has a window and all of them fit. What the model can use of it is
    another limit (`KVCache.context`). Raises RefusedError where the ranks cannot share the KV heads.
    """
    free, held = _free(weights_bytes, memory_bytes, ranks), rank_cache(cache, ranks)
    window = max((layer.window or 0 for layer in held.layers), default=0)  # from here on the cache grows linearly
    growth = held.bytes_at(window + 1) - held.bytes_at(window)
    if not growth and held.bytes_at(window) <= free:
        return None
    most = window + max(free, 0) // max(growth, 1) + 1  # surely too many
    return max(bisect_right(range(most + 1), free, key=held.bytes_at) - 1, 0)


def _free(weights_bytes: int, memory_bytes: int, ranks: int) -> int:
    """Bytes of one rank's memory that its share of the weights leaves; negative where it does not fit."""
    return memory_bytes - -(-weights_bytes // max(ranks, 1))
