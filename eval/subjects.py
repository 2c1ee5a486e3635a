"""The checkpoints to evaluate, and their records from config and headers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import RefusedError, explain, one_line
from gqa.checkpoint.hub import open_model
from gqa.checkpoint.loading import check_predicts_tokens, load_tokenizer, positions, read_auto_config
from gqa.checkpoint.provenance import PROVENANCE, UPTRAINING, read_record
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import KVCache, read_config
from gqa.convert.recast.targets import as_it_is, checkpoint_cache
from gqa.corpus.pairs import PairEncoder
from gqa.eval.cache_bits import layers_with_cache


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
    def vocabulary(self) -> int:
        return int(self.config.get_text_config(decoder=True).vocab_size)

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

    def record(self) -> dict[str, Any]:
        """JSON-ready record from config and headers."""
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
    if revision is not None and all(map(os.path.lexists, models)):
        raise RefusedError("--revision is for hub ids, and all of these are local paths")
    checkpoints = [open_model(model, None if os.path.lexists(model) else revision) for model in models]
    paths = [(c.hub_id,) if c.hub_id else Path(os.path.abspath(c.directory or "")).parts for c in checkpoints]
    return [
        Subject(name, str(checkpoint.directory), checkpoint, trust_remote_code)
        for name, checkpoint in zip(distinct_names(paths), checkpoints, strict=True)
    ]


def with_bits(subjects: list[Subject], bits: Sequence[int] | None) -> list[Subject]:
    """`subjects`, and each once more per cache width of `bits`. Raises RefusedError for unsupported caches."""
    for subject in subjects if bits else ():
        layers_with_cache(subject.checkpoint)  # refuses
    return [*subjects, *(subject.quantised(width) for width in bits or () for subject in subjects)]


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
