"""What is evaluated: checkpoints by name, and what config and headers tell of each before any weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gqa.convert.card import PROVENANCE
from gqa.convert.checkpoint import Checkpoint
from gqa.convert.errors import RefusedError, explain
from gqa.convert.hub import open_model
from gqa.convert.kv_cache import KVCache, checkpoint_cache
from gqa.convert.model_config import read_config


@dataclass(frozen=True)
class Subject:
    """A checkpoint to evaluate. `path` is what transformers loads, `name` what a table calls it."""

    name: str
    path: str
    checkpoint: Checkpoint
    trust_remote_code: bool = False

    @cached_property
    def config(self) -> Any:
        """transformers' config."""
        import transformers

        try:
            return transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # whatever a library raises about a config it cannot read
            raise RefusedError(f"transformers cannot read the config of {self.name}: {explain(error)}") from None

    @cached_property
    def tokenizer(self) -> Any:
        import transformers

        try:
            return transformers.AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            raise RefusedError(f"transformers cannot load the tokenizer of {self.name}: {explain(error)}") from None

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

    @cached_property
    def weight_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.checkpoint.tensors.values())

    @cached_property
    def parameters(self) -> int:
        return sum(spec.numel for spec in self.checkpoint.tensors.values())

    @cached_property
    def cache(self) -> KVCache | None:
        """By formula; None for an architecture whose key/value heads are not known."""
        try:
            return checkpoint_cache(self.checkpoint)
        except RefusedError:
            return None

    def record(self) -> dict[str, Any]:
        """What is known without running the model."""
        found: dict[str, Any] = {
            "name": self.name,
            "path": self.path,
            "revision": self.checkpoint.revision,
            "model_type": self.config.model_type,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "provenance": self._provenance(),
        }
        if self.cache:
            heads = read_config(self.checkpoint.config, self.name).main
            context = self.cache.context
            found["heads"] = {"query": heads.query, "kv": heads.kv}
            found["kv_cache"] = {
                "bytes_per_token": self.cache.bytes_per_token,
                "context": context,
                "bytes_at_context": self.cache.bytes_at(context) if context else None,
                "remark": self.cache.remark,
            }
        return found

    def _provenance(self) -> Any:
        try:
            return json.loads((Path(self.path) / PROVENANCE).read_text())
        except (OSError, ValueError):
            return None


def open_subjects(models: Sequence[str], trust_remote_code: bool = False, revision: str | None = None) -> list[Subject]:
    """Directories or hub ids; a hub id is fetched. Names are made different where two directories have the same."""
    checkpoints = [open_model(model, revision if not Path(model).is_dir() else None) for model in models]
    names = [checkpoint.hub_id or checkpoint.name for checkpoint in checkpoints]
    return [
        Subject(name if names.count(name) == 1 else model, str(checkpoint.directory), checkpoint, trust_remote_code)
        for name, model, checkpoint in zip(names, models, checkpoints, strict=True)
    ]
