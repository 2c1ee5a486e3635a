"""What is evaluated: checkpoints by name, and what config and headers tell of each before any weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import RefusedError, explain, one_line
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.loading import read_auto_config
from gqa.checkpoint.provenance import PROVENANCE, UPTRAINING, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert.heads.config import read_config
from gqa.convert.heads.kv_cache import KVCache
from gqa.convert.recast.targets import as_it_is, checkpoint_cache


@dataclass(frozen=True)
class Subject:
    """A checkpoint to evaluate. `path` is what transformers loads, `name` what a table calls it."""

    name: str
    path: str
    checkpoint: Checkpoint
    trust_remote_code: bool = False
    cache_bits: int | None = None

    def quantised(self, bits: int) -> Subject:
        """The same with a KV cache of `bits`."""
        return replace(self, name=f"{self.name} (int{bits})", cache_bits=bits)

    @cached_property
    def config(self) -> Any:
        """transformers' config."""
        try:
            return read_auto_config(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # whatever a library raises about a config it cannot read
            raise RefusedError(f"transformers cannot read the config of {self.name}: {explain(error)}") from None

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
        """Positions that the model was made for; None where its config states none."""
        return getattr(self.text_config, "max_position_embeddings", None)

    @property
    def decoder_start(self) -> int:
        """The token that an encoder-decoder's decoder reads first."""
        stated = getattr(self.config, "decoder_start_token_id", None)
        start = getattr(self.text_config, "bos_token_id", None) if stated is None else stated  # T5Gemma: the decoder's
        if start is None:
            raise RefusedError(f"the config of {self.name} does not say which token its decoder starts with")
        return int(start)

    @cached_property
    def weight_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.checkpoint.tensors.values())

    @cached_property
    def cache(self) -> KVCache | None:
        """By formula; None for an architecture whose key/value heads are not known."""
        try:
            found = checkpoint_cache(self.checkpoint)
        except RefusedError:
            return None
        return found.quantised(self.cache_bits) if self.cache_bits else found

    @cached_property
    def record(self) -> dict[str, Any]:
        """What is known without running the model, JSON-ready; whoever measures adds to it."""
        found: dict[str, Any] = {
            "name": self.name,
            "path": self.path,
            "revision": self.checkpoint.revision,
            "model_type": self.config.model_type,
            "parameters": self.checkpoint.parameters,
            "weight_bytes": self.weight_bytes,
            "provenance": read_record(self.checkpoint, PROVENANCE),
            "training": read_record(self.checkpoint, UPTRAINING),
        }
        if self.cache:
            config = read_config(as_it_is(self.checkpoint).config, self.name)
            context = self.cache.context
            found["heads"] = {"query": config.main.query, "kv": config.average_kv}
            found["kv_cache"] = {
                "bytes_per_token": self.cache.bytes_per_token,
                "context": context,
                "bytes_at_context": self.cache.bytes_at(context) if context else None,
                "remark": self.cache.remark,
                "bits": self.cache_bits,
            }
        return found


def open_subjects(models: Sequence[str], trust_remote_code: bool = False, revision: str | None = None) -> list[Subject]:
    """Directories or hub ids; a hub id is fetched. Every name is another, though it be the same checkpoint."""
    local = [os.path.lexists(model) for model in models]
    if revision is not None and all(local):
        raise RefusedError("--revision is for hub ids, and all of these are local paths")
    checkpoints = [open_model(model, None if here else revision) for model, here in zip(models, local, strict=True)]
    places = [(c.hub_id,) if c.hub_id else Path(os.path.abspath(c.directory or "")).parts for c in checkpoints]
    return [
        Subject(name, str(checkpoint.directory), checkpoint, trust_remote_code)
        for name, checkpoint in zip(distinct_names(places), checkpoints, strict=True)
    ]


def distinct_names(places: Sequence[tuple[str, ...]]) -> list[str]:
    """The last part of each path, with the parts before it that tell it from others; numbered where it is the same."""
    names: list[str] = []
    for parts in places:
        others = [other for other in places if other != parts]
        enough = (n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in others))
        name = one_line("/".join(parts[-next(enough, len(parts)) :]))
        again = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({again + 1})" if again else name)
    return names
