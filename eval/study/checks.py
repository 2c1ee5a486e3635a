"""Where a study agrees with the GQA paper (arXiv 2305.13245), and where not: found in the rows, not asserted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pandas

from gqa.eval.study.tradeoff import heads

POOLED = ["mean", "first"]
PAPER = [*POOLED, "random"]
ALPHAS = [0.0, 0.05, 0.1]
_HOW = ["train", "teacher"]


class Check(NamedTuple):
    """A claim of the paper at one place of the grid; `detail` has the numbers."""

    claim: str
    where: str
    agrees: bool
    detail: str


def checks(points: pandas.DataFrame) -> Iterator[Check]:
    """All claims that the points have numbers for. They are about whole caches."""
    points = points[points.bits == 0]
    pooled, paper = (points[points.method.isin(methods)] for methods in (POOLED, PAPER))
    for where, losses in _places(paper, [*_HOW, "groups", "alpha"], "method"):
        if len(losses) == len(PAPER):
            told = ", ".join(f"{method} {loss:.3f}" for method, loss in losses.items())
            yield Check("mean before first before random (figure 4)", where, losses.is_monotonic_increasing, told)
    for where, losses in _places(paper[paper.alpha.isin(ALPHAS)], [*_HOW, "groups", "method"], "alpha"):
        if len(losses) == len(ALPHAS):
            first, second = -losses.sort_index().diff().iloc[1:]
            told = f"{first:+.3f} nats gained by alpha 0.05, {second:+.3f} more by 0.1"
            claim = "5 % of training gains, another 5 % gains less (figure 5)"
            yield Check(claim, where, first > 0 and first > second, told)
    untrained = pooled[pooled.alpha == 0].drop_duplicates(["method", "groups"])
    for where, losses in _places(untrained, ["method"], "groups", "loss_increase"):
        # "GQA already achieves reasonable performance after conversion while MQA requires uptraining" (section 3.3)
        if losses.index[0] == 1 < len(losses):
            told = f"{_by_heads(losses, '{:+.3f}')} (agrees below half)"
            claim = "untrained, groups lose less than a single head (figure 5)"
            yield Check(claim, where, losses.iloc[-1] < losses[1] / 2, told)
    longest = pooled[pooled.alpha == pooled.groupby(_HOW).alpha.transform("max")]
    for where, losses in _places(longest, [*_HOW, "method", "alpha"], "groups"):
        if len(losses) > 1:
            claim, told = "more groups, better quality (figure 3, table 1)", _by_heads(losses, "{:.3f}")
            yield Check(claim, where, losses.is_monotonic_decreasing, told)
    timed = points.dropna(subset="decode_seconds_per_token").drop_duplicates("groups")
    for where, times in _places(timed, ["decode_tokens_before"], "groups", "decode_seconds_per_token"):
        if len(times) > 2:
            claim = "decoding takes longer with more groups, most from the last step (figure 6)"
            agrees = times.is_monotonic_increasing and times.diff().idxmax() == times.index[-1]
            yield Check(claim, where, agrees, _by_heads(times * 1e3, "{:.2f} ms"))


def _places(
    points: pandas.DataFrame, at: list[str], across: str, value: str = "loss"
) -> Iterator[tuple[str, pandas.Series]]:
    """What each combination of the columns `at` is called, and its values by the column `across`."""
    for keys, some in points.groupby(at, sort=False):
        place = dict(zip(at, keys, strict=True))
        parts = [str(place["method"])] if "method" in place else []
        parts += [heads(place["groups"])] if "groups" in place else []
        parts += [f"alpha {place['alpha']:g}"] if "alpha" in place else []
        parts += [place["train"]] if place.get("train", "all") != "all" else []
        parts += ["taught"] if place.get("teacher") == "source" else []
        yield ", ".join(parts) or "all methods", some.set_index(across)[value]


def _by_heads(numbers: pandas.Series, form: str) -> str:
    return ", ".join(f"{heads(groups)} {form.format(number)}" for groups, number in numbers.items())
