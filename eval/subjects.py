"""The checkpoints to evaluate: their records from config and headers, and the loaded models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from gqa.checkpoint.hub import open_model
from gqa.checkpoint.provenance import PROVENANCE, UPTRAINING, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import check_config, read_config
from gqa.convert.heads.kv_cache import KVCache
from gqa.convert.recast.targets import checkpoint_cache, recast_as_is
from gqa.core.compat import attention_name
from gqa.core.devices import emulates, find_device, ranks
from gqa.core.errors import RefusedError, one_line
from gqa.corpus.pairs import PairEncoder
from gqa.eval.cache_formats import CACHE_FORMATS, CacheFormatName
from gqa.eval.quantized_cache import quantize_cache
from gqa.models.classes import positions, read_auto_config
from gqa.models.loading import load_model
from gqa.models.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Subject:
    """A checkpoint to evaluate.

    name: What tables call it.
    path: What transformers loads.
    checkpoint: Its config and headers.
    cache_format: The format of its KV cache, a key of `CACHE_FORMATS`, if the cache is quantized.
    """

    name: str
    path: str
    checkpoint: Checkpoint
    trust_remote_code: bool = False
    cache_format: CacheFormatName | None = None

    @cached_property
    def config(self) -> Any:
        """transformers' config."""
        return read_auto_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer."""
        return load_tokenizer(self.checkpoint, self.trust_remote_code)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def positions(self) -> int | None:
        """Positions in the model's config, or None."""
        return positions(self.config)

    @cached_property
    def encoder(self) -> PairEncoder | None:
        """Encoder of pairs for an encoder-decoder, else None."""
        if not self.config.is_encoder_decoder:
            return None
        return PairEncoder(self.config, self.tokenizer, self.name)

    @cached_property
    def cache(self) -> KVCache | None:
        """KV cache by formula; None for an architecture whose KV heads are unknown."""
        try:
            formula = checkpoint_cache(self.checkpoint)
        except RefusedError:
            return None
        if self.cache_format is None:
            return formula
        return replace(formula, quantized=CACHE_FORMATS[self.cache_format].bytes_per_head)

    def record(self, context: int, memory: int | None = None) -> dict[str, Any]:
        """JSON-ready record from config and headers.

        Args:
            context: Number of tokens whose cache bytes are recorded.
            memory: Bytes; the batch that fits into them is recorded, if they are given.
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
            config = read_config(recast_as_is(self.checkpoint).config, self.name)
            record["heads"] = {"query": config.main_heads.query, "kv": config.average_kv}
            record["kv_cache"] = self._cache_record(self.cache, context, memory)
        return record

    def _cache_record(self, cache: KVCache, context: int, memory: int | None) -> dict[str, Any]:
        """JSON-ready sizes of the cache, in bytes."""
        record: dict[str, Any] = {
            "bytes_per_token": cache.bytes_per_token,
            "cross_bytes_per_token": cache.cross_bytes_per_token,
            "context": context,
            "bytes_at_context": cache.bytes_at(context),
            "bits": self.cache_format or 8 * cache.bytes_per_number,
        }
        if memory:
            free = max(memory - self.checkpoint.nbytes, 0)
            record["fits"] = {"batch": free // cache.bytes_at(context)}
        return record

    def load(self, precision: str = "auto", device: str | None = None) -> PreTrainedModel:
        """The model, with a quantized cache if the subject has one. Raises RefusedError.

        precision: A dtype, or `auto`: as stored, but float32 on a CPU that emulates 16 bits.
        """
        if device != "auto":
            device = input_device(device)
        dtype = precision
        if precision == "auto" and emulates(self.config.dtype, device):
            dtype = "float32"
        model = load_model(
            self.path,
            dtype=dtype,
            device=device,
            trust_remote_code=self.trust_remote_code,
        )
        if self.cache_format and self.cache:
            cache_format = CACHE_FORMATS[self.cache_format]
            quantize_cache(model, cache_format, len(self.cache.layers), self.name)
        return model


def open_subjects(
    models: Sequence[str],
    trust_remote_code: bool = False,
    revision: str | None = None,
    simulated_caches: Sequence[CacheFormatName] = (),
) -> list[Subject]:
    """Open directories and model ids; model ids are downloaded.

    All of them come once more for each format of a cache in `simulated_caches`.

    Raises RefusedError.
    """
    is_local = {model: os.path.lexists(model) for model in models}
    if revision is not None and all(is_local.values()):
        raise RefusedError(
            "--revision is for model ids, but all of these are local paths; remove --revision"
        )

    checkpoints = []
    for model in models:
        revision_of_model = None if is_local[model] else revision
        checkpoints.append(open_model(model, revision_of_model))
    for checkpoint in checkpoints:
        check_config(checkpoint.config, checkpoint.name)

    names = [checkpoint.hub_id or checkpoint.name for checkpoint in checkpoints]
    if len({*names}) < len({*models}):  # of two with one name, say what the user named
        names = [*models]
    subjects = [
        Subject(one_line(name), str(checkpoint.directory), checkpoint, trust_remote_code)
        for name, checkpoint in zip(names, checkpoints, strict=True)
    ]
    if not simulated_caches:
        return subjects

    for subject in subjects:
        if not subject.cache or subject.cache.cross:
            raise RefusedError(
                "--simulate-cache works only with decoders that have KV heads, but "
                f"{subject.name} is not one; remove --simulate-cache"
            )
    with_quantized_caches = list[Subject]()
    for cache_format in simulated_caches:
        for subject in subjects:
            name = f"{subject.name} ({CACHE_FORMATS[cache_format].name})"
            with_quantized_caches.append(replace(subject, name=name, cache_format=cache_format))
    return subjects + with_quantized_caches


def input_device(name: str | None) -> str:
    """Device of inputs: `name`, or without one, or with `auto`, this rank's.

    Raises RefusedError if it cannot be used, and for `auto` if several processes would each use all
    devices.
    """
    state = ranks()
    if name == "auto" and state.num_processes > 1:
        raise RefusedError(
            f"--device auto works with one process only, but there are {state.num_processes}; "
            "start the command without a launcher"
        )
    if name in (None, "auto", state.device.type):
        return str(state.device)
    return find_device(name)


def numerics(model: PreTrainedModel) -> dict[str, str]:
    """The dtype and the attention implementation of a loaded model, for a record."""
    return {"dtype": str(model.dtype).removeprefix("torch."), "attention": attention_name(model)}
