"""The combinations of a study over their seeds, the Pareto front, and the recommendation within bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pandas

from gqa.convert.summary import size
from gqa.eval.study.directory import Row
from gqa.eval.study.study import UNMERGED, Cell

BASE = "base model"  # the series of what is not converted
Point = Any  # a line of `points`
_POINT = ["groups", "method", "train", "teacher", "alpha", "bits", "budget"]
_NUMBERS = ("loss", "loss_increase", "kl", "recall_text", "kv_bytes_per_token")


def _series(cell: Cell, cells: Sequence[Cell]) -> str:
    """Label: the method, its training if the study trains it in several ways, budgets and cache bits."""
    same_method = [other for other in cells if other.method == cell.method]
    parts = [BASE if cell.method == "none" else cell.method]
    parts += [cell.train] * (len({other.train for other in same_method}) > 1)
    parts += ["taught"] * (cell.teacher != "none" and len({other.teacher for other in same_method}) > 1)
    parts += ["heads by layer"] if cell.budget else []
    parts += [f"int{cell.bits} cache"] if cell.bits else []
    return ", ".join(parts)


def points(rows: Iterable[Row]) -> pandas.DataFrame:
    """One line a combination without an error, in the order of the grid: the row of its first seed, but over all
    `seeds`

    `loss` (nats per token), `loss_increase` (above the source's), `kl` and `recall_text` are means, `lowest`,
    `highest`, `worst` (of the increases) and `recall_worst` extremes. `series`: the method, and what is unusual about
    its training and its KV cache. `bits` are 0 where it is not quantised, `budget` where all layers are alike.
    """
    measured = sorted((row for row in rows if not row["error"]), key=lambda row: Cell.of(row).order)
    cells = [Cell.of(row) for row in measured]
    extra = [{"series": _series(cell, cells), "bits": cell.bits or 0, "budget": cell.budget or 0} for cell in cells]
    frame = pandas.DataFrame([row | columns for row, columns in zip(measured, extra, strict=True)])
    columns = list(dict.fromkeys([*_POINT, "series", *_NUMBERS, *frame.columns]))  # though nothing was measured
    frame = frame.reindex(columns=columns).astype({"kl": float})
    seeds = frame.groupby(_POINT, sort=False)
    loss, increase, recall, kl = (seeds[column] for column in ("loss", "loss_increase", "recall_text", "kl"))
    return frame.drop_duplicates(_POINT).set_index(_POINT).assign(
        seeds=seeds.size(), loss=loss.mean(), lowest=loss.min(), highest=loss.max(), loss_increase=increase.mean(),
        worst=increase.max(), kl=kl.mean(), recall_text=recall.mean(), recall_worst=recall.min(),
    ).reset_index()  # fmt: skip


def heads(groups: float) -> str:
    return f"{groups:.3g} KV heads" if groups != 1 else "1 KV head"


def name(point: Point) -> str:
    trained = f"alpha {point.alpha:g}" if point.alpha else "untrained"
    return f"{point.series}, {heads(point.groups)}, {trained}"


def pareto_front(pairs: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (cost, loss) pairs that no other pair dominates, by rising cost and falling loss."""
    best, front = math.inf, list[int]()
    for index in sorted(range(len(pairs)), key=lambda i: pairs[i]):
        if pairs[index][1] < best:
            best, front = pairs[index][1], [*front, index]
        elif front and pairs[index] == pairs[front[-1]]:
            front.append(index)
    return front


class Bounds(NamedTuple):
    """Largest loss against the source, in nats per token and in points of recall (`recall_text`); or, instead of both,
    the largest KV cache of a token in bytes.
    """

    loss: float = 0.1
    recall: float = 5.0
    kv_bytes: int | None = None


class Recommendation(NamedTuple):
    """`chosen` is None if nothing smaller than the source is within the bounds; `lines` are (label, reason)."""

    chosen: Point | None
    lines: list[tuple[str, str]]

    @property
    def text(self) -> str:
        return "\n".join(f"{label:12}{line}" for label, line in self.lines)


def least_recall(source: Row, bounds: Bounds) -> tuple[float, str]:
    """The smallest allowed recall of second copies, and the reason; 0 without a bound.

    The bound applies if the source gets at least half of the tokens right in second copies that it gets wrong in first
    copies.
    """
    share, first = source.get("recall_text"), source.get("recall_first_reading", 0.0)
    if share is None:
        refused = source.get("recall_refused")
        return 0.0, f"not measured: {refused}" if refused else "not measured"
    reason = (
        f"the base model gets {share:.1%} of second copies of the text right, and {first:.1%} where they stand first"
    )
    if share - first < (1 - first) / 2:
        return 0.0, f"{reason}: it recalls too little for a bound"
    return share - bounds.recall / 100, reason


def recommend(measured: pandas.DataFrame, source: Row, bounds: Bounds) -> Recommendation:
    """The smallest KV cache with every seed within the bounds; then the fewest training tokens, then the least loss.
    With a bound in bytes, the least loss of the worst seed.
    """
    source_bytes, limit_bytes = source["kv_bytes_per_token"], bounds.kv_bytes
    smaller = measured[measured.kv_bytes_per_token < source_bytes]
    if smaller.empty:
        return Recommendation(
            None, [("recommended", "nothing: no KV cache smaller than the base model's was measured")]
        )
    recalls = list[tuple[str, str]]()
    if limit_bytes:
        limit = f"a KV cache of at most {size(limit_bytes)} a token"
        order = ["worst", "train_tokens", "kv_bytes_per_token"]
        if source_bytes <= limit_bytes:
            return Recommendation(None, [("recommended", f"nothing: the base model has {limit}, {size(source_bytes)}")])
        within, none = smaller[smaller.kv_bytes_per_token <= limit_bytes], f"none has {limit}"
        closest = _best(smaller, "kv_bytes_per_token", "worst")
        advice = "allow more with --kv-bytes, or add smaller --groups or --cache-bits to the study"
    else:
        least, recall = least_recall(source, bounds)
        fluent = smaller[smaller.worst <= bounds.loss]
        within = fluent[fluent.recall_worst >= least] if least else fluent
        limit = f"within {bounds.loss:g} nats per token above the base model"
        limit += f" and {bounds.recall:g} points of recall below it" if least else ""
        none, order, recalls = f"none is {limit}", ["kv_bytes_per_token", "train_tokens", "loss"], [("recall", recall)]
        closest, option = _best(smaller, "worst"), "--max-loss-increase"
        if forgetful := len(fluent) - len(within):
            closest, option = (
                _best(fluent.drop(within.index), "recall_worst", highest=True),
                "max_recall_loss (from Python)",
            )
            recalls.append(("", f"it alone rules out {forgetful}: the best of them is {_named(closest)}"))
        advice = f"allow more with {option}, or add longer training, a teacher or methods to the study"
    if within.empty:
        lines = [("recommended", f"nothing: of {len(smaller)} combinations {none}")]
        return Recommendation(None, [*lines, ("closest", _with_cache(closest, source_bytes)), *recalls, ("", advice)])
    chosen = _best(within, *order)
    lines = [("recommended", _with_cache(chosen, source_bytes))]
    if limit_bytes:
        lines.append(("why", f"it loses least of {len(within)} combinations with {limit}"))
    else:
        lines += _why_smallest(chosen, within, smaller, limit)
    return Recommendation(chosen, [*lines, *_bits_alone(chosen, within, order, source_bytes), *recalls])


def _why_smallest(
    chosen: Point, within: pandas.DataFrame, smaller: pandas.DataFrame, limit: str
) -> list[tuple[str, str]]:  # fmt: skip
    below = smaller[smaller.kv_bytes_per_token < chosen.kv_bytes_per_token]
    same = within[within.kv_bytes_per_token == chosen.kv_bytes_per_token]
    none = "none has a smaller cache"
    if len(below):
        none = f"none of those with a smaller cache: at best {_named(_best(below, 'worst'))}"
    lines = [("why", f"{len(within)} of {len(smaller)} combinations are {limit}, {none}")]
    if len(same) > 1:
        best = _best(same, "loss")
        better = f"; {_named(best)} is better" if best.loss < chosen.loss else ""
        lines.append(("", f"of {len(same)} with that cache it trains on the fewest tokens{better}"))
    return lines


def _bits_alone(chosen: Point, within: pandas.DataFrame, order: list[str], source_bytes: int) -> list[tuple[str, str]]:
    """The base model with a quantised KV cache, if that was measured and is within the bound."""
    alone = within[(within.method == UNMERGED[0]) & (within.alpha == 0)]
    if alone.empty:
        return []
    best = _best(alone, *order)
    if best.series == chosen.series and not chosen.alpha:
        return [("", "a quantised cache alone does it: no heads need to be merged")]
    return [("", f"a quantised cache alone: {_with_cache(best, source_bytes)}")]


def _best(candidates: pandas.DataFrame, *by: str, highest: bool = False) -> Point:
    return candidates.sort_values(list(by), ascending=not highest, kind="stable").iloc[0]


def _with_cache(point: Point, source_bytes: int) -> str:
    cache_bytes = point.kv_bytes_per_token
    share = f"{cache_bytes / source_bytes:.0%} of the base model's"
    return f"{_named(point)}, with {size(cache_bytes)} of KV cache a token ({share})"


def _named(point: Point) -> str:
    """A point and its loss of quality, in words."""
    worst = f" (worst of {point.seeds} seeds {point.worst:+.4f})" if point.seeds > 1 else ""
    recall = f", {point.recall_worst:.1%} of second copies right" if pandas.notna(point.recall_worst) else ""
    return f"{name(point)}: {point.loss_increase:+.4f} nats per token{worst}{recall}"
