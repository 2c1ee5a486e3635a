"""What a study recommends: the smallest KV cache within a bound of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gqa.convert.summary import size
from gqa.convert.verdict import Level, Loss
from gqa.core.errors import one_line
from gqa.eval.metrics import main_kind, recall_key
from gqa.study.rows import Row

_LONGEST_LINE = 4000


@dataclass(frozen=True)
class Line:
    """A line of the recommendation; `level` is that of the combination that it describes."""

    title: str
    text: str
    level: Level | None = None

    def __str__(self) -> str:
        level = f"{self.level}: " if self.level else ""
        return one_line(f"{self.title:12}{level}{self.text}", _LONGEST_LINE)


def measured(rows: Sequence[Row]) -> list[Row]:
    """Rows with a finite loss."""
    return [row for row in rows if not row["error"] and row["loss"] is not None]


def loss(row: Row) -> float:
    """Nats per token of a measured row."""
    return float(row["loss"])


def cache_bytes(row: Row) -> float:
    """Bytes of KV cache per token of a measured row."""
    return float(row["kv_bytes_per_token"])


def recommend(rows: Sequence[Row], max_loss_increase: float) -> tuple[Row | None, list[Line]]:
    """The row with the smallest KV cache within so many nats per token above the base model; then
    with the fewest training tokens, then with the least loss.

    Args:
        rows: Of a study, the base model's first.
        max_loss_increase: Nats per token.

    Returns:
        The row, or None if there is none with a smaller cache than the base model's; and why.
    """
    base = rows[0]
    smaller = [row for row in measured(rows) if cache_bytes(row) < cache_bytes(base)]
    within = [row for row in smaller if row["loss_increase"] <= max_loss_increase]
    limit = f"within {max_loss_increase:g} nats per token of the base model"
    if not smaller:
        return None, [
            Line("recommended", "nothing: no KV cache smaller than the base model's was measured")
        ]
    if not within:
        closest = _describe("closest", min(smaller, key=loss), base)
        return None, [
            Line("recommended", f"nothing: none of {len(smaller)} combinations is {limit}"),
            closest,
            Line("advice", _advice(closest.level)),
        ]

    chosen = min(within, key=lambda row: (cache_bytes(row), row["train_tokens"], loss(row)))
    lines = [
        _describe("recommended", chosen, base),
        Line("why", f"{len(within)} of {len(smaller)} combinations are {limit}"),
    ]
    even_smaller = [row for row in smaller if cache_bytes(row) < cache_bytes(chosen)]
    if even_smaller:
        lines.append(_describe("smaller", min(even_smaller, key=loss), base))
    of_equal_cache = [row for row in within if cache_bytes(row) == cache_bytes(chosen)]
    best = min(of_equal_cache, key=loss)
    if loss(best) < loss(chosen):
        lines.append(_describe("better", best, base))
    lines += [Line("command", command) for command in chosen.get("commands", [])]
    return chosen, lines


def _advice(closest: Level | None) -> str:
    """What to do if no combination is within the limit, from the level of the closest one."""
    advice = "add more heads, longer training or other methods to the study"
    if closest == "damaged":  # a higher limit would recommend what cannot be used
        return advice
    return f"{advice}, or raise --max-loss-increase"


def loss_of_row(row: Row, base: Row) -> Loss:
    """The quality that a row's model has lost against the base model, as far as it was measured."""
    kinds = [kind for kind in ("text", "generated") if recall_key(kind) in row]
    column = recall_key(main_kind(kinds))
    recall_loss = None
    if column in row and column in base:
        recall_loss = base[column] - row[column]
    return Loss(row.get("perplexity_ratio"), row.get("perplexity_ratio_high"), recall_loss)


def _describe(title: str, row: Row, base: Row) -> Line:
    """A row, its quality and its cache, in words."""
    trained = f"alpha {row['alpha']:g}" if row["alpha"] else "untrained"
    share = cache_bytes(row) / cache_bytes(base)
    parts = [
        f"{row['loss_increase']:+.4f} nats per token (perplexity x{row['perplexity_ratio']:.3g})"
    ]
    if "recall_text" in row:
        parts.append(f"recall {row['recall_text']:.1%}")
    parts.append(f"KV cache {size(row['kv_bytes_per_token'])} per token ({share:.0%})")

    combination = f"{row['method']}, {row['groups']} of {base['groups']} KV heads, {trained}"
    return Line(title, f"{combination}: {', '.join(parts)}", loss_of_row(row, base).level)
