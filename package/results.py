"""What the functions give: small objects that say in a line what was done."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .given import undisturbed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gqa.convert.plan import Plan


@dataclass(frozen=True, repr=False, kw_only=True)
class _Written:
    """What lies at `path`, and is given to other functions as that."""

    path: Path

    def __fspath__(self) -> str:
        return os.fspath(self.path)


@dataclass(frozen=True, repr=False, kw_only=True)
class _Checkpoint(_Written):
    """A checkpoint that was written: something that every function takes as a model."""

    _kept: Any = field(default=None, compare=False)  # a temporary directory, which is there as long as this is

    def load(
        self,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> PreTrainedModel:
        """The model, in evaluation mode, in the class that its config names.

        Args:
            dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`.

        Raises:
            RefusedError: transformers cannot load it.
        """
        from gqa.checkpoint.loading import load_model

        with undisturbed():
            return load_model(
                str(self.path), dtype=dtype, device=device, attention=attn_implementation,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip

    def _line(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._line()}>"


@dataclass(frozen=True, repr=False, kw_only=True)
class ConvertedModel(_Checkpoint):
    """What `convert_model` wrote.

    layer_errors: by layer, the squared error of its attention outputs relative to the base model's on the calibration
    text; empty where the method looks at no text. seconds: of all of it.
    """

    plan: Plan
    warnings: tuple[str, ...] = ()
    layer_errors: Mapping[int, float] = field(default_factory=dict)
    checksums: Mapping[str, Mapping[str, str]] | None = None
    seconds: float = 0.0

    def _line(self) -> str:
        from gqa.convert.heads.layout import groups_text

        heads, groups = self.plan.config.main.kv, groups_text(self.plan.groups)
        before, after = self.plan.cache_before.bytes_at(1), self.plan.cache_after.bytes_at(1)
        cache = f", KV cache {before / after:.3g}x smaller" if 0 < after < before else ""
        return f"{self.path}: {heads} -> {groups} KV heads ({self.plan.method}){cache}"


@dataclass(frozen=True, repr=False, kw_only=True)
class TrainedModel(_Checkpoint):
    """What `uptrain_model` wrote. `record` is what lies beside the weights as gqa_uptraining.json."""

    record: Mapping[str, Any]

    @property
    def heldout(self) -> tuple[float | None, float | None]:
        """Nats per token on text that was held out, before and after; None where none was."""
        losses = self.record["losses"]
        return losses["heldout_before"], losses["heldout_after"]

    def _line(self) -> str:
        before, after = self.heldout
        told = "" if before is None else f", held-out loss {before:.4f} -> {after:.4f}"
        return f"{self.path}: {self.record['steps']:,} steps, {self.record['tokens']:,} tokens{told}"


@dataclass(frozen=True, repr=False, kw_only=True)
class Study:
    """What `ablate` measured. `rows` are those of results.jsonl, one for each combination; `path` has the report."""

    path: Path
    rows: list[dict[str, Any]]

    def text(self) -> str:
        """The table that gqa-ablate prints."""
        from gqa.eval.study.report import open_results, short_table

        return short_table(open_results(self.path)).text()

    def recommend(
        self, max_loss_increase: float = 0.1, max_recall_loss: float = 5.0, kv_bytes: int | None = None
    ) -> str:
        """The smallest KV cache within so many nats per token above the base model and so many points of recall below
        it. With `kv_bytes` instead what loses least within so many bytes a token.
        """
        from gqa.eval.study.report import open_results
        from gqa.eval.study.tradeoff import Bounds, recommend

        results = open_results(self.path)
        return recommend(results.points, results.source, Bounds(max_loss_increase, max_recall_loss, kv_bytes)).text

    def __repr__(self) -> str:
        failed = sum(bool(row["error"]) for row in self.rows)
        return f"<Study {self.path}: {len(self.rows)} combinations{f', {failed} failed' if failed else ''}>"


@dataclass(frozen=True, repr=False, kw_only=True)
class Evaluation:
    """What `evaluate` measured. `results` is what gqa-eval writes as results.json, `path` where its report lies."""

    results: Mapping[str, Any]
    path: Path | None = None

    @property
    def models(self) -> list[dict[str, Any]]:
        """What was found of each model, the baseline first."""
        return list(self.results["models"])

    def text(self, every: bool = False) -> str:
        """The verdicts and tables that gqa-eval prints; `every` table that there is."""
        from gqa.eval.report import tables, verdicts

        found, shown = dict(self.results), [table.text() for table in tables(dict(self.results), every=every)]
        return "\n\n".join(["\n".join(verdicts(found)), *shown]).lstrip()

    def __repr__(self) -> str:
        parts = []
        for model in self.models:
            quality, ratio = model.get("quality"), model.get("against_baseline", {}).get("ratio")
            told = f" {quality['token_perplexity']:.4g}" if quality else ""
            parts.append(f"{model['name']}{told}" + (f" (x{ratio:.4g})" if ratio else ""))
        what = "perplexity of " if any("quality" in model for model in self.models) else ""
        return f"<Evaluation {what}{', '.join(parts)}>"
