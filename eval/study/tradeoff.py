"""What quality costs: combinations of a study over their seeds, the Pareto front, and what to take within a budget."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import pandas

from gqa.convert.methods import METHODS
from gqa.convert.summary import size
from gqa.eval.study.directory import Row
from gqa.eval.study.study import TRAINING, UNMERGED, Cell
from gqa.uptrain.options import TrainOptions

Point = Any  # a line of `points`
_POINT = ["groups", "method", "train", "teacher", "alpha"]
_NUMBERS = ("loss", "loss_increase", "kv_bytes_per_token", "decode_seconds_per_token", "decode_tokens_before")


def measured(rows: Iterable[Row]) -> pandas.DataFrame:
    """Rows without an error, in the order of the grid. `series`: the method, and what is unusual about its training.
    The columns that are counted on are there though nothing was measured.
    """
    found = sorted((row for row in rows if not row["error"]), key=lambda row: Cell.of(row).order)
    frame = pandas.DataFrame([row | {"series": _series(Cell.of(row))} for row in found])
    return frame.reindex(columns=list(dict.fromkeys([*_POINT, "series", *_NUMBERS, *frame.columns])))


def _series(cell: Cell) -> str:
    name = "source" if cell.method == "none" else cell.method
    return ", ".join([name, *[cell.train] * (cell.train != "all"), *["taught"] * (cell.teacher != "none")])


def points(rows: Iterable[Row]) -> pandas.DataFrame:
    """One line a combination, in the order of the grid: the row of its first seed, but over all `seeds`

    `loss` (nats per token) and `loss_increase` (above the source's) are means, `lowest`, `highest` and `worst` (of the
    increases) extremes.
    """
    frame = measured(rows)
    seeds = frame.groupby(_POINT, sort=False)
    loss, increase = seeds["loss"], seeds["loss_increase"]
    found = frame.drop_duplicates(_POINT).set_index(_POINT)
    return found.assign(
        seeds=seeds.size(), loss=loss.mean(), lowest=loss.min(), highest=loss.max(), loss_increase=increase.mean(),
        worst=increase.max(),
    ).reset_index()  # fmt: skip


def heads(groups: int) -> str:
    return f"{groups} KV heads" if groups > 1 else "1 KV head"


def name(point: Point) -> str:
    trained = f"alpha {point.alpha:g}" if point.alpha else "untrained"
    return f"{point.series}, {heads(point.groups)}, {trained}"


def pareto_front(pairs: Sequence[tuple[float, float]]) -> list[int]:
    """Which (cost, loss) pairs no other is as good as in both and better than in one; by rising cost, falling loss."""
    best, front = math.inf, list[int]()
    for index in sorted(range(len(pairs)), key=lambda i: pairs[i]):
        if pairs[index][1] < best:
            best, front = pairs[index][1], [*front, index]
        elif front and pairs[index] == pairs[front[-1]]:
            front.append(index)
    return front


class Recommendation(NamedTuple):
    """`chosen` is None where nothing that is smaller than the source is within the budget; `text` says why."""

    chosen: Point | None
    text: str


def recommend(found: pandas.DataFrame, source_bytes: int, budget: float) -> Recommendation:
    """The smallest KV cache whose loss, of its worst seed, is at most `budget` nats above the source's; of those with
    the same cache what trains on the fewest tokens, and then what loses least.
    """
    smaller = found[found.kv_bytes_per_token < source_bytes]
    if smaller.empty:
        return Recommendation(None, "nothing with a smaller KV cache than the source's was measured")
    within = smaller[smaller.worst <= budget]
    limit = f"{budget:g} nats per token above the source"
    if within.empty:
        closest = _best(smaller, "worst")
        return Recommendation(
            None,
            f"nothing that was measured is within {limit}\n"
            f"closest     {name(closest)}: {_increase(closest)} with {_cache(closest, source_bytes)}\n"
            "allow more with --max-loss-increase, or add longer training, a teacher or methods to the study",
        )
    chosen = _best(within, "kv_bytes_per_token", "train_tokens", "loss")
    below = smaller[smaller.kv_bytes_per_token < chosen.kv_bytes_per_token]
    same = within[within.kv_bytes_per_token == chosen.kv_bytes_per_token]
    none = "none has a smaller cache"
    if len(below):
        best = _best(below, "worst")
        none = f"none of those with a smaller cache: at best {name(best)} with {_increase(best)}"
    lines = [
        f"recommended {name(chosen)}: {_cache(chosen, source_bytes)}, {_increase(chosen)}",
        f"why         {len(within)} of {len(smaller)} combinations are within {limit}, {none}",
    ]
    if len(same) > 1:
        least = _best(same, "loss")
        better = f"; {name(least)} is better with {_increase(least)}" if least.loss < chosen.loss else ""
        lines.append(f"            of {len(same)} with that cache it trains on the fewest tokens{better}")
    return Recommendation(chosen, "\n".join([*lines, *(f"            {line}" for line in commands(chosen))]))


def _best(found: pandas.DataFrame, *by: str) -> Point:
    return found.sort_values(list(by), kind="stable").iloc[0]


def _cache(point: Point, source_bytes: int) -> str:
    kept = point.kv_bytes_per_token
    return f"{size(kept)} of KV cache a token ({kept / source_bytes:.0%} of the source's)"


def _increase(point: Point) -> str:
    worst = f" (worst of {point.seeds} seeds {point.worst:+.4f})" if point.seeds > 1 else ""
    return f"{point.loss_increase:+.4f} nats per token{worst}"


def commands(point: Point) -> list[str]:
    """What makes the checkpoint of a point again."""
    model, method = point["model"], point["method"]
    out = f"{model.split('/')[-1]}-gqa{point['groups']}"
    words = ["gqa-convert", model, "--groups", point["groups"]]
    if method not in UNMERGED:
        words += ["--method", method]
    names: list[str] = []
    how = METHODS.get(method)  # none where no heads were merged
    if how and how.draws:
        words += ["--seed", point["seed"]]
    if how and how.aligns and point["grouping"] != "contiguous":
        names += ["grouping"]
    if how and how.needs == "text":
        names += ["calibration", "calibration_tokens", "calibration_length", "ridge"]
        words += [] if point.get("calibration_repeats") else ["--no-calibration-repeats"]
    if how and how.refines:
        names += ["refine_steps", "refine_batch", "refine_learning_rate", "refine_precision"]
    found = [[*words, *_options(point, names), "-o", out]]
    if point["alpha"]:
        defaults = {field.name: field.default for field in fields(TrainOptions)}
        given = [name for name in ("alpha", *TRAINING[1:], "train", "seed") if point.get(name) != defaults[name]]
        words = ["gqa-uptrain", out]
        for source in point["data"].split(","):
            words += ["--data", source]
        words += _options(point, [name for name in given if pandas.notna(point.get(name))])
        words += ["--teacher", model] if point["teacher"] == "source" else []
        found.append([*words, "-o", f"{out}-trained"])
    return [shlex.join(map(str, line)) for line in found]


def _options(point: Point, names: Iterable[str]) -> list[Any]:
    return [word for name in names for word in (f"--{name.replace('_', '-')}", point[name])]
