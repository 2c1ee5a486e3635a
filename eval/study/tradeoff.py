"""What quality costs: combinations of a study over their seeds, the Pareto front, and what to take within a budget."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from gqa.convert.methods import ALIGNING
from gqa.convert.summary import size
from gqa.eval.study.study import UNMERGED, Cell
from gqa.uptrain.options import TrainOptions

Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One combination; losses are nats per token, one of each seed, `increases` those above the source's."""

    method: str
    groups: int
    train: str
    teacher: str
    alpha: float
    losses: tuple[float, ...]
    increases: tuple[float, ...]
    kv_bytes: int
    decode_seconds: float | None
    train_tokens: int
    rows: tuple[Row, ...]

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return sum(self.losses) / len(self.losses)

    @property
    def increase(self) -> float:
        return sum(self.increases) / len(self.increases)

    @property
    def series(self) -> str:
        """The method, and what else is unusual about how it is trained."""
        name = "source" if self.method == "none" else self.method
        return ", ".join([name, *[self.train] * (self.train != "all"), *["taught"] * (self.teacher != "none")])

    def mean(self, column: str) -> float | None:
        """Of a column over the seeds; None where one has none."""
        found = [row.get(column) for row in self.rows]
        return None if any(value is None for value in found) else sum(map(float, found)) / len(found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        trained = f"alpha {self.alpha:g}" if self.alpha else "untrained"
        return f"{self.series}, {self.groups} KV head{'s' * (self.groups > 1)}, {trained}"


def points(rows: Iterable[Row]) -> list[Point]:
    """Rows without an error, those that differ in the seed alone as one; in the order of the grid."""
    cells = sorted(
        ((Cell.of(row)._replace(seed=0), row) for row in rows if not row["error"]), key=lambda pair: pair[0].order
    )
    found = []
    for cell, some in groupby(cells, key=lambda pair: pair[0]):
        same = tuple(row for _, row in some)
        found.append(
            Point(
                cell.method, cell.groups, cell.train, cell.teacher, cell.alpha, tuple(row["loss"] for row in same),
                tuple(row["loss_increase"] for row in same), same[0]["kv_bytes_per_token"],
                same[0].get("decode_seconds_per_token"), same[0]["train_tokens"], same,
            )
        )  # fmt: skip
    return found


def pareto_front(pairs: Sequence[tuple[float, float]]) -> list[int]:
    """Which (cost, loss) pairs no other is as good as in both and better than in one; by rising cost, falling loss."""
    best, front = math.inf, list[int]()
    for index in sorted(range(len(pairs)), key=lambda i: pairs[i]):
        if pairs[index][1] < best:
            best, front = pairs[index][1], [*front, index]
        elif front and pairs[index] == pairs[front[-1]]:
            front.append(index)
    return front


@dataclass(frozen=True)
class Recommendation:
    """`chosen` is None where nothing that is smaller than the source is within the budget; `lines` say why."""

    chosen: Point | None
    lines: tuple[str, ...]

    def text(self) -> str:
        return "\n".join(self.lines)


def recommend(found: Sequence[Point], source_bytes: int, budget: float) -> Recommendation:
    """The smallest KV cache whose loss, of its worst seed, is at most `budget` nats above the source's; of those with
    the same cache what trains on the fewest tokens, and then what loses least.
    """
    smaller = [point for point in found if point.kv_bytes < source_bytes]
    within = [point for point in smaller if max(point.increases) <= budget]
    limit = f"{budget:g} nats per token above the source"
    if not smaller:
        return Recommendation(None, ("nothing with a smaller KV cache than the source's was measured",))
    if not within:
        closest = min(smaller, key=lambda point: max(point.increases))
        return Recommendation(
            None,
            (
                f"nothing that was measured is within {limit}",
                f"closest     {closest}: {_increase(closest)} with {_cache(closest, source_bytes)}",
                "allow more with --max-loss-increase, or add longer training, a teacher or methods to the study",
            ),
        )
    chosen = min(within, key=lambda point: (point.kv_bytes, point.train_tokens, point.loss))
    lines = [
        f"recommended {chosen}: {_cache(chosen, source_bytes)}, {_increase(chosen)}",
        f"why         {len(within)} of {len(smaller)} combinations are within {limit}, {_smaller(chosen, smaller)}",
    ]
    if equal := [point for point in within if point.kv_bytes == chosen.kv_bytes and point is not chosen]:
        least = min(equal, key=lambda point: point.loss)
        better = f"; {least} is better with {_increase(least)}" if least.loss < chosen.loss else ""
        lines.append(f"            of {len(equal) + 1} with that cache it trains on the fewest tokens{better}")
    return Recommendation(chosen, (*lines, *(f"            {line}" for line in commands(chosen))))


def _cache(point: Point, source_bytes: int) -> str:
    return f"{size(point.kv_bytes)} of KV cache a token ({point.kv_bytes / source_bytes:.0%} of the source's)"


def _increase(point: Point) -> str:
    worst = f" (worst of {len(point.increases)} seeds {max(point.increases):+.4f})" if len(point.increases) > 1 else ""
    return f"{point.increase:+.4f} nats per token{worst}"


def _smaller(chosen: Point, smaller: Sequence[Point]) -> str:
    below = [point for point in smaller if point.kv_bytes < chosen.kv_bytes]
    if not below:
        return "none has a smaller cache"
    best = min(below, key=lambda point: max(point.increases))
    return f"none of those with a smaller cache: at best {best} with {_increase(best)}"


def commands(point: Point) -> list[str]:
    """What makes the checkpoint of a point again."""
    row = point.rows[0]
    words = ["gqa-convert", row["model"], "--groups", row["groups"]]
    out = f"{row['model'].split('/')[-1]}-gqa{row['groups']}"
    if row["method"] not in UNMERGED:
        words += ["--method", row["method"], "--seed", row["seed"]]
    if row["method"] in ALIGNING and row["grouping"] != "contiguous":
        words += ["--grouping", row["grouping"]]
    if row["method"] in ("calibrated", "refined"):
        words += ["--calibration", row["calibration"], "--calibration-tokens", row["calibration_tokens"]]
        words += ["--calibration-length", row["calibration_length"], "--ridge", row["ridge"]]
    if row["method"] == "refined":
        words += ["--refine-steps", row["refine_steps"], "--refine-batch", row["refine_batch"]]
        words += ["--refine-learning-rate", row["refine_learning_rate"]]
        words += ["--refine-precision", row["refine_precision"]]
    found = [shlex.join(map(str, [*words, "-o", out]))]
    if point.alpha:
        words = ["gqa-uptrain", out]
        for source in row["data"].split(","):
            words += ["--data", source]
        names = ("alpha", "field", "heldout", "heldout_fraction", "pretraining_tokens", "learning_rate", "warmup",
                 "batch_size", "block_size", "optimizer", "weight_decay", "precision", "train", "seed")  # fmt: skip
        defaults = {field.name: field.default for field in fields(TrainOptions)}
        for name in names:
            if row.get(name) not in (None, defaults[name]):
                words += [f"--{name.replace('_', '-')}", row[name]]
        words += ["--teacher", row["model"]] if row["teacher"] == "source" else []
        found.append(shlex.join(map(str, [*words, "-o", f"{out}-trained"])))
    return found
