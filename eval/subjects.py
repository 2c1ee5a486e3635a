"""The checkpoints to evaluate: their records from config and headers, and the loaded models.

At the end, a KV cache quantized to few bits is simulated. Each key and each value of a head is
split into equal groups of at most 64 numbers. A group stores its minimum and step in 16 bits
(float16, or bfloat16 beyond its range), and every number as a multiple of the step (asymmetric
rounding to nearest, per token; KIVI, arXiv 2402.02750, section 3.1). Engines round slightly
differently: this measures the cost of the bits, not an engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.checkpoint.hub import open_model
from gqa.checkpoint.provenance import PROVENANCE, UPTRAINING, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import KVCache, check_config, groups_per_head, read_config
from gqa.convert.recast.targets import as_it_is, checkpoint_cache
from gqa.core.compat import attention_name
from gqa.core.devices import find_device, ranks
from gqa.core.errors import RefusedError, one_line
from gqa.corpus.pairs import PairEncoder
from gqa.models.attention_functions import PLAIN, register
from gqa.models.loading import load_model, load_tokenizer, positions, read_auto_config


@dataclass(frozen=True)
class Subject:
    """A checkpoint to evaluate. transformers loads `path`; tables show `name`."""

    name: str
    path: str
    checkpoint: Checkpoint
    trust_remote_code: bool = False
    cache_bits: int | None = None

    @cached_property
    def config(self) -> Any:
        """transformers' config."""
        return read_auto_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.checkpoint, self.trust_remote_code)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def positions(self) -> int | None:
        """Positions in the model's config, or None."""
        return positions(self.config)

    @cached_property
    def encoder(self) -> PairEncoder | None:
        """Encoder of pairs for an encoder-decoder, else None."""
        return (
            PairEncoder(self.config, self.tokenizer, self.name)
            if self.config.is_encoder_decoder
            else None
        )

    @cached_property
    def cache(self) -> KVCache | None:
        """KV cache by formula; None for an architecture whose KV heads are unknown."""
        try:
            formula = checkpoint_cache(self.checkpoint)
        except RefusedError:
            return None
        return replace(formula, bits=self.cache_bits) if self.cache_bits else formula

    def record(self, context: int, memory: int | None = None) -> dict[str, Any]:
        """JSON-ready record from config and headers: bytes of `context` tokens, and the batch that
        fits `memory`.
        """
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
            record["heads"] = {"query": config.main.query, "kv": config.average_kv}
            record["kv_cache"] = {
                "bytes_per_token": self.cache.bytes_per_token,
                "cross_bytes_per_token": self.cache.cross_bytes_per_token,
                "context": context,
                "bytes_at_context": self.cache.bytes_at(context),
                "bits": self.cache_bits or 8 * self.cache.bytes_per_number,
            }
            if memory:
                free = max(memory - self.checkpoint.nbytes, 0)
                record["kv_cache"]["fits"] = {"batch": free // self.cache.bytes_at(context)}
        return record

    def load(self, precision: str = "auto", device: str | None = None) -> PreTrainedModel:
        """The model, with a quantized cache if the subject has one. Raises RefusedError."""
        model = load_model(
            self.path,
            dtype=precision,
            device="auto" if device == "auto" else input_device(device),
            trust_remote_code=self.trust_remote_code,
        )
        if self.cache_bits and self.cache:
            quantize_cache(model, self.cache_bits, len(self.cache.layers), self.name)
        return model


def open_subjects(
    models: Sequence[str],
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache_bits: Sequence[int] = (),
) -> list[Subject]:
    """Open directories and hub ids; hub ids are downloaded.

    All of them come once more for each cache width of `cache_bits`. Raises RefusedError.
    """
    if revision is not None and all(map(os.path.lexists, models)):
        raise RefusedError("--revision is for hub ids, and all of these are local paths")
    checkpoints = [
        open_model(model, None if os.path.lexists(model) else revision) for model in models
    ]
    for checkpoint in checkpoints:
        check_config(checkpoint.config, checkpoint.name)
    names = [checkpoint.hub_id or checkpoint.name for checkpoint in checkpoints]
    if len({*names}) < len({*models}):  # of two with one name, say what the user named
        names = [*models]
    subjects = [
        Subject(one_line(name), str(checkpoint.directory), checkpoint, trust_remote_code)
        for name, checkpoint in zip(names, checkpoints, strict=True)
    ]
    for subject in subjects if cache_bits else ():
        if not subject.cache or subject.cache.cross:
            raise RefusedError(
                f"--cache-bits is for decoders with key/value heads, and {subject.name} is not "
                "one; leave it out"
            )
    return subjects + [
        replace(subject, name=f"{subject.name} (int{bits})", cache_bits=bits)
        for bits in cache_bits
        for subject in subjects
    ]


def input_device(name: str | None) -> str:
    """Device of inputs: `name`, or without one, or with `auto`, this rank's.

    Raises RefusedError if it cannot be used, and for `auto` if several processes would each use all
    devices.
    """
    state = ranks()
    if name == "auto" and state.num_processes > 1:
        raise RefusedError(
            f"--device auto is for one process, and there are {state.num_processes}; start it "
            "without a launcher"
        )
    return str(state.device) if name in (None, "auto", state.device.type) else find_device(name)


def numerics(model: PreTrainedModel) -> dict[str, str]:
    """The dtype and the attention implementation of a loaded model, for a record."""
    return {"dtype": str(model.dtype).removeprefix("torch."), "attention": attention_name(model)}


def fake_quantize(heads: Tensor, bits: int) -> Tensor:
    """Quantize keys or values (..., d) to `bits` per number and dequantize them."""
    grouped = heads.float().unflatten(-1, (groups_per_head(heads.shape[-1]), -1))
    least = stored_in_16_bits(grouped.amin(-1, keepdim=True))
    most = stored_in_16_bits(grouped.amax(-1, keepdim=True))

    largest_code = 2**bits - 1
    step = stored_in_16_bits((most - least) / largest_code)
    step = step.clamp_min(2.0**-24)  # the smallest positive float16

    codes = ((grouped - least) / step).round().clamp(0, largest_code)
    numbers: Tensor = (codes * step + least).flatten(-2)

    # A step that was rounded up may lead beyond the largest float16.
    limit = torch.finfo(heads.dtype).max
    return numbers.clamp(-limit, limit).to(heads.dtype)


def stored_in_16_bits(numbers: Tensor) -> Tensor:
    """Float32 numbers rounded to float16; those beyond its range (65,504) to bfloat16, as engines
    do that keep the cache of a bfloat16 model in bfloat16. NaN and infinity stay.
    """
    rounded = numbers.half().float()
    return torch.where(rounded.isfinite(), rounded, numbers.bfloat16().float())


@torch.no_grad()
def quantize_cache(model: PreTrainedModel, bits: int, layers: int, name: str) -> None:
    """Replace the model's attention with one whose keys and values are quantized to `bits`.

    Raises RefusedError for other attention implementations, or if fewer than `layers` layers call
    it.
    """
    plain, calls = attention_name(model), 0
    if plain not in PLAIN:
        raise RefusedError(
            f"--cache-bits needs sdpa or eager attention, {name} has {plain}; leave it out"
        )
    attend, mask = PLAIN[plain]

    def attend_quantized(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
    ) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(module, q, fake_quantize(k, bits), fake_quantize(v, bits), *rest, **options)

    register(f"gqa_cache{bits}_{plain}", attend_quantized, mask)
    model.set_attn_implementation(f"gqa_cache{bits}_{plain}")
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    if calls < layers:
        raise RefusedError(
            f"--cache-bits: {calls} of {layers} layers of {name} call transformers' attention "
            "functions; leave it out for this model"
        )
