"""What the functions return: a path, the record of what was done, and how to load it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import called_from_python

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, repr=False, kw_only=True)
class _Checkpoint:
    """A checkpoint that was written, which every function takes as a model; `record` is the JSON file that lies beside
    its weights.
    """

    path: Path
    record: Mapping[str, Any]
    _directory: Any = field(default=None, compare=False)  # a temporary directory, which exists as long as this does

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def load(
        self, *, dtype: str = "auto", device: str = "cpu", attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> PreTrainedModel:  # fmt: skip
        """The model, in evaluation mode, in the class that its config names.

        Args:
            dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.

        Raises:
            RefusedError: transformers cannot load it.
        """
        from gqa.checkpoint.loading import load_model

        with called_from_python():
            return load_model(
                str(self.path), dtype=dtype, device=device, attention=attn_implementation,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip


@dataclass(frozen=True, repr=False, kw_only=True)
class ConvertedModel(_Checkpoint):
    """What `convert_model` wrote. layer_errors: by layer, the squared error of its attention outputs relative to the
    base model's on the calibration text; empty where the method reads no text.
    """

    warnings: tuple[str, ...] = ()
    layer_errors: Mapping[int, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        heads = self.record["heads"]
        return (
            f"<ConvertedModel {self.path}: {heads['kv_before']} -> {heads['kv_after']} KV heads "
            f"({self.record['options']['method']})>"
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class TrainedModel(_Checkpoint):
    """What `uptrain_model` wrote."""

    def __repr__(self) -> str:
        before, after = (self.record["losses"][f"heldout_{when}"] for when in ("before", "after"))
        losses = "" if before is None else f", held-out loss {before:.4f} -> {after:.4f}"
        return f"<TrainedModel {self.path}: {self.record['steps']:,} steps, {self.record['tokens']:,} tokens{losses}>"


@dataclass(frozen=True, repr=False, kw_only=True)
class Study:
    """What `ablate` measured. `rows` are those of results.jsonl, one for each combination; `path` has the report."""

    path: Path
    rows: list[dict[str, Any]]

    def text(self) -> str:
        """The table that gqa-ablate prints."""
        from gqa.eval.study.report import short_table

        return short_table(self.rows).text()

    def recommend(self, max_loss_increase: float = 0.1) -> str:
        """The smallest KV cache within so many nats per token above the base model, and why."""
        from gqa.eval.study.recommendation import recommend

        return recommend(self.rows, max_loss_increase)[1]

    def __repr__(self) -> str:
        failed = sum(bool(row["error"]) for row in self.rows)
        return f"<Study {self.path}: {len(self.rows)} combinations{f', {failed} failed' if failed else ''}>"


@dataclass(frozen=True, repr=False, kw_only=True)
class Evaluation:
    """What `evaluate` measured. `record` is what gqa-eval writes as results.json, `path` where its report lies."""

    record: Mapping[str, Any]
    path: Path | None = None

    @property
    def models(self) -> list[dict[str, Any]]:
        """The record of each model, the baseline first."""
        return list(self.record["models"])

    def text(self, every: bool = False) -> str:
        """The verdicts and tables that gqa-eval prints; `every` table that there is."""
        from gqa.eval.report import as_text

        return as_text(dict(self.record), every)

    def __repr__(self) -> str:
        parts = []
        for model in self.models:
            quality, ratio = model.get("quality"), model.get("against_baseline", {}).get("ratio")
            perplexity = f" {quality['token_perplexity']:.4g}" if quality else ""
            parts.append(f"{model['name']}{perplexity}" + (f" (x{ratio:.4g})" if ratio else ""))
        measure = "perplexity of " if any("quality" in model for model in self.models) else ""
        return f"<Evaluation {measure}{', '.join(parts)}>"
