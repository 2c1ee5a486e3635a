"""The smallest KV cache of a study within a bound of the loss."""

from __future__ import annotations

from collections.abc import Sequence

from gqa.convert.summary import size
from gqa.eval.study.directory import Row

BASE = "base model"


def measured(rows: Sequence[Row]) -> list[Row]:
    """Rows with a finite loss."""
    return [row for row in rows if not row["error"] and row["loss"] is not None]


def loss(row: Row) -> float:
    return float(row["loss"])


def cache_bytes(row: Row) -> int:
    """KV cache bytes of one token."""
    return int(row["kv_bytes_per_token"])


def recommend(rows: Sequence[Row], max_loss_increase: float) -> tuple[Row | None, str]:
    """The row with the smallest KV cache within so many nats per token above the base model; then with the fewest
    training tokens, then with the least loss. None if there is none smaller than the base model. And why.
    """
    base = rows[0]
    smaller = [row for row in measured(rows) if cache_bytes(row) < cache_bytes(base)]
    within = [row for row in smaller if row["loss_increase"] <= max_loss_increase]
    limit = f"within {max_loss_increase:g} nats per token above the base model"
    if not smaller:
        return None, "recommended nothing: no KV cache smaller than the base model's was measured"
    if not within:
        return None, (
            f"recommended nothing: of {len(smaller)} combinations none is {limit}\n"
            f"closest     {_describe(min(smaller, key=loss), base)}\n"
            "advice      allow more with --max-loss-increase, or add longer training or methods to the study"
        )
    row = min(within, key=lambda row: (cache_bytes(row), row["train_tokens"], loss(row)))
    text = f"recommended {_describe(row, base)}\nwhy         {len(within)} of {len(smaller)} combinations are {limit}"
    if below := [other for other in smaller if cache_bytes(other) < cache_bytes(row)]:
        text += f"\nsmaller     {_describe(min(below, key=loss), base)}"
    best = min((other for other in within if cache_bytes(other) == cache_bytes(row)), key=loss)
    return row, text + (f"\nbetter      {_describe(best, base)}" if loss(best) < loss(row) else "")


def _describe(row: Row, base: Row) -> str:
    """A row, its quality and its cache, in words."""
    trained = f"alpha {row['alpha']:g}" if row["alpha"] else "untrained"
    loses = f"{row['loss_increase']:+.4f} nats per token (perplexity x{row['perplexity_ratio']:.3g})"
    recall = f", {row['recall_text']:.1%} of second copies right" if "recall_text" in row else ""
    cache = f"{size(cache_bytes(row))} of KV cache a token ({cache_bytes(row) / cache_bytes(base):.0%})"
    return f"{row['method']}, {row['groups']} of {base['groups']} KV heads, {trained}: {loses}{recall}, {cache}"
